"""The traced step: which stream holds what, in Lightning's order."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memest.errors import TraceError
from memest.estimator.device.dispatch import Recorder
from memest.estimator.device.storages import MemKind, StorageTable
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.optimizers.specs import make_grad_scaler, make_optimizer
from memest.estimator.trace.program import MicroBatch, Program, StateBytes
from memest.estimator.trace.replay import replay
from memest.estimator.trace.step import StepTracer

# Shapes: B rows, D width in, F width out. Pairwise different, so none can cancel.
B, D, F = 3, 5, 7


class Model(nn.Module):
    """One linear layer between two that are frozen or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, F, bias=False)
        self.head = nn.Linear(F, 2, bias=False)
        self.register_buffer("scale", torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def traced(
    optim: str = "adamw",
    *,
    num_micro_batches: int = 1,
    autocast_dtype: torch.dtype | None = None,
    freeze_body: bool = False,
    scaler: Any = None,
    loss_of: Any = lambda model, batch: model(batch["x"]).sum(),
) -> Program:
    recorder = Recorder(find_gpu("h200"), StorageTable())
    tracer = StepTracer(recorder, autocast_dtype=autocast_dtype, accumulates=num_micro_batches > 1)
    model = tracer.setup(Model)
    model.get_submodule("body").requires_grad_(not freeze_body)
    trained = [p for p in model.parameters() if p.requires_grad]
    return tracer.run(
        model,
        lambda: {"x": torch.empty(B, D, device="meta")},
        loss_of,
        make_optimizer(optim, trained, momentum=0.0),
        scaler,
        num_micro_batches,
    )


def sizes(program: Program, events: Iterable[int], *kinds: MemKind) -> list[int]:
    """Bytes of the births among `events`, of some kinds or of all but workspaces."""
    table = program.storages
    return [
        table.num_bytes[e]
        for e in events
        if e >= 0
        and (table.kinds[e] in kinds if kinds else table.kinds[e] is not MemKind.WORKSPACE)
    ]


def alive(program: Program, *streams: Iterable[int]) -> list[int]:
    """Bytes of what the streams leave alive, workspaces left out, in order of birth."""
    ids: dict[int, None] = {}
    for stream in streams:
        for event in stream:
            if event >= 0:
                ids[event] = None
            else:
                ids.pop(~event, None)
    return sizes(program, ids)


def first(program: Program) -> MicroBatch:
    assert program.first is not None
    return program.first


BODY, HEAD = F * D * 4, 2 * F * 4  # bytes in float32


def test_setup_records_parameters_and_buffers() -> None:
    program = traced()
    table = program.storages

    assert sizes(program, program.setup, MemKind.PARAMS) == [BODY, HEAD]
    assert sizes(program, program.setup, MemKind.BUFFERS) == [11 * 4]
    assert [table.sites[i].module for i in range(3)] == ["body", "head", ""]


def test_the_forward_keeps_inputs_of_trained_layers_and_the_loss() -> None:
    """x (B,D), body's output (B,F), then the loss, its quotient and Lightning's copy of it."""
    program = traced()

    assert alive(program, first(program).forward) == [B * D * 4, B * F * 4, 4, 4]


def test_a_frozen_layer_keeps_no_input() -> None:
    """x (B,D) dies with the forward; of the graph only head's input (B,F) is kept."""
    program = traced(freeze_body=True)

    assert alive(program, first(program).forward) == [B * F * 4, 4, 4]
    assert program.after.grads == HEAD


def test_the_backward_leaves_gradients_and_the_loss() -> None:
    program = traced()

    after = alive(program, first(program).forward, first(program).backward)

    assert sorted(after) == sorted([BODY, HEAD, 4, 4])


def test_releasing_the_closure_leaves_gradients_alone() -> None:
    program = traced()
    streams = (first(program).forward, first(program).backward, first(program).release)

    assert sorted(alive(program, *streams)) == sorted([BODY, HEAD])
    assert all(event < 0 for event in first(program).release)


def test_gradients_are_labelled_and_listed_in_the_order_of_the_parameters() -> None:
    program = traced()
    table = program.storages

    assert [table.num_bytes[i] for i in program.grads] == [BODY, HEAD]
    assert [table.sites[i].module for i in program.grads] == ["body", "head"]
    assert {table.kinds[i] for i in program.grads} == {MemKind.GRADS}
    assert not any(~i in first(program).forward + first(program).backward for i in program.grads)


def test_one_micro_batch_accumulates_nothing() -> None:
    assert traced().accumulating is None


def test_a_second_micro_batch_makes_no_gradients_that_stay() -> None:
    program = traced(num_micro_batches=2)
    second = program.accumulating
    assert second is not None

    assert alive(program, second.forward) == [B * D * 4, B * F * 4, 4, 4]
    assert alive(program, second.forward, second.backward, second.release) == []
    gradients = [BODY, HEAD, B * F * 4]  # of both weights, and of what lies between them
    assert sorted(n for n in sizes(program, second.backward) if n > 4) == sorted(gradients)


def test_adamw_makes_two_moments_per_parameter_in_its_first_step() -> None:
    program = traced("adamw")

    assert sizes(program, program.optimizer_first, MemKind.OPTIMIZER) == [BODY, BODY, HEAD, HEAD]
    assert sorted(alive(program, program.optimizer_first)) == sorted([BODY, HEAD] * 2)
    assert alive(program, program.optimizer_next) == []


def test_sgd_makes_nothing_that_stays() -> None:
    program = traced("sgd")

    assert alive(program, program.optimizer_first, program.optimizer_next) == []
    assert program.after == StateBytes(BODY + HEAD, BODY + HEAD, 0)


def test_a_probe_reads_the_sums_before_and_after() -> None:
    """The step counters of AdamW are on the CPU and count for nothing."""
    program = traced("adamw")

    assert program.before == StateBytes(BODY + HEAD, 0, 0)
    assert program.after == StateBytes(BODY + HEAD, BODY + HEAD, 2 * (BODY + HEAD))


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    program = traced("adamw", freeze_body=True)

    assert [program.storages.num_bytes[i] for i in program.grads] == [HEAD]
    assert sizes(program, program.optimizer_first, MemKind.OPTIMIZER) == [HEAD, HEAD]


def test_mixed_precision_casts_in_the_forward_and_keeps_float32_gradients() -> None:
    """Of x, of body's output and of head's weight the backward needs the casts to bfloat16."""
    program = traced(autocast_dtype=torch.bfloat16)

    kept = alive(program, first(program).forward)
    assert kept == [B * D * 2, B * F * 2, HEAD // 2, 4, 4]
    assert [program.storages.num_bytes[i] for i in program.grads] == [BODY, HEAD]


def test_sites_name_the_part_of_the_step() -> None:
    program = traced("adamw", num_micro_batches=2)
    table = program.storages

    def phases(events: Iterable[int]) -> set[str]:
        return {table.sites[e].phase for e in events if e >= 0}

    assert phases(program.setup) == {"setup"}
    assert phases(first(program).backward) == {"backward"}
    assert phases(program.optimizer_first) == {"optimizer"}
    assert "forward" in phases(first(program).forward)


class Scaler:
    """Notes the order in which it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.real = make_grad_scaler()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.real, name)


def test_a_scaler_scales_every_micro_batch_and_steps_the_optimizer() -> None:
    scaler = Scaler()
    traced("adamw", num_micro_batches=2, scaler=scaler, autocast_dtype=torch.float16)

    assert scaler.asked == ["scale", "scale", *["unscale_", "step", "update"] * 2]


def test_two_traces_are_identical() -> None:
    one, two = traced(num_micro_batches=2), traced(num_micro_batches=2)

    assert one == two


def test_garbage_is_collected_again_after_the_trace() -> None:
    assert gc.isenabled()
    traced()
    assert gc.isenabled()


def test_a_trace_that_fails_leaves_nothing_behind() -> None:
    before = len(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(TraceError):
        traced(loss_of=lambda model, batch: model(batch["x"])[0, 0].item())

    assert gc.isenabled()
    assert len(nn.modules.module._global_forward_pre_hooks) == before
    assert torch.ones(2).sum().item() == 2


def test_nothing_is_alive_that_should_not_be_after_many_steps() -> None:
    """Parameters, buffer, gradients, moments: rounded to 512 each; and cuBLAS's workspace."""
    program = traced("adamw", num_micro_batches=2)
    rows = replay(program, num_steps=4, num_micro_batches=2).rows

    before = [r.allocated_bytes for r in rows if r.phase == "before_forward" and r.micro_batch == 0]
    workspaces = before[1] - before[0] - 6 * 512  # two gradients, four moments
    assert before[0] == 3 * 512
    assert before[1:] == [before[1]] * 3
    assert workspaces >= 0
    assert workspaces % 512 == 0
