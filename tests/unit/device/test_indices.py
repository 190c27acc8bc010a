"""Indices that are masks, or lie on the host, as the GPU was recorded to take them; bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import memest
from tests.requested import Requests

MASK = torch.arange(16 * 427).view(16, 427) % 7 < 3
COUNT = int(MASK.sum())
POSITIONS = COUNT * 2 * 8
"""One int64 for each dimension of a mask that finds so many."""


@pytest.fixture
def requests() -> Iterator[Requests]:
    with memest.virtual_gpu("h100-80gb") as session:
        yield Requests(session.virtual)


def test_a_mask_is_searched_before_what_it_selects_is_made(requests: Requests) -> None:
    """6832 entries: their number, the sum's storage, the positions, the selection's storage."""
    values, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()

    found = requests.of(lambda: values[mask])

    assert [n for n in found if n > 0] == [4, 21503, POSITIONS, 1023, 4 * COUNT]
    assert found.index(-POSITIONS) > found.index(4 * COUNT)


def test_a_mask_that_selects_is_an_index(requests: Requests) -> None:
    values, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()

    assert requests.of(lambda: torch.masked_select(values, mask)) == requests.of(
        lambda: values[mask]
    )


def test_a_number_fills_where_a_mask_is_true_and_a_row_is_put_at_positions(
    requests: Requests,
) -> None:
    hidden, mask = torch.ones(16, 427, 32, device="cuda"), MASK.cuda()
    row = torch.ones(32, device="cuda")

    def fill() -> None:
        hidden[mask] = 0

    def put() -> None:
        hidden[mask] = row

    assert POSITIONS not in requests.of(fill)
    assert [n for n in requests.of(put) if n > 0] == [4, 21503, POSITIONS, 1023]


def test_what_is_put_elsewhere_is_a_copy_before_the_mask_is_searched(requests: Requests) -> None:
    hidden, mask = torch.ones(16, 427, device="cuda"), MASK.cuda()
    values = torch.ones(COUNT, device="cuda")

    found = requests.of(lambda: hidden.index_put((mask,), values))

    assert [n for n in found if n > 0] == [4 * MASK.numel(), 4, 21503, POSITIONS, 1023]


@pytest.mark.parametrize("is_mask", [False, True])
def test_indices_of_the_host_are_copied_to_the_card(requests: Requests, is_mask: bool) -> None:
    values = torch.ones(100, 8, device="cuda")
    index = torch.arange(6)

    found = requests.of(lambda: values[torch.arange(100) < 6 if is_mask else index])

    assert found[:2] == [6 * 8, 6 * 8 * 4]
    assert -6 * 8 in found


def test_the_backward_searches_again(requests: Requests) -> None:
    weight, mask = torch.ones(16, 427, device="cuda", requires_grad=True), MASK.cuda()
    loss = weight[mask].sum()

    found = requests.of(loss.backward)

    assert found.count(POSITIONS) == 1
