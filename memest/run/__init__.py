"""Unmodified scripts on a virtual GPU: `memest run`, `memest.virtual_gpu`."""
