"""`TrainingPlan`: what can be pasted, what contradicts itself, and the words that say so."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from memest.errors import MemestError, PlanError
from memest.plan import TrainingPlan
from memest.plan.keys import ATTENTIONS, IGNORED_KEYS, PRECISIONS, STRATEGIES
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.training_plan import PLAN_KEYS
from scripts import plan_page


def plan(**values: Any) -> TrainingPlan:
    return TrainingPlan.from_dict({"model_name": "gpt2", **values})


def message_of(error_type: type[MemestError], **values: Any) -> tuple[str, str]:
    with pytest.raises(error_type) as caught:
        plan(**values)
    assert type(caught.value) is error_type
    return str(caught.value), caught.value.hint


def test_a_lab_config_can_be_pasted() -> None:
    """Keys that touch memory are read; the rest of a lab's dictionary is passed over."""
    lab = {
        "model_name": "blip2-flan-t5-xxl",
        "batch_size": 32,
        "accumulate_grad_batches": 2,
        "precision": "bf16-true",
        "optim": "sgd",
        "act_ckpt": True,
        "strategy": "auto",
        "devices": 1,
        "use_lora": True,
        "lora_r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q", "v"],
        "lr": 5e-5,
        "num_workers": 4,
        "max_epochs": 3,
        "log_every_n_steps": None,
    }

    read = TrainingPlan.from_dict(lab)

    assert read == TrainingPlan(
        model_name="blip2-flan-t5-xxl", batch_size=32, accumulate_grad_batches=2,
        precision="bf16-true", optim="sgd", act_ckpt=True, use_lora=True, lora_r=8, lora_alpha=32,
        lora_dropout=0.1, lora_target_modules=("q", "v"),
    )  # fmt: skip


def test_only_the_model_is_required() -> None:
    assert plan() == TrainingPlan(model_name="gpt2")


def test_defaults_are_those_that_the_report_states() -> None:
    made = plan()

    assert (made.batch_size, made.accumulate_grad_batches, made.steps) == (1, 1, 2)
    assert (made.precision, made.optim, made.strategy) == ("bf16-true", "adamw", "auto")
    assert (made.seq_len, made.image_size, made.memory_limit) == (None, None, None)


@pytest.mark.parametrize(
    ("short", "full"),
    [("32", "32-true"), (32, "32-true"), ("bf16", "bf16-mixed"), ("16", "16-mixed"),
     (16, "16-mixed")],
)  # fmt: skip
def test_short_precisions_mean_what_lightning_reads(short: Any, full: str) -> None:
    assert plan(precision=short).precision == full


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_its_own_name(precision: str) -> None:
    assert plan(precision=precision).precision == precision


@pytest.mark.parametrize("optim", [o for o in OPTIMIZERS if o != "deepspeed_cpu"])
def test_every_optimizer_makes_a_plan(optim: str) -> None:
    given = {"momentum": 0.9} if OPTIMIZERS[optim].needs_momentum else {}
    assert plan(optim=optim, **given).optim == optim


def test_an_optimizer_of_bitsandbytes_that_needs_momentum_says_so() -> None:
    assert message_of(PlanError, optim="sgd_8bit") == (
        "`optim` `sgd_8bit` of bitsandbytes cannot be made without `momentum`",
        "give a `momentum` above 0, such as 0.9",
    )


@pytest.mark.parametrize("key", sorted(IGNORED_KEYS))
def test_keys_that_do_not_touch_memory_change_nothing(key: str) -> None:
    assert plan(**{key: object()}) == plan()


def test_no_key_is_both_read_and_ignored() -> None:
    assert not IGNORED_KEYS & {field.name for field in dataclasses.fields(TrainingPlan)}


def test_a_key_given_as_null_is_the_default() -> None:
    assert plan(batch_size=None, seq_len=None, lora_target_modules=None) == plan()


def test_overrides_win_and_none_does_not() -> None:
    read = TrainingPlan.from_dict({"model_name": "gpt2", "batch_size": 3}, batch_size=5, optim=None)

    assert (read.batch_size, read.optim) == (5, "adamw")


@pytest.mark.parametrize("given", ["q, v", ["q", "v"], ("q", "v"), ["q,v"], "q,,v"])
def test_names_may_be_a_list_or_separated_by_commas(given: Any) -> None:
    assert plan(use_lora=True, lora_target_modules=given).lora_target_modules == ("q", "v")


def test_sizes_are_read_as_text() -> None:
    assert plan(gpu_memory="24GiB", memory_limit="80 GB").gpu_memory == 24 * 2**30
    assert plan(gpu_memory="24GiB", memory_limit="80 GB").memory_limit == 80 * 10**9


def test_a_plan_comes_back_from_its_own_json() -> None:
    made = plan(
        batch_size=3, use_qlora=True, lora_target_modules=["q"], gpu=["h200"], gpu_memory="8GiB",
        memory_limit=7, seq_len=5, padded=True, precision=32, double_quant=True,
    )  # fmt: skip

    assert TrainingPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_batch_is_padded_where_it_has_more_than_one_row() -> None:
    assert not plan(batch_size=1).is_padded
    assert plan(batch_size=2).is_padded
    assert not plan(batch_size=2, padded=False).is_padded


def test_adapters_are_lora_or_qlora() -> None:
    uses = [plan(**k).uses_adapters for k in ({}, {"use_lora": True}, {"use_qlora": True})]

    assert uses == [False, True, True]


def test_the_label_is_the_name_or_the_model() -> None:
    assert (plan().label, plan(name="mine").label) == ("gpt2", "mine")


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().batch_size = 2  # type: ignore[misc]


def test_the_page_of_plan_keys_is_up_to_date() -> None:
    """Also: every key has a docstring."""
    written = plan_page.PAGE.read_text(encoding="utf-8")

    assert plan_page.page(written) == written
    assert set(plan_page.docstrings()) == {*PLAN_KEYS, "assumed", "trust_remote_code"}
    for name in PLAN_KEYS:
        assert f"| `{name}` |" in written


def test_a_changed_row_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    written = plan_page.PAGE.read_text(encoding="utf-8")
    row = dataclasses.replace(PLAN_KEYS["steps"], flag="--num-steps")
    monkeypatch.setitem(PLAN_KEYS, "steps", row)

    assert plan_page.page(written) != written


def test_the_default_of_the_trainer_is_the_one_in_the_row() -> None:
    from transformers import TrainingArguments

    fields = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    row = PLAN_KEYS["gradient_clip_val"]

    assert row.in_loops["transformers"] == fields["max_grad_norm"]
    assert plan(loop="transformers").clip_norm == fields["max_grad_norm"]
    assert plan(loop="plain").clip_norm is None
    assert plan(loop="transformers", gradient_clip_val=0).clip_norm == 0


def test_every_other_name_is_read_as_its_key() -> None:
    values = {"float | None": 0.5, "bool": True, "int": 3, "int | None": 3}
    for name, row in PLAN_KEYS.items():
        for other in row.other_names:
            value = values.get(row.type, {"eps": 1e-6})
            extra = {"limit_val_batches": 1, "eval_strategy": "epoch"} if row.need else {}
            read = plan(**{other: value}, **extra).to_dict()
            assert read[name] == value, other


# What is refused, word by word.


def test_no_model_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("the plan names no model")) as caught:
        TrainingPlan.from_dict({"batch_size": 2})

    assert caught.value.hint == "give `model_name`, or `--model NAME`"


@pytest.mark.parametrize("name", ["", "  ", "\n"])
def test_an_empty_model_is_refused(name: str) -> None:
    assert message_of(PlanError, model_name=name) == (
        "`model_name` is empty",
        "`memest models` lists what is bundled",
    )


def test_a_slip_in_a_key_names_the_closest_key() -> None:
    message, hint = message_of(PlanError, batchsize=2)

    assert message == "`batchsize` is not a key of a plan"
    assert hint.startswith("the closest keys: `batch_size`")


def test_a_key_like_no_other_gets_the_whole_list() -> None:
    message, hint = message_of(PlanError, zzzzzz=2)

    assert message == "`zzzzzz` is not a key of a plan"
    assert hint.startswith("keys: `accumulate_grad_batches`, `act_ckpt`")


@pytest.mark.parametrize("key", [1, None, True, (1, 2)])
def test_a_key_that_is_no_text_is_refused(key: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"`{key}` is not a key of a plan")):
        TrainingPlan.from_dict({"model_name": "gpt2", key: 1})


@pytest.mark.parametrize("values", [None, [], "gpt2", 3, [("model_name", "gpt2")]])
def test_a_plan_that_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(PlanError, match="a plan is a mapping of keys to values, not `"):
        TrainingPlan.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("precision", "fp8", PRECISIONS),
        ("precision", 64, PRECISIONS),
        ("precision", "BF16-true", PRECISIONS),
        ("strategy", "dp", STRATEGIES),
        ("attn_implementation", "flash", ATTENTIONS),
    ],
)
def test_a_value_that_does_not_exist_gets_the_list(
    key: str, value: Any, allowed: tuple[str, ...]
) -> None:
    message, hint = message_of(PlanError, **{key: value})

    assert message == f"`{key}` cannot be `{value}`"
    assert hint == "allowed: " + ", ".join(f"`{a}`" for a in sorted(allowed))


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("batch_size", 65536),
        ("accumulate_grad_batches", 65536),
        ("seq_len", 4194304),
        ("image_size", 16384),
        ("lora_r", 16384),
        ("steps", 1000),
        ("devices", 16384),
    ],
)
def test_whole_numbers_have_a_range(key: str, largest: int) -> None:
    for value in (0, -1, largest + 1):
        assert message_of(PlanError, **{key: value}) == (
            f"`{key}` is `{value}`",
            f"give a whole number from 1 to {largest}",
        )
    if key != "devices":
        assert getattr(plan(**{key: largest}), key) == largest


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("batch_size", "2", "a whole number"),
        ("batch_size", 2.0, "a whole number"),
        ("batch_size", True, "a whole number"),
        ("seq_len", "50", "a whole number"),
        ("seq_len", False, "a whole number"),
        ("act_ckpt", 1, "true or false"),
        ("act_ckpt", "yes", "true or false"),
        ("padded", 0, "true or false"),
        ("tie_word_embeddings", "no", "true or false"),
        ("optim", 3, "text"),
        ("model_name", ["gpt2"], "text"),
        ("attn_implementation", 1, "text"),
        ("precision", 1.5, "text"),
        ("precision", True, "text"),
        ("momentum", "0.9", "a number"),
        ("lora_dropout", True, "a number"),
        ("lora_alpha", [], "a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(key: str, value: Any, expected: str) -> None:
    shown = value if isinstance(value, str) else repr(value)

    assert message_of(PlanError, **{key: value}) == (f"`{key}` is `{shown}`", f"give {expected}")


@pytest.mark.parametrize("key", ["freeze", "gpu", "quant_skip", "lora_target_modules"])
@pytest.mark.parametrize("value", [3, [1], [""], {"a": 1}, [["a"]]])
def test_lists_hold_names(key: str, value: Any) -> None:
    assert message_of(PlanError, **{key: value}) == (
        f"`{key}` is `{value}`",
        "give a list of names",
    )


def test_lists_hold_names_in_the_constructor_too() -> None:
    with pytest.raises(PlanError, match=re.escape("`freeze` is `([],)`")):
        TrainingPlan(model_name="gpt2", freeze=([],))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 1.0, -0.1, float("nan"), float("inf")])
def test_probabilities_and_momentum_are_below_one(value: float) -> None:
    assert message_of(PlanError, lora_dropout=value) == (
        f"`lora_dropout` is `{value}`",
        "give 0 <= p < 1",
    )
    assert message_of(PlanError, momentum=value, optim="sgd") == (
        f"`momentum` is `{value}`",
        "give 0 <= momentum < 1",
    )


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 10**400])
def test_the_scale_of_adapters_is_positive_and_finite(value: float) -> None:
    message, hint = message_of(PlanError, lora_alpha=value)

    assert message.startswith("`lora_alpha` is `")
    assert hint == "give a positive number"


@pytest.mark.parametrize("key", ["gpu_memory", "memory_limit"])
@pytest.mark.parametrize("value", ["much", "", "-1GiB", [], 1.5, True, "1 EiB"])
def test_a_size_that_cannot_be_read_is_refused(key: str, value: Any) -> None:
    message, hint = message_of(PlanError, **{key: value})

    assert "is not a memory size" in message
    assert hint == "write it as `78.4GiB` or `80GB`"


@pytest.mark.parametrize("key", ["gpu_memory", "memory_limit"])
def test_a_size_is_positive(key: str) -> None:
    assert message_of(PlanError, **{key: 0})[0] == "memory size `0` is not positive"
    with pytest.raises(PlanError, match=f"`{key}` is `-5`"):
        TrainingPlan(model_name="gpt2", **{key: -5})


def test_numbers_too_long_to_print_are_refused_all_the_same() -> None:
    huge = 16**5000  # Python does not print integers of more than 4300 digits

    for key in ("batch_size", "precision", "memory_limit", "lora_r", "lora_alpha", "momentum"):
        message_of(PlanError, **{key: huge}, **({"optim": "sgd"} if key == "momentum" else {}))
    message_of(PlanError, freeze=[huge])
    with pytest.raises(PlanError):
        TrainingPlan.from_dict({"model_name": "gpt2", huge: 1})  # type: ignore[dict-item]


# What contradicts itself.


@pytest.mark.parametrize("optim", ["adamw", "adam_8bit", "adagrad"])
def test_momentum_needs_an_optimizer_that_has_it(optim: str) -> None:
    assert message_of(PlanError, momentum=0.9, optim=optim) == (
        f"`momentum` 0.9 does not go with `optim` `{optim}`",
        "use it with `sgd` or `rmsprop`",
    )


@pytest.mark.parametrize("optim", ["sgd", "rmsprop"])
def test_sgd_and_rmsprop_have_momentum(optim: str) -> None:
    assert plan(momentum=0.9, optim=optim).momentum == 0.9


def test_freezing_does_not_go_with_adapters() -> None:
    for adapters in ("use_lora", "use_qlora"):
        assert message_of(PlanError, freeze=["wte.*"], **{adapters: True}) == (
            "`freeze` does not go with LoRA, which freezes the whole base",
            "leave `freeze` out, or narrow `lora_target_modules`",
        )


def test_targets_without_adapters_are_refused() -> None:
    assert message_of(PlanError, lora_target_modules=["q"]) == (
        "`lora_target_modules` is given for a full fine-tune",
        "add `use_lora: true` (`--lora`) or leave it out",
    )


def test_double_quantisation_needs_qlora() -> None:
    assert message_of(PlanError, double_quant=True, use_lora=True) == (
        "`double_quant` is given without QLoRA",
        "add `use_qlora: true` (`--qlora`)",
    )


def test_modules_that_stay_unquantised_need_qlora() -> None:
    assert message_of(PlanError, quant_skip=["lm_head"], use_lora=True) == (
        "`quant_skip` is given without QLoRA",
        "add `use_qlora: true` (`--qlora`)",
    )


def test_one_row_is_never_padded() -> None:
    assert message_of(PlanError, padded=True, batch_size=1) == (
        "`padded` is true for `batch_size` 1: its only row is the longest",
        "leave `padded` out or raise `batch_size`",
    )


def test_the_cpu_optimizer_needs_an_offload_strategy() -> None:
    assert message_of(PlanError, optim="deepspeed_cpu") == (
        "`deepspeed_cpu` needs an offload strategy, not `auto`",
        "use `deepspeed_stage_2_offload` or `deepspeed_stage_3_offload`",
    )


def test_fsdp2_refuses_a_gradient_scaler_as_lightning_does() -> None:
    assert message_of(PlanError, strategy="fsdp2", devices=4, precision="16-mixed") == (
        "Lightning's `ModelParallelStrategy`, which is `fsdp2`, refuses `16-mixed`",
        "use `bf16-mixed`, or `strategy: fsdp`",
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_of_lightning_is_a_plan(strategy: str) -> None:
    optim = "deepspeed_cpu" if strategy.endswith("_offload") else "adamw"

    made = plan(strategy=strategy, optim=optim, devices=2)

    assert made.is_distributed
    assert [made.is_ddp, made.is_fsdp, made.is_deepspeed].count(True) == 1


def test_several_gpus_are_ddp_as_lightning_chooses() -> None:
    assert plan(devices=2).is_ddp
    assert not plan(devices=1).is_distributed


def test_offload_takes_the_optimizer_of_the_cpu_alone() -> None:
    assert message_of(PlanError, strategy="deepspeed_stage_2_offload", optim="adamw") == (
        "`deepspeed_stage_2_offload` updates on the CPU and refuses `optim` `adamw`",
        "use `optim: deepspeed_cpu`",
    )


def test_a_quantised_base_is_not_divided() -> None:
    assert message_of(PlanError, strategy="deepspeed_stage_3", devices=4, use_qlora=True) == (
        "`deepspeed_stage_3` cannot shard a quantised base: its weights are packed bytes next to"
        " 16-bit ones",
        "use `ddp` or `deepspeed_stage_2`, or LoRA without quantisation",
    )


def test_shards_divide_the_gpus() -> None:
    values = {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"}
    assert message_of(PlanError, **values, devices=6, shard_size=4) == (
        "`shard_size` 4 does not divide 6 GPUs",
        "give a divisor of `devices`",
    )


def test_keys_of_another_strategy_are_refused() -> None:
    assert message_of(PlanError, strategy="ddp", devices=2, wrap_classes=("Layer",)) == (
        "`wrap_classes` does not go with `strategy` `ddp`",
        "it is read by `strategy: fsdp`",
    )


def test_fsdp2_has_no_mode_without_shards() -> None:
    message, _ = message_of(PlanError, strategy="fsdp2", devices=2, sharding_strategy="NO_SHARD")
    assert message == "`fsdp2` has no `NO_SHARD`"
