"""The real loops on the virtual GPU: what a plan says of them, and what it passes over."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers

from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict
from memest.estimator.replay.replay import Program, Replayed, Run
from memest.estimator.replay.virtual_run import run_plan, shortened
from memest.loops import job
from memest.loops import lightning as lightning_loop
from memest.plan import TrainingPlan
from memest.plan.keys import IGNORED_KEYS, LOOPS, OTHER_NAMES
from memest.report import Phase

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
H200 = find_gpu("h200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture
def run(model: str) -> Callable[..., Program]:
    def run(**keys: Any) -> Program:
        plan = TrainingPlan.from_dict({"model_name": model, "batch_size": 2, "seq_len": 9, **keys})
        return run_plan(shortened(plan)[0], H200).program

    return run


def events(program: Program) -> list[list[int]]:
    """Bytes of every birth and death in order, by stretch."""
    sizes = program.storages.num_bytes
    return [
        [sizes[e] if e >= 0 else -sizes[~e] for e in stream if abs(e) < len(sizes) + 1]
        for stream in (program.setup, *(part.events for part in program.all_parts()))
    ]


def grads_alive(program: Program, phase: Phase) -> list[int]:
    parts = [part for step in program.steps for batch in step for part in batch]
    return [part.state.grads for part in parts if part.phase is phase]


# --- the order of a step


def test_lightning_keeps_gradients_into_the_next_forward(run: Callable[..., Program]) -> None:
    first, second = grads_alive(run(), Phase.BEFORE_FORWARD)

    assert first == 0
    assert second > 0


@pytest.mark.parametrize("loop", ["transformers", "plain"])
def test_the_others_free_them_after_the_step(loop: str, run: Callable[..., Program]) -> None:
    program = run(loop=loop)

    assert grads_alive(program, Phase.BEFORE_FORWARD) == [0, 0]
    assert grads_alive(program, Phase.AFTER_OPTIMIZER_STEP) == [0, 0]
    assert 0 not in grads_alive(program, Phase.AFTER_BACKWARD)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_is_read_at_the_same_phases(loop: str, run: Callable[..., Program]) -> None:
    """Whatever of them ran: of five micro-batches two or three do."""
    program = run(loop=loop, accumulate_grad_batches=5)

    phases = [
        [(step, micro, part.phase) for part in program.parts(step, micro, 5) if part.phase]
        for step in range(2)
        for micro in range(5)
    ]
    three = [Phase.BEFORE_FORWARD, Phase.AFTER_FORWARD, Phase.AFTER_BACKWARD]
    four = [*three, Phase.AFTER_OPTIMIZER_STEP]
    assert phases == [
        [(step, micro, phase) for phase in (four if micro == 4 else three)]
        for step in range(2)
        for micro in range(5)
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_repeated_step_is_the_one_that_would_have_run(loop: str, model: str) -> None:
    """Four steps of five micro-batches as they run, and as the first few of both repeat."""
    keys = {"model_name": model, "batch_size": 2, "seq_len": 9, "loop": loop}
    plan = TrainingPlan.from_dict(keys | {"steps": 4, "accumulate_grad_batches": 5})

    short, num_ahead = shortened(plan)
    runs = run_plan(plan, H200), run_plan(short, H200, num_ahead=num_ahead)
    every, repeated = (Run(r.program, 4, 5).on() for r in runs)

    def phases(run: Replayed) -> list[tuple[Any, ...]]:
        return [(r.step, r.micro_batch, r.phase) for r in run.rows]

    assert phases(every) == phases(repeated)
    # the Trainer counts the tokens of all batches, whose flags are 512 bytes each
    slack = 2 * 512 * num_ahead if loop == "transformers" else 0
    for figure in ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes"):
        pairs = zip(every.rows, repeated.rows, strict=True)
        assert max(abs(getattr(a, figure) - getattr(b, figure)) for a, b in pairs) <= slack


@pytest.mark.parametrize("loop", LOOPS)
def test_a_validation_is_a_phase_with_its_peak(loop: str, model: str) -> None:
    keys = {"model_name": model, "batch_size": 2, "seq_len": 9, "loop": loop, "gpu": ["h200"]}
    report = predict(TrainingPlan.from_dict(keys | {"limit_val_batches": 2, "val_batch_size": 64}))

    validation = report.phases[-1]
    assert validation.phase is Phase.AFTER_VALIDATION
    assert validation.peak_allocated_bytes == report.peak_allocated_bytes
    assert report.peak.phase == "evaluation"


def test_clipping_takes_a_norm_of_each_gradient(run: Callable[..., Program]) -> None:
    plain, clipped = run(), run(gradient_clip_val=1.0)

    assert events(plain) != events(clipped)
    assert events(run(gradient_clip_val=0.0)) == events(plain)


def test_the_trainer_takes_the_norm_whether_it_clips_or_not(run: Callable[..., Program]) -> None:
    by_default = events(run(loop="transformers"))

    assert by_default == events(run(loop="transformers", gradient_clip_val=1.0))
    assert by_default == events(run(loop="transformers", gradient_clip_val=0))
    assert by_default[4] != events(run(loop="plain"))[4]


def test_weight_decay_copies_the_gradients_of_sgd(run: Callable[..., Program]) -> None:
    """The multi-tensor path adds decay to a copy; Adam's decoupled decay copies nothing."""
    sgd, decayed = run(optim="sgd"), run(optim="sgd", weight_decay=0.1)

    grads = grads_alive(sgd, Phase.AFTER_BACKWARD)[0]
    made = [sum(n for n in events(p)[4] if n > 0) for p in (sgd, decayed)]
    assert made[1] - made[0] == grads
    assert events(run(optim="adamw")) == events(run(optim="adamw", weight_decay=0.3))


def test_a_loop_cannot_go_with_a_strategy() -> None:
    with pytest.raises(PlanError, match="loop"):
        TrainingPlan(model_name="gpt2", loop="transformers", strategy="fsdp", devices=2)


# --- what is passed over


def same_with(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, **given: Any) -> None:
    """Let `owner.name` be called with these options, whatever the loop gives."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())
    def call(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, **given})

    monkeypatch.setattr(owner, name, call)


LABELS = {
    "note", "expected", "experiment_name", "project", "run_name", "dataset", "dataset_name",
    "data_dir", "train_size", "val_size",
}  # fmt: skip
"""Keys that name something, and that no loop is given."""


def _optimizer_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    monkeypatch.setattr(job, "LEARNING_RATE", 3e-2)
    same_with(monkeypatch, torch.optim, "AdamW", betas=(0.8, 0.95), eps=1e-6)
    return {"lr", "learning_rate", "betas", "eps"}


def _loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    same_with(
        monkeypatch, torch.utils.data, "DataLoader",
        num_workers=2, persistent_workers=True, pin_memory=True, shuffle=True,
    )  # fmt: skip
    return {"num_workers", "persistent_workers", "pin_memory", "shuffle"}


def _lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    same_with(
        monkeypatch, L, "Trainer",
        max_epochs=5, min_epochs=2, max_steps=2, limit_train_batches=1.0,
    )  # fmt: skip
    return {"max_epochs", "min_epochs", "num_epochs", "epochs", "max_steps", "limit_train_batches"}


def _outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    from lightning.pytorch.loggers import CSVLogger

    same_with(
        monkeypatch, L, "Trainer",
        logger=CSVLogger(tmp_path), log_every_n_steps=1, enable_checkpointing=True,
        default_root_dir=tmp_path, enable_progress_bar=True,
    )  # fmt: skip
    return {
        "logger", "log_dir", "log_every_n_steps", "enable_checkpointing", "output_dir", "save_dir",
        "enable_progress_bar",
    }  # fmt: skip


def _schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    original = lightning_loop.FineTune.configure_optimizers

    def configure(self: Any) -> Any:
        optimizer = original(self)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    monkeypatch.setattr(lightning_loop.FineTune, "configure_optimizers", configure)
    return {"lr_scheduler", "scheduler", "warmup_steps", "warmup_ratio"}


def _seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    monkeypatch.setattr("memest.loops.job.SEED", 7)
    return {"seed"}


GROUPS = (_optimizer_values, _loader, _lengths, _outputs, _schedule, _seed)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about what is asked of it here
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__.strip("_"))
def test_what_is_passed_over_changes_no_event(
    group: Callable[[pytest.MonkeyPatch, Path], set[str]],
    run: Callable[..., Program],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    without = events(run())
    keys = group(monkeypatch, tmp_path)

    assert events(run()) == without
    assert keys <= IGNORED_KEYS


def test_every_key_that_is_passed_over_is_in_a_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        shown = set().union(*(group(patch, Path()) for group in GROUPS))

    assert shown | LABELS == IGNORED_KEYS


OTHER_VALUES = {
    "num_train_epochs": 7.0, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6,
    "lr_scheduler_type": "cosine", "warmup_ratio": None,
    "save_only_model": True, "save_total_limit": 1, "disable_tqdm": True,
    "remove_unused_columns": False, "ignore_data_skip": True, "dataloader_drop_last": True,
    "data_seed": 3, "skip_memory_metrics": True, "include_for_metrics": [],
    "average_tokens_across_devices": False, "eval_do_concat_batches": False,
    "restore_callback_states_from_checkpoint": False,
}  # fmt: skip
"""Other values than the defaults of names of `TrainingArguments`, all at once."""


def test_names_of_training_arguments_that_are_passed_over_change_no_event(
    run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = events(run(loop="transformers"))
    given = {k: v for k, v in OTHER_VALUES.items() if v is not None}
    same_with(monkeypatch, transformers, "TrainingArguments", **given)
    monkeypatch.setattr(
        "memest.loops.transformers.TrainingArguments", transformers.TrainingArguments
    )

    assert events(run(loop="transformers")) == without
    assert set(OTHER_VALUES) <= set(OTHER_NAMES["passed_over"])
