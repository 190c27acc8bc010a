"""Each optimizer allocates on meta what it allocates on CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memest.errors import PlanError, UnsupportedError
from memest.estimator.optimizers.specs import (
    OPTIMIZERS,
    make_grad_scaler,
    make_optimizer,
    managed_state_bytes,
    optimizer_state_bytes,
    optimizer_state_tensors,
)

BIG, SMALL = (300, 400), (7,)  # 120 000 elements: blocks of 256 and pages; 7: neither


class StorageLog(TorchDispatchMode):
    """The sizes of meta storages, in the order in which they are born (+) and die (-)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self._known: set[int] = set()

    def _meet(self, tree: Any, *, is_new: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                finalize(storage, self._bury, key, num_bytes)
                if is_new:
                    self.events.append(num_bytes)

    def _bury(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.events.append(-num_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self._meet((args, kwargs), is_new=False)
        out = func(*args, **(kwargs or {}))
        self._meet(out, is_new=True)
        return out


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        made.append(parameter)
    return made


def events_of(step: Callable[[], object]) -> list[int]:
    log = StorageLog()
    with log:
        step()
    return log.events


def test_adamw_makes_two_moments_in_the_dtype_of_the_parameter() -> None:
    params = parameters((3, 5), (7,), dtype=torch.bfloat16)
    optimizer = make_optimizer("adamw", params)

    events = events_of(optimizer.step)

    # moments of each parameter in turn, then one square root of each, freed from the last on
    assert events == [30, 30, 14, 14, 30, 14, -14, -30]
    assert optimizer_state_bytes(optimizer) == 2 * (15 + 7) * 2


def test_adamw_makes_only_the_square_roots_from_its_second_step_on() -> None:
    optimizer = make_optimizer("adamw", parameters((3, 5), (7,)))
    optimizer.step()

    assert events_of(optimizer.step) == [60, 28, -28, -60]


def test_the_single_tensor_path_has_one_parameter_of_temporaries_at_a_time() -> None:
    optimizer = make_optimizer("adamw_single", parameters((3, 5), (7,)))
    optimizer.step()

    assert max_live(events_of(optimizer.step)) == 2 * 60


def max_live(events: Sequence[int]) -> int:
    live = peak = 0
    for change in events:
        live += change
        peak = max(peak, live)
    return peak


def test_a_parameter_of_a_subclass_sends_adamw_down_the_single_tensor_path() -> None:
    class Special(torch.nn.Parameter):
        pass

    special = Special(torch.empty(3, 5, device="meta"))
    special.grad = torch.empty_like(special)

    optimizer = make_optimizer("adamw", [*parameters((7,)), special])

    assert optimizer.param_groups[0]["foreach"] is False


@pytest.mark.parametrize("name", ["adamw_fused", "adam_fused"])
def test_a_fused_step_makes_counters_on_the_device_and_no_temporaries(name: str) -> None:
    optimizer = make_optimizer(name, parameters((3, 5), (7,)))

    assert events_of(optimizer.step) == [4, 60, 60, 4, 28, 28]
    assert events_of(optimizer.step) == []
    assert optimizer_state_bytes(optimizer) == 2 * (60 + 28) + 2 * 4


def test_sgd_keeps_nothing_and_momentum_keeps_one_copy_of_the_gradients() -> None:
    plain = make_optimizer("sgd", parameters((3, 5), (7,)))
    heavy = make_optimizer("sgd", parameters((3, 5), (7,)), momentum=0.9)

    assert events_of(plain.step) == []
    assert events_of(heavy.step) == [60, 28]
    assert optimizer_state_bytes(heavy) == 60 + 28


def test_weight_decay_of_adam_costs_a_passing_copy_of_the_gradients() -> None:
    optimizer = make_optimizer("adam", parameters((3, 5)), weight_decay=0.1)
    optimizer.step()

    # decayed gradients, dead before the square roots are born
    assert events_of(optimizer.step) == [60, -60, 60, -60]


def test_adam_8bit_keeps_a_byte_per_moment_and_a_scale_per_256_elements() -> None:
    optimizer = make_optimizer("adam_8bit", parameters(BIG, SMALL, dtype=torch.bfloat16))
    num_blocks = 469  # 120 000 / 256 = 468.75

    events = events_of(optimizer.step)

    maps, moments, scales = [1024, 1024], [120_000, 120_000], [4 * num_blocks, 4 * num_blocks]
    assert events == [*maps, *moments, *scales, 28, 28]  # 7 elements: two fp32 moments
    assert events_of(optimizer.step) == []


def test_shared_quantisation_maps_are_counted_with_every_parameter() -> None:
    optimizer = make_optimizer("adam_8bit", parameters(BIG, BIG))
    optimizer.step()

    per_parameter = 2 * (120_000 + 469 * 4) + 2 * 1024
    assert optimizer_state_bytes(optimizer) == 2 * per_parameter
    unique = sum(tensor.nbytes for tensor in optimizer_state_tensors(optimizer))
    assert unique == 2 * per_parameter - 2 * 1024


def test_a_paged_optimizer_puts_large_moments_outside_the_allocator() -> None:
    optimizer = make_optimizer("paged_adamw_8bit", parameters(BIG, (64, 100)))

    events = events_of(optimizer.step)

    assert managed_state_bytes(optimizer) == 2 * 120_000
    # 6 400 elements are below the threshold of 100 000, with 25 blocks
    assert events == [1024, 1024, 469 * 4, 469 * 4, 6400, 6400, 100, 100]


def test_lion_8bit_has_one_moment() -> None:
    optimizer = make_optimizer("lion_8bit", parameters(BIG, SMALL))

    assert events_of(optimizer.step) == [1024, 120_000, 469 * 4, 28]
    assert managed_state_bytes(optimizer) == 0


def test_adafactor_keeps_a_row_and_a_column_and_reads_norms_on_meta() -> None:
    optimizer = make_optimizer("adafactor", parameters((3, 5), (7,)))
    optimizer.step()

    assert optimizer_state_bytes(optimizer) == (3 + 5 + 7) * 4


def test_adagrad_makes_its_state_when_it_is_made() -> None:
    params = parameters((3, 5))

    events = events_of(lambda: globals().update(_kept=make_optimizer("adagrad", params)))

    assert events == [60]
    globals().pop("_kept")


def test_counters_stay_on_the_cpu_when_the_optimizer_is_made_under_a_meta_default() -> None:
    params = parameters((3, 5))
    with torch.device("meta"):
        optimizer = make_optimizer("adagrad", params)

    optimizer.step()

    assert optimizer_state_bytes(optimizer) == 60


def test_the_loss_scaler_makes_six_scalars_and_keeps_two() -> None:
    params = parameters((3, 5))
    optimizer = make_optimizer("sgd", params)
    scaler = make_grad_scaler()
    loss = torch.zeros((), device="meta")

    def step() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    events = events_of(step)

    # scale and growth tracker stay; the scaled loss dies
    assert events[:4] == [4, 4, 4, -4]
    # fp64 copy, its reciprocal, fp32 inverse, found_inf, and both copied per device
    assert events[4:] == [8, 8, -8, 4, -8, 4, 4, 4, -4, -4, -4, -4]


def test_a_fused_optimizer_takes_the_scale_with_it() -> None:
    optimizer = make_optimizer("adamw_fused", parameters((3, 5)))
    scaler = make_grad_scaler()
    scaler.scale(torch.zeros((), device="meta"))

    scaler.step(optimizer)
    scaler.update()

    assert optimizer_state_bytes(optimizer) == 2 * 60 + 4


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_steps_and_frees_its_gradients(name: str) -> None:
    params = parameters(BIG, SMALL)
    optimizer = make_optimizer(name, params)

    optimizer.step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    assert all(param.grad is None for param in params)


def test_an_unknown_optimizer_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(PlanError, match=re.escape("there is no optimizer `adamv`")) as caught:
        make_optimizer("adamv", [])

    assert "`adamw`" in caught.value.hint


def test_momentum_for_an_optimizer_without_it_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`adamw` has no `momentum` (it is 0.9)")):
        make_optimizer("adamw", [], momentum=0.9)


def test_an_optimizer_on_the_host_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("`deepspeed_cpu` runs on the host")):
        make_optimizer("deepspeed_cpu", [])
