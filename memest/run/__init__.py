"""Unmodified scripts on a virtual GPU: `memest run`, `memest.virtual_gpu`."""

from __future__ import annotations
