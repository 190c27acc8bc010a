"""JSON schemas of reports: stored and new reports are valid, wrong ones are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import memest
from memest.cli import main
from memest.pytest_plugin import _peak_of
from memest.report.schema import REPORTS, schema_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.json"))
MEASURED = sorted((ROOT / "validation" / "runs").glob("*.jsonl"))
PYTHON = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "array": list,
    "object": dict, "null": type(None),
}  # fmt: skip


def faults(value: Any, schema: dict[str, Any], top: dict[str, Any], at: str = "") -> Iterator[str]:
    """What breaks the schema, by the keywords that memest writes; and keys that it lacks."""
    if "$ref" in schema:
        schema = top["$defs"][schema["$ref"].rpartition("/")[2]]
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value}"
    if "anyOf" in schema:
        found = [list(faults(value, each, top, at)) for each in schema["anyOf"]]
        if all(found):
            yield from min(found, key=len)
    kind = schema.get("type")
    if kind is None:
        return
    is_bool = isinstance(value, bool) and kind != "boolean"
    if is_bool or not isinstance(value, PYTHON[kind]):
        yield f"{at}: {value!r} is no {kind}"
        return
    if kind == "array":
        for item in value:
            yield from faults(item, schema["items"], top, f"{at}[]")
    elif kind == "object":
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (
            f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value
        )
        for name, item in value.items():
            inner = properties.get(name, rest)
            if inner is None:
                yield f"{at}.{name}: not in the schema"
            else:
                yield from faults(item, inner, top, f"{at}.{name}")


def check(name: str, values: Any) -> list[str]:
    schema = schema_of(name)
    return list(faults(values, schema, schema))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_reports_are_valid(path: Path) -> None:
    assert check("predicted", json.loads(path.read_text())) == []


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_reports_are_valid(path: Path) -> None:
    schema = schema_of("measured")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    assert {fault for row in rows for fault in faults(row, schema, schema)} == set()


@pytest.fixture(scope="module")
def report() -> memest.report.RunReport:
    import torch

    with memest.virtual_gpu("t4") as gpu:
        torch.nn.Linear(8, 8).cuda()(torch.ones(2, 8, device="cuda")).sum().item()
    return gpu.report()


def test_reports_of_scripts_and_peaks_are_valid(report: memest.report.RunReport) -> None:
    plan = memest.TrainingPlan(model_name="gpt2", batch_size=4)

    assert check("run", json.loads(report.to_json())) == []
    assert check("peak", json.loads(json.dumps(asdict(_peak_of(report))))) == []
    assert check("plan", json.loads(json.dumps(plan.to_dict()))) == []


def test_wrong_reports_are_not_valid(report: memest.report.RunReport) -> None:
    values = json.loads(report.to_json())

    assert check("predicted", values) != []
    assert check("run", {**values, "gpu": 4}) == [".gpu: 4 is no string"]
    assert check("run", {**values, "ending": "gone"}) == [".ending: gone"]
    assert check("run", {k: v for k, v in values.items() if k != "peak"}) == [".peak: missing"]
    wrong = replace(report, lines=({"name": "a"},))  # type: ignore[arg-type]
    assert ".lines[].num_bytes: missing" in check("run", json.loads(wrong.to_json()))


def test_fields_have_descriptions() -> None:
    run = schema_of("run")

    assert run["properties"]["process_bytes"]["description"].startswith("Bytes in nvidia-smi")
    assert run["$defs"]["Verdict"]["properties"]["margin_bytes"]["description"]


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["run"]):
        with pytest.raises(SystemExit) as ended:
            main(["schema", *args])
        assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["schema", "runs"])

    out, err = capsys.readouterr()
    every, end = json.JSONDecoder().raw_decode(out)
    assert list(every) == list(REPORTS)
    assert json.loads(out[end:]) == every["run"]
    assert ended.value.code == 2
    assert "no report is called `runs`\nhint: known: run, predicted" in err


def test_the_schemas_are_valid_schemas() -> None:
    validators = pytest.importorskip("jsonschema")

    for name in REPORTS:
        validators.Draft202012Validator.check_schema(schema_of(name))
