"""Elementwise operators with temporaries."""

from __future__ import annotations

import torch

from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import Scratch
from tests.op_calls import meta, scratch

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_isinf_compares_the_absolute_values() -> None:
    assert scratch(aten.isinf.default, meta(3, 5, dtype=torch.float16)).before == (3 * 5 * 2,)


def test_where_casts_what_has_another_type_beside_its_result() -> None:
    """TensorCompare.cpp: 5 x 7 elements to 4 bytes each; a number of the host is copied."""
    mask, half, full = meta(5, 7, dtype=torch.bool), meta(5, 7, dtype=torch.half), meta(5, 7)

    assert scratch(aten.where.self, mask, half, full) == Scratch(before=(5 * 7 * 4,))
    assert scratch(aten.where.self, mask, full, torch.tensor(1.0)) == Scratch(before=(4,))
    assert scratch(aten.where.self, mask, full, full) == Scratch()


def test_a_number_to_the_power_of_a_tensor_is_a_tensor_first_unless_it_is_1() -> None:
    assert scratch(aten.pow.Scalar, 10000.0, meta(3)) == Scratch(after=(8,))
    assert scratch(aten.pow.Scalar, 1, meta(3)) == Scratch()


def test_the_modulus_of_complex_numbers_is_complex_first() -> None:
    numbers = meta(24, 201, 601, dtype=torch.complex64)

    assert scratch(aten.abs.default, numbers) == Scratch(after=(8 * numbers.numel(),))
    assert scratch(aten.abs.default, meta(4, 4)) == Scratch()


def test_the_angle_of_complex_numbers_is_allocated_after_its_complex_copy() -> None:
    """Recorded on an H200 in StyleTTS2's decoder: 1,689,952 bytes, then 844,976."""
    phase = meta(3, 5, dtype=torch.complex64)

    assert scratch(torch.ops.aten.angle.default, phase) == Scratch(before=(phase.nbytes,))
    assert scratch(torch.ops.aten.angle.default, meta(3, 5)) == Scratch()


def test_complex_numbers_from_two_real_ones_allocate_the_result_only() -> None:
    for func in (aten.polar.default, aten.complex.default):
        assert op_of(func).has_outputs_only
    assert op_of(aten._assert_async.default).has_outputs_only
    assert op_of(aten._assert_async.msg).has_outputs_only
