"""The package `flash_attn` on the virtual GPU, where it can be neither built nor imported.

`models_meta.flash_attention` replaces it for transformers' `flash_attention_2` and for a script
that imports it. Libraries that only check for the package find the installed state.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from memest.estimator.gpu.imports import ImportHooks, importing_frame, remove_finder
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.models_meta import flash_attention
from memest.plan.values import FLASH_ATTENTION_2

VERSION = "2.8.3"
"""Mirrored release."""

_CONTENTS = {
    "flash_attn": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "flash_attn.flash_attn_interface": (
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    ),
    "flash_attn.bert_padding": ("unpad_input", "pad_input"),
}  # fmt: skip
_NOTE = f"`flash_attn` {VERSION} is taken to be installed where the script runs"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Install the stubs in transformers and for imports of the script."""
    finder = Finder(mode)
    sys.meta_path.insert(0, finder)
    patches.on_undo(finder.remove)
    stack = contextlib.ExitStack()
    patches.on_undo(stack.close)
    is_replaced: list[bool] = []

    def after(module: ModuleType) -> None:
        kind = module.PreTrainedModel
        if not hasattr(kind, "_check_and_adjust_attn_implementation"):
            patches.set(kind, "_check_and_enable_flash_attn_2", staticmethod(refuse_old_release))
            return
        check = kind._check_and_adjust_attn_implementation

        def checked(model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if attn_implementation == FLASH_ATTENTION_2 and not is_replaced:
                is_replaced.append(True)
                mode.notes.add(_NOTE)
                stack.enter_context(flash_attention.replace_functions())
            return check(model, attn_implementation, *args, **kwargs)

        patches.set(kind, "_check_and_adjust_attn_implementation", checked)

    hooks.after("transformers.modeling_utils", after)


def refuse_old_release(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse FlashAttention in releases of transformers that look for its package otherwise."""
    raise flash_attention.too_old()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `flash_attn` for the script's own import statements."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of the package and its two known modules."""
        if fullname not in _CONTENTS or not self._is_asked_by_script():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "flash_attn")

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        self._mode.notes.add(_NOTE)
        vars(module).update((n, getattr(flash_attention, n)) for n in _CONTENTS[module.__name__])
        vars(module)["__version__"] = VERSION

    def remove(self) -> None:
        """Remove the finder and its modules."""
        remove_finder(self)

    def _is_asked_by_script(self) -> bool:
        """Return whether the innermost frame outside of the import machinery is the script's."""
        frame = importing_frame()
        return frame is not None and self._mode.attribution.lines.frame(frame) is frame
