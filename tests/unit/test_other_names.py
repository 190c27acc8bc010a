"""Plans in the words of Lightning and of transformers' `TrainingArguments`."""

from __future__ import annotations

from typing import Any

import pytest

from memest.errors import MemestError, PlanError, UnsupportedError
from memest.plan import TrainingPlan
from memest.plan.optimizers import OPTIMIZERS, optimizer_name


def plan(**keys: Any) -> TrainingPlan:
    return TrainingPlan.from_dict({"model_name": "gpt2", **keys})


def test_training_arguments_are_a_plan() -> None:
    made = plan(
        per_device_train_batch_size=4, gradient_accumulation_steps=8, gradient_checkpointing=True,
        bf16=True, fp16=False, optim="adamw_torch_fused", max_grad_norm=0.5, weight_decay=0.01,
        num_train_epochs=3, report_to="none", save_strategy="no", output_dir="out",
    )  # fmt: skip

    assert (made.batch_size, made.accumulate_grad_batches, made.act_ckpt) == (4, 8, True)
    assert (made.precision, made.optim, made.loop) == ("bf16-mixed", "adamw_fused", "transformers")
    assert (made.gradient_clip_val, made.weight_decay) == (0.5, 0.01)
    assert any("Trainer" in line for line in made.assumed)


def test_neither_half_precision_is_fp32() -> None:
    assert plan(bf16=False, fp16=False).precision == "32-true"
    assert plan().precision == "bf16-true"


def test_an_evaluation_becomes_a_validation() -> None:
    made = plan(
        eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=3,
        per_device_eval_batch_size=16,
    )  # fmt: skip

    assert (made.limit_val_batches, made.val_check_interval, made.val_batch_size) == (2, 6, 16)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"bf16": True, "fp16": True}, "both on"),
        ({"bf16": True, "precision": "32-true"}, "precision"),
        ({"bf16": "yes"}, "bf16"),
        ({"batch_size": 2, "per_device_train_batch_size": 4}, "they are one"),
        ({"accelerator": "tpu"}, "accelerator"),
        ({"accelerator": "cpu"}, "accelerator"),
        ({"use_cpu": True}, "cpu"),
        ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"gradient_clip_algorithm": "norms"}, "gradient_clip_algorithm"),
        ({"val_batch_size": 4}, "limit_val_batches"),
        ({"limit_val_batches": 2, "val_check_interval": 50}, "val_check_interval"),
        ({"optim_options": [1, 2]}, r"`optim_options` is `\[1, 2\]`"),
        ({"optim_options": [[[1], 2]]}, "optim_options"),
        ({"loop": "keras"}, "loop"),
        ({"num_nodes": 0}, "num_nodes"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        plan(**keys)


def test_a_slip_is_told_the_nearest_name() -> None:
    with pytest.raises(PlanError) as error:
        plan(per_device_train_batchsize=2)

    assert "per_device_train_batch_size" in (error.value.hint or "")


@pytest.mark.parametrize(
    "name",
    ["label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel", "torch_compile", "fsdp"],
)
def test_what_touches_memory_is_refused_where_it_is_on(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        plan(**{name: 0.1})
    assert plan(**{name: False}) == plan()


def test_a_gpu_by_any_of_its_names_is_accepted() -> None:
    for name in ("gpu", "cuda", "auto"):
        assert plan(accelerator=name) == plan()


def test_auto_devices_are_one_and_said() -> None:
    made = plan(devices="auto")

    assert made.devices == 1
    assert any("devices" in line for line in made.assumed)


def test_nodes_multiply_the_gpus() -> None:
    made = plan(devices=4, num_nodes=2, strategy="fsdp")

    assert made.world_size == 8


# --- optimizers


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("AdamW", "adamw"), ("torch.optim.NAdam", "nadam"), ("Muon", "muon"),
        ("Adam8bit", "adam_8bit"), ("bitsandbytes.optim.PagedLion8bit", "paged_lion_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"), ("adamw_torch", "adamw"), ("Adafactor", "adafactor"),
    ],
)  # fmt: skip
def test_an_optimizer_has_several_names(asked: str, name: str) -> None:
    assert TrainingPlan(model_name="gpt2", optim=asked).optim == name


@pytest.mark.parametrize(
    "asked",
    ["schedule_free_adamw", "galore_adamw", "apollo_adamw", "lomo", "LBFGS", "SparseAdam",
     "ScheduleFreeAdamW", "adamw_torch_8bit", "lamb_8bit", "paged_ademamix_32bit"],
)  # fmt: skip
def test_other_optimizers_are_refused_by_name(asked: str) -> None:
    with pytest.raises(UnsupportedError, match=asked):
        optimizer_name(asked)


def test_an_optimizer_that_does_not_exist_is_told_the_nearest() -> None:
    with pytest.raises(PlanError) as error:
        optimizer_name("adamv")

    assert "`adam`" in (error.value.hint or "")


def test_every_row_names_a_class_that_exists() -> None:
    import torch

    for name, row in OPTIMIZERS.items():
        if row.library == "torch":
            assert hasattr(torch.optim, row.class_name), name


def test_options_are_read_from_text_and_mappings() -> None:
    by_text = plan(optim_options="amsgrad=true,eps=1e-6")

    assert by_text == plan(optim_options={"amsgrad": True, "eps": 1e-6})
    assert TrainingPlan.from_dict(by_text.to_dict()) == by_text


def test_errors_of_a_plan_have_hints() -> None:
    with pytest.raises(MemestError) as error:
        plan(optim="adamw", momentum=0.5)

    assert error.value.hint
