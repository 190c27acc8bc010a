"""The formulas that memest is compared with, by hand, and the page against its data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package in scripts/, with its modules."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import rivals.accelerate_rule
    import rivals.case
    import rivals.page
    import rivals.scores
    import rivals.textbook
    import rivals.textbook_with_matrix
    import rivals.torch_preflight

    yield rivals
    for name in [n for n in sys.modules if n.partition(".")[0] == "rivals"]:
        del sys.modules[name]


# Shapes: s tokens, b batch, h width, a heads, v vocabulary, L layers; pairwise different.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 10,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "vocab_size": 17,
}
PLAN = {
    "strategy": "auto",
    "freeze": (),
    "use_lora": False,
    "use_qlora": False,
    "optim": "adamw",
    "momentum": 0.0,
    "precision": "bf16-true",
    "batch_size": 2,
    "seq_len": 7,
    "attn_implementation": None,
    "act_ckpt": False,
}


def case(rivals: Any, **changes: Any) -> Any:
    return rivals.case.Case(
        key="file/run",
        plan=PLAN | changes,
        hub_id="a/model",
        config=CONFIG,
        architecture="LlamaForCausalLM",
        modality="text",
        num_params_published=1000,
        num_params=1000,
        num_trainable_params=1000,
        limit_bytes=10**9,
        gpu_bytes=10**9 + 1,
    )


def activations(rivals: ModuleType, **changes: Any) -> int:
    given = {"s": 7, "b": 2, "k": 2, "has_matrix": False, "is_checkpointed": False}
    found: int = rivals.textbook.activation_bytes(CONFIG, **given | changes)
    return found


OUTSIDE = 7 * 2 * 10 * 5 + 4 * 7 * 2 * 17  # dropout, last norm, output's input; logits in fp32


def test_a_layer_in_16_bit_keeps_34_sbh(rivals: ModuleType) -> None:
    assert activations(rivals) == 3 * 34 * 7 * 2 * 10 + OUTSIDE


def test_the_attention_matrix_is_5_a_s_s_b_more(rivals: ModuleType) -> None:
    assert activations(rivals, has_matrix=True) == 3 * (34 * 140 + 5 * 5 * 49 * 2) + OUTSIDE


def test_in_fp32_all_but_the_masks_doubles(rivals: ModuleType) -> None:
    """66 = 2 x 32 + 2 masks, 9 = 2 x 4 + 1 mask; 9 = 1 + 4 + 4 outside the layers."""
    layers = 3 * (66 * 140 + 9 * 5 * 49 * 2)

    assert activations(rivals, k=4, has_matrix=True) == layers + 140 * 9 + 4 * 14 * 17


def test_checkpointing_keeps_2_sbh_a_layer_and_one_layer(rivals: ModuleType) -> None:
    assert activations(rivals, is_checkpointed=True) == 3 * 2 * 140 + 34 * 140 + OUTSIDE


def test_the_textbook_adds_states_in_the_dtype_of_the_parameters(rivals: ModuleType) -> None:
    """Weights 2, gradients 2, two moments 4 bytes."""
    found = rivals.textbook.estimate(case(rivals))

    assert found.allocated_bytes == 1000 * 8 + activations(rivals)
    assert found.process_bytes is None
    assert found.fits


def test_under_autocast_the_states_are_fp32_and_the_activations_16_bit(rivals: ModuleType) -> None:
    found = rivals.textbook.estimate(case(rivals, precision="bf16-mixed"))

    assert found.allocated_bytes == 1000 * 16 + activations(rivals)


def test_adapters_alone_have_gradients_and_moments(rivals: ModuleType) -> None:
    run = replace(case(rivals, use_lora=True), num_trainable_params=100)

    assert rivals.textbook.estimate(run).allocated_bytes == (
        1000 * 2 + 100 * 6 + activations(rivals)
    )


@pytest.mark.parametrize(
    ("optim", "momentum", "num_bytes"),
    [("adam_8bit", 0.0, 2), ("paged_adamw_8bit", 0.0, 0), ("sgd", 0.0, 0), ("sgd", 0.9, 2)],
)
def test_each_optimizer_has_its_bytes(
    rivals: ModuleType, optim: str, momentum: float, num_bytes: int
) -> None:
    found = rivals.textbook.estimate(case(rivals, optim=optim, momentum=momentum))

    assert found.allocated_bytes == 1000 * (4 + num_bytes) + activations(rivals)


def test_eager_attention_keeps_its_matrix(rivals: ModuleType) -> None:
    eager = rivals.textbook.estimate(case(rivals, attn_implementation="eager"))

    assert eager == rivals.textbook_with_matrix.estimate(case(rivals))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_qlora": True}, "quantised weights"),
        ({"optim": "lion_8bit"}, "optimizer lion_8bit"),
        ({"freeze": ("vision_model.*",)}, "frozen by name"),
        ({"strategy": "deepspeed_stage_2"}, "shards or offloads"),
    ],
)
def test_the_textbook_says_what_it_has_no_formula_for(
    rivals: ModuleType, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(rivals.case.Refused, match=reason):
        rivals.textbook.estimate(case(rivals, **changes))


@pytest.mark.parametrize(
    ("precision", "times"), [("32-true", 4), ("bf16-mixed", 2), ("16-mixed", 2), ("bf16-true", 2)]
)
def test_accelerate_takes_a_multiple_of_the_fp32_model(
    rivals: ModuleType, precision: str, times: int
) -> None:
    assert rivals.accelerate_rule.training_bytes(1000, precision) == times * 1000


def test_accelerate_counts_the_model_without_its_head(rivals: ModuleType) -> None:
    """Embeddings v h, three layers of four h x h and three h x f with two norms, one norm; and the
    buffers: the one rotary frequency of a head of width 2, kept twice."""
    config = CONFIG | {"intermediate_size": 11, "num_key_value_heads": 5}
    layer = 4 * 10 * 10 + 3 * 10 * 11 + 2 * 10

    assert rivals.accelerate_rule.model_bytes(config) == 4 * (17 * 10 + 3 * layer + 10 + 2)


def figures(**values: Any) -> dict[str, Any]:
    base = {"plan_id": "p", "model": "m", "verdict": "fits", "is_limited": False}
    return base | {"allocated_bytes": 100, "reserved_bytes": 150, "process_bytes": 200} | values


def answer(allocated: int, process: int | None, *, fits: bool = True) -> dict[str, Any]:
    return {
        "allocated_bytes": allocated,
        "process_bytes": process,
        "fits": fits,
        "stretch": "",
        "seconds": 1.0,
    }


def test_a_plan_counts_once_and_a_limited_run_has_no_process_error(rivals: ModuleType) -> None:
    data = {
        "runs": {
            "limited": figures(is_limited=True),
            "free": figures(),
            "other": figures(plan_id="q", is_limited=True),
            "oom": figures(plan_id="r", verdict="oom", is_limited=True),
            "refused": figures(plan_id="s"),
        },
        "tools": {
            "textbook": {
                "answers": {
                    "limited": answer(300, 300),
                    "free": answer(110, 190),
                    "other": answer(80, 100, fits=False),
                    "oom": answer(50, 50),
                    "refused": {"refused": "why"},
                }
            }
        },
    }

    scores = rivals.scores.scores_of(data, "textbook")

    assert (scores.allocated, scores.process) == ([10.0, -20.0], [-5.0])
    assert (scores.num_expressed, scores.num_oom) == (4, 1)
    assert (scores.num_unsafe, scores.num_cautious) == (1, 1)


def test_the_page_is_what_its_data_says(rivals: ModuleType) -> None:
    data = json.loads((ROOT / "validation" / "rivals.json").read_text(encoding="utf-8"))

    assert (DOCS / "rivals.md").read_text(encoding="utf-8") == rivals.page.render(data), (
        "run `python scripts/compare_rivals.py --render`"
    )


def test_every_tool_answers_or_refuses_every_run(rivals: ModuleType) -> None:
    data = json.loads((ROOT / "validation" / "rivals.json").read_text(encoding="utf-8"))

    assert all(tool["answers"].keys() == data["runs"].keys() for tool in data["tools"].values())


def test_scripts_show_errors_of_both_peaks_or_why_a_tool_stops(rivals: ModuleType) -> None:
    peaks = {"allocated_bytes": 2 * 2**30, "reserved_bytes": 4 * 2**30}
    read = {"activations_bytes": 0, "model": "Net", "reserved_bytes": 100}
    scripts = {
        "versions": {"memest": "1", "fakegpu": "2", "torch": "3", "torch_preflight": "4"},
        "measured": {"a": peaks | {"command": "a.py 1"}, "b": peaks | {"command": "b.py"}},
        "runs": {
            "a": {
                "memest": peaks | {"cpu_seconds": 3.2},
                "fakegpu": {
                    "allocated_bytes": 3 * 2**30, "reserved_bytes": 2**30, "cpu_seconds": 61.0
                },
            },
            "b": {
                "memest": peaks | {"cpu_seconds": 4.0},
                "fakegpu": {"error": "TypeError: no", "cpu_seconds": 1.0},
            },
        },
        "read": {
            "a.py": read | {"total_bytes": 121},
            "b.py": read | {"total_bytes": 81},
            "c.py": read | {"model": "", "total_bytes": 0},
            "d.py": {"error": "ImportError"},
        },
    }  # fmt: skip

    text = rivals.page._scripts(scripts)

    zero = "+0.000 % / +0.000 %"
    assert f"| `a.py 1` | 2.00 / 4.00 | {zero} | 3 s | +50 % / -75 % | 61 s |" in text
    assert f"| `b.py` | 2.00 / 4.00 | {zero} | 4 s | stops: TypeError: no | 1 s |" in text
    assert "Of the 4 scripts" in text
    assert "model in 2. In 0 of these" in text
    assert "peak in 1." in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"use_qlora": True}, "quantised weights"), ({"optim": "muon"}, "optimizer muon")],
)
def test_torch_preflight_refuses_what_no_flag_expresses(
    rivals: ModuleType, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(rivals.case.Refused, match=reason):
        rivals.torch_preflight.refuse(case(rivals, **changes))
