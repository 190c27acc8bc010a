"""Decisions that torch makes for CUDA tensors before autograd: autocast, dropout, attention.

torch decides these in C++ by `tensor.is_cuda()`, which is false for a meta tensor. Here the same
decisions are kernels on a dispatch key in front of autograd: `AutocastIPU`, whose backend no longer
exists in torch. Autograd and the mode below see the operators that a GPU would run. The autocast
state is that of `torch.autocast("cuda")`, which torch keeps per thread.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _python_dispatch

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.registry import Args, Kwargs, arguments_by_name, op_of, overloads
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.tensors.known_values import map_tensors
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import INSIDE, is_meta, on_gpu, tensors_in
from memest.estimator.versions import simulated
from memest.plan.reading import read_table

KEY_NAME = "AutocastIPU"
_KEY = getattr(torch._C.DispatchKey, KEY_NAME)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST = torch._C.DispatchKey.AutocastCUDA

_POLICIES = read_table(__file__, "autocast.json").values()
LOWER_PRECISION, FLOAT32, FLOAT32_SINCE_2_12, FLOAT32_RESULT, PROMOTE = _POLICIES
"""Operators by the policies of ATen/autocast_mode.h (torch 2.11). A test compares their union with
what the installed torch registers for AutocastCUDA. The release's `casts_rms_norm` decides the
third.
"""

_active_gpus: list[Gpu] = []
_torch_dispatch: Any = HigherOrderOperator.dispatch
_CUDA = "cuda"  # the device whose autocast state counts


def follow_autocast(patches: Patches) -> None:
    """Make torch record whether a script is in autocast, since dispatch modes disable autocast."""

    def set_enabled(*args: Any) -> None:
        torch._C.set_autocast_enabled(*args)
        INSIDE.autocast_block = torch.is_autocast_enabled(_CUDA)

    INSIDE.autocast_block = torch.is_autocast_enabled(_CUDA)
    patches.set(torch, "set_autocast_enabled", set_enabled)
    patches.set(
        torch._C,
        "_is_any_autocast_enabled",
        lambda: torch.is_autocast_enabled(_CUDA) or torch.is_autocast_enabled("cpu"),
    )
    patches.set(HigherOrderOperator, "dispatch", _dispatch_higher_order)


def _dispatch_higher_order(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the higher-order operator `self` by its kernel for the dispatch key `key`. Its tensors
    are cast where CUDA's autocast would cast them."""
    if key != _KEY:
        is_for_mode = key == torch._C.DispatchKey.Python
        mode = _python_dispatch._get_current_dispatch_mode() if is_for_mode else None
        # torch 2.8 and older call no mode for an operator without a rule for the mode's class
        torch_calls_modes = hasattr(
            _python_dispatch.TorchDispatchMode, "supports_higher_order_operators"
        )
        takes_operator = getattr(mode, "supports_higher_order_operators", False)
        if takes_operator and not torch_calls_modes and type(mode) not in self.python_key_table:
            with _python_dispatch._pop_mode_temporarily() as mode:
                return mode.__torch_dispatch__(self, [], args, kwargs)
        return _torch_dispatch(self, key, *args, **kwargs)
    if _AUTOCAST in self.py_kernels and torch.is_autocast_enabled(_CUDA):
        dtype = torch.get_autocast_dtype(_CUDA)
        args = tuple(_cast(a, dtype) if isinstance(a, Tensor) else a for a in args)
    keyset = torch._ops._compute_keyset(args, kwargs, self.non_fallthrough_keys) & _BELOW  # type: ignore[no-untyped-call]
    return _dispatch_higher_order(self, keyset.highestPriorityTypeId(), *args, **kwargs)


class CastCache:
    """Cache of casts of leaf weights; `torch.autocast` empties it when its outermost context ends.

    Mirrors `cached_cast` of ATen/autocast_mode.cpp (torch 2.11): a float32 leaf with
    `requires_grad` is cast once, and in inference mode at each use.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `tensor.to(dtype)`, from autocast's cache if torch caches that cast."""
        is_cached = (
            dtype is torch.get_autocast_dtype(_CUDA)
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not is_cached:
            return tensor.to(dtype)
        if entry := self._casts.get(tensor._cdata):
            source, cast = entry
            if source() is tensor:  # the address of a deleted tensor may be in use again
                return cast
        with torch.enable_grad():  # a later use of the cast may need gradients
            cast = tensor.to(dtype)
        self._casts[tensor._cdata] = weakref.ref(tensor), cast
        return cast

    def clear(self) -> None:
        """Drop all casts, like `torch.clear_autocast_cache`."""
        self._casts.clear()


CASTS = CastCache()


@contextlib.contextmanager
def decisions_of(gpu: Gpu) -> Iterator[None]:
    """Make torch decide as for CUDA tensors on `gpu` within the block. The decisions are the casts
    of autocast, and which operators run for dropout and attention. torch takes them before
    autograd. Kernels on the dispatch key `AutocastIPU` replace torch's code."""
    _register_kernels()
    _active_gpus.append(gpu)
    try:
        with reenabled_decisions():
            yield
    finally:
        _active_gpus.pop()


@contextlib.contextmanager
def reenabled_decisions() -> Iterator[None]:
    """Enable `decisions_of` again within the block, where a dispatch mode has disabled it."""
    was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    was_on = torch.is_autocast_enabled(_CUDA)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    torch._C.set_autocast_enabled(_CUDA, was_on or INSIDE.autocast_block)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch._C.set_autocast_enabled(_CUDA, was_on)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, was_excluded)


class Next:
    """Next kernel of an operator in dispatch order. A rule above autograd calls it to continue."""

    __slots__ = ("_keyset", "_op")

    def __init__(self, op: OpOverload, keyset: Any) -> None:
        self._op = op
        self._keyset = keyset

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next kernel. Under `vmap`, which passes no key set, run the decomposition."""
        if self._keyset is None:
            return self._op._op_dk(_COMPOSITE, *args, **kwargs)
        return self._op.redispatch(self._keyset & _BELOW, *args, **kwargs)

    def below_autograd(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator below autograd, so that autograd records no node for it."""
        keyset = self._keyset & _BELOW & torch._C._after_autograd_keyset
        return self._op.redispatch(keyset, *args, **kwargs)


def active_gpu() -> Gpu:
    """Return the GPU of the innermost `decisions_of`."""
    return _active_gpus[-1]


@cache
def _register_kernels() -> tuple[Any, Any]:
    """Register the kernels on `KEY_NAME`, and return the libraries that hold them. The cache keeps
    the libraries, since torch removes the kernels of a deleted library."""
    library: Any = torch.library.Library  # untyped in torch
    fallback, aten = library("_", "IMPL"), library("aten", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, KEY_NAME)
    policy_by_op: dict[OpOverload, Policy] = {}
    for names, policy in (
        (LOWER_PRECISION, lambda op, args, kwargs: _cast_all(args, kwargs)),
        (FLOAT32, lambda op, args, kwargs: _cast_all(args, kwargs, torch.float32)),
        (FLOAT32_RESULT, _to_float32_result),
        (PROMOTE, _to_widest),
        (("binary_cross_entropy",), _refuse),
    ):
        policy_by_op |= dict.fromkeys(overloads(*names), policy)
    decision_by_op = registry.rules_by_op("above_autograd")
    float32_since_2_12 = set(overloads(*FLOAT32_SINCE_2_12))
    for op in decision_by_op | policy_by_op | dict.fromkeys(overloads(*NOT_IN_A_POLICY)):
        kernel = kernel_above(op, decision_by_op.get(op))
        if op in policy_by_op:
            kernel = _with_policy(op, policy_by_op[op], kernel)
        if op in float32_since_2_12:
            kernel = _with_policy(op, _to_float32_by_release, kernel)
        aten.impl(op, kernel, KEY_NAME, with_keyset=True)
    with warnings.catch_warnings():  # C++ warns once that a kernel replaces another
        warnings.simplefilter("ignore")
        for op, key in registry.rules_by_op("vmap_key").items():
            if key:
                aten.impl(op, _under_vmap(op, decision_by_op[op]), key)
    return fallback, aten


def kernel_above(op: OpOverload, decide: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a kernel for `op` that runs before autograd's. For GPU tensors it calls `decide` with
    a `Next` and the arguments. For others, or if `decide` is None, it runs torch's own kernel."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_on_gpu(args):
            args = _on_one_device(op, args)
        elif decide:
            return decide(Next(op, keyset), *args, **kwargs)
        return op.redispatch(keyset & _BELOW, *args, **kwargs)

    return kernel


NOT_IN_A_POLICY = ("istft", "nanquantile", "quantile", "stft", "stft.center", "take_along_dim")
"""Composite operators without an autocast policy, whose C++ compares devices."""


def _on_one_device(op: OpOverload, args: Args) -> Args:
    """Return `args` with host tensors moved to device `meta`, if one of them is already there.
    Integer tensors are not moved.

    A host tensor on `meta` has no data, and a host tensor on `cpu` has data. C++ compares devices
    before it decomposes `op`, and refuses a mix of `cpu` and `meta`.

    Integer tensors are lengths, such as those of `ctc_loss`. C++ takes lengths on `cpu`, and reads
    their values. In `take_along_dim` integer tensors are indices, and are replaced too. In `istft`
    only the window is replaced.
    """
    without_data = [t for t in tensors_in(args) if is_meta(t) and not on_gpu(t)]
    if not without_data:
        return args
    if op is torch.ops.aten.istft.default:
        call = op_of(op).call(args, {})  # C++ reads whether the window covers each sample
        window = torch.ops.aten.ones([call.win_length or call.n_fft], device="meta")
        return tuple((call | {"window": window})[name] for name in op_of(op).names)
    meta_scalar = without_data[0].detach().as_strided((), ())
    has_indices = op is torch.ops.aten.take_along_dim.default

    def drop_data(tensor: Tensor) -> Tensor:
        is_length = not (tensor.is_floating_point() or tensor.dtype is torch.bool or has_indices)
        if is_meta(tensor) or is_length:
            return tensor
        return tensor * meta_scalar.to(tensor.dtype)  # keeps the autograd graph of `tensor`

    return tuple(map_tensors(drop_data, args))


def _is_on_gpu(args: Args) -> bool:
    return next(map(on_gpu, tensors_in(args)), False)


def _under_vmap(op: OpOverload, decide: Callable[..., Any]) -> Callable[..., Any]:
    next_kernel = Next(op, None)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_virtual = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        if is_virtual and _is_on_gpu(args):
            return decide(next_kernel, *args, **kwargs)
        return next_kernel(*args, **kwargs)

    return kernel


Policy = Callable[[OpOverload, Args, Kwargs], tuple[Any, Any]]  # returns cast (args, kwargs)


def _with_policy(op: OpOverload, policy: Policy, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def cast_then_run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if INSIDE.autocast or not torch.is_autocast_enabled(_CUDA):
            return kernel(keyset, *args, **kwargs)
        # as torch does, casts and the operators inside a composite run without autocast
        INSIDE.autocast = True
        try:
            cast_args, cast_kwargs = policy(op, args, kwargs)
            out = kernel(keyset, *cast_args, **cast_kwargs)
            # C++ frees the casts from the first argument on; a list frees its last item first
            cast_args = [*cast_args]
            cast_args.reverse()
            return out
        finally:
            INSIDE.autocast = False

    return cast_then_run


def _is_eligible(value: Any) -> bool:
    """Return whether autocast casts the value: a floating-point GPU tensor that is not float64."""
    return (
        isinstance(value, Tensor)
        and on_gpu(value)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_eligible(value):
        return value if value.dtype is dtype else CASTS.cast(value, dtype)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _cast_all(args: Args, kwargs: Kwargs, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Return (args, kwargs) with tensors cast to `dtype` (None: autocast's), the last one first.
    `WrapFunction_` of ATen/autocast_mode.h casts within an argument list, whose order C++ leaves
    open; GCC goes from right to left. Evidence: every cast recorded on an H200."""
    dtype = dtype or torch.get_autocast_dtype(_CUDA)
    cast_kwargs = {k: _cast(v, dtype) for k, v in reversed(list(kwargs.items()))}
    cast_args = [_cast(a, dtype) for a in reversed(args)]
    return cast_args[::-1], dict(reversed(list(cast_kwargs.items())))


def _to_float32_by_release(op: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.float32) if simulated().casts_rms_norm else (args, kwargs)


def _to_float32_result(op: Any, args: Args, kwargs: Kwargs) -> tuple[Any, dict[str, Any]]:
    """Return (args, kwargs) of `op` with `dtype=torch.float32`, unless the caller gave a dtype."""
    given = arguments_by_name(op, args, kwargs)
    if _is_eligible(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in given]
    by_keyword = {name: value for name, value in given.items() if name not in positional}
    return [given[name] for name in positional], by_keyword


def _refuse(op: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Raise torch's `binary_cross_entropy_banned` error on a GPU; else return (args, kwargs)."""
    return op._op_dk(_AUTOCAST, *args, **kwargs) if _is_on_gpu(args) else (args, kwargs)


def _to_widest(op: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    tensors = [a for a in (*args, *kwargs.values()) if _is_eligible(a)]
    if not tensors:
        return args, kwargs
    is_mixed = any(a.dtype is torch.float32 for a in tensors)
    return _cast_all(args, kwargs, torch.float32 if is_mixed else None)


_KEY_OF_PYTHON_KERNEL = {
    "CUDA": torch._C.DispatchKey.CUDA,
    "CompositeExplicitAutograd[alias]": torch._C.DispatchKey.CompositeExplicitAutograd,
    "CompositeImplicitAutograd[alias]": _COMPOSITE,
}
_TORCH_NAMESPACES = ("aten", "prim", "memest", "quantized", "c10d")
_KEYS_OF_OWN_KERNELS = ("CPU", "CUDA", "Meta", "CompositeExplicitAutograd")
_FUNCTIONAL = "_c10d_functional"  # C++ kernels allocate the result and call operators of `c10d`
_DECOMPOSED_BELOW_AUTOGRAD = frozenset(
    f"aten::{name}"
    for name in """_euclidean_dist affine_grid_generator _trilinear _unsafe_index.Tensor allclose
    as_strided_scatter block_diag count_nonzero diagonal_scatter dist fft_fftfreq fft_rfftfreq
    ldexp.Tensor linalg_pinv.atol_rtol_tensor mvlgamma norm.Scalar norm.ScalarOpt_dtype
    select_scatter slice_scatter bartlett_window bartlett_window.periodic blackman_window
    blackman_window.periodic hamming_window hamming_window.periodic hamming_window.periodic_alpha
    hamming_window.periodic_alpha_beta hann_window hann_window.periodic kaiser_window
    kaiser_window.periodic kaiser_window.beta""".split()
)
"""Operators that C++ decomposes below autograd; autograd has formulas for some of them."""


def decomposition_key(func: Any) -> Any:
    """Return the dispatch key or function that decomposes `func`; None if `func` is one kernel. A
    function decomposes operators of `prims`, and those with an `Op.decomposition`. An operator of
    another library is decomposed if it has a kernel in Python. The dispatcher stores the file that
    registered a kernel: one that ends with `.py`, or in torch 2.6 and 2.8 `/dev/null`."""
    name = func.name()
    if func.namespace == "prims":
        return getattr(func, "impl_aten", None)  # the function that CUDA runs
    if decomposition := op_of(func).decomposition:
        return decomposition
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if name in _DECOMPOSED_BELOW_AUTOGRAD or func.namespace == _FUNCTIONAL:
        key = "CompositeExplicitAutograd"
        return getattr(
            torch._C.DispatchKey, key if has_kernel(name, key) else f"{key}NonFunctional"
        )
    if func.namespace in _TORCH_NAMESPACES:
        is_composite = has_kernel(name, "CompositeImplicitAutograd") and not any(
            has_kernel(name, key) for key in _KEYS_OF_OWN_KERNELS
        )
        return _COMPOSITE if is_composite else None
    for line in torch._C._dispatch_dump(name).splitlines():
        key, _, source = line.partition(": ")
        if key in _KEY_OF_PYTHON_KERNEL and (".py:" in source or "/dev/null:" in source):
            return _KEY_OF_PYTHON_KERNEL[key]
    return None


def run_decomposed(mode: SimMode, key: Any, func: Any, args: Args, kwargs: Any) -> Any:
    """Run `func` by its kernel for the dispatch key `key`; `mode` records the operators inside.

    If `key` is a function, it runs in place of `func`.
    """
    depth, INSIDE.depth = INSIDE.depth, 0  # so that `mode` records the operators inside
    composite = INSIDE.composite
    if func.namespace in (_FUNCTIONAL, "aten"):  # C++ makes tensors with the options of the input
        INSIDE.composite = any(map(on_gpu, tensors_in(args)))
    try:
        with mode, reenabled_decisions():
            return key(*args, **kwargs) if callable(key) else func._op_dk(key, *args, **kwargs)
    finally:
        INSIDE.depth, INSIDE.composite = depth, composite
