"""Holds memest beside what a user would pick instead, on the measured runs of results/.

    python scripts/compare_rivals.py --out docs/rivals.md     # ask every tool, write page and chart
    python scripts/compare_rivals.py --venv .rivals           # keep the tools' environment there
    python scripts/compare_rivals.py --render                 # from docs/rivals.json alone

The tools from PyPI are installed into a virtual environment of their own, with the versions of
`PACKAGES`. Beside the page are written rivals.json, its data, and img/rivals.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from rivals import memtracker, page, worker  # noqa: E402
from rivals.case import Case  # noqa: E402
from rivals.scores import OURS  # noqa: E402

ROOT = SCRIPTS.parent
RESULTS = ROOT / "results"

PACKAGES = ("fitcheck-llm==0.3.1", "canifinetune==0.4.1")
APART = ("fitcheck_llm", "can_i_finetune")
"""Rivals that run in the environment with `PACKAGES`."""

HERE = ("accelerate_rule", "textbook", "textbook_with_matrix")
"""Rivals that run in this Python; `deepspeed_zero` too where DeepSpeed is installed, and
`memtracker` where there is a GPU."""

NOT_OF_THE_PLAN = ("name", "memory_limit", "gpu", "gpu_memory", "steps")
"""Fields in which two runs of one plan may differ."""

_PROCESS_TIMEOUT_S = 1800


def main(arguments: Sequence[str]) -> None:
    """Ask, unless told to render alone; then write page and chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "rivals.md")
    parser.add_argument("--venv", type=Path, help="environment of the tools; made where missing")
    parser.add_argument("--render", action="store_true", help="from the data that is there")
    options = parser.parse_args(arguments)
    data_path = options.out.with_suffix(".json")
    if not options.render:
        with tempfile.TemporaryDirectory() as folder:
            python = tools_python(options.venv or Path(folder))
            write(data_path, to_text(compare_all(python)))
    data = json.loads(data_path.read_text(encoding="utf-8"))
    write(options.out, page.render(data))
    draw(data, options.out.parent / "img" / "rivals.png")


def compare_all(python: Path) -> dict[str, Any]:
    """Every tool over every run."""
    measured, cases = measured_cases()
    tools = {OURS: predictions(measured)}
    for name in (*APART, *HERE):
        print(name, file=sys.stderr)
        tools[name] = ask(python, name, cases) if name in APART else worker.answers(name, cases)
    not_run = {}
    if find_spec("deepspeed") is not None:
        tools["deepspeed_zero"] = worker.answers("deepspeed_zero", cases)
    else:
        not_run["deepspeed_zero"] = "`deepspeed` was not installed"
    if memtracker.can_run():
        tools["memtracker"] = worker.answers("memtracker", cases)
    else:
        not_run["memtracker"] = "needs a CUDA build of torch and a GPU; this page was made without"
    return {"runs": measured_figures(measured, cases), "tools": tools, "not_run": not_run}


def measured_cases() -> tuple[dict[str, Any], list[Case]]:
    """The runs on one GPU that ended by themselves, and the question that each is."""
    from memest.report import Outcome, read_measurements

    measured = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for found in read_measurements(path):
            is_single = found.plan.get("devices", 1) == 1
            if is_single and found.verdict is not Outcome.FAILED:
                measured[f"{path.stem}/{found.name}"] = found
    return measured, [case_of(key, found) for key, found in measured.items()]


def case_of(key: str, measured: Any) -> Case:
    """The question that a measured run is."""
    from memest.models_meta.assemble import sequence_length
    from memest.models_meta.registry import find_entry, resolve_config
    from memest.validate.compare import plan_of

    plan = plan_of(measured)
    config, entry = resolve_config(plan.model_name), find_entry(plan.model_name)
    assert entry is not None, f"{plan.model_name} is not bundled"
    raw = json.loads(entry.path.read_text(encoding="utf-8"))["config"]
    # Older files leave it to the class; a tool must not guess wrong for that.
    is_tied = getattr(config.pretrained, "tie_word_embeddings", None)
    if is_tied is not None:
        raw.setdefault("tie_word_embeddings", is_tied)
    limit = plan.memory_limit or measured.device["memory_bytes"] - measured.context_bytes
    return Case(
        key=key,
        plan={**asdict(plan), "seq_len": sequence_length(plan, config)},
        hub_id=entry.hub_id,
        config=raw,
        architecture=config.architecture,
        modality=entry.modality,
        num_params_published=entry.num_params_published,
        num_params=measured.model["num_params"],
        num_trainable_params=measured.model["num_trainable_params"],
        limit_bytes=limit,
        card_bytes=limit + measured.context_bytes,
    )


def measured_figures(measured: dict[str, Any], cases: list[Case]) -> dict[str, Any]:
    """What each run measured; runs of one plan share a `plan_id`."""
    plans: dict[str, str] = {}
    figures = {}
    for case in cases:
        run = measured[case.key]
        fields = {k: v for k, v in case.plan.items() if k not in NOT_OF_THE_PLAN}
        figures[case.key] = {
            "plan_id": plans.setdefault(json.dumps(fields, sort_keys=True), case.key),
            "model": case.hub_id,
            "verdict": str(run.verdict),
            "is_limited": case.plan["memory_limit"] is not None,
            "allocated_bytes": run.peak_allocated_bytes,
            "reserved_bytes": run.peak_reserved_bytes,
            "process_bytes": run.process_bytes,
        }
    return figures


def predictions(measured: dict[str, Any]) -> dict[str, Any]:
    """memest's own answers, one after the other in this process."""
    import memest
    from memest.errors import MemestError
    from memest.estimator.predict import predict
    from memest.validate.compare import plan_of

    plans = {key: plan_of(found) for key, found in measured.items()}
    predict(next(iter(plans.values())))  # pays for the imports
    answers: dict[str, dict[str, Any]] = {}
    for key, plan in plans.items():
        print(f"memest {key}", file=sys.stderr)
        start = time.perf_counter()
        try:
            found = predict(plan)
        except MemestError as error:
            answers[key] = {"refused": str(error)}
            continue
        answers[key] = {
            "allocated_bytes": found.peak_allocated_bytes,
            "process_bytes": found.process_bytes,
            "fits": found.verdict == "fits",
            "stretch": "",
            "seconds": round(time.perf_counter() - start, 3),
        }
    return {
        "version": memest.__version__,
        "source": "memest/estimator",
        "predicts": "peak allocated, peak reserved, process",
        "answers": answers,
    }


def tools_python(folder: Path) -> Path:
    """The Python of an environment with `PACKAGES`, made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def ask(python: Path, name: str, cases: Sequence[Case]) -> dict[str, Any]:
    """The answers of a rival that runs in another Python, without the network."""
    found = subprocess.run(
        [python, "-m", "rivals.worker", name],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        cwd=SCRIPTS,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SCRIPTS)},
        timeout=_PROCESS_TIMEOUT_S,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"rivals.worker {name} failed:\n{found.stderr[-2000:]}")
    return dict(json.loads(found.stdout))


def to_text(data: dict[str, Any]) -> str:
    """JSON with a line for each run and each answer, so that a change of one is seen as one."""

    def block(values: dict[str, Any], depth: int) -> str:
        pad = " " * depth
        lines = [
            f"{pad} {json.dumps(key)}: "
            + (block(value, depth + 1) if _is_nested(value) else json.dumps(value))
            for key, value in values.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{pad}}}"

    return block(data, 0) + "\n"


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(v, dict) for v in value.values())


def draw(data: dict[str, Any], path: Path) -> None:
    """The chart."""
    from rivals import chart

    from memest.plots import save

    save(chart.draw(data), path)


def write(path: Path, text: str) -> None:
    """Complete or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
