"""`from_pretrained` of transformers without weights or Hub.

A folder or a Hub id without weights on this machine still loads: transformers' own code runs on a
state dict of names and shapes. Each such load is noted. Weights are never downloaded.
"""

import inspect
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memest.estimator.gpu.imports import ImportHooks, wrap_everywhere
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, constant
from memest.estimator.tensors.placement import CPU, META
from memest.models_meta.registry import ModelEntry, find_entry

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
"""Extensions of weight files. A folder with such a file has weights, so a mismatch is an error."""

DESCRIBING = frozenset(("config.json", "generation_config.json", "adapter_config.json"))
"""Config files of bundled models: read from this machine, never downloaded."""


class NoWeights(str):
    """String in place of the path of a weight file, for a model without weights on this machine.
    transformers gets it as a path. `dtype_of` and `load_state` detect it by its class, and pass
    tensors to transformers instead, so that no file is read."""


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make transformers load models without weight files. `hooks` apply `patches` when a script
    imports transformers. `mode` collects notes for the report."""
    hooks.after("transformers.utils.hub", partial(_install_configs, patches, mode))
    hooks.after(  # without threads, whose allocation order would be random
        "transformers.core_model_loading",
        lambda module: patches.set(module, "ThreadPoolExecutor", constant(None)),
    )
    hooks.after("transformers.modeling_utils", partial(_install_models, patches, mode))


def _install_configs(patches: Patches, mode: CudaSimMode, module: ModuleType) -> None:
    """Patch `module`, `transformers.utils.hub`: it reads a bundled config if this machine has none
    for a model, and adds a note to `mode`."""

    @cache
    def folder() -> Path:
        directory = tempfile.TemporaryDirectory(prefix="memest-")
        patches.on_undo(directory.cleanup)
        return Path(directory.name)

    def config_of(entry: ModelEntry, name: str) -> list[str]:
        path = folder() / entry.name / "config.json"
        if not path.exists():
            path.parent.mkdir()
            config = json.loads(entry.path.read_text(encoding="utf-8"))["config"]
            path.write_text(json.dumps(config), encoding="utf-8")
        mode.notes.add(f"`{name}` was not found on this machine: its bundled config was taken")
        return [str(path)]

    @wrap_everywhere(patches, module, "cached_files")
    def find_or_make(
        cached_files: Any, path_or_repo_id: Any, filenames: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        name = str(path_or_repo_id)
        entry = None if os.path.exists(name) else find_entry(name)
        if entry is None or not DESCRIBING.issuperset(filenames):
            return cached_files(path_or_repo_id, filenames, *args, **kwargs)
        kwargs["local_files_only"] = True  # no network access
        try:
            files = cached_files(path_or_repo_id, filenames, *args, **kwargs)
        except OSError:
            if filenames != ["config.json"]:
                raise
            files = None
        is_missing = not files and filenames == ["config.json"]
        return config_of(entry, name) if is_missing else files


def _install_models(patches: Patches, mode: CudaSimMode, module: Any) -> None:
    """Patch `module`, `transformers.modeling_utils`, to look for weights on this machine only.
    Without weights it builds a model from its config, and adds a note to `mode`."""

    @wrap_everywhere(patches, module, "_get_resolved_checkpoint_files")
    def resolve_here(resolve: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
        if name is None or kwargs.get("gguf_file"):
            return resolve(*args, **kwargs)
        folder = Path(str(name))
        if not folder.is_dir() and "download_kwargs" in kwargs:
            options = kwargs["download_kwargs"] or {}
            kwargs["download_kwargs"] = {**options, "local_files_only": True}
        try:
            return resolve(*args, **kwargs)
        except OSError:
            if folder.is_dir() and any(f.suffix in WEIGHT_FILES for f in folder.rglob("*")):
                raise
        mode.notes.add(
            f"`{name}` has no weights on this machine: the model was built from its config, as if "
            "all of its weights had been loaded"
        )
        return [NoWeights("model.safetensors")], None

    is_old = not hasattr(module, "_get_dtype")  # before transformers 4.56
    wrap_everywhere(patches, module, "_get_torch_dtype" if is_old else "_get_dtype")(dtype_of)

    @patches.wrap(module.PreTrainedModel, "_load_pretrained_model")
    def load_state(load: Any, *args: Any, **kwargs: Any) -> Any:
        bound_args = inspect.signature(load).bind(*args, **kwargs)
        model, state, files, *configs = bound_args.args
        if state is None and files and isinstance(files[0], NoWeights):
            conversions = getattr(configs[0], "weight_mapping", None)  # none before transformers 5
            state, files = _weights_of(model, conversions, mode), None
        return load(model, state, files, *configs, **bound_args.kwargs)


def dtype_of(get_dtype: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of transformers' `get_dtype(*args, **kwargs)`: a tuple of the config and
    the dtype in which to load the model. Older releases of transformers add a third element.

    `get_dtype` has an argument `checkpoint_files`, and may read the dtype from the first file in
    that list. The first file can be a `NoWeights`, which cannot be read. Then, if there is no
    `state_dict`, `get_dtype` gets one with an empty tensor of the default dtype to read instead.
    """
    bound_args = inspect.signature(get_dtype).bind(*args, **kwargs)
    files = bound_args.arguments["checkpoint_files"]
    if bound_args.arguments["state_dict"] is None and files and isinstance(files[0], NoWeights):
        bound_args.arguments["state_dict"] = {"": torch.empty(0, device=CPU)}
    return get_dtype(*bound_args.args, **bound_args.kwargs)


def _weights_of(model: Any, conversions: Any, mode: CudaSimMode) -> dict[str, Tensor]:
    """Return {name: meta tensor} as in a checkpoint of `model`, a tied weight once. `mode` counts
    the bytes of the model's tensors as host memory.

    `conversions` are the changes that transformers 5 makes to loaded weights, or None. An example
    is to merge the experts of a layer into one tensor. The result is as before the changes, so it
    has one tensor for each expert.
    """
    weights = {}
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and name not in tied:
            weights[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
            mode.host.put(weights[name])
    if not conversions:
        return weights
    from transformers import core_model_loading

    converter = core_model_loading.WeightConverter
    if not any(isinstance(conversion, converter) for conversion in conversions):
        return weights
    model._weight_conversions = conversions  # published files hold experts one by one
    try:
        published: dict[str, Tensor] = core_model_loading.revert_weight_conversion(model, weights)
    finally:
        del model._weight_conversions
    return published
