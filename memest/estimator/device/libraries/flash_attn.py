"""The package `flash_attn` on the virtual GPU.

It can be neither built nor imported without a GPU. Where transformers is asked for
`flash_attention_2`, and where a script imports the package by a line of its own, the functions of
`models_meta.flash_attention` stand for it. Libraries that only look whether it is there find what
is installed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.models_meta import flash_attention
from memest.plan.values import FLASH_ATTENTION_2

VERSION = "2.8.3"
"""The release that is mirrored."""

_CONTENTS = {
    "flash_attn": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "flash_attn.flash_attn_interface": (
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    ),
    "flash_attn.bert_padding": ("unpad_input", "pad_input"),
}  # fmt: skip
_NOTE = f"`flash_attn` {VERSION} is taken to be installed where the script runs"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let transformers and the script find the stand-ins."""
    finder = Finder(mode)
    sys.meta_path.insert(0, finder)
    patches.on_undo(finder.remove)
    stack = contextlib.ExitStack()
    patches.on_undo(stack.close)
    is_standing_in: list[bool] = []

    def after(module: ModuleType) -> None:
        kind = module.PreTrainedModel
        check = kind._check_and_adjust_attn_implementation

        def checked(model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if attn_implementation == FLASH_ATTENTION_2 and not is_standing_in:
                is_standing_in.append(True)
                mode.notes.add(_NOTE)
                stack.enter_context(flash_attention.stand_in())
            return check(model, attn_implementation, *args, **kwargs)

        patches.set(kind, "_check_and_adjust_attn_implementation", checked)

    hooks.after("transformers.modeling_utils", after)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `flash_attn` for the script's own import statements."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of the package and the two modules whose functions are known."""
        if fullname not in _CONTENTS or not self._is_asked_by_script():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "flash_attn")

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        self._mode.notes.add(_NOTE)
        vars(module).update((n, getattr(flash_attention, n)) for n in _CONTENTS[module.__name__])
        vars(module)["__version__"] = VERSION

    def remove(self) -> None:
        """Take the modules away, too."""
        sys.meta_path.remove(self)
        for name in _CONTENTS:
            module = sys.modules.get(name)
            if module is not None and getattr(module.__spec__, "loader", None) is self:
                del sys.modules[name]

    def _is_asked_by_script(self) -> bool:
        """Whether the innermost frame that is not of the import machinery is the script's."""
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and self._mode.attribution.lines.frame(frame) is frame
