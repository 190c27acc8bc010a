"""Inductor without a GPU: its graphs are on `cuda`, and no pass runs a kernel."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations.inductor import fakes, padding
from memest.estimator.integrations.inductor.kernels import kernels_for
from memest.estimator.ops.autograd_ops import CASTS
from memest.estimator.ops.convolution import convolution_format
from memest.estimator.tensors.patches import Patches, setting
from memest.estimator.tensors.placement import CPU, GPU, INSIDE

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOGRAD_META = torch._C.DispatchKey.AutogradMeta

EAGERLY = "`torch.compile` ran {name} as it is written, which keeps more temporaries: {why}"


class NotSimulated(UnsupportedError):
    """The compiler of the installed torch lacks a private name that memest replaces."""


@contextmanager
def as_the_compiler(mode: CudaSimMode) -> Iterator[None]:
    """Let Inductor find what a GPU would have, until the block ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it uses itself
        from torch._inductor import config

        patches = Patches()
        try:
            _install(patches, mode)
            _install_waits(patches, mode)
            padding.install(patches, mode)
            fakes.install(patches)
        except (AttributeError, ImportError, KeyError) as error:
            patches.undo()
            raise NotSimulated(f"torch {torch.__version__} lacks {error}", hint="") from None
    try:
        with ExitStack() as stack:
            stack.enter_context(setting(CASTS, "_casts", {}))
            stack.enter_context(setting(INSIDE, "compiles", True))
            stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
            if not padding.is_estimated():
                stack.enter_context(config.patch(shape_padding=False))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            # the report has Inductor's failures
            logger = logging.getLogger("torch._inductor")
            stack.enter_context(setting(logger, "disabled", True))
            yield
    finally:
        patches.undo()


def _install(patches: Patches, mode: CudaSimMode) -> None:
    from torch import _ops
    from torch._dynamo import utils
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.codegen import triton_utils
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import proxy_tensor
    from torch.utils import _triton

    passes = compile_fx._recursive_joint_graph_passes
    resolve = _ops.resolve_key

    def key_of(op: Any, key: Any) -> Any:
        return _COMPOSITE if key == _AUTOGRAD_META and _is_composite(op) else resolve(op, key)

    def on_gpu_passes(graph: Any, *args: Any, **kwargs: Any) -> Any:
        place_on_gpu(graph)
        return passes(graph, *args, **kwargs)

    def fold(self: Any) -> Any:
        with _constants_on_the_host(self.module):
            return run_folder(self)

    def on_gpu(graph: Any, inputs: Any, **options: Any) -> Any:
        return _lower(mode, graph, inputs, options)

    def compile_graph(model: Any, inputs: Any, inner_compile: Any = on_gpu, **kw: Any) -> Any:
        return compile_whole(model, inputs, inner_compile=inner_compile, **kw)

    @contextmanager
    def with_constants_on_the_gpu() -> Iterator[Any]:
        """Compute with the constants of a trace, which are small tensors of the GPU."""
        with unset_fake() as fake_mode, mode, _Puts():  # type: ignore[no-untyped-call]
            yield fake_mode

    compile_whole = compile_fx.compile_fx
    unset_fake = vars(proxy_tensor)["unset_fake_temporarily"]
    folder: Any = joint_graph.UniformValueConstantFolder
    run_folder = folder.run
    guards: Any = torch._C._dynamo.guards
    triton = importlib.import_module("triton")
    utils.__dict__.setdefault("triton", triton)  # which it imports where there is CUDA
    patches.set(proxy_tensor, "unset_fake_temporarily", with_constants_on_the_gpu)
    patches.set(_ops, "resolve_key", key_of)
    if isinstance(vars(triton_utils)["AttrsDescriptorWrapper"], type):  # Triton is a stub
        patches.set(triton_utils, "AttrsDescriptorWrapper", lambda *args, **kwargs: {})
    patches.set(_triton, "triton_hash_with_backend", lambda: "virtual")
    patches.set(fake_tensor, "init_gpu_context", lambda device: None)  # allocates on the GPU
    patches.set(compile_fx, "compile_fx", compile_graph)
    patches.set(compile_fx, "_recursive_joint_graph_passes", on_gpu_passes)
    patches.set(folder, "run", fold)
    patches.set(async_compile.AsyncCompile, "triton", kernels_for(mode.work))
    patches.set(
        torch._C, "_conv_determine_backend_memory_format",
        lambda tensor, weight, backend: convolution_format(tensor, weight),
    )  # fmt: skip
    patches.set(guards, "_empty_strided_cuda", _empty_strided)
    patches.set(guards, "copy_if_misaligned", lambda tensor: tensor)


def _install_waits(patches: Patches, mode: CudaSimMode) -> None:
    """Wait for the arguments of a graph on the GPU: no mode is active when torch resolves them."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    trigger: Any = AsyncCollectiveTensor.trigger_wait

    def trigger_wait(pending: Any) -> Any:
        with mode if type(pending.elem) is Tensor else nullcontext():
            return trigger(pending)

    patches.set(AsyncCollectiveTensor, "trigger_wait", trigger_wait)


def _lower(mode: CudaSimMode, graph: Any, inputs: Any, options: Any) -> Any:
    """Lower a graph: a forward's when its frame is compiled, a backward's when it first runs."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx

    if INSIDE.compiles:
        place_on_gpu(graph)
        return compile_fx.compile_fx_inner(graph, inputs, **options)
    hooks = mode.attribution.modules.without_hooks
    try:
        with _disable_current_modes(), as_the_compiler(mode), hooks():
            return _lower(mode, graph, inputs, options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        mode.guesses.warn(EAGERLY.format(name="a backward", why=why(error)))
        return make_boxed_func(graph.forward)


class _Puts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies to the GPU that a prim of torch makes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prims.device_put.default:
            return args[0].to(args[1])
        return func(*args, **(kwargs or {}))


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def place_on_gpu(graph: Any) -> None:
    """Place on the GPU the tensors of a graph whose C++ code named the device of a fake tensor."""
    from torch.fx.node import map_aggregate

    def device(value: Any) -> Any:
        return GPU.device if isinstance(value, torch.device) and value.type == "meta" else value

    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, device)
        node.kwargs = map_aggregate(node.kwargs, device)
    graph.recompile()


@contextmanager
def _constants_on_the_host(graph: Any) -> Iterator[None]:
    """Create constants on the host until the block ends, because Inductor folds them there."""
    from torch.fx.node import map_aggregate

    def device(value: Any) -> Any:
        return CPU if isinstance(value, torch.device) else value

    puts = torch.ops.prims.device_put.default
    constants = (aten.full.default, aten.scalar_tensor.default, puts)
    found = [node for node in graph.graph.nodes if node.target in constants]
    before = [(node, node.args, node.kwargs) for node in found]
    for node in found:
        node.args = map_aggregate(node.args, device)
        node.kwargs = map_aggregate(node.kwargs, device)
    yield
    for node, args, kwargs in before:
        node.args, node.kwargs = args, kwargs


def _is_composite(operator: Any) -> bool:
    """Return whether C++ decomposes the operator above autograd, whatever Python has for meta."""
    if not isinstance(operator, torch._ops.OpOverload):  # it calls operators
        return False
    name = str(operator._schema.name)
    if operator._schema.overload_name:
        name += f".{operator._schema.overload_name}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "Meta")


def why(error: Exception) -> str:
    """Return one line of the innermost reason."""
    error = getattr(error, "inner_exception", error)
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    found = next((line for line in lines if ": got " in line), lines[0])
    return f"{type(error).__name__}: {found.rpartition(': got ')[2][:200]}"
