"""The page to play with, in a real browser without a head: choices, figures, links, silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memest import TrainingPlan, predict
from memest.cli import main
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search.sweep import SETTINGS, Explored, explore
from memest.plan.training_plan import read_suite
from memest.report.explorer import (
    MAX_PAGE_BYTES,
    explorer_data,
    explorer_page,
    technique_of,
)
from memest.units import GIB
from memest.validate.results import find_suite
from tests.browser import MAKER, browse, found_in, needs_browser, width_on_a_phone

GPUS = ("a100-80gb", "a100-40gb")
SOME = [
    SETTINGS[0],
    {"precision": "bf16-true", "optim": "sgd", "act_ckpt": True},
    {"precision": "bf16-true", "optim": "adamw", "act_ckpt": False, "use_lora": True, "lora_r": 8},
]

PRESET = TrainingPlan(
    model_name="gpt2", batch_size=2, accumulate_grad_batches=2, use_lora=True, lora_r=8, seq_len=64,
    name="a LoRA row",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(shallow: Callable[..., str]) -> str:
    return shallow("gpt2")


@pytest.fixture(scope="module")
def points(model: str) -> list[Explored]:
    sizes: dict[str, Any] = {"batches": (1, 2, 3), "micro_batches": (1, 2), "seq_len": 64}
    return explore([model], GPUS, settings=SOME, **sizes, jobs=1)


@pytest.fixture(scope="module")
def page(points: list[Explored], model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    limits = {name: find_gpu(name).limit_bytes for name in GPUS}
    there = replace(PRESET, model_name=model)
    presets = [there, replace(there, lora_r=32, name="another rank")]
    text = explorer_page(explorer_data(points, limits, tokens="64 tokens", presets=presets))
    path.write_text(text, encoding="utf-8")
    return path


def asked(point: Explored) -> TrainingPlan:
    return replace(point.plan, gpu=GPUS)


@pytest.mark.parametrize("index", [0, 3, 8, 13, 17])
def test_every_figure_is_that_of_predict(points: list[Explored], index: int) -> None:
    point = points[index]
    report = predict(asked(point))

    assert sum(point.kinds.values()) == report.peak_allocated_bytes
    assert point.reserved_bytes == report.unlimited_reserved_bytes
    assert point.verdicts == report.verdicts
    last = point.plan.accumulate_grad_batches - 1
    rows = [r for r in report.phases if (r.step, r.micro_batch) == (1, last)]
    assert [(row[0], row[4]) for row in point.phases] == [
        (r.params_bytes, r.peak_allocated_bytes) for r in rows
    ]
    of_kind = [t.num_bytes for t in report.terms if t.kind == "activations"]
    assert point.kinds["activations"] == sum(of_kind)


def test_the_grid_has_every_combination(points: list[Explored]) -> None:
    assert len(points) == len(SOME) * 3 * 2
    assert len({replace(p.plan, name="") for p in points}) == len(points)
    assert {technique_of(p.plan) for p in points} == {"full", "LoRA"}


def test_batch_sizes_of_one_progression_share_traces(model: str) -> None:
    """Powers of two are no progression: their even numbers are."""
    made = explore([model], GPUS[:1], settings=SOME[:1], batches=(2, 4, 8, 16, 32),
                   micro_batches=(1,), seq_len=64, jobs=1)  # fmt: skip

    report = predict(replace(made[3].plan, gpu=GPUS[:1]))
    assert made[3].plan.batch_size == 16
    assert made[3].reserved_bytes == report.unlimited_reserved_bytes
    assert sum(made[3].kinds.values()) == report.peak_allocated_bytes


def test_the_grid_of_the_lab_has_600_plans() -> None:
    from memest.estimator.search.sweep import BATCHES, MICRO_BATCHES

    models = {plan.model_name for plan in read_suite(find_suite("lab-a100"), {})}
    assert len(models) * len(SETTINGS) * len(BATCHES) * len(MICRO_BATCHES) >= 600


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert len(text.encode()) < MAX_PAGE_BYTES // 10
    assert re.findall(r"(?:src|href)=[\"'](?!data:)", text) == []
    assert "default-src 'none'" in text
    assert "http:" not in text
    assert "https:" not in text


def test_an_empty_grid_is_refused() -> None:
    with pytest.raises(PlanError, match="the grid is empty"):
        explore([], GPUS)


def test_the_command_refuses_what_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explore", "--suite", "lab-a100", "--model", "gpt2"])

    assert ended.value.code == 2
    assert "`--suite` and `--model`" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["explore", "--model", "gpt2", "-o", "page.pdf"])
    assert ended.value.code == 2
    assert "`page.pdf` is no .html file" in capsys.readouterr().err


# ------------------------------------------------------------------ in the browser

PLAY = """
<script>
addEventListener("load", () => {
  const out = [], by = id => document.getElementById(id);
  const all = wanted => [...document.querySelectorAll(wanted)];
  const look = what => out.push({
    what, hash: location.hash, changed: by("changed").textContent,
    presets: by("presets").textContent, why: by("why").textContent,
    verdict: by("verdict").textContent, margin: by("margin").textContent,
    bar: all("#bar button").map(piece => [piece.className, +piece.dataset.bytes]),
    phases: all(".phase").length, off: all("label.off").length,
    hidden: ["verdict", "margin", "shown"].map(id => by(id).hidden),
    votes: [by("yes").textContent, by("no").textContent],
  });
  const choose = (name, value) => {
    const input = all(`input[name=${name}]`).find(one => one.value === value);
    const start = performance.now();
    input.click();
    document.body.offsetWidth;
    out.push({ what: "ms", ms: performance.now() - start });
  };
  look("start");
  choose("batch", "3"); look("batch 3");
  choose("accumulation", "2"); look("accumulation 2");
  choose("gpu", "a100-40gb"); look("gpu");
  choose("optimizer", "sgd"); look("not there");
  choose("precision", "32-true"); look("back");
  document.querySelector("#bar button.optimizer").focus(); look("focus");
  document.querySelector("#presets button").click(); look("preset");
  const key = name => dispatchEvent(new KeyboardEvent("keydown", { key: name }));
  key("q"); look("quiz"); key("f"); key("o"); by("yes").click(); look("voted");
  key("r"); key("f"); look("revealed"); choose("batch", "1"); look("next"); key("q"); look("over");
  location.hash =
    "batch=2&precision=32-true&optimizer=adamw&accumulation=1&technique=full&checkpointing=false";
  addEventListener("hashchange", () => setTimeout(() => {
    look("link");
    const found = Object.assign(document.createElement("pre"), { id: "found" });
    found.textContent = JSON.stringify(out);
    document.body.replaceChildren(found);
  }));
});
</script>
"""


@pytest.fixture(scope="module")
def played(page: Path) -> tuple[dict[str, dict[str, Any]], list[float], str, Path]:
    """What is seen after each choice, how long each took, the console, the log of the network."""
    path, log = page.with_name("played.html"), page.with_name("net.json")
    path.write_text(page.read_text(encoding="utf-8").replace("</body>", PLAY + "</body>"))
    dom, said = browse(path.as_uri(), f"--log-net-log={log}", "--window-size=500,900")
    steps = found_in(dom, said)
    looks = {step["what"]: step for step in steps if step["what"] != "ms"}
    return looks, [step["ms"] for step in steps if step["what"] == "ms"], said, log


def at(points: list[Explored], **keys: Any) -> Explored:
    return next(p for p in points if all(getattr(p.plan, k) == v for k, v in keys.items()))


@needs_browser
def test_a_choice_changes_the_bar_to_the_figures_of_predict(
    played: Any, points: list[Explored]
) -> None:
    looks = played[0]
    for what, batch, count, gpu in (
        ("start", 1, 1, GPUS[0]), ("batch 3", 3, 1, GPUS[0]), ("accumulation 2", 3, 2, GPUS[0]),
        ("gpu", 3, 2, GPUS[1]), ("link", 2, 1, GPUS[1]),
    ):  # fmt: skip
        point = at(points, batch_size=batch, accumulate_grad_batches=count, optim="adamw",
                   precision="32-true", act_ckpt=False, use_lora=False)  # fmt: skip
        report = predict(asked(point))
        verdict = report.verdicts[gpu]
        bar = dict(looks[what]["bar"])
        assert sum(bar.values()) == verdict.needs_bytes
        for kind in ("params", "grads", "optimizer"):
            assert bar.get(kind, 0) == sum(t.num_bytes for t in report.terms if t.kind == kind)
        assert looks[what]["verdict"] == "fits"
        assert f"{verdict.margin_bytes / GIB:.2f} GiB to spare" in looks[what]["margin"]
        assert looks[what]["phases"] == 4


@needs_browser
def test_a_choice_outside_the_grid_moves_to_the_nearest_plan_and_says_so(played: Any) -> None:
    looks = played[0]

    assert looks["start"]["off"] > 0
    assert looks["start"]["changed"] == ""
    assert "optimizer=sgd&checkpointing=true" in looks["not there"]["hash"]
    assert looks["not there"]["verdict"] == "fits"
    assert looks["not there"]["changed"].endswith(
        "also changed: precision 32-true \u2192 bf16-true, checkpointing off \u2192 on"
    )
    assert looks["back"]["changed"].endswith(
        "optimizer sgd \u2192 adamw, checkpointing on \u2192 off"
    )
    assert "batch=3" in looks["back"]["hash"]


@needs_browser
def test_a_quiz_hides_the_answer_until_it_is_revealed(played: Any) -> None:
    looks = played[0]

    assert looks["preset"]["hidden"] == [False] * 3
    assert looks["quiz"]["hidden"] == looks["voted"]["hidden"] == [True] * 3
    assert looks["voted"]["votes"] == looks["revealed"]["votes"] == ["2", "1"]
    assert looks["revealed"]["hidden"] == [False] * 3
    assert (looks["next"]["hidden"], looks["next"]["votes"]) == ([True] * 3, ["0", "0"])
    assert looks["over"]["hidden"] == [False] * 3


@needs_browser
def test_the_rows_of_a_suite_are_presets(played: Any, points: list[Explored]) -> None:
    look = played[0]["preset"]

    assert look["presets"] == PRESET.name
    assert "batch=2&accumulation=2" in look["hash"]
    assert "technique=LoRA" in look["hash"]
    point = at(points, batch_size=2, accumulate_grad_batches=2, use_lora=True)
    assert dict(look["bar"])["params"] == point.kinds["params"]


def test_the_grid_has_the_rows_of_the_lab_with_adapters_and_8_bit_states() -> None:
    from memest.estimator.search.sweep import BATCHES, MICRO_BATCHES
    from memest.plan.training_plan import read_suite
    from memest.validate.results import find_suite

    grid = {
        (
            s["precision"],
            s["optim"],
            s["act_ckpt"],
            technique_of(TrainingPlan.from_dict({"model_name": "gpt2", **s})),
        )
        for s in SETTINGS
    }
    missing = [
        plan.label
        for plan in read_suite(find_suite("lab-a100"), {})
        if (plan.precision, plan.optim, plan.checkpoints_activations, technique_of(plan))
        not in grid
        or plan.batch_size not in BATCHES
        or plan.accumulate_grad_batches not in MICRO_BATCHES
    ]

    assert missing == ["flan-t5-xxl DeepSpeed CPU offload"]


@needs_browser
def test_a_part_of_the_bar_says_its_arithmetic_to_the_keyboard(played: Any) -> None:
    assert re.match(r"optimizer [\d.]+ GiB = .* x 4 B \(float32\)", played[0]["focus"]["why"])


@needs_browser
def test_a_link_keeps_the_state(played: Any) -> None:
    assert "batch=3" in played[0]["batch 3"]["hash"]
    assert "gpu=a100-40gb" in played[0]["gpu"]["hash"]


@needs_browser
def test_a_choice_answers_within_50_ms(played: Any) -> None:
    assert sorted(played[1])[len(played[1]) // 2] < 50


@needs_browser
def test_nothing_leaves_the_page_and_the_console_is_silent(played: Any) -> None:
    _, _, said, log = played
    urls = set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8")))

    assert "CONSOLE" not in said
    assert [url for url in urls if url.startswith("http") and not MAKER.match(url)] == []


@needs_browser
def test_these_two_checks_can_fail(tmp_path: Path) -> None:
    bad, log = tmp_path / "bad.html", tmp_path / "net.json"
    bad.write_text("<script>fetch('https://example.invalid/x'); console.error('boo');</script>")
    _, said = browse(bad.as_uri(), f"--log-net-log={log}")

    assert "CONSOLE" in said
    assert '"url":"https://example.invalid/x"' in log.read_text(encoding="utf-8")


@needs_browser
def test_the_page_is_as_wide_as_a_phone(page: Path) -> None:
    assert width_on_a_phone(page) <= 390
