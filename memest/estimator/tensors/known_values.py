"""Known values: a CPU copy of each small tensor whose values follow from the script's own data.

Models branch on values (`attention_mask.all()`, the largest position), and a meta tensor has none.
Ids, masks, positions, small constants and everything computed from them have a CPU storage per meta
storage, so views and in-place writes agree. A script that reads a tensor that depends on weights
gets a guessed value (`gpu/guesses.py`).
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.tensors.placement import CPU, is_meta, operators, storage_key, tensors_in

aten = torch.ops.aten

MAX_BYTES = 1 << 26  # largest known value: larger masks cost seconds, and scripts do not read them
MAX_FLOAT_NUMEL = 1 << 18  # largest known floating-point tensor: masks, scales, schedules
MAX_SHOWN_NUMEL = 64  # largest copied tensor that a script is assumed to print or compare
MAX_SPLIT_BYTES = 8 * MAX_SHOWN_NUMEL  # largest value of which a part may be unknown
MAX_TOTAL_BYTES = 1 << 28  # all known values; one of up to a 256th of it is always stored
_CONSTANT_LIKE = frozenset(map(id, (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
)))  # fmt: skip
"""Operators whose result does not depend on their first argument's values."""

_UNWRITTEN = operators("empty.memory_format empty_strided empty_like new_empty new_empty_strided")
"""Factories without values. Their known value is zeros, so that two runs never differ."""

READS_VALUE = operators("_local_scalar_dense equal is_nonzero allclose")
"""Operators whose result is a Python value."""

FROM_PARAMETER, FROM_BUFFER = 1, 2  # bits of `KnownValues.sources`
_IGNORED_ON_CPU = {"device", "pin_memory"}


class ValueUnknown(Exception):
    """Raised if an operator needs a value that is not known."""


class KnownValues:
    """Values of meta tensors, as CPU copies of their storages. A value that is missing here is
    looked up in `below`, another object of this class, unless that is None."""

    def __init__(self, below: "KnownValues | None" = None) -> None:
        self.guessed: set[int] = set()  # keys of storages whose value is or contains a guess
        self.copies: dict[int, torch.UntypedStorage] = {}  # on the CPU, by the meta storage's key
        self._unknown: dict[int, Tensor] = {}  # unknown bytes of a copy, where not all are known
        self._below = below
        self._above: KnownValues | None = None
        if below is not None:
            below._above = self
        self._random_state: Tensor | None = None
        self.sources: dict[int, int] = {}  # bits of `FROM_*` by storage, if `watch` was called
        self.read = 0  # bits of `FROM_*` of all values that were looked up since

    def __bool__(self) -> bool:
        """True if any value is stored here; `below` is not searched."""
        return bool(self.copies)

    # --- store

    def adopt(self, tensor: Tensor, value: Tensor) -> None:
        """Make `value`, a CPU tensor of equal shape, the known value of a meta `tensor`."""
        self._unknown.pop(storage_key(tensor), None)
        self.copies[storage_key(tensor)] = value.contiguous().clone().untyped_storage()

    def adopt_small(self, tensor: Tensor, value: Tensor) -> None:
        """Make `value` the known value of a meta `tensor`, if it is contiguous and small."""
        if value.numel() <= MAX_SHOWN_NUMEL and value.is_contiguous() and value.numel():
            with _disable_current_modes():
                self.adopt(tensor, value.detach())

    def adopt_guess(self, tensor: Tensor, value: Tensor) -> None:
        """Make `value` the known value of the meta tensor `tensor`, and mark it as a guess."""
        self.adopt(tensor, value)
        self.guessed.add(storage_key(tensor))

    def overwrite(self, tensor: Tensor, value: Tensor) -> bool:
        """Replace the known values of `tensor` by `value`, or add `value` if it may be stored.
        Return whether the values of `tensor` are known afterwards."""
        known = self.value_of(tensor)
        if known is not None:
            known.copy_(value)
            self.guessed.discard(storage_key(tensor))
        elif self.may_hold(tensor) and tensor.nbytes >= tensor.untyped_storage().nbytes():
            self.adopt_like(tensor, value)
        return self.is_known(tensor)

    def drop(self, key: int) -> None:
        """Drop the known values of the storage whose `storage_key` is `key`."""
        self.copies.pop(key, None)
        self._unknown.pop(key, None)
        self.guessed.discard(key)
        self.sources.pop(key, None)

    def forget(self, key: int) -> None:
        """Drop the known values of the freed storage whose `storage_key` is `key`. Also drop them
        in the object that has this one as `below`."""
        self.drop(key)
        if self._above is not None:
            self._above.drop(key)

    def _mark_unknown(self, tensor: Tensor) -> None:
        """Drop the known values of `tensor`. Other values of its storage stay if the storage is
        small (`MAX_SPLIT_BYTES`)."""
        key, num_bytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if tensor.nbytes >= num_bytes or num_bytes > MAX_SPLIT_BYTES or key not in self.copies:
            self.drop(key)
            return
        none_unknown = torch.zeros(num_bytes, dtype=torch.bool, device=CPU)
        _bytes_of(tensor, self._unknown.setdefault(key, none_unknown)).fill_(True)

    def watch(self, model: torch.nn.Module) -> None:
        """Record from this call on which values depend on parameters and buffers of `model`."""
        for tensors, bit in ((model.parameters(), FROM_PARAMETER), (model.buffers(), FROM_BUFFER)):
            self.sources |= {storage_key(t): bit for t in tensors if is_meta(t)}

    # --- look up

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a CPU tensor with the values, shape and strides of `tensor`; None if unknown.
        A tensor without elements has no unknown values."""
        if not is_meta(tensor):
            return tensor
        if self.sources:
            self.read |= self.sources.get(storage_key(tensor), 0)
        copy = self.copies.get(tensor.untyped_storage()._cdata)
        if copy is None or self._is_partly_unknown(tensor):
            if self._below is not None:
                return self._below.value_of(tensor)
            return None if tensor.numel() else torch.empty_like(tensor, device=CPU)
        empty = torch.empty(0, dtype=tensor.dtype, device=CPU)
        return empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a meta tensor with a copy here; `below` is not searched."""
        return is_meta(tensor) and storage_key(tensor) in self.copies

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether all values of `tensor` are known; those of a tensor with data are."""
        if not is_meta(tensor):
            return True
        if storage_key(tensor) in self.copies and not self._is_partly_unknown(tensor):
            return True
        return not tensor.numel() if self._below is None else self._below.is_known(tensor)

    def _is_partly_unknown(self, tensor: Tensor) -> bool:
        """Return whether some element of `tensor` is unknown, although its storage has a copy."""
        unknown = self._unknown.get(storage_key(tensor))
        return unknown is not None and bool(_bytes_of(tensor, unknown).any())

    def is_guessed(self, args: Any) -> bool:
        """Return whether the value of any tensor in `args` (nested lists or tuples) is a guess."""
        return any(is_meta(t) and storage_key(t) in self.guessed for t in tensors_in(args))

    def decides(self, tensor: Tensor) -> bool:
        """Return whether the value of `tensor` may decide a shape: it is known, and not a guess."""
        return self.value_of(tensor) is not None and not self.is_guessed([tensor])

    # --- compute

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operator `func` on the CPU, for the known values of its
        arguments. Raise `ValueUnknown` if one is unknown. The host's random state does not
        change."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return self._compute(func, args, kwargs)
        generator = torch.default_generator
        host_state = generator.get_state()
        try:
            generator.set_state(host_state if self._random_state is None else self._random_state)
            return self._compute(func, args, kwargs)
        finally:
            self._random_state = generator.get_state()
            generator.set_state(host_state)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def look_up(tensor: Tensor) -> Tensor:
            value = self.value_of(tensor)
            if value is None:
                raise ValueUnknown(str(func))
            return value

        cpu_args = map_tensors(look_up, args)
        cpu_kwargs = {
            k: map_tensors(look_up, v) for k, v in kwargs.items() if k not in _IGNORED_ON_CPU
        }
        if "device" in kwargs:
            cpu_kwargs["device"] = CPU
        if func is aten.histc.default:  # CPU kernels count only floats (Histogram.cpp)
            cpu_args = (cpu_args[0].double(), *cpu_args[1:])
        return func(*cpu_args, **cpu_kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Run the operator `func` on known values, and store the result as the values of `out`.
        `out`, the result on meta tensors, gets no values if they depend on unknown ones."""
        is_mutable = func._schema.is_mutable
        first = args[0] if args else None
        if is_mutable and isinstance(first, list | tuple):
            self._write_all(func, args, kwargs)
            return
        if is_mutable and isinstance(first, Tensor) and not self.is_known(first):
            return
        if is_mutable and _is_view_in_place(func):
            return  # only the geometry changed, and is set already
        if id(func) in _CONSTANT_LIKE and isinstance(first, Tensor):
            if self.may_hold(out):
                like = torch.empty((), dtype=first.dtype, device=CPU).expand(first.size())
                args = (like, *args[1:])
        elif not is_mutable and not all(map(self.is_known, tensors_in((*args, *kwargs.values())))):
            return
        self._follow(func, args, kwargs, out)
        if self.guessed and self.is_guessed(args):
            self.guessed.update(map(storage_key, filter(is_meta, tensors_in((out,)))))
        if self.sources:
            self._pass_sources((*args, *kwargs.values()), out)

    def _pass_sources(self, args: tuple[Any, ...], out: Any) -> None:
        """Record that `out` depends on the parameters and buffers on which `args` depend."""
        arg_sources = [self.sources.get(storage_key(t), 0) for t in tensors_in(args) if is_meta(t)]
        sources = reduce(or_, arg_sources, 0)
        for tensor in filter(is_meta, tensors_in((out,))) if sources else ():
            self.sources[storage_key(tensor)] = sources

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        written = [a for a in args[:1] if isinstance(a, Tensor) and func._schema.is_mutable]
        results = [o for o in _flat(out) if isinstance(o, Tensor)]
        if func in _UNWRITTEN:
            for result in filter(self.may_hold, results):
                zeros = np.zeros(result.untyped_storage().nbytes(), np.uint8)  # no page is written
                storage = torch.from_numpy(zeros).untyped_storage()
                self.copies[result.untyped_storage()._cdata] = storage
            return
        is_copy = func is aten._to_copy.default
        if not written and not any(self.may_hold(o, is_copy=is_copy) for o in results):
            return
        read = self.read
        try:
            values = self.compute(func, args, kwargs)
        except (ValueUnknown, NotImplementedError, RuntimeError):
            for tensor in written:
                self._mark_unknown(tensor)
            return
        finally:
            self.read = read
        for result, value in zip(results, _flat(values), strict=False):
            if self.may_hold(result, is_copy=is_copy) and isinstance(value, Tensor):
                self.adopt_like(result, value)

    def _write_all(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update known values after the operator `func` has written to `args[0]`, a list of
        tensors. Values that cannot be computed are dropped. A gradient scaler's check for infinity
        and NaN (`_amp_foreach_non_finite_check_and_unscale_`) is skipped, since gradients are
        assumed to be finite. So the flag of the check keeps its value."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return
        tensors = tensors_in((*args, *kwargs.values()))
        if self._below is None and all(map(self.is_known, tensors)):
            with suppress(NotImplementedError, RuntimeError):
                self.compute(func, args, kwargs)  # writes the copies in place
                return
        for tensor in args[0]:
            if isinstance(tensor, Tensor) and is_meta(tensor) and self.is_known(tensor):
                self.drop(storage_key(tensor))

    def may_hold(self, result: Tensor, *, is_copy: bool = False) -> bool:
        """Return whether known values may be stored for `result`: it is small and has none yet. A
        copy of data (`is_copy`), such as an adjacency matrix, may be larger than other results."""
        storage = result.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        is_known = key in self.copies and key not in self._unknown
        if not is_meta(result) or not num_bytes or is_known:
            return False
        if result.is_floating_point() and not (is_copy and result.dim() == 2):
            return num_bytes <= MAX_FLOAT_NUMEL * 4  # bytes of a float32
        if result.is_complex() or num_bytes > MAX_BYTES:
            return False
        if num_bytes <= MAX_TOTAL_BYTES >> 8:
            return True
        return num_bytes + sum(copy.nbytes() for copy in self.copies.values()) <= MAX_TOTAL_BYTES

    def adopt_like(self, result: Tensor, value: Tensor) -> None:
        """Make `value` the known values of `result`, stored with the strides of `result`. Do
        nothing if the two tensors have different shapes."""
        if value.shape != result.shape:
            return
        num_items = result.untyped_storage().nbytes() // result.element_size()
        flat = torch.empty(num_items, dtype=result.dtype, device=CPU)
        flat.as_strided(result.size(), result.stride(), result.storage_offset()).copy_(value)
        self._unknown.pop(storage_key(result), None)
        self.copies[result.untyped_storage()._cdata] = flat.untyped_storage()


def _bytes_of(tensor: Tensor, flags: Tensor) -> Tensor:
    """Return a view of `flags` in the shape of `tensor`: for each element the flag of its first
    byte. `flags` has one flag per byte of the storage of `tensor`."""
    itemsize = tensor.element_size()
    strides = [stride * itemsize for stride in tensor.stride()]
    return flags.as_strided(tensor.size(), strides, tensor.storage_offset() * itemsize)


@cache
def _is_view_in_place(func: Any) -> bool:
    name = func._schema.name
    return torch.Tag.inplace_view in func.tags and name not in ("aten::resize_", "aten::set_")


def materialise(values: Any) -> Any:
    """Return `values` (tensors, nested lists or tuples) with meta tensors in place of tensors."""
    return map_tensors(lambda t: torch.empty_like(t, device="meta"), values)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value`, nested lists or tuples, with `function(tensor)` for each tensor. The pytree
    of torch would leave a reference cycle, so Python would collect garbage more often."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def known_without_values(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return the result for every element if the operator `func` tests `args[0]` for infinity or
    NaN; else None. All elements are assumed to be finite."""
    if func is aten.isinf.default or func is aten.isnan.default:
        return False
    if func is aten.ne.Tensor or func is aten.eq.Tensor:  # how isnan and isfinite are written
        return func is aten.eq.Tensor if args[0] is args[1] else None
    if func is aten.eq.Scalar or func is aten.ne.Scalar:  # how isinf and isfinite are written
        return func is aten.ne.Scalar if args[1] == float("inf") else None
    return None


COMPARISONS = operators("gt.Tensor ge.Tensor lt.Tensor le.Tensor")


def compared_with_infinity(
    func: Any, args: tuple[Any, ...], values: KnownValues, shape: torch.Size
) -> Tensor | None:
    """Return the result, of shape `shape`, if the operator `func` compares unknown numbers with
    infinities; else None. `args` are two tensors, whose known numbers are in `values`. Unknown
    numbers are assumed to be finite."""
    if func not in COMPARISONS:
        return None
    left, right = map(values.value_of, args)
    finite = torch.zeros((), device=CPU)
    if left is None and right is not None:
        bound, operands = right, (finite, right)
    elif left is not None and right is None:
        bound, operands = left, (left, finite)
    else:
        return None
    return func(*operands).expand(shape) if bool(bound.isinf().all()) else None


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)
