"""Plans of several GPUs that contradict themselves, and what the command line says of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

from memest.cli import main
from memest.errors import PlanError
from memest.models_meta.sharding import checkpointed_class_names, wrap_class_names
from memest.plan import TrainingPlan


def plan(**values: Any) -> TrainingPlan:
    return TrainingPlan.from_dict({"model_name": "gpt2", "devices": 4, **values})


def refused(**values: Any) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        plan(**values)
    return str(caught.value), caught.value.hint


def test_the_cpu_optimizer_needs_offload() -> None:
    assert refused(strategy="deepspeed_stage_2", optim="deepspeed_cpu") == (
        "`deepspeed_cpu` needs an offload strategy, not `deepspeed_stage_2`",
        "use `deepspeed_stage_2_offload` or `deepspeed_stage_3_offload`",
    )


def test_offload_needs_the_cpu_optimizer() -> None:
    assert refused(strategy="deepspeed_stage_3_offload", optim="adamw") == (
        "`deepspeed_stage_3_offload` updates on the CPU and refuses `optim` `adamw`",
        "use `optim: deepspeed_cpu`",
    )


@pytest.mark.parametrize("devices", [0, -1, (1 << 14) + 1])
def test_devices_that_do_not_exist_are_refused(devices: int) -> None:
    message, _ = refused(strategy="ddp", devices=devices)

    assert message.startswith(f"`devices` is `{devices}`")


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    message, hint = refused(strategy="deepspeed_stage_4")

    assert "`deepspeed_stage_4`" in message
    assert "`deepspeed_stage_3`" in hint


class Layer(nn.Module):
    """In a list of layers."""


class Tower(nn.Module):
    """Two layers; does not say what must not be split."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])


def test_a_wrap_class_that_matches_nothing_lists_the_layer_classes() -> None:
    with pytest.raises(PlanError, match=re.escape("`wrap_classes` names `Block`")) as caught:
        wrap_class_names(Tower(), plan(strategy="fsdp", wrap_classes=["Block"]))

    assert str(caught.value) == "`wrap_classes` names `Block`, which no module of `Tower` is"
    assert caught.value.hint == "its layer classes: `Layer`"


def test_a_checkpointed_class_that_matches_nothing_lists_the_layer_classes() -> None:
    given = plan(strategy="fsdp2", activation_checkpointing_policy=["Block"])
    with pytest.raises(PlanError) as caught:
        checkpointed_class_names(Tower(), given)

    assert str(caught.value) == (
        "`activation_checkpointing_policy` names `Block`, which no module of `Tower` is"
    )
    assert caught.value.hint == "its layer classes: `Layer`"


def test_a_model_that_names_no_layers_asks_for_them() -> None:
    with pytest.raises(PlanError) as caught:
        wrap_class_names(Tower(), plan(strategy="fsdp"))

    assert str(caught.value) == "`gpt2` does not define which layers FSDP wraps"
    assert caught.value.hint == "name them with `wrap_classes`; its layer classes: `Layer`"


@pytest.mark.parametrize(
    ("strategy", "optim"),
    [
        ("fsdp", "adamw"),
        ("fsdp2", "adamw"),
        ("deepspeed_stage_3", "adamw"),
        ("deepspeed_stage_3_offload", "deepspeed_cpu"),
    ],
)
def test_a_quantised_base_cannot_be_divided(strategy: str, optim: str) -> None:
    assert refused(strategy=strategy, optim=optim, use_qlora=True) == (
        f"`{strategy}` cannot shard a quantised base: its weights are packed bytes next to 16-bit"
        " ones",
        "use `ddp` or `deepspeed_stage_2`, or LoRA without quantisation",
    )


def test_a_shard_size_divides_the_gpus() -> None:
    given = {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"}

    assert refused(**given, shard_size=3) == (
        "`shard_size` 3 does not divide 4 GPUs",
        "give a divisor of `devices`",
    )
    assert plan(**given, shard_size=2).shard_size == 2


@pytest.mark.parametrize(
    ("values", "key", "where"),
    [
        ({"strategy": "fsdp", "bucket_cap_mb": 5}, "bucket_cap_mb", "`strategy: ddp`"),
        (
            {"strategy": "deepspeed_stage_2", "gradient_as_bucket_view": True},
            "gradient_as_bucket_view",
            "`strategy: ddp`",
        ),
        (
            {"strategy": "ddp", "sharding_strategy": "SHARD_GRAD_OP"},
            "sharding_strategy",
            "`strategy: fsdp`",
        ),
        ({"strategy": "ddp", "wrap_classes": ["GPT2Block"]}, "wrap_classes", "`strategy: fsdp`"),
        (
            {"strategy": "fsdp", "shard_size": 2},
            "shard_size",
            "`sharding_strategy: HYBRID_SHARD` of FSDP",
        ),
        (
            {"strategy": "fsdp", "reduce_bucket_size": 7},
            "reduce_bucket_size",
            "a DeepSpeed strategy",
        ),
    ],
)
def test_a_key_of_another_strategy_is_refused(values: dict[str, Any], key: str, where: str) -> None:
    assert refused(**values) == (
        f"`{key}` does not go with `strategy` `{values['strategy']}`",
        f"it is read by {where}",
    )


def test_fsdp2_keeps_nothing_whole() -> None:
    assert refused(strategy="fsdp2", sharding_strategy="NO_SHARD") == (
        "`fsdp2` has no `NO_SHARD`",
        "use `ddp`, which keeps all on every GPU",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "ddp", "--optim", "deepspeed_cpu"], "needs an offload strategy"),
        (["--strategy", "ddp", "--devices", "0"], "`devices` is `0`"),
        (["--strategy", "fsdp", "--devices", "4", "--wrap", "Block"], "classes: `GPT2Block`"),
        (["--strategy", "fsdp", "--devices", "4", "--qlora"], "cannot shard a quantised base"),
        (
            ["--strategy", "fsdp", "--devices", "6", "--sharding", "HYBRID_SHARD",
             "--shard-size", "4"],
            "does not divide 6 GPUs",
        ),
    ],
)  # fmt: skip
def test_the_command_line_says_it_in_two_lines(flags: list[str], message: str) -> None:
    """Exit 2, nothing on stdout, and no stack."""
    result = CliRunner().invoke(main, ["predict", "--model", "gpt2", *flags])

    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "\nhint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_a_process_that_is_in_a_group_already_is_told_to_predict_elsewhere() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memest.errors import UnsupportedError
    from memest.estimator.predict import predict
    from memest.plan import TrainingPlan

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(UnsupportedError, match="belongs to a group"):
            predict(TrainingPlan(model_name="gpt2", strategy="fsdp", devices=2, seq_len=8))
    finally:
        dist.destroy_process_group()
