"""LitGPT on the virtual GPU: all of it is its own; here is only what its users are told.

Where its checkpoint is not there, its own message is followed by how to get a stand-in. Its
releases differ in what they keep for the backward, so the report names one that was not measured.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from memest.errors import UnsupportedError
from memest.estimator.device.imports import ImportHooks, names_of
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches

MEASURED_RELEASE = "0.5.13"
"""The release whose runs on a GPU were laid beside the simulated ones: docs/scripts.md."""

OFFER = (
    "memest: without a download, `memest checkpoint NAME --format litgpt FOLDER` writes a stand-in "
    "that its scripts load here"
)


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Offer stand-ins where LitGPT, when it is imported, misses a checkpoint; refuse Thunder."""

    def checked(check: Any) -> Any:
        def check_valid_checkpoint_dir(*args: Any, **kwargs: Any) -> Any:
            try:
                return check(*args, **kwargs)
            except FileNotFoundError as error:
                error.add_note(OFFER)
                raise
            except SystemExit:
                sys.stderr.write(f"{OFFER}\n")
                raise

        return check_valid_checkpoint_dir

    def after_utils(module: ModuleType) -> None:
        original = module.check_valid_checkpoint_dir
        made = checked(original)
        for owner, name in names_of(original):
            patches.set(owner, name, made)

    def after_import(module: ModuleType) -> None:
        try:
            release = version("litgpt")
        except PackageNotFoundError:
            return
        if release != MEASURED_RELEASE:
            mode.notes.add(
                f"LitGPT {release} ran as it is; the release that was measured on a GPU is "
                f"{MEASURED_RELEASE}"
            )

    def after_thunder(module: ModuleType) -> None:
        patches.set(module, "jit", _refuse_thunder)

    hooks.after("litgpt", after_import)
    hooks.after("litgpt.utils", after_utils)
    hooks.after("thunder", after_thunder)


def _refuse_thunder(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "what `thunder.jit` compiles cannot be simulated: its kernels keep other tensors than the "
        "model as it is written",
        hint="run the script without Thunder: an eager run takes more memory",
    )
