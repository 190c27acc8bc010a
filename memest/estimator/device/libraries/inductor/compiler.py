"""What Inductor finds where there is no GPU: a card that its graphs lie on, and none of its passes
that would measure or draw on one.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.cuda_semantics import CASTS
from memest.estimator.device.libraries.inductor.kernels import Kernel
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, CPU, INSIDE, META
from memest.estimator.kernels.convolution import convolution_format

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOGRAD_META = torch._C.DispatchKey.AutogradMeta


class NotCompiled(Exception):
    """A function cannot be compiled here; the message says why."""


@contextmanager
def as_the_compiler() -> Iterator[Any]:
    """Within it nothing is recorded, and Inductor, which is given, finds what a GPU would have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it uses itself
        from torch._functorch import config as of_aot
        from torch._inductor import compile_fx, config

    patches = Patches()
    _install(patches)
    casts, CASTS._casts = CASTS._casts, {}
    INSIDE.depth += 1
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
            stack.enter_context(of_aot.patch(force_non_lazy_backward_lowering=True))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_silent(logging.getLogger("torch._inductor")))
            yield compile_fx
    finally:
        INSIDE.depth -= 1
        CASTS._casts = casts
        patches.undo()


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """What it says of a function that it cannot compile, the report says."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _install(patches: Patches) -> None:
    from torch import _ops
    from torch._dynamo import utils
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses import fake_tensor
    from torch.utils import _triton, checkpoint

    passes = compile_fx._recursive_joint_graph_passes
    resolve = _ops.resolve_key

    def key_of(op: Any, key: Any) -> Any:
        return _COMPOSITE if key == _AUTOGRAD_META and _is_composite(op) else resolve(op, key)

    def of_the_card(graph: Any, *args: Any, **kwargs: Any) -> Any:
        tell(graph)
        with _constants_on_the_host(graph):
            return passes(graph, *args, **kwargs)

    guards: Any = torch._C._dynamo.guards
    triton = importlib.import_module("triton")
    utils.__dict__.setdefault("triton", triton)  # which it imports where there is CUDA
    patches.set(_ops, "resolve_key", key_of)
    patches.set(_triton, "triton_hash_with_backend", lambda: "virtual")
    patches.set(fake_tensor, "init_gpu_context", lambda device: None)  # allocates on the GPU
    patches.set(joint_graph, "lazy_init", lambda *args: None)  # traces patterns on CUDA
    patches.set(compile_fx, "_recursive_joint_graph_passes", of_the_card)
    patches.set(async_compile.AsyncCompile, "triton", lambda self, *args, **kw: Kernel(*args[:2]))
    for name, instead in _INSTEAD.items():
        patches.set(Tensor, name, _for_fakes(instead, getattr(Tensor, name)))
    patches.set(
        torch._C, "_conv_determine_backend_memory_format",
        lambda tensor, weight, backend: convolution_format(tensor, weight),
    )  # fmt: skip
    patches.set(guards, "_empty_strided_cuda", _empty_strided)
    patches.set(guards, "copy_if_misaligned", lambda tensor: tensor)
    patches.set(checkpoint.CheckpointFunction, "apply", _recomputes)
    patches.set(checkpoint, "_checkpoint_without_reentrant_generator", _recomputes)
    patches.set(torch.compiler, "_is_compiling_flag", True)


class MadeOnMeta(TorchFunctionMode):
    """What a function that is traced makes on the card, or takes there, is where its inputs are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda and args[0].device.type == "meta":
            return args[0]
        if isinstance(func, type):  # `torch.device` itself
            return func(*args, **(kwargs or {}))
        factor = (kwargs or {}).get(_FACTORS.get(getattr(func, "__name__", ""), ""))
        if isinstance(factor, Tensor):
            return args[0].add_(_term(func.__name__, args[1:]) * factor)
        return func(*map(_on_meta, args), **{k: _on_meta(v) for k, v in (kwargs or {}).items()})


_FACTORS = {"add_": "alpha", "addcmul_": "value", "addcdiv_": "value"}
"""Methods whose factor Dynamo multiplies if it is a tensor (`_dynamo/variables/tensor.py`)."""


def _term(name: str, operands: tuple[Any, ...]) -> Any:
    if name == "add_":
        return operands[0]
    return operands[0] * operands[1] if name == "addcmul_" else operands[0] / operands[1]


def _on_meta(value: Any) -> Any:
    is_card = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return META if is_card else value


def _recomputes(*args: Any, **kwargs: Any) -> Any:
    raise NotCompiled("it recomputes activations")


def _for_fakes(instead: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    @wraps(method)
    def either(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (instead if type(tensor) is FakeTensor else method)(tensor, *args, **kwargs)

    return either


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        made: Tensor = aten.copy_.default(tensor, source, non_blocking)
    return made


def _contiguous(
    tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.clone(memory_format=memory_format)


def _item(tensor: Tensor, index: Any) -> Tensor:
    """Indexing by numbers, slices, None, an ellipsis and tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    num_taken = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    where = parts.index(Ellipsis)
    parts[where : where + 1] = [slice(None)] * (tensor.dim() - num_taken)
    found: list[Tensor | None] = []
    dim = 0
    for part in parts:
        if isinstance(part, Tensor):
            found += [None] * (dim - len(found)) + [part]
        elif part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            if part != slice(None):
                last = sys.maxsize if part.stop is None else part.stop
                tensor = aten.slice.Tensor(tensor, dim, part.start or 0, last, part.step or 1)
        else:
            tensor = tensor.select(dim, part)
            continue
        dim += 1
    return aten.index.Tensor(tensor, found) if found else tensor


_INSTEAD: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "contiguous": _contiguous,
    "__invert__": torch.bitwise_not,
    "__getitem__": _item,
}
"""Methods whose C++ asks for the device before it looks at what kind of tensor there is."""


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def tell(graph: Any) -> None:
    """Put a graph that was traced on meta tensors on the GPU.

    The fake tensors keep the mode and the storages of the trace. AOTAutograd finds by their
    storages which saved tensors the backward may overwrite (`bw_donated_idxs`).
    """
    from torch._guards import detect_fake_mode
    from torch.fx.node import map_aggregate

    def device(value: Any) -> Any:
        return CARD.device if isinstance(value, torch.device) and value.type == "meta" else value

    mode = detect_fake_mode([node.meta.get("val") for node in graph.graph.nodes])
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, node.target, None)
        if isinstance(constant, Tensor) and constant.device.type == "meta":  # a number's tensor
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(
                    aten.full.default,
                    (list(constant.shape), 0),
                    {"dtype": constant.dtype, "device": CARD.device},
                )
            made.meta["val"] = fake(constant, mode)
            node.replace_all_uses_with(made)
            graph.graph.erase_node(node)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(lambda value: fake(value, mode), node.meta["val"])
        node.meta.pop("tensor_meta", None)
        node.args = map_aggregate(node.args, device)
        node.kwargs = map_aggregate(node.kwargs, device)
    graph.recompile()


@contextmanager
def _constants_on_the_host(graph: Any) -> Iterator[None]:
    """Within it constants are made there, where Inductor's passes compute with them."""
    constants = (aten.full.default, aten.scalar_tensor.default)
    for node in graph.graph.nodes:
        if node.target in constants and node.kwargs.get("device") == CARD.device:
            node.kwargs = {**node.kwargs, "device": CPU}
    yield
    for node in graph.graph.nodes:
        made = node.meta.get("val")
        if node.kwargs.get("device") == CPU and getattr(made, "device", CPU) == CARD.device:
            node.kwargs = {**node.kwargs, "device": CARD.device}


def fake(value: Any, mode: Any) -> Any:
    """A tensor on `cuda` that shares the storage of a meta tensor."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    if not isinstance(value, Tensor) or value.device.type != "meta":
        return value
    with in_kernel_invocation_manager(mode):
        same = aten.as_strided.default(
            value.detach(), value.size(), value.stride(), value.storage_offset()
        )
    return FakeTensor(mode, same, CARD.device)


def _is_composite(op: Any) -> bool:
    """Whether C++ takes `op` apart above autograd, whatever Python has for meta tensors besides."""
    name = op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "Meta")
