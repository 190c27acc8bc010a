"""Values for the few tensors that models read: a real CPU twin beside small integer and boolean
meta tensors.

Models branch on values (`attention_mask.all()`, the largest position). A meta tensor has none. Ids,
masks, positions and what is computed from them alone keep a twin on the CPU, one per storage, so
that views and in-place writes agree. What depends on weights or activations has no twin; reading it
is an error that names the operator; on the virtual GPU it is guessed (`guesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.tensors import is_meta, storage_key, tensors_in

aten = torch.ops.aten

MAX_BYTES = 1 << 26
"""Twins above it are dropped: a mask of that size is looked at by nobody, and computing it would
cost seconds.
"""

MAX_TWIN_NUMEL = 1 << 18
"""On the virtual GPU, floating-point tensors up to this length keep what is known of them, too:
masks that are made of ones, scales, schedules.
"""

_CONSTANT_LIKE = frozenset(
    map(id, (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default))
)
"""Their results are known whatever their first argument holds."""

MAX_TOTAL_BYTES = 1 << 28
"""Twins of a script together, but for those of up to a 256th of it."""

_UNWRITTEN = frozenset((
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
))  # fmt: skip
"""Room for values: there are none yet. Zeros stand there, so that no two runs differ by what lay in
the memory.
"""

READS_VALUE = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.allclose.default,
    }
)
"""Operators whose result is a Python value."""

_IGNORED_ON_CPU = {"device", "pin_memory"}


class ValueUnknown(Exception):
    """The traced code reads a value that the meta device does not have."""


class Twins(dict[int, torch.UntypedStorage]):
    """Twins by the key of the storage, and what they take."""

    num_bytes = 0

    def __setitem__(self, key: int, twin: torch.UntypedStorage) -> None:
        self.pop(key, None)
        self.num_bytes += twin.nbytes()
        super().__setitem__(key, twin)

    def pop(self, key: int, default: Any = None) -> Any:
        """As `dict.pop`."""
        twin = super().pop(key, default)
        if twin is not None:
            self.num_bytes -= twin.nbytes()
        return twin


class ShadowValues:
    """The CPU twins of a trace, by storage."""

    def __init__(self) -> None:
        self._twins = Twins()

    def adopt(self, tensor: Tensor, value: Tensor) -> None:
        """Make `value` (CPU, same shape) the twin of `tensor`'s storage."""
        self._twins[tensor.untyped_storage()._cdata] = value.contiguous().clone().untyped_storage()

    def drop(self, storage_key: int) -> None:
        """The storage holds values that are no longer known."""
        self._twins.pop(storage_key, None)

    def forget(self, storage_key: int) -> None:
        """The storage died."""
        self.drop(storage_key)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The twin of `tensor`, a CPU view of the same geometry, or None."""
        if not is_meta(tensor):
            return tensor
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())

    def decides(self, tensor: Tensor) -> bool:
        """Whether the value of `tensor` is known well enough to decide a shape."""
        return self.value_of(tensor) is not None

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` on the twins.

        Raises:
            ValueUnknown: a tensor argument has none.
        """

        def twin(tensor: Tensor) -> Tensor:
            value = self.value_of(tensor)
            if value is None:
                raise ValueUnknown(str(func))
            return value

        cpu_args = _mapped(twin, args)
        cpu_kwargs = {k: _mapped(twin, v) for k, v in kwargs.items() if k not in _IGNORED_ON_CPU}
        if "device" in kwargs:
            cpu_kwargs["device"] = torch.device("cpu")
        return func(*cpu_args, **cpu_kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """After `func` ran on meta tensors: give its integer and boolean results their twins."""
        written = [a for a in args[:1] if isinstance(a, Tensor) and func._schema.is_mutable]
        results = [o for o in _flat(out) if isinstance(o, Tensor)]
        if func in _UNWRITTEN:
            for result in filter(self._wants_twin, results):
                room = torch.zeros(result.untyped_storage().nbytes(), dtype=torch.uint8)
                self._twins[result.untyped_storage()._cdata] = room.untyped_storage()
            return
        if not written and not any(self._wants_twin(o) for o in results):
            return
        try:
            values = self.compute(func, args, kwargs)
        except (ValueUnknown, NotImplementedError, RuntimeError):
            for tensor in written:
                self.drop(tensor.untyped_storage()._cdata)
            return
        for result, value in zip(results, _flat(values), strict=False):
            if self._wants_twin(result) and isinstance(value, Tensor):
                self._adopt_like(result, value)

    def _wants_twin(self, result: Tensor) -> bool:
        storage = result.untyped_storage()
        return (
            result.device.type == "meta"
            and not result.is_floating_point()
            and not result.is_complex()
            and 0 < storage.nbytes() <= MAX_BYTES
            and storage._cdata not in self._twins
        )

    def _adopt_like(self, result: Tensor, value: Tensor) -> None:
        if value.shape != result.shape:
            return
        num_items = result.untyped_storage().nbytes() // result.element_size()
        flat = torch.empty(num_items, dtype=result.dtype)
        flat.as_strided(result.size(), result.stride(), result.storage_offset()).copy_(value)
        self._twins[result.untyped_storage()._cdata] = flat.untyped_storage()


class LiveValues(ShadowValues):
    """Values beside the tensors of a virtual GPU: of floating-point numbers too, and with the
    guesses among them told apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guessed: set[int] = set()
        """Storages whose twin is a guess, or was computed from one."""

        self.supposed: LiveValues | None = None
        """What is supposed beside it in order to decide shapes."""

        self._is_mutable: dict[int, bool] = {}
        self._random_state: Tensor | None = None

    def drop(self, storage_key: int) -> None:
        """As `ShadowValues.drop`."""
        super().drop(storage_key)
        self.guessed.discard(storage_key)

    def forget(self, storage_key: int) -> None:
        """As `ShadowValues.forget`."""
        self.drop(storage_key)
        if self.supposed is not None:
            self.supposed.drop(storage_key)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether there is a value for `tensor`, or it is one."""
        return not is_meta(tensor) or storage_key(tensor) in self._twins

    def decides(self, tensor: Tensor) -> bool:
        """As `ShadowValues.decides`: no guess does."""
        return super().decides(tensor) and not self.is_guessed([tensor])

    def is_guessed(self, args: Any) -> bool:
        """Whether a twin among `args` is a guess."""
        return any(is_meta(t) and storage_key(t) in self.guessed for t in tensors_in(args))

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """As `ShadowValues.follow`; most operators end here, at an argument that is not known."""
        is_mutable = self._is_mutable.get(id(func))
        if is_mutable is None:
            is_mutable = self._is_mutable[id(func)] = func._schema.is_mutable
        first = args[0] if args else None
        if is_mutable and isinstance(first, list | tuple):
            self._drop_all(func, first)
            return
        if is_mutable and isinstance(first, Tensor) and not self.is_known(first):
            return
        if id(func) in _CONSTANT_LIKE and isinstance(first, Tensor):
            if self._wants_twin(out):
                args = (torch.empty(first.size(), dtype=first.dtype), *args[1:])
        elif not is_mutable and not all(map(self.is_known, tensors_in((*args, *kwargs.values())))):
            return
        super().follow(func, args, kwargs, out)
        if self.guessed and self.is_guessed(args):
            self.guessed.update(map(storage_key, filter(is_meta, tensors_in((out,)))))

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `ShadowValues.compute`; what is drawn on the card is not drawn from the host's state,
        on which the order of a script's data may depend.
        """
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return super().compute(func, args, kwargs)
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.set_state(before if self._random_state is None else self._random_state)
            return super().compute(func, args, kwargs)
        finally:
            self._random_state = generator.get_state()
            generator.set_state(before)

    def adopt_guess(self, tensor: Tensor, value: Tensor) -> None:
        """As `adopt`, of a value that is guessed."""
        self.adopt(tensor, value)
        self.guessed.add(storage_key(tensor))

    def overwrite(self, tensor: Tensor, value: Tensor) -> bool:
        """Let `tensor`, all of whose elements have been written, have this value; whether it is
        kept.
        """
        known = self.value_of(tensor)
        if known is not None:
            known.copy_(value)
            self.guessed.discard(storage_key(tensor))
        elif self._wants_twin(tensor):
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes < tensor.untyped_storage().nbytes():
                return False
            self._adopt_like(tensor, value)
        return self.is_known(tensor)

    def _drop_all(self, func: Any, tensors: Iterable[Any]) -> None:
        """What a list operator writes is not followed; gradients are taken to be finite."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return
        for tensor in tensors:
            if isinstance(tensor, Tensor) and is_meta(tensor) and self.is_known(tensor):
                self.drop(storage_key(tensor))

    def _wants_twin(self, result: Tensor) -> bool:
        if not result.is_floating_point():
            return super()._wants_twin(result) and self._has_room(result.untyped_storage().nbytes())
        return (
            is_meta(result)
            and 0 < result.untyped_storage().nbytes() <= MAX_TWIN_NUMEL * 4
            and storage_key(result) not in self._twins
        )

    def _has_room(self, num_bytes: int) -> bool:
        is_small = num_bytes <= MAX_TOTAL_BYTES >> 8
        return is_small or self._twins.num_bytes + num_bytes <= MAX_TOTAL_BYTES


def materialise(values: Any) -> Any:
    """Meta tensors of the shapes that `values` (computed on twins) turned out to have."""
    return _mapped(lambda t: torch.empty_like(t, device="meta"), values)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of each tensor in it. That of torch's pytree leaves a cycle behind,
    at which Python would look for garbage more often than in a real run.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [_mapped(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def known_without_values(func: Any, args: tuple[Any, ...]) -> Callable[[Tensor], Tensor] | None:
    """For tests of activations for infinity or NaN: the twin of their result, all False.

    A training step whose activations are finite is what is predicted.
    """
    if func is aten.isinf.default or func is aten.isnan.default:
        return lambda out: torch.zeros(out.shape, dtype=torch.bool)
    if func is aten.ne.Tensor and args[0] is args[1]:  # how torch.isnan is written
        return lambda out: torch.zeros(out.shape, dtype=torch.bool)
    if func is aten.eq.Scalar and args[1] == float("inf"):  # how torch.isinf is written
        return lambda out: torch.zeros(out.shape, dtype=torch.bool)
    if func is aten.eq.Tensor and args[0] is args[1]:  # how torch.isfinite is written, with the
        return lambda out: torch.ones(out.shape, dtype=torch.bool)
    if func is aten.ne.Scalar and args[1] == float("inf"):  # next
        return lambda out: torch.ones(out.shape, dtype=torch.bool)
    return None


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)
