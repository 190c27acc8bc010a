"""Host of the simulated run: which of its tensors are real, and which have no data.

Parameters, tensors read from checkpoints, copies of GPU tensors and results of these have no values
and take no memory. So a model of any size can be built. All other tensors are real, up to two
bounds of their size.
"""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.gpu.attribution import Attribution
from memest.estimator.gpu.guesses import GuessedValues
from memest.estimator.ops.indexing import MASK_DTYPES
from memest.estimator.ops.random import skip_mt19937
from memest.estimator.ops.registry import Args, op_of
from memest.estimator.tensors import placement
from memest.estimator.tensors.known_values import KnownValues, map_tensors
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, META, Place, is_meta, operators, tensors_in

aten = torch.ops.aten

MANY_DRAWS = 1 << 26  # above this, skipping ahead (0.1 s) is faster than drawing (2 to 3 ns each)
CHUNK = 1 << 20  # numbers that are drawn at a time
BLOCK = 16  # block size of normal numbers (`normal_fill`)
_UNIFORM = operators("uniform_ rand rand.generator rand_like")
_NORMAL = operators("normal_ randn randn.generator randn_like normal.float_float")


def num_draws(func: Any, tensor: Tensor) -> int:
    """Return how many 32-bit random words `func` draws to fill `tensor`; 0 if it is not random."""
    if func not in _UNIFORM and func not in _NORMAL:
        return 0
    count = tensor.numel()
    if func in _NORMAL and count % BLOCK:  # the last block is drawn again, whole
        count += BLOCK
    return 2 * count if tensor.dtype is torch.float64 else count


class HostRng:
    """Count of the random numbers that tensors without data would draw from the CPU generator. The
    generator skips as many before its next use, so that later numbers are those of a real run."""

    def __init__(self) -> None:
        self.num_waiting = 0

    def skip(self, func: Any, tensor: Tensor, generator: torch.Generator | None) -> None:
        """Skip, at once or by the next `settle`, the random numbers that `func` would draw from
        `generator` (None: the default one) to fill `tensor`, which has no data."""
        if func in _NORMAL and tensor.numel() < BLOCK:  # made in pairs, of which one is kept
            self.settle()
            with _disable_current_modes():
                numbers = torch.empty(tensor.numel(), dtype=tensor.dtype, device=CPU)
                numbers.normal_(generator=generator)
        elif generator is None or generator is torch.default_generator:
            self.num_waiting += num_draws(func, tensor)
        else:
            self._skip_now(num_draws(func, tensor), generator)

    def settle(self) -> None:
        """Advance the default generator by the numbers to skip. Call it before the next draw."""
        count, self.num_waiting = self.num_waiting, 0
        if count:
            self._skip_now(count, None)

    def _skip_now(self, count: int, generator: torch.Generator | None) -> None:
        with _disable_current_modes():
            if count > MANY_DRAWS:
                skip_mt19937(generator or torch.default_generator, count)
                return
            buffer = torch.empty(min(count, CHUNK), dtype=torch.uint8, device=CPU)
            while count:
                chunk = buffer[:count]
                chunk.random_(generator=generator)
                count -= len(chunk)

    def install(self, patches: Patches) -> None:
        """Wrap torch's functions that read or set the state of the default generator. The wrappers
        create no Python container, which would change when Python collects garbage."""
        get_state, set_state = torch.get_rng_state, torch.set_rng_state
        set_seed, set_random_seed = torch.manual_seed, torch.seed

        def get_rng_state() -> Tensor:
            self.settle()
            return get_state()

        def set_rng_state(new_state: Tensor) -> None:
            self.num_waiting = 0
            set_state(new_state)

        def manual_seed(seed: int) -> torch.Generator:
            self.num_waiting = 0
            return set_seed(seed)

        def seed_randomly() -> int:
            self.num_waiting = 0
            return set_random_seed()

        functions = {
            "get_rng_state": get_rng_state, "set_rng_state": set_rng_state,
            "manual_seed": manual_seed, "seed": seed_randomly,
        }  # fmt: skip
        patches.set_all(functions, torch, torch.random)


VIRTUAL_HOST_BYTES = 1 << 20  # smaller floating-point tensors are real, and not counted
MAX_REAL_BYTES = 1 << 28  # largest real result: MNIST's images in float32 take 188 MB
MAX_NOISE_BYTES = 1 << 25
"""Largest tensor of the host with real random numbers, bytes: it takes 100 ms. Masks are made of
smaller ones (a batch of 2048 sequences of 4096 tokens is at the bound), random images of larger
ones."""

REAL_BYTES = 1 << 30  # all counted real tensors at a time; a run stays below 2.5 GiB
_FACTORIES = operators(
    "empty.memory_format empty_strided zeros ones full rand randn rand.generator "
    "randn.generator normal.float_float new_empty new_zeros new_ones new_full new_empty_strided"
)
_NOISE = _UNIFORM | _NORMAL | operators("bernoulli normal.Tensor_float normal.Tensor_Tensor")


class HostTensors:
    """CPU tensors of the script. Large floating-point ones have no data: they are meta tensors.
    `live` has {`storage_key`: id} of the storages on the GPU. `values` and `guessed` have known and
    guessed values of tensors without data. `attribution` has the script's line, for errors."""

    def __init__(
        self,
        live: dict[int, int],
        values: KnownValues,
        guessed: GuessedValues,
        attribution: Attribution,
    ) -> None:
        self.num_bytes = self.peak_bytes = 0  # host tensors without data: now, and at the peak
        self.rng = HostRng()
        self._live, self._values = live, values
        self._guessed, self._attribution = guessed, attribution
        self._references: dict[int, Any] = {}
        self._pinned: dict[int, Any] = {}
        self._real_bytes = 0
        self._real: dict[int, Any] = {}

    # --- placement

    def place(self, tensor: Tensor) -> Place:
        """Return the place of `tensor`: GPU, host with or without data, or torch's own `meta`."""
        tensor = placement.local_part(tensor)
        if not is_meta(tensor):
            return Place.REAL
        if placement.INSIDE.compiles and type(tensor) not in placement.PLAIN:  # a fake tensor
            return Place.GPU
        key = placement.storage_key(tensor)
        if key in self._live:
            return Place.GPU
        return Place.HOST if key in placement.host_storages else Place.META

    def put(self, tensor: Tensor) -> None:
        """Register the storage of a meta tensor as memory of the host, and count its bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in placement.host_storages or key in self._live:
            return
        num_bytes = storage.nbytes()
        placement.host_storages[key] = num_bytes
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

        def on_free(reference: Any) -> None:
            if placement.host_storages.pop(key, None) is not None:
                self.num_bytes -= num_bytes
            self._references.pop(key, None)
            self._values.forget(key)

        self._references[key] = weakref.ref(storage, on_free)

    def held(self) -> Iterator[tuple[int, bool]]:
        """Yield (bytes, True if it is pinned) of each large storage on the host."""
        sizes = placement.host_storages | {
            key: storage().nbytes() for key, storage in self._real.items()
        }
        for key, num_bytes in sizes.items():
            yield num_bytes, key in self._pinned

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in pinned memory, or `tensor` itself if it is pinned."""
        return tensor if self.is_pinned(tensor) else self._pin(tensor.clone())

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is pinned, as `Tensor.is_pinned` does."""
        return placement.storage_key(tensor) in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        key = placement.storage_key(tensor)
        self._pinned[key] = weakref.ref(
            tensor.untyped_storage(), lambda reference: self._pinned.pop(key, None)
        )
        return tensor

    # --- operators on tensors without data

    def run_without_data(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Return the result of `func` on host tensors without data; it has no data either."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        if func is aten._pin_memory.default:
            return self.pinned(args[0])
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func._schema.is_mutable:
            target = args[0] if args else None
            if isinstance(target, Tensor) and is_meta(target):
                self.rng.skip(func, target, kwargs.get("generator"))
            if not func._schema.returns:
                return None
            if isinstance(target, Tensor) and not is_meta(target):
                return target  # the new values are unknown; keep the old ones
        out = self._on_meta(func, args, kwargs)
        for tensor in tensors_in((out,)):
            if is_meta(tensor):
                self.put(tensor)
        self._guessed.follow(func, args, kwargs, out)
        if self._values:
            self._values.follow(func, args, kwargs, out)
        return out

    def _on_meta(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Return the result of `func`, called with meta tensors. If torch cannot do that, return a
        result of guessed shape, or that of the operator's rule (`Op.result`). If there is neither,
        call `func` with ones in place of tensors without data, or raise an error."""
        try:
            return func(*as_meta(args), **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if func is aten.index.Tensor:
                return func(as_meta(args[0]), list(self._positions(args[1])))
            if func in (aten.index_put_.default, aten.masked_scatter_.default):
                return args[0]
            if func is aten.masked_select.default and not is_meta(args[1]):  # the mask has data
                source, mask = args
                if source.dim():
                    mask = mask.expand_as(source)
                return as_meta(source).new_empty(int(mask.sum()))
            op = op_of(func)
            result = self._guessed.result(func, args, kwargs) if op.shaped_by else None
            if result is None and op.result:
                with suppress(NotImplementedError):
                    result = op.result(op.call(as_meta(args), kwargs))
            if result is not None:
                return result
            failure = self._attribution.failure(func, error)
            is_on_gpu = any(self.place(tensor) is Place.GPU for tensor in tensors_in(args))
            if isinstance(failure, UnsupportedError) and not is_on_gpu:
                if not op.shaped_by and not func._schema.is_mutable:  # run it on ones instead
                    self._guessed.guesses.note(f"the result of {func}")
                    with suppress(NotImplementedError, RuntimeError):
                        return func(*map_tensors(_ones_like, args), **kwargs)
                raise UnsupportedError(
                    str(failure),
                    hint="the tensor is on the host and has no values there: it is a weight, a copy"
                    " from the GPU, computed from one, or too large; take values that decide a"
                    " shape from data",
                ) from error
            raise failure from error

    def _positions(self, indices: list[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield each of `indices`. In place of a mask, yield the positions of its True entries: a
        tensor for each dimension of the mask."""
        for index in indices:
            if index is None or index.dtype not in MASK_DTYPES:
                yield index
            else:
                yield from self.nonzero(index).to(META).unbind(1)

    def nonzero(self, mask: Tensor) -> Tensor:
        """Return `mask.nonzero()` of a host mask; without data if the mask's values are unknown."""
        value = self._values.value_of(mask)
        if value is None:
            return self.run_without_data(aten.nonzero.default, (mask,), {})
        return value.nonzero()

    # --- operators on tensors with data

    def run(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Return the result of `func` on host tensors with data; a very large one has no data."""
        if func is aten._pin_memory.default:
            return self.pinned(args[0])
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return self._pin(self.run(func, args, {**kwargs, "pin_memory": False}))
        if self.rng.num_waiting and torch.Tag.nondeterministic_seeded in func.tags:
            self.rng.settle()
        tensors = (t for t in tensors_in(args) if t.dtype is torch.uint8 or t.is_floating_point())
        in_float32 = sum(t.numel() * 4 for t in tensors)
        if func in _FACTORIES or in_float32 >= VIRTUAL_HOST_BYTES:
            result = self._without_data(func, args, kwargs)
            if result is not None:
                return result
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not func._schema.is_mutable and not func.is_view:
                self._track_real(out)
            return out
        return func(*args, **kwargs)

    def _without_data(self, func: Any, args: Args, kwargs: Any) -> Tensor | None:
        """Return the result of `func` as a meta tensor, if it is floating-point and too large to
        compute, or comes from dummy weights. None means that the caller computes it."""
        if func._schema.is_mutable or func.is_view:
            return None
        meta_args = as_meta(args)
        if func in _FACTORIES or "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        try:
            result = func(*meta_args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return None
        if not isinstance(result, Tensor) or not result.is_floating_point() or _is_sparse(result):
            return None
        num_bytes = result.nbytes
        if num_bytes < VIRTUAL_HOST_BYTES:
            return None
        limit = MAX_NOISE_BYTES if func in _NOISE else MAX_REAL_BYTES
        can_be_real = num_bytes <= min(limit, REAL_BYTES - self._real_bytes)
        if can_be_real and not any(map(_is_dummy, tensors_in(args))):
            return None
        self.put(result)
        self.rng.skip(func, result, kwargs.get("generator"))
        return result

    def _track_real(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, if it is large, in the bytes of real tensors."""
        if _is_sparse(tensor):
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes < VIRTUAL_HOST_BYTES or key in self._real:
            return

        def on_free(reference: Any) -> None:
            if self._real.pop(key, None) is not None:
                self._real_bytes -= num_bytes

        self._real_bytes += num_bytes
        self._real[key] = weakref.ref(storage, on_free)


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


def _is_dummy(tensor: Tensor) -> bool:
    """Return whether `tensor` is large and repeats one number, as dummy weights do."""
    is_large = not _is_sparse(tensor) and tensor.nbytes >= VIRTUAL_HOST_BYTES
    return is_large and not any(tensor.stride())


def _ones_like(tensor: Tensor) -> Tensor:
    """Return ones in place of a tensor without data; any other tensor unchanged."""
    ones = torch.ones((), dtype=tensor.dtype, device=CPU)
    return ones.expand(tensor.shape) if is_meta(tensor) else tensor


def as_meta(value: Any) -> Any:
    """Return `value` with its tensors as meta tensors, except 0-d tensors with data."""
    return map_tensors(lambda t: t if is_meta(t) or not t.dim() else t.to(META), value)


def without_tensors(args: Args) -> tuple[Any, ...]:
    """Return `args` with an uninitialised CPU tensor of equal size and strides for each tensor."""
    return map_tensors(
        lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=CPU), args
    )
