"""Plain, foreach and fused optimizers, Nesterov's momentum, 32-bit and paged ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from memest.errors import PlanError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.optimizers.specs import (
    OPTIMIZERS,
    make_optimizer,
    managed_state_bytes,
    optimizer_state_bytes,
    optimizer_state_tensors,
)
from memest.loops.optimizers import BITSANDBYTES, make_real_optimizer
from memest.plan import TrainingPlan
from memest.plan.values import OPTIMIZERS as NAMES

BIG, SMALL = (300, 400), (7,)  # 120 000 elements: above 100 000, which are paged; 7: below 4096
NUMEL = 300 * 400


def parameters(*shapes: tuple[int, ...], device: str = "meta") -> list[torch.nn.Parameter]:
    made = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        parameter.grad = torch.zeros_like(parameter)
        made.append(parameter)
    return made


def peak_of_step(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes alive at once among those that a step makes."""
    recorder = Recorder(find_gpu("h200"), StorageTable())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for tensor in [*params, *(p.grad for p in params), *optimizer_state_tensors(optimizer)]:
        recorder.adopt(tensor, MemKind.PARAMS)
    recorder.take_events()
    with recorder:
        optimizer.step()
    live = peak = 0
    for event in recorder.take_events():
        size = recorder.storages.num_bytes[event if event >= 0 else ~event]
        live += size if event >= 0 else -size
        peak = max(peak, live)
    return peak


def test_every_name_of_a_plan_is_made_on_both_sides() -> None:
    assert {*OPTIMIZERS, "deepspeed_cpu"} == set(NAMES)
    for name in set(OPTIMIZERS) - set(BITSANDBYTES):
        plan = TrainingPlan(model_name="gpt2", optim=name)
        if name.endswith("_fused"):
            continue  # their constructors look for a GPU
        real = make_real_optimizer(plan, parameters(SMALL, device="cpu"))
        mirror = make_optimizer(name, parameters(SMALL))
        assert type(real).__name__ == type(mirror).__name__.removeprefix("Meta")


@pytest.mark.parametrize("name", ["sgd", "sgd_single", "sgd_fused"])
def test_momentum_is_one_buffer_however_sgd_runs(name: str) -> None:
    optimizer = make_optimizer(name, parameters(BIG, SMALL), momentum=0.9)
    optimizer.step()

    assert optimizer_state_bytes(optimizer) == 4 * (NUMEL + 7)


@pytest.mark.parametrize(
    ("name", "temporary"), [("sgd", 0), ("sgd_fused", 0), ("sgd_single", 4 * NUMEL)]
)
def test_nesterov_copies_a_gradient_on_the_plain_path_alone(name: str, temporary: int) -> None:
    optimizer = make_optimizer(name, parameters(BIG, SMALL), momentum=0.9, nesterov=True)
    optimizer.step()

    assert peak_of_step(optimizer) == temporary


def test_plain_adam_has_the_temporaries_of_one_parameter() -> None:
    four = [BIG] * 4
    foreach, plain = (make_optimizer(n, parameters(*four)) for n in ("adam", "adam_single"))
    foreach.step()
    plain.step()

    # square roots of all four second moments; a root, its quotient, and the quotient before, which
    # the loop's variable still holds
    assert (peak_of_step(foreach), peak_of_step(plain)) == (4 * 4 * NUMEL, 3 * 4 * NUMEL)


@pytest.mark.parametrize("name", ["rmsprop_single", "adagrad_single"])
def test_plain_paths_do_not_grow_with_the_number_of_parameters(name: str) -> None:
    def peak(shapes: Sequence[tuple[int, ...]]) -> int:
        optimizer = make_optimizer(name, parameters(*shapes))
        optimizer.step()
        return peak_of_step(optimizer)

    # the denominator of a parameter, and that of the one before
    assert peak([BIG, BIG]) == peak([BIG] * 5) == 2 * 4 * NUMEL


@pytest.mark.parametrize(
    ("name", "on_gpu", "on_host"),
    [
        # one or two moments of one byte; a scale of 4 bytes per 256 elements; a map of 1 KiB; the
        # seven elements of the small one in fp32
        ("paged_lion_8bit", 4 * 469 + 1024 + 4 * 7, NUMEL),
        ("lion_32bit", 4 * (NUMEL + 7), 0),
        ("paged_lion_32bit", 4 * 7, 4 * NUMEL),
        ("paged_adamw_32bit", 2 * 4 * 7, 2 * 4 * NUMEL),
    ],
)
def test_paged_state_is_split_between_gpu_and_host(name: str, on_gpu: int, on_host: int) -> None:
    assert -(-NUMEL // 256) == 469
    optimizer = make_optimizer(name, parameters(BIG, SMALL))
    optimizer.step()

    assert optimizer_state_bytes(optimizer) == on_gpu
    assert managed_state_bytes(optimizer) == on_host


def test_adafactor_keeps_rows_and_columns_on_either_path() -> None:
    for name in ("adafactor", "adafactor_foreach"):
        optimizer = make_optimizer(name, parameters(BIG, SMALL))
        optimizer.step()

        # of the matrix a column and a row, of the vector a variance
        assert optimizer_state_bytes(optimizer) == 4 * (300 + 400 + 7)


@pytest.mark.parametrize(
    "values", [{"optim": "sgd"}, {"optim": "rmsprop", "momentum": 0.9}, {"optim": "adamw"}]
)
def test_nesterov_needs_sgd_with_momentum(values: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=re.escape("`nesterov` does not go with")):
        TrainingPlan.from_dict({"model_name": "gpt2", "nesterov": True, **values})
