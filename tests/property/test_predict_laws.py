"""Laws that every prediction keeps, over random plans for a model small enough to try many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memest import Prediction, TrainingPlan, predict
from memest.errors import MemestError
from memest.plan.keys import PRECISIONS
from memest.plan.optimizers import BITSANDBYTES, OPTIMIZERS

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 128,
}  # fmt: skip
GPUS = ("a100-40gb", "h200", "t4")
pytestmark = pytest.mark.slow

few = settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def has_kernels(values: dict[str, Any]) -> bool:
    """bitsandbytes steps small parameters by 32-bit kernels, of which some take no bfloat16."""
    row = OPTIMIZERS[values["optim"]]
    lacks_bf16 = row.class_name.startswith(("Adagrad", "LARS", "RMSprop", "SGD"))
    return not (row.library == BITSANDBYTES and lacks_bf16 and values["precision"] == "bf16-true")


plans = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 5),
        "accumulate_grad_batches": st.integers(1, 4),
        "seq_len": st.integers(8, 128),
        "precision": st.sampled_from(PRECISIONS),
        "optim": st.sampled_from([o for o in OPTIMIZERS if o != "deepspeed_cpu"]),
        "act_ckpt": st.booleans(),
        "use_lora": st.booleans(),
        "steps": st.integers(1, 4),
        "gpu": st.sampled_from(GPUS).map(lambda name: [name]),
    }
).filter(has_kernels)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def predicted(model: Path, values: dict[str, Any], **changes: Any) -> Prediction:
    if OPTIMIZERS[values["optim"]].needs_momentum:
        changes["momentum"] = 0.9
    if values["optim"] == "muon":  # which trains matrices and nothing else
        changes["use_lora"] = True
    return predict(TrainingPlan.from_dict({"model_name": str(model), **values, **changes}))


@settings(few, max_examples=30)
@given(values=plans, share=st.floats(0.2, 1.5))
def test_a_prediction_keeps_the_laws(model: Path, values: dict[str, Any], share: float) -> None:
    """One plan is under all laws, so that it is simulated once."""
    report = predicted(model, values)
    again = predicted(model, values)
    longer = predicted(model, values, steps=values["steps"] + 1)
    limit = int(report.peak_reserved_bytes * share)

    check_parts(report, values)
    assert {**report.to_dict(), "elapsed_s": 0} == {**again.to_dict(), "elapsed_s": 0}
    check_longer(report, longer)
    check_capped(report, predicted(model, values, memory_limit=limit), limit)


def check_parts(report: Prediction, values: dict[str, Any]) -> None:
    """Rows add up, peaks are highest, and what is held at the peak is the peak."""
    rows = report.phases

    assert len(rows) == values["steps"] * (3 * values["accumulate_grad_batches"] + 1)
    for row in rows:
        parts = row.params_bytes + row.grads_bytes + row.optimizer_bytes + row.activations_bytes
        assert parts == row.allocated_bytes <= row.peak_allocated_bytes
        assert row.allocated_bytes <= row.reserved_bytes <= report.peak_reserved_bytes
    assert report.peak_allocated_bytes == max(row.peak_allocated_bytes for row in rows)
    assert report.peak_allocated_bytes <= report.peak_reserved_bytes < report.process_bytes
    assert sum(term.num_bytes for term in report.terms) == report.peak_allocated_bytes
    assert report.verdict == "fits"
    json.dumps(report.to_dict())
    assert str(report)


def check_longer(one: Prediction, two: Prediction) -> None:
    """A longer run never needs less, and begins as the shorter one."""
    assert one.peak_allocated_bytes <= two.peak_allocated_bytes
    assert one.peak_reserved_bytes <= two.peak_reserved_bytes
    assert two.phases[: len(one.phases)] == one.phases


def check_capped(free: Prediction, capped: Prediction, limit: int) -> None:
    """Above the peak all is as without a limit; below the bytes that must be held nothing fits."""
    if limit >= free.peak_reserved_bytes:
        assert capped.phases == free.phases
        assert capped.verdict == "fits"
    held = free.phases[0].reserved_bytes  # as the model came onto the GPU, which no limit hinders
    if limit >= held:
        assert capped.peak_reserved_bytes <= limit
    else:
        assert capped.verdict == "oom"
    if limit < free.peak_allocated_bytes:
        assert capped.verdict == "oom"


@few
@given(values=plans)
def test_a_larger_batch_never_needs_less(model: Path, values: dict[str, Any]) -> None:
    """Twice the rows of at least as many tokens keep at least as much."""
    one = predicted(model, values, padded=False)
    two = predicted(model, values, padded=False, batch_size=2 * values["batch_size"])

    assert one.peak_allocated_bytes <= two.peak_allocated_bytes


@few
@given(values=plans, name=st.sampled_from(["batch_sise", "optim"]))
def test_what_cannot_be_predicted_is_refused_with_a_hint(
    model: Path, values: dict[str, Any], name: str
) -> None:
    with pytest.raises(MemestError) as caught:
        predicted(model, values, **{name: "nothing"})

    assert caught.value.hint
