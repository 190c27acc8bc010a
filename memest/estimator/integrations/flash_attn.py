"""The package `flash_attn` on the virtual GPU, which cannot be built without a GPU.

`models_meta.flash_attention` replaces it for transformers' `flash_attention_2` and for a script
that imports it. Libraries that only check for the package find the installed state.
"""

import contextlib
from functools import cache
from types import ModuleType
from typing import Any

from memest.estimator.gpu.imports import ImportHooks, StubFinder
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches
from memest.models_meta import flash_attention
from memest.plan.keys import FLASH_ATTENTION_2

VERSION = "2.8.3"  # mirrored release
_FUNCTIONS = (
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func",
)  # fmt: skip
_CONTENTS = {
    "flash_attn": _FUNCTIONS,
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.bert_padding": ("unpad_input", "pad_input"),
}
_NOTE = f"`flash_attn` {VERSION} is taken to be installed where the script runs"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make transformers and the script import a stub of `flash_attn`."""
    Finder(mode).install(patches)
    stack = contextlib.ExitStack()
    patches.on_undo(stack.close)

    @cache
    def replace() -> None:
        mode.notes.add(_NOTE)
        stack.enter_context(flash_attention.replace_functions())

    def after(module: ModuleType) -> None:
        kind = module.PreTrainedModel
        if not hasattr(kind, "_check_and_adjust_attn_implementation"):
            refusal = staticmethod(flash_attention.refuse_old_release)
            patches.set(kind, "_check_and_enable_flash_attn_2", refusal)
            return

        @patches.wrap(kind, "_check_and_adjust_attn_implementation")
        def checked(check: Any, model: Any, requested: str | None, *args: Any, **kw: Any) -> Any:
            if requested == FLASH_ATTENTION_2:
                replace()
            return check(model, requested, *args, **kw)

    hooks.after("transformers.modeling_utils", after)


class Finder(StubFinder):
    """Import finder that gives a stub of `flash_attn` to the script, and not to libraries."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode

    def serves(self, fullname: str) -> bool:
        """Return whether `fullname` is a module of the stub, and the script itself imports it."""
        frame = self.importing_frame() if fullname in _CONTENTS else None
        return frame is not None and self._mode.attribution.lines.script_frame(frame) is frame

    def exec_module(self, module: ModuleType) -> None:
        self._mode.notes.add(_NOTE)
        vars(module).update((n, getattr(flash_attention, n)) for n in _CONTENTS[module.__name__])
        vars(module)["__version__"] = VERSION
