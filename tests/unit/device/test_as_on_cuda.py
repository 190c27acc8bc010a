"""What C++ runs otherwise for tensors of the GPU than for those of meta, as a script meets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memest
from memest.run.session import Session
from tests.requested import Requests


@pytest.fixture
def session() -> Iterator[Session]:
    with memest.virtual_gpu("h100-80gb") as entered:
        yield entered


@pytest.fixture(autouse=True)
def _use(session: Session) -> None:
    """Every test runs on the GPU."""


def test_autocast_leaves_the_dtype_of_a_root_mean_square_norm() -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")

    with torch.autocast("cuda", torch.bfloat16):
        assert F.rms_norm(x, (64,)).dtype == torch.bfloat16


def test_numbers_of_the_complex_plane_take_part_in_a_backward() -> None:
    p = torch.ones(3, device="cuda", requires_grad=True)

    ((1j * p).real.sum() + (p / 2j).abs().sum()).backward()  # type: ignore[no-untyped-call]

    assert p.grad is not None
    assert p.grad.shape == (3,)


@pytest.mark.parametrize(("weight", "grad"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_gradient_of_another_place_is_refused(weight: str, grad: str) -> None:
    p = nn.Parameter(torch.ones(64, 64, device=weight))

    with pytest.raises(RuntimeError, match=f"device type '{grad}' to a .* device type '{weight}'"):
        p.grad = torch.ones(64, 64, device=weight).to(grad)


def test_padded_steps_lie_on_the_gpu() -> None:
    packed = pack_padded_sequence(
        torch.ones(4, 6, 8, device="cuda"), torch.tensor([6, 5, 3, 2]), batch_first=True
    )
    before = torch.cuda.memory_allocated()

    padded, lengths = pad_packed_sequence(packed, batch_first=True)

    assert padded.device.type == "cuda"
    assert torch.cuda.memory_allocated() - before == 1024  # 768, in blocks of 512
    assert lengths.tolist() == [6, 5, 3, 2]


def test_classes_become_rows_by_one_allocation() -> None:
    classes = torch.tensor([0, 2, 1], device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    rows = F.one_hot(classes, 128)

    assert (rows.shape, rows.dtype) == ((3, 128), torch.int64)
    assert torch.cuda.max_memory_allocated() - before == 3 * 128 * 8
    assert F.one_hot(classes).shape == (3, 3)


def test_the_gradient_of_a_running_product_needs_no_values() -> None:
    x = torch.ones(4, 16, device="cuda", requires_grad=True)

    x.cumprod(1).sum().backward()  # type: ignore[no-untyped-call]

    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("is_on", [False, True])
def test_the_report_says_that_cudnn_tries_its_kernels(
    session: Session, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", is_on)

    nn.Conv2d(3, 8, 3).cuda()(torch.ones(1, 3, 32, 32, device="cuda"))

    assert any("cudnn.benchmark" in note for note in session.virtual.notes) == is_on


def test_tensors_go_to_the_gpu_in_inference_mode() -> None:
    """There C++ hands `to(device, dtype)` on as it is."""
    with torch.inference_mode():
        on_gpu = torch.ones(2, device="cuda")
        made = [
            torch.ones(2).to("cuda", torch.float16), torch.ones(2).type_as(on_gpu),
            torch.ones(2).to("cuda", torch.float32, copy=True), on_gpu.to("cuda", torch.float16),
        ]  # fmt: skip

        assert [(t.device.type, t.dtype) for t in made] == [
            ("cuda", torch.float16), ("cuda", torch.float32),
            ("cuda", torch.float32), ("cuda", torch.float16),
        ]  # fmt: skip
        assert on_gpu.to("cpu", torch.float16).device.type == "cpu"


@pytest.mark.parametrize("is_last", [False, True])
def test_a_copy_into_another_order_passes_through_a_buffer(is_last: bool) -> None:
    """`copy_requires_temporaries` of Copy.cu: weights that go to the GPU as channels-last."""
    weight = torch.randn(64, 64, 3, 3)
    if is_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    moved = weight.to("cuda", memory_format=torch.channels_last)

    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.cuda.memory_allocated() - before == 4 * weight.numel()
    buffers = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert buffers == (0 if is_last else 4 * weight.numel())


def test_a_cast_that_is_not_waited_for_is_the_gpu_s() -> None:
    """The numbers cross as they are, and are cast there."""
    pinned = torch.randn(1024, 1024).pin_memory()
    torch.cuda.reset_peak_memory_stats()
    moved = pinned.to("cuda", torch.float16, non_blocking=True)

    assert moved.dtype == torch.float16
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() == 4 * moved.numel()


def test_autocast_holds_within_what_inference_mode_takes_apart() -> None:
    """`interpolate` and `cross_entropy` are made of operators that autocast runs in float32."""
    x = torch.ones(2, 8, 16, 16, device="cuda", dtype=torch.float16)
    classes = torch.zeros(2, dtype=torch.int64, device="cuda")

    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        assert F.interpolate(x, size=(32, 32), mode="bilinear").dtype == torch.float32
        assert F.cross_entropy(x.flatten(1), classes).dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert F.interpolate(x, size=(32, 32), mode="bilinear").dtype == torch.float16


def test_inference_casts_a_weight_at_each_use_and_what_is_kept_has_a_gradient() -> None:
    layer = nn.Linear(64, 64, bias=False, device="cuda")
    x = torch.ones(4, 64, device="cuda", dtype=torch.float16)

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x)
        return torch.cuda.max_memory_allocated() - before

    with torch.autocast("cuda", torch.float16):
        with torch.inference_mode():
            layer(x)
            assert peak() == 64 * 64 * 2 + 512
        with torch.no_grad():
            layer(x)
            assert peak() == 512
        layer(x).float().sum().backward()

    assert layer.weight.grad is not None


def test_the_gradient_of_an_index_is_put_in_place_where_a_graph_is_made() -> None:
    x = torch.ones(1024, 32, device="cuda", requires_grad=True)
    picked = x[torch.arange(512, device="cuda")]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    (gradient,) = torch.autograd.grad((picked * picked).sum(), x, create_graph=True)

    assert gradient.requires_grad
    assert torch.cuda.max_memory_allocated() - before < 2 * 1024 * 32 * 4 + 4 * 512 * 32 * 4


@pytest.mark.parametrize("lengths", [[50] * 4, torch.full((4,), 50)])
def test_a_ctc_loss_makes_its_numbers_in_the_order_of_the_source(
    session: Session, lengths: list[int] | torch.Tensor
) -> None:
    """Recorded: losses, zero, comparison, choice, lengths, those of at least 1, quotient, mean."""
    log_probs = torch.ones(50, 4, 12, device="cuda").log_softmax(-1)
    targets = torch.ones(4, 10, dtype=torch.int64, device="cuda")
    of_targets = [10] * 4 if isinstance(lengths, list) else torch.full((4,), 10)

    found = Requests(session.virtual).of(
        lambda: F.ctc_loss(log_probs, targets, lengths, of_targets, zero_infinity=True)
    )

    assert [n for n in found if n > 0][-8:] == [16, 4, 4, 16, 16, 16, 16, 4]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_weight_that_an_optimizer_changed_fails_an_older_graph(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    """The order in some GANs: the generator's step, then the discriminator's backward."""
    first, second = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
    y = second(first(torch.randn(8, 64, device="cuda")))
    y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    optimizer(second.parameters(), lr=0.1).step()  # type: ignore[call-arg]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.mean().backward()  # type: ignore[no-untyped-call]


def test_a_module_moves_to_the_device_of_a_tensor() -> None:
    """BYOL's projector, `projector.to(hidden)`: integers keep their type."""
    hidden = torch.randn(4, 8, device="cuda", dtype=torch.float16)

    for norm in (torch.nn.BatchNorm1d(8).to(hidden), torch.nn.BatchNorm1d(8).to(tensor=hidden)):
        assert {t.device.type for t in norm.state_dict().values()} == {"cuda"}
        assert norm.weight.dtype is torch.float16
        assert norm.num_batches_tracked is not None
        assert norm.num_batches_tracked.dtype is torch.int64
        norm.cuda()


def test_classes_that_override_a_factory_still_do() -> None:
    """`tensordict.TensorDict` finds its functions by the names that it reads from torch."""
    before: Any = torch.ones_like
    overridden = {torch.empty_like: "empty", before.__wrapped__: "ones"}

    class Dictionary:
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return overridden.get(func, NotImplemented)

    given: Any = Dictionary()

    assert torch.empty_like(given) == "empty"
    assert torch.ones_like(given) == "ones"
    with pytest.raises(TypeError, match="zeros_like"):
        torch.zeros_like(given)
