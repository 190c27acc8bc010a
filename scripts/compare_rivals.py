"""Holds memest beside what a user would pick instead, on the measured runs of validation/.

    python scripts/compare_rivals.py --out docs/rivals.md     # ask every tool, write page and chart
    python scripts/compare_rivals.py --venv .rivals           # keep the tools' environment there
    python scripts/compare_rivals.py --render                 # from validation/rivals.json alone
    python scripts/compare_rivals.py --gpu-rows rows.jsonl    # ask those that need a GPU, on one
    python scripts/compare_rivals.py --render --merge rows.jsonl  # take these rows in
    python scripts/compare_rivals.py --scripts PYTHON --given FOLDER  # only scripts

The tools from PyPI are installed into a virtual environment of their own, with the versions of
`PACKAGES`. Beside the page are written rivals.json, its data, and img/rivals.png. An answer that is
in rivals.json is asked again only where the question, the tool or its adapter changed (`--fresh`
asks everything); answers made on a GPU are kept on a machine without one, with where they are from.
`--scripts` runs the measured scripts of `rivals/whole_scripts.py` alone, with FakeGPU and
torch-preflight installed in PYTHON; FOLDER is that of `compare_scripts.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from rivals import keep, many, page, whole_scripts, worker  # noqa: E402
from rivals.case import Case  # noqa: E402
from rivals.scores import OURS  # noqa: E402

ROOT = SCRIPTS.parent
RESULTS = ROOT / "validation" / "runs"

PACKAGES = ("fitcheck-llm==0.3.1", "canifinetune==0.4.1", "torch-preflight==0.5.0")
APART = ("fitcheck_llm", "can_i_finetune", "torch_preflight")
"""Rivals that run in the environment with `PACKAGES`."""

HERE = ("accelerate_rule", "textbook", "textbook_with_matrix")
"""Rivals that run in this Python; `deepspeed_zero` too where DeepSpeed is installed."""

ON_A_GPU = ("memtracker",)
"""Rivals that `--gpu-rows` asks."""

NOT_ASKED = "not run on the GPU: time ran out, or the run was measured later"

_PROCESS_TIMEOUT_S = 1800


def main(arguments: Sequence[str]) -> None:
    """Ask, unless told to render alone; then write page and chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "rivals.md")
    parser.add_argument("--data", type=Path, default=ROOT / "validation" / "rivals.json")
    parser.add_argument("--venv", type=Path, help="environment of the tools; made where missing")
    parser.add_argument("--render", action="store_true", help="from the data that is there")
    parser.add_argument("--fresh", action="store_true", help="ask everything again")
    parser.add_argument("--merge", type=Path, help="rows of --gpu-rows to take in")
    parser.add_argument("--gpu-rows", type=Path, help="ask those that need a GPU, into this file")
    parser.add_argument("--known", type=Path, help="rows of an earlier --gpu-rows to keep")
    parser.add_argument("--jobs", type=int, default=8, help="of --gpu-rows, at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one, likewise")
    parser.add_argument("--scripts", type=Path, help="Python of the tools that take a script")
    parser.add_argument("--given", type=Path, help="of --scripts: scripts of others")
    options = parser.parse_args(arguments)
    if options.gpu_rows:
        write_gpu_rows(
            options.gpu_rows, known=options.known, jobs=options.jobs, timeout_s=options.timeout
        )
        return
    data = json.loads(options.data.read_text(encoding="utf-8")) if options.data.exists() else {}
    if options.scripts:
        known = data.get("scripts", {})
        data["scripts"] = whole_scripts.compare(options.scripts, options.given, known)
    elif not options.render:
        scripts = data.get("scripts")
        with tempfile.TemporaryDirectory() as folder:
            python = tools_python(options.venv or Path(folder))
            data = compare_all(python, {} if options.fresh else data)
        data |= {"scripts": scripts} if scripts else {}
    if options.merge:
        take_in(data, options.merge)
    data["tools"] = {name: data["tools"][name] for name in page.LABELS if name in data["tools"]}
    write(options.data, to_text(data))
    write(options.out, page.render(data))
    draw(data, options.out.parent / "img" / "rivals.png")


def compare_all(python: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Every tool over every run; `before` is the data of an earlier time."""
    measured, cases = measured_cases()
    questions = question_ids(cases)
    data = {"runs": measured_figures(measured, cases, questions), "tools": {}, "not_run": {}}

    def add(name: str, ask_about: Callable[[list[Case]], dict[str, Any]], *paths: Path) -> None:
        code = keep.code_id(paths or keep.adapter_paths(name))
        version = ask_about([])["version"]
        held = keep.still_hold(before, name, code=code, version=version, questions=questions)
        missing = [case for case in cases if case.key not in held]
        print(f"{name}: {len(missing)} of {len(cases)}", file=sys.stderr)
        found = ask_about(missing)
        answers = held | found["answers"]
        ordered = {key: answers[key] for key in data["runs"]}
        data["tools"][name] = found | {"code": code, "answers": ordered}

    add(OURS, lambda asked: predictions({c.key: measured[c.key] for c in asked}), *our_paths())
    for name in APART:
        add(name, functools.partial(ask, python, name))
    for name in HERE:
        add(name, functools.partial(worker.answers, name))
    if find_spec("deepspeed") is not None:
        add("deepspeed_zero", functools.partial(worker.answers, "deepspeed_zero"))
    else:
        data["not_run"]["deepspeed_zero"] = "`deepspeed` was not installed"
    for name in ON_A_GPU:
        keep_gpu_rows(data, before, name, questions)
    return data


def question_ids(cases: Sequence[Case]) -> dict[str, str]:
    """Of each case by its key."""
    from memest.plan import TrainingPlan

    defaults = asdict(TrainingPlan(model_name="gpt2"))
    return {case.key: keep.question_id(case, defaults) for case in cases}


def our_paths() -> list[Path]:
    """The files that make memest's predictions."""
    package = ROOT / "memest"
    folders = [package / "estimator", package / "models_meta"]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [*package.glob("plan/*.py"), *(p for p in paths if p.suffix in (".py", ".json"))]


def keep_gpu_rows(
    data: dict[str, Any], before: dict[str, Any], name: str, questions: dict[str, str]
) -> None:
    """The answers of an earlier time on a GPU, where they still hold."""
    tool = before.get("tools", {}).get(name)
    if tool:
        code = keep.code_id(keep.adapter_paths(name))
        held = keep.still_hold(
            before, name, code=code, version=tool["version"], questions=questions
        )
        if held:
            rows = {key: held.get(key, {"refused": NOT_ASKED}) for key in data["runs"]}
            data["tools"][name] = tool | {"answers": rows}
            return
    data["not_run"][name] = "needs a CUDA build of torch and a GPU; this page was made without"


def write_gpu_rows(path: Path, *, known: Path | None, jobs: int, timeout_s: float) -> None:
    """A line for each run and each rival of `ON_A_GPU`, as they come, the quick ones first.

    Rows of `known` that hold are copied; among them, those that took too long are asked again, and
    a later row counts.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that this process can fork
    _, cases = measured_cases()
    questions = question_ids(cases)
    with path.open("w", encoding="utf-8") as file:
        for name in ON_A_GPU:
            told = {"tool": name} | worker.describe(name)
            told |= {
                "code": keep.code_id(keep.adapter_paths(name)),
                "where": import_module(f"rivals.{name}").where(),
            }
            held = keep.known_rows(known, told, questions) if known else []
            file.writelines(f"{json.dumps(row)}\n" for row in [told, *held])
            done = {row["key"] for row in held if many.is_final(row)}
            missing = sorted((case for case in cases if case.key not in done), key=many.work_of)
            for row in many.rows(name, missing, jobs=jobs, timeout_s=timeout_s):
                line = json.dumps({"tool": name, "question": questions[row["key"]]} | row)
                print(line, file=file, flush=True)
                print(line, flush=True)


def take_in(data: dict[str, Any], path: Path) -> None:
    """Put the rows of a file of `write_gpu_rows` into the data, where the question is the same."""
    asked = {key: run["question"] for key, run in data["runs"].items()}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = row.pop("tool")
        if "key" not in row:
            rows = {key: {"refused": NOT_ASKED} for key in data["runs"]}
            data["tools"][name] = row | {"answers": rows}
            data["not_run"].pop(name, None)
            continue
        key, question = row.pop("key"), row.pop("question")
        if asked.get(key) == question:
            kept = {k: v for k, v in row.items() if k not in ("parts", "why")}
            data["tools"][name]["answers"][key] = kept


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
        gpu_bytes=limit + measured.context_bytes,
    )


def measured_figures(
    measured: dict[str, Any], cases: list[Case], questions: dict[str, str]
) -> dict[str, Any]:
    """What each run measured; runs of one plan share a `plan_id`."""
    plans: dict[str, str] = {}
    figures = {}
    for case in cases:
        run = measured[case.key]
        plan = json.dumps(case.plan_alone, sort_keys=True)
        figures[case.key] = {
            "plan_id": plans.setdefault(plan, case.key),
            "question": questions[case.key],
            "model": case.hub_id,
            "gpu": run.device["name"],
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
    for plan in [*plans.values()][:1]:
        predict(plan)  # pays for the imports
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
