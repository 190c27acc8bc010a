"""Shapes that depend on unknown values: choices spread evenly, or the largest result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memest
from memest.errors import UnsupportedError
from memest.run.session import Session

TOKENS, EXPERTS, PICKED, WIDTH = 4096, 8, 2, 64
EACH = TOKENS * PICKED // EXPERTS


@pytest.fixture
def gpu() -> Iterator[Session]:
    with memest.virtual_gpu("h100-80gb") as found:
        yield found


def activations(*shape: int) -> Tensor:
    """Too many for their values to be followed."""
    wide = torch.randn(*shape[:-1], 1 << 10, device="cuda")
    return wide @ torch.randn(1 << 10, shape[-1], device="cuda")


def test_a_mask_made_like_unknown_activations_is_known(gpu: Session) -> None:
    """A block mask of the host is copied into `new_zeros` (DINOv2 in lightly)."""
    x, blocks = activations(16, WIDTH), torch.arange(16 * 9).view(16, 9) % 5 == 0
    for made, value in ((x.new_zeros, 0), (x.new_ones, 1)):
        mask = made((16, 10), dtype=torch.bool)
        assert len(mask.nonzero()) == 160 * value
        mask[:, 1:] = blocks.cuda()
        assert len(mask.nonzero()) == 16 * value + int(blocks.sum())


def by_where(chosen: Tensor) -> list[int]:
    return [len(torch.where(chosen == expert)[0]) for expert in range(EXPERTS)]


def by_one_hot(chosen: Tensor) -> list[int]:
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    return [len(torch.where(mask[expert[0]])[1]) for expert in hit]


def by_counts(chosen: Tensor) -> list[int]:
    counts: list[int] = torch.bincount(chosen.view(-1), minlength=EXPERTS).cpu().numpy().tolist()
    return counts


def by_scatter(chosen: Tensor) -> list[int]:
    counts = chosen.new_zeros((TOKENS, EXPERTS))
    counts.scatter_(1, chosen, 1)
    parts = chosen.view(-1).argsort().split(counts.sum(0).tolist())
    return [len(part) for part in parts]


def by_mask(chosen: Tensor) -> list[int]:
    masks = [(chosen == expert).any(-1) for expert in range(EXPERTS)]
    x = activations(TOKENS, WIDTH)
    return [len(x[mask]) for mask in masks if mask.any()]


def by_items(chosen: Tensor) -> list[int]:
    counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
    return [int(counts[expert].item()) for expert in range(EXPERTS)]


def by_histogram(chosen: Tensor) -> list[int]:
    counts = torch.histc(chosen.view(-1), bins=EXPERTS, min=0, max=EXPERTS)
    ends = counts.cumsum(0)
    assert chosen.new_empty(ends[-1]).shape == (TOKENS * PICKED,)
    return [int(count) for count in counts]


ASKS = [by_where, by_one_hot, by_counts, by_scatter, by_mask, by_items, by_histogram]


@pytest.mark.parametrize("ask", ASKS)
def test_a_router_sends_as_many_tokens_to_each_expert(
    gpu: Session, ask: Callable[[Tensor], list[int]]
) -> None:
    chosen = activations(TOKENS, EXPERTS).softmax(-1).topk(PICKED).indices

    assert ask(chosen) == [EACH] * EXPERTS
    assert gpu.report().guesses


def test_one_of_few_is_chosen_evenly_along_any_dimension(gpu: Session) -> None:
    scores = activations(6, 300, 4)

    for chosen in (scores.argmax(-1), scores.max(-1).indices, scores.min(2, keepdim=True)[1]):
        assert [len((chosen == i).nonzero()) for i in range(4)] == [450] * 4
    picked = scores.movedim(-1, 0).softmax(0).topk(2, dim=0).indices
    assert [len((picked == i).nonzero()) for i in range(4)] == [900] * 4
    drawn = scores.view(-1, 4).softmax(-1).multinomial(2)
    assert [len((drawn == i).nonzero()) for i in range(4)] == [900] * 4


def test_all_of_it_passes_a_threshold_though_nothing_is_said_to(gpu: Session) -> None:
    losses = activations(512, 32)

    assert losses[losses > 0.7].shape == (512 * 32,)
    assert losses[(losses.abs() <= 3).all(-1)].shape == (512, 32)
    assert not (losses > 0.7).any()
    torch.ones(2, device="cuda")
    told = [guess.what for guess in gpu.report().guesses]
    assert "nonzero as 16384 of 16384 elements" in told
    assert any("as large" in note or "spread evenly" in note for note in gpu.report().notes)


def test_a_count_of_elements_that_pass_a_threshold_agrees_with_its_number(gpu: Session) -> None:
    """The loss of YOLOv6 is that of boxes only if `fg_mask.sum() > 0`."""
    mask = activations(512, 32) > 0.5
    count = mask.sum()

    assert count > 0
    assert count.item() == 512 * 32
    assert count != 0
    assert not count < 1
    assert bool(mask.sum() == 0) is False
    rounds = 0
    while count > 0:
        count = (activations(512, 32) > count).sum()
        rounds += 1
    assert rounds == 2


def test_a_mask_whose_opposite_selected_nothing_has_elements(gpu: Session) -> None:
    """Splines of nflows: outside of an interval nothing is done, and inside only if any is."""
    x = activations(512, 32)
    inside = (x >= -3) & (x <= 3)
    outside = ~inside

    assert len(x[outside]) == 0
    assert torch.any(inside)
    assert len(x[inside]) == x.numel()
    assert not torch.any((x >= -3) & (x <= 3))  # another mask


def test_a_mask_in_the_place_of_a_freed_one_has_not_selected(gpu: Session) -> None:
    x = activations(512, 32)
    for _ in range(20):
        inside = (x >= -3) & (x <= 3)
        assert not torch.any(inside)
        x[inside]
        del inside


def test_what_is_known_of_a_mask_is_kept(gpu: Session) -> None:
    scores = activations(512, 32)
    is_real = torch.arange(512, device="cuda") < 100

    assert scores[is_real & (scores.mean(-1) > 0.5)].shape == (100, 32)


def test_results_without_any_value_are_as_large_as_they_can_be(gpu: Session) -> None:
    codes = activations(64, 2000).argmax(-1)
    kept, inverse, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    assert (kept.shape, inverse.shape, counts.shape) == ((64,), (64,), (64,))
    assert kept.dtype is codes.dtype

    paths = activations(2, 30, 2000).argmax(-1)
    assert torch.unique_consecutive(paths, dim=1).shape == (2, 30)
    assert torch.unique_consecutive(paths[0]).shape == (30,)
    rows, which = torch.unique(activations(40, 8), dim=0, return_inverse=True)
    assert (rows.shape, which.shape) == ((40, 8), (40,))
    large = activations(1 << 8, 1 << 14)
    assert (large > 0).nonzero().shape == (1 << 22, 2)
    assert (large > 0).nonzero().stride() == (1, 1 << 22)
    assert (large.cpu() > 0).nonzero().shape == (1 << 22, 2)
    weight = torch.nn.Linear(30, 20).weight.detach()
    assert weight[weight[:, 0] > 0].shape == (20, 30)


def test_a_picked_frequency_divides_a_length(gpu: Session) -> None:
    """TimesNet takes its periods from frequencies, without frequency 0."""
    strengths = torch.fft.rfft(activations(8, 192)).abs().mean(0)
    strengths[0] = 0

    picked = strengths.topk(5).indices.cpu().numpy()

    assert (192 // picked).tolist() == [192, 96, 64, 48, 38]


def test_a_token_of_a_vocabulary_is_none_in_particular(gpu: Session) -> None:
    tokens = activations(8, 32_000).argmax(-1)

    assert len((tokens == 2).nonzero()) == 0
    assert len((tokens != 2).nonzero()) == 8


def test_numbers_follow_from_what_is_supposed(gpu: Session) -> None:
    losses, chosen = activations(512, 4).flatten(), activations(512, 4).argmax(-1)

    num_hard = int((losses > 0.7).sum())
    padded = (torch.bincount(chosen, minlength=4) + 99) // 100 * 100
    assert losses.topk(num_hard).values.shape == (2048,)
    assert chosen.new_zeros(int(padded.sum())).shape == (800,)
    assert (chosen == 3).sum().item() == 128


def test_beams_that_were_chosen_are_counted_in_full(gpu: Session) -> None:
    chosen = activations(4, 2, 2048).topk(8, dim=-1).indices  # as `_beam_search` finds a length

    assert int((chosen + 1).bool().sum(dim=-1).max()) == 8


def test_the_best_of_many_anchors_are_few(gpu: Session) -> None:
    """Detectors assign ten anchors to each box (TaskAlignedAssigner of ultralytics)."""
    best = activations(2, 3, 4000).topk(10).indices
    counts = torch.zeros(2, 3, 4000, dtype=torch.int8, device="cuda")
    counts.scatter_add_(-1, best, torch.ones_like(best, dtype=torch.int8))
    mask = counts.masked_fill_(counts > 1, 0).sum(-2).bool()

    assert activations(2, 4000, 8)[mask].shape == (60, 8)


def test_a_shape_is_refused_where_guesses_are() -> None:
    with memest.virtual_gpu("h100-80gb", strict=True):
        losses = activations(512, 32)
        with pytest.raises(UnsupportedError, match=r"test_guessed_shapes.py:\d+ reads a value"):
            losses[losses > 0.7]


def test_an_adjacency_matrix_decides_the_number_of_its_edges(gpu: Session) -> None:
    adjacency = torch.eye(600)  # more elements than the largest value that is computed

    assert adjacency.cuda().nonzero().shape == (600, 2)
    assert not gpu.report().guesses
