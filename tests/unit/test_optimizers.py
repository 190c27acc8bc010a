"""What each optimizer of a plan asks of the allocator on the virtual GPU, in its library's code."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu
from memest.loops.job import make_optimizer
from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS
from tests.requested import Requests, peak, without_workspaces

BIG, SMALL = (300, 400), (7,)  # 120 000 elements: above 100 000, which are paged; 7: below 4096
NUMEL = 300 * 400
SCALES = 4 * 469  # of 4 bytes for 256 elements: 120 000 / 256 = 468.75
MAP = 4 * 256

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture
def requests() -> Iterator[Requests]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        yield Requests(gpu)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = []
    for shape in shapes:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda"))
        parameter.grad = torch.empty_like(parameter)
        made.append(parameter)
    return made


def optimizer(name: str, params: Sequence[nn.Parameter], **values: object) -> torch.optim.Optimizer:
    plan = TrainingPlan.from_dict({"model_name": "gpt2", "optim": name, **values})
    return make_optimizer(plan, params)


def steps(
    requests: Requests, name: str, *shapes: tuple[int, ...], **values: object
) -> tuple[list[int], list[int]]:
    """The requests of the first and of the second step."""
    made = optimizer(name, parameters(*shapes), **values)
    return requests.of(made.step), requests.of(made.step)


def kept(requests: list[int]) -> int:
    return sum(without_workspaces(requests))


# --- torch's own


def test_adamw_makes_two_moments_in_the_dtype_of_the_parameter(requests: Requests) -> None:
    made = optimizer("adamw", parameters((3, 5), (7,), dtype=torch.bfloat16))

    # moments of each parameter in turn, then one square root of each
    assert requests.of(made.step) == [30, 30, 14, 14, 30, 14, -30, -14]
    assert requests.of(made.step) == [30, 14, -30, -14]


def test_the_plain_path_has_the_temporaries_of_one_parameter_at_a_time(requests: Requests) -> None:
    """Square roots of all four second moments; else a root, its quotient, and the quotient before,
    which the loop's variable still holds.
    """
    _, foreach = steps(requests, "adam", *[BIG] * 4)
    _, plain = steps(requests, "adam_single", *[BIG] * 4)

    assert (peak(foreach), peak(plain)) == (4 * 4 * NUMEL, 3 * 4 * NUMEL)


@pytest.mark.parametrize("name", ["rmsprop_single", "adagrad_single"])
def test_plain_paths_do_not_grow_with_the_number_of_parameters(
    requests: Requests, name: str
) -> None:
    """The denominator of a parameter, and that of the one before."""
    peaks = [peak(steps(requests, name, *[BIG] * count)[1]) for count in (2, 5)]

    assert peaks == [2 * 4 * NUMEL] * 2


def test_a_parameter_of_a_subclass_sends_adamw_down_the_plain_path(requests: Requests) -> None:
    class Special(nn.Parameter):
        pass

    def second_step(kind: type[nn.Parameter]) -> list[int]:
        odd = kind(torch.empty(BIG, device="cuda"))
        odd.grad = torch.empty_like(odd)
        made = optimizer("adamw", [*parameters(*[BIG] * 4), odd])
        made.step()
        return requests.of(made.step)

    assert peak(second_step(nn.Parameter)) == 5 * 4 * NUMEL
    assert peak(second_step(Special)) == 3 * 4 * NUMEL


@pytest.mark.parametrize("name", ["adamw_fused", "adam_fused"])
def test_a_fused_step_makes_counters_on_the_gpu_and_no_temporaries(
    requests: Requests, name: str
) -> None:
    assert steps(requests, name, (3, 5), (7,)) == ([4, 60, 60, 4, 28, 28], [])


@pytest.mark.parametrize("name", ["sgd", "sgd_single", "sgd_fused"])
def test_momentum_is_one_buffer_however_sgd_runs(requests: Requests, name: str) -> None:
    assert kept(steps(requests, name, BIG, SMALL)[0]) == 0
    assert kept(steps(requests, name, BIG, SMALL, momentum=0.9)[0]) == 4 * (NUMEL + 7)


@pytest.mark.parametrize(
    ("name", "temporary"), [("sgd", 0), ("sgd_fused", 0), ("sgd_single", 4 * NUMEL)]
)
def test_nesterov_copies_a_gradient_on_the_plain_path_alone(
    requests: Requests, name: str, temporary: int
) -> None:
    _, second = steps(requests, name, BIG, SMALL, momentum=0.9, nesterov=True)

    assert peak(second) == temporary


def test_weight_decay_of_adam_costs_a_passing_copy_of_the_gradients(requests: Requests) -> None:
    """Decayed gradients, dead before the square roots are born."""
    _, second = steps(requests, "adam", (3, 5), weight_decay=0.1)

    assert second == [60, -60, 60, -60]


@pytest.mark.parametrize("name", ["adafactor", "adafactor_foreach"])
def test_adafactor_keeps_rows_and_columns_on_either_path(requests: Requests, name: str) -> None:
    """Of the matrix a row and a column, of the vector a variance."""
    assert kept(steps(requests, name, BIG, SMALL)[0]) == 4 * (300 + 400 + 7)


def test_adagrad_makes_its_state_when_it_is_made(requests: Requests) -> None:
    params, held = parameters((3, 5)), []

    assert requests.of(lambda: held.append(optimizer("adagrad", params))) == [60]
    assert kept(requests.of(held[0].step)) == 0


def test_the_loss_scaler_makes_six_scalars_and_keeps_two(requests: Requests) -> None:
    made, scaler = optimizer("sgd", parameters((3, 5))), torch.amp.GradScaler()
    loss = torch.zeros((), device="cuda")

    def step() -> None:
        scaler.scale(loss)
        scaler.unscale_(made)
        scaler.step(made)
        scaler.update()

    asked = requests.of(step)

    # scale and growth tracker stay; the scaled loss dies
    assert asked[:4] == [4, 4, 4, -4]
    # fp64 copy, its reciprocal, fp32 inverse, found_inf, and both copied per device
    assert sorted(asked[4:]) == sorted([8, 8, -8, 4, -8, 4, 4, 4, -4, -4, -4, -4])


# --- bitsandbytes'


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("name", "num_moments"), [("adam_8bit", 2), ("adamw_8bit", 2), ("lion_8bit", 1)]
)
def test_8_bits_keep_a_byte_per_moment_and_a_scale_per_256_elements(
    requests: Requests, name: str, num_moments: int
) -> None:
    """From 4096 elements on; below, fp32. A map of 256 values for each moment serves all."""
    first, second = steps(requests, name, BIG, (64, 64), (4095,))

    big, small = (NUMEL, SCALES), (4096, 4 * 16)
    maps = [MAP] * num_moments
    expected = [n for pair in (big, small) for n in pair for _ in range(num_moments)]
    assert first == [*maps, *expected, *[4 * 4095] * num_moments]
    assert second == []


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("name", "on_gpu", "on_host"),
    [
        ("paged_adamw_8bit", 2 * (SCALES + MAP + 4 * 7), 2 * NUMEL),
        ("paged_lion_8bit", SCALES + MAP + 4 * 7, NUMEL),
        ("lion_32bit", 4 * (NUMEL + 7), 0),
        ("paged_lion_32bit", 4 * 7, 4 * NUMEL),
        ("paged_adamw_32bit", 2 * 4 * 7, 2 * 4 * NUMEL),
    ],
)
def test_paged_states_of_100000_elements_lie_on_the_host(
    requests: Requests, name: str, on_gpu: int, on_host: int
) -> None:
    before = requests.gpu.mode.host.num_bytes

    made = optimizer(name, parameters(BIG, SMALL))

    assert kept(requests.of(made.step)) == on_gpu
    assert requests.gpu.mode.host.num_bytes - before == on_host


@needs_bitsandbytes
def test_what_is_just_too_small_is_not_paged(requests: Requests) -> None:
    made = optimizer("paged_lion_32bit", parameters((99_999,), (100_000,)))

    assert kept(requests.of(made.step)) == 4 * 99_999


# --- all of them


@pytest.mark.parametrize(
    "name", [name for name, row in sorted(OPTIMIZERS.items()) if row.library != DEEPSPEED]
)
def test_every_optimizer_of_a_plan_steps_and_keeps_no_more_in_its_second_step(
    requests: Requests, name: str
) -> None:
    if OPTIMIZERS[name].library == BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    shapes = [BIG] if name == "muon" else [BIG, SMALL]  # which takes matrices alone

    given = {"momentum": 0.9} if OPTIMIZERS[name].needs_momentum else {}

    first, second = steps(requests, name, *shapes, **given)

    assert kept(first) >= 0
    assert kept(second) == 0
