"""LitGPT on the virtual GPU: its own code, with additional messages.

A hint about dummy checkpoints follows its message about a missing checkpoint. The report names a
release that was not measured.
"""

import sys
from types import ModuleType
from typing import Any

from memest.estimator.gpu.imports import ImportHooks, wrap_everywhere
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing
from memest.estimator.versions import installed_versions

MEASURED_RELEASE = "0.5.13"  # its runs were compared with simulated ones: validation/scripts.md
OFFER = (
    "memest: without a download, `memest checkpoint NAME --format litgpt FOLDER` writes a dummy "
    "checkpoint that its scripts load here"
)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Add a hint about dummy checkpoints if LitGPT finds no checkpoint; refuse `thunder.jit`."""

    def offer_dummy_checkpoint(module: ModuleType) -> None:
        @wrap_everywhere(patches, module, "check_valid_checkpoint_dir")
        def check_and_offer(check: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return check(*args, **kwargs)
            except FileNotFoundError as error:
                error.add_note(OFFER)
                raise
            except SystemExit:  # with `raise_error=False`, after LitGPT has printed its message
                sys.stderr.write(f"{OFFER}\n")
                raise

    def note_release(module: ModuleType) -> None:
        release = installed_versions("litgpt").get("litgpt")
        if release not in (None, MEASURED_RELEASE):
            mode.notes.add(
                f"LitGPT {release} ran as it is; the release that was measured on a GPU is "
                f"{MEASURED_RELEASE}"
            )

    hooks.after("litgpt", note_release)
    hooks.after("litgpt.utils", offer_dummy_checkpoint)
    hint = "run the script without Thunder: an eager run saves other tensors, and takes more memory"
    refuse_jit = refusing("code that `thunder.jit` compiles", hint)
    hooks.after("thunder", lambda module: patches.set(module, "jit", refuse_jit))
