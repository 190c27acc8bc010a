"""Declarations of operators by torch: the file from which its wheel's kernels are generated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_FILE = "packaged/ATen/native/native_functions.yaml"
_OF_CUDA = re.compile(r"^    [\w, ]*\bCUDA\b[\w, ]*:|^  structured", re.MULTILINE)
_UNCHECKED = "device_check: NoCheck"


@cache
def comparing_methods() -> Mapping[str, str]:
    """Return the C++ method of each operator that compares the devices of all tensors, by operator.

    Others take a number of the host as a tensor without dimensions. torch generates the check for
    kernels of CUDA without `NoCheck` (torchgen/dest/register_dispatch_key.py). There are none if
    the wheel has no torchgen.

    >>> comparing_methods()["aten.clamp.Tensor"]
    'wrapper_CUDA_clamp_Tensor'
    """
    spec = find_spec("torchgen")
    file = Path(spec.origin).parent / _FILE if spec is not None and spec.origin else None
    if file is None or not file.exists():
        return {}
    found = {}
    for block in file.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        if _OF_CUDA.search(block) and _UNCHECKED not in block:
            name = block.partition("(")[0]
            base, _, overload = name.partition(".")
            is_structured = "\n  structured" in block
            method = name.replace(".", "_") if is_structured else f"{overload}_{base}"
            found[f"aten.{name}"] = f"wrapper_CUDA_{method}"
    return found
