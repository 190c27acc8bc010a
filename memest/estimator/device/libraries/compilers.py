"""Compilers of torch on the virtual GPU: `torch.compile`, `torch.jit`, extensions in CUDA.

`torch.compile` compiles (`inductor/`). What else would be compiled runs as it is written: a
compiled function asks for other memory, as fused operators keep fewer temporaries, and the report
says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memest.errors import UnsupportedError
from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.libraries.inductor import Compiled, compiled_function
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches

COMPILED = (
    "`torch.compile` ran its function eagerly: a compiled one keeps fewer temporaries, and its "
    "compiler may take memory of its own"
)
DISABLED_BY = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Environment variables with which torch compiles nothing (`torch/_dynamo/config.py`)."""

CAPTURES = "reduce-overhead"
"""The mode of `torch.compile` that is made of CUDA graphs, which keep pools of their own
(https://docs.pytorch.org/docs/stable/generated/torch.compile.html).
"""

SCRIPTED = "`torch.jit` ran its functions eagerly: nothing is fused"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Let `torch.compile` and `torch.jit` give back what they are given."""
    _install_compile(patches, mode, hooks)
    _install_script(patches, mode)
    _skip_dynamo(patches)


def _install_compile(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    graphs: dict[Any, Any] = {}

    def compile_(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_(function, **options)
        _refuse_what_differs(options)
        if options.get("disable") or any(os.environ.get(name) == "1" for name in DISABLED_BY):
            return model
        if not _is_by_inductor(model, options):
            _say(
                mode.notes.add if options.get("backend") == "eager" else mode.guesses.warn,
                mode,
                COMPILED,
            )
            if isinstance(model, nn.Module):
                model.__dict__["_orig_mod"] = model
            return model
        if isinstance(model, nn.Module):
            model.__dict__["_orig_mod"] = model  # what scripts unwrap
            model._compiled_call_impl = Compiled(mode, model._call_impl, graphs)
            return model
        return compiled_function(mode, model, graphs)

    def without_dynamo(config: Any) -> None:
        """What was compiled before the virtual GPU was there runs eagerly, too."""
        was, config.disable = config.disable, True
        patches.on_undo(lambda: setattr(config, "disable", was))

    def without_caches(dynamo: Any) -> None:
        patches.set(dynamo, "reset", lambda: None)  # nothing is compiled

    patches.set(torch, "compile", compile_)
    patches.set(torch.compiler, "compile", compile_)
    patches.set(nn.Module, "compile", lambda module, *args, **options: compile_(module, **options))
    hooks.after("torch._dynamo.config", without_dynamo)
    hooks.after("torch._dynamo", without_caches)


def _is_by_inductor(model: Any, options: dict[str, Any]) -> bool:
    """Whether the compiler is simulated: with its defaults, of what is called itself."""
    if hasattr(model, "training_step"):  # Lightning calls the steps of its module
        return False
    return (options.get("backend") or "inductor") == "inductor" and (
        options.get("mode") or "default"
    ) == "default"


def _refuse_what_differs(options: dict[str, Any]) -> None:
    """Refuse what a run of the function as it is written does not stand for."""
    given, backend = options.get("mode"), options.get("backend")
    if given == CAPTURES:
        raise UnsupportedError(
            f"`torch.compile(mode={given!r})` records CUDA graphs, whose memory is not simulated",
            hint="compile without that mode, or not at all (`--compile false` of LitGPT)",
        )
    if "thunder" in str(backend or "") or "thunder" in getattr(backend, "__module__", ""):
        raise UnsupportedError(
            "`torch.compile` by Thunder is not simulated", hint="run the script without Thunder"
        )


def _say(say: Callable[[str], None], mode: CudaSimMode, text: str) -> None:
    """Report `text`, unless a library decorates its functions while it is imported."""
    frame = sys._getframe(2)
    script = mode.attribution.lines.frame(frame)
    while frame is not None and frame is not script:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        frame = frame.f_back  # type: ignore[assignment]
    say(text)


def _install_script(patches: Patches, mode: CudaSimMode) -> None:
    def as_written(made: Any) -> Any:
        _say(mode.notes.add, mode, SCRIPTED)
        if isinstance(made, nn.Module):
            made.__dict__.setdefault("save", _refused("`save` of a scripted module"))
        return made

    torchscript = torch.jit.script

    def script(obj: Any = None, *args: Any, **options: Any) -> Any:
        if getattr(obj, "__module__", "").startswith("torch._decomp"):
            return torchscript(obj, *args, **options)  # torch itself reads the graph
        return as_written(obj)

    def trace(func: Any, example_inputs: Any = None, *args: Any, **options: Any) -> Any:
        """torch runs the function once to see its operators."""
        inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        named = options.get("example_kwarg_inputs")
        if named is not None:
            func(**named)
        elif example_inputs is not None:
            func(*inputs)
        return as_written(func)

    patches.set(torch.jit, "script", script)
    patches.set(torch.jit, "trace", trace)
    patches.set(torch.jit, "freeze", lambda module, *args, **options: module)
    patches.set(torch.jit, "optimize_for_inference", lambda module, *args, **options: module)


def _refused(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{what} cannot be simulated", hint="nothing is compiled on the virtual GPU"
        )

    return refused


def _skip_dynamo(patches: Patches) -> None:
    """Nothing is compiled, so nothing need be kept from the compiler, whose import takes a second.

    torch wraps functions that shall not be compiled (`torch/_compile.py`), and imports its compiler
    when the first of them is called; each keeps the function to call in `__dynamo_disable`.
    """

    def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        return fn if fn is not None else (lambda function: function)

    patches.set(torch, "_disable_dynamo", disable)
    patches.set(torch.compiler, "disable", disable)
    for function in vars(torch.optim.Optimizer).values():
        inner = getattr(function, "__wrapped__", None)
        if inner is not None and not hasattr(inner, "__dynamo_disable"):
            patches.set(inner, "__dynamo_disable", inner)
