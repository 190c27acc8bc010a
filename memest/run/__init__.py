"""A script, unmodified, on a GPU that is not there: `memest run` and `memest.virtual_gpu`."""

from __future__ import annotations
