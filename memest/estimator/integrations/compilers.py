"""Compilers: `torch.compile` (`inductor/`), `torch.jit`, extensions in CUDA.

Functions for other compilers run uncompiled, with more temporaries; the report notes that.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.jit import _trace

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations import inductor
from memest.estimator.tensors.patches import NOT_COMPILED, Patches, refusing

TUNED = "`torch.compile` compiled with its defaults: what tuning kernels allocates is not simulated"
TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
"""Options of `torch.compile` with which Inductor times kernels (torch/_inductor/config.py)."""

SCRIPTED = "`torch.jit` ran its functions eagerly: nothing is fused"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make `torch.compile` and `torch.jit` return functions that run on the virtual GPU."""
    _install_compile(patches, mode, hooks)
    _install_script(patches, mode, hooks)

    def after_cpp_extension(module: ModuleType) -> None:
        for name in ("load", "load_inline", "CUDAExtension"):
            patches.wrap(module, name)(partial(_build_for_cpu, mode))

    hooks.after("torch.utils.cpp_extension", after_cpp_extension)


def _install_compile(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    @patches.wrap(torch, "compile")
    def compile_as_simulated(compile_: Any, model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_as_simulated, **options)
        backend = options.get("backend")
        if str(backend).startswith("cudagraphs"):  # torch/_dynamo/backends/cudagraphs.py
            raise UnsupportedError(
                f"`torch.compile(backend={backend!r})` is not simulated",
                hint="use `mode='reduce-overhead'`, which captures CUDA graphs too",
            )
        if "thunder" in str(backend or "") or "thunder" in getattr(backend, "__module__", ""):
            raise UnsupportedError(
                "`torch.compile` by Thunder is not simulated", hint="run the script without Thunder"
            )
        tuning = str(options.get("mode"))
        if "max-autotune" in tuning:
            _note_unless_importing(mode.guesses.warn, mode, TUNED)
            options["mode"] = "reduce-overhead" if tuning == "max-autotune" else None  # CUDA graphs
        settings = dict(options.get("options") or {})
        if any([settings.pop(name, False) for name in TUNING]):  # a list: removes all
            _note_unless_importing(mode.guesses.warn, mode, TUNED)
            options["options"] = settings
        with warnings.catch_warnings(action="ignore"):  # of modules that the compiler imports
            compiled = compile_(model, **options)
        owner = getattr(model, "__self__", None)
        if not isinstance(owner, nn.Module):
            return compiled

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Call a compiled method without the hooks of its module, as `Module.compile` does."""
            with mode.attribution.modules.running(owner):
                return compiled(*args, **kwargs)

        return call

    inductor.install(patches, mode, hooks)


def _note_unless_importing(note: Callable[[str], None], mode: CudaSimMode, text: str) -> None:
    """Call `note(text)`, which reports the running call of `torch.compile` or `torch.jit`. Report
    nothing if a library makes that call while it is being imported. `mode` finds the stack frame of
    the script, from which the library is imported."""
    frame = sys._getframe(2)
    script = mode.attribution.lines.script_frame(frame)
    while frame is not None and frame is not script:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        frame = frame.f_back  # type: ignore[assignment]
    note(text)


def _install_script(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    def as_written(obj: Any) -> Any:
        _note_unless_importing(mode.notes.add, mode, SCRIPTED)
        if isinstance(obj, nn.Module):
            obj.__dict__.setdefault("save", refusing("`save` of a scripted module", NOT_COMPILED))
        return obj

    @patches.wrap(torch.jit, "script")
    def script(torchscript: Any, obj: Any = None, *args: Any, **options: Any) -> Any:
        if getattr(obj, "__module__", "").startswith("torch._decomp"):
            return torchscript(obj, *args, **options)  # the caller is torch, which reads the graph
        return as_written(obj)

    def trace(
        func: Any, example_inputs: Any = None, *args: Any, check_trace: bool = True, **options: Any
    ) -> Any:
        """Call `func` as often as `torch.jit.trace` does; return it uncompiled."""
        is_one = isinstance(example_inputs, (torch.Tensor, dict))
        inputs = (example_inputs,) if is_one else tuple(example_inputs or ())
        _call_to_trace(func, options.get("example_kwarg_inputs") or inputs, check_trace)
        return as_written(func)

    def after_tensorboard(module: ModuleType) -> None:
        def graph(model: nn.Module, args: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            """Call `model` with `args` as often as a trace calls it. Return (graph, run metadata)
            for `SummaryWriter.add_graph`. Both are empty protocol buffers."""
            with module._set_model_to_eval(model):
                trace(model, args)
            return module.GraphDef(), module.RunMetadata()

        patches.set(module, "graph", graph)

    hooks.after("torch.utils.tensorboard._pytorch_graph", after_tensorboard)
    unchanged: Any = lambda module, *args, **options: module  # noqa: E731
    replacements = {
        "script_method": as_written,
        "ScriptModule": type("ScriptModule", (nn.Module,), {}),  # it compiles nothing
        "trace": trace,
        "freeze": unchanged,
        "optimize_for_inference": unchanged,
    }
    patches.set_all(replacements, torch.jit)


def _call_to_trace(func: Any, inputs: Any, checks: bool) -> None:
    """Call `func` with `inputs` as often as `torch.jit.trace` calls it (torch/jit/_trace.py, 2.11).
    `inputs` is a tuple, or a dict by name.

    Without `checks`, `func` is called once. With `checks`, four calls without gradients follow.
    Each of the four calls has its own copy of the inputs. The outputs of calls 3 to 5 are kept
    until call 5 has ended. If `func` is a module, the inputs of call 2 are also kept until then.
    """

    clone: Any = _trace._clone_inputs

    def call(arguments: Any) -> Any:
        return func(**arguments) if isinstance(arguments, dict) else func(*arguments)

    call(inputs)
    if checks:
        with torch.no_grad():
            copies = clone(inputs)
            call(copies)
            if not isinstance(func, nn.Module):
                del copies
            outputs = [call(clone(inputs)) for _ in range(3)]
            outputs.clear()


def _has_gpu_code(arguments: Mapping[str, Any]) -> bool:
    """Return whether a C++ extension with these arguments of `load` has sources for the GPU."""
    if arguments.get("with_cuda") or arguments.get("cuda_sources"):
        return True
    sources = arguments.get("sources", ())
    sources = (sources,) if isinstance(sources, str) else sources
    return any(str(source).endswith((".cu", ".cuh")) for source in sources)


def _build_for_cpu(mode: CudaSimMode, build: Any, *args: Any, **options: Any) -> Any:
    """Call `build`, such as `load`; raise `UnsupportedError` for an extension with GPU code."""
    arguments = signature(build).bind(*args, **options).arguments
    if build.__name__ != "CUDAExtension" and not _has_gpu_code(arguments):
        return build(*args, **options)
    name, location = arguments["name"], mode.attribution.lines.current() or "the script"
    raise UnsupportedError(
        f"{location}: `{name}` is an extension in CUDA, whose kernels cannot be simulated",
        hint="run the script without it; see docs/run.md for what is supported",
    )
