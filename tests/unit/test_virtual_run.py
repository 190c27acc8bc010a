"""What a run of a plan on the virtual GPU leaves: streams, states, names, and nothing else."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import TraceError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.replay import Program, Run, StateBytes, TracedPlan
from memest.estimator.replay.virtual_run import run_plan, shortened
from memest.estimator.tensors.storages import MemKind
from memest.estimator.virtual_gpu import VirtualGpu
from memest.plan import TrainingPlan
from memest.report import Phase

# Shapes: L layers, D model width, F mlp width, V vocabulary.
L, D, F, V = 2, 64, 96, 101
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": D,
    "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 2, "vocab_size": V,
    "max_position_embeddings": 64, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EMBEDDING = V * D
LAYER = 4 * D * D + 3 * D * F + 2 * D  # attention, mlp, two norms
NUMEL = 2 * EMBEDDING + L * LAYER + D
H200 = find_gpu("h200")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    (made / "config.json").write_text(json.dumps(LLAMA))
    return made


def run(folder: Path, **keys: Any) -> TracedPlan:
    values = {"model_name": str(folder), "batch_size": 2, "seq_len": 9, **keys}
    return run_plan(shortened(TrainingPlan.from_dict(values))[0], H200)


@cache
def adamw(folder: Path) -> TracedPlan:
    """Two micro-batches a step."""
    return run(folder, accumulate_grad_batches=2)


def states(program: Program, phase: Phase) -> list[StateBytes]:
    parts = [part for step in program.steps for batch in step for part in batch]
    return [part.state for part in parts if part.phase is phase]


def alive(program: Program) -> list[int]:
    """Storages that live at the end, in order of birth."""
    found: dict[int, None] = {}
    for stream in (program.setup, *(part.events for part in program.all_parts())):
        for event in stream:
            if event >= 0:
                found[event] = None
            else:
                found.pop(~event, None)
    return list(found)


def held(program: Program, kind: MemKind, indices: Iterable[int] | None = None) -> list[int]:
    """Bytes of the storages of a kind: of those that live at the end, or of `indices`."""
    table = program.storages
    chosen = alive(program) if indices is None else [i for i in indices if i >= 0]
    return [table.num_bytes[i] for i in chosen if table.kinds[i] is kind]


def test_setup_makes_the_parameters_of_the_model(folder: Path) -> None:
    program = adamw(folder).program

    assert sum(held(program, MemKind.PARAMS, program.setup)) == 2 * NUMEL
    assert adamw(folder).param_groups["params"] == {"bfloat16": NUMEL}


def test_parameters_are_named_by_their_module(folder: Path) -> None:
    program = adamw(folder).program
    table = program.storages
    named = {table.sites[i].module for i in alive(program) if table.kinds[i] is MemKind.PARAMS}

    assert {"model.embed_tokens", "model.layers.1.mlp.down_proj", "lm_head"} <= named


def test_gradients_and_two_moments_have_the_dtype_of_the_parameters(folder: Path) -> None:
    program = adamw(folder).program

    assert sum(held(program, MemKind.GRADS)) == 2 * NUMEL
    assert sum(held(program, MemKind.OPTIMIZER)) == 2 * 2 * NUMEL


def test_probes_read_the_sums_before_and_after(folder: Path) -> None:
    """The step counters of AdamW are on the CPU and count for nothing."""
    program = adamw(folder).program
    params = 2 * NUMEL

    assert states(program, Phase.BEFORE_FORWARD)[0] == StateBytes(params, 0, 0)
    assert states(program, Phase.AFTER_BACKWARD)[0] == StateBytes(params, params, 0)
    assert (
        states(program, Phase.AFTER_OPTIMIZER_STEP) == [StateBytes(params, params, 2 * params)] * 2
    )


def test_sgd_keeps_nothing_and_mixed_precision_all_in_float32(folder: Path) -> None:
    program = run(folder, optim="sgd", precision="bf16-mixed").program

    assert states(program, Phase.AFTER_OPTIMIZER_STEP)[-1] == StateBytes(4 * NUMEL, 4 * NUMEL, 0)


def test_frozen_parameters_have_neither_gradient_nor_state(folder: Path) -> None:
    traced = run(folder, freeze=["model.embed_tokens", "lm_head"])
    trained = 2 * (NUMEL - 2 * EMBEDDING)

    last = states(traced.program, Phase.AFTER_OPTIMIZER_STEP)[-1]
    assert last == StateBytes(2 * NUMEL, trained, 2 * trained)


def test_a_second_micro_batch_leaves_what_the_first_left(folder: Path) -> None:
    rows = Run(adamw(folder).program, 1, 2).on().rows

    after = [row.allocated_bytes for row in rows if row.phase is Phase.AFTER_BACKWARD]
    assert after[0] == after[1]


def test_nothing_grows_in_many_steps(folder: Path) -> None:
    rows = Run(adamw(folder).program, 5, 2).on().rows

    before = [r.allocated_bytes for r in rows if r.phase is Phase.BEFORE_FORWARD]
    assert before[2:] == before[2:4] * 4


def test_sites_name_the_part_of_the_step(folder: Path) -> None:
    program = adamw(folder).program
    table = program.storages
    events = (program.setup, *(part.events for part in program.all_parts()))
    made = [event for part in events for event in part if event >= 0]
    found = {table.sites[event].phase for event in made}

    assert {"setup", "forward", "backward", "optimizer"} <= found


def test_the_loss_of_fp16_is_scaled_by_a_factor_on_the_gpu(folder: Path) -> None:
    """Scale and growth tracker of the scaler, 4 bytes each, stay from the first backward on."""

    def small(precision: str) -> int:
        program = run(folder, precision=precision).program
        return sum(program.storages.num_bytes[i] == 4 for i in alive(program))

    assert small("16-mixed") - small("bf16-mixed") >= 2


@pytest.mark.parametrize("keys", [{}, {"use_qlora": True, "quant": "int8"}], ids=["full", "int8"])
def test_two_runs_of_a_plan_are_identical(folder: Path, keys: dict[str, Any]) -> None:
    if keys:
        pytest.importorskip("bitsandbytes")

    assert run(folder, **keys) == run(folder, **keys)


def world() -> dict[str, Any]:
    """What a run must leave as it was."""
    return {
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count(),
        "hooks": len(nn.modules.module._global_forward_pre_hooks),
        "has_cuda": torch.cuda.is_available(),
        "device": vars(torch.Tensor).get("device"),
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "virtual": VirtualGpu._active,
    }


@pytest.mark.parametrize("stage", ["forward", "backward", "optimizer"])
def test_a_plan_that_fails_leaves_no_patch_and_no_tensor_behind(
    folder: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("it broke")

    def broken(*args: Any, **options: Any) -> Any:
        raise ValueError("it broke")

    run(folder)  # imports what is imported late
    before = world()
    gc.collect()
    models = sum(type(o) is LlamaMLP for o in gc.get_objects())
    with monkeypatch.context() as patch:
        if stage == "optimizer":
            patch.setattr(torch.optim.AdamW, "step", broken)
        else:
            forward = broken if stage == "forward" else lambda self, x: Fails.apply(x)
            patch.setattr(LlamaMLP, "forward", forward)
        with pytest.raises(TraceError, match="it broke") as raised:
            run(folder)
    if stage == "forward":
        assert "model.layers.0" in str(raised.value)
    del raised

    assert world() == before
    assert torch.ones(2).sum().item() == 2
    gc.collect()
    assert sum(type(o) is LlamaMLP for o in gc.get_objects()) == models
