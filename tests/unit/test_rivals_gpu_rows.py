"""Answers that are kept, made several at a time, and taken in from a GPU."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "memtracker"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """compare_rivals.py, and the modules of scripts/rivals."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    names = ("case", "keep", "many", "variants", "worker")
    modules = {name: importlib.import_module(f"rivals.{name}") for name in names}
    yield SimpleNamespace(compare=importlib.import_module("compare_rivals"), **modules)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("rivals", "compare_rivals")]:
        del sys.modules[name]


def case(scripts: Any, key: str, *, num_params: int = 1000, **plan: Any) -> Any:
    defaults = {"batch_size": 2, "accumulate_grad_batches": 1, "act_ckpt": False, "name": key}
    return scripts.case.Case(
        key=key,
        plan=defaults | {"memory_limit": None} | plan,
        hub_id="a/model",
        config={},
        architecture="LlamaForCausalLM",
        modality="text",
        num_params_published=1000,
        num_params=num_params,
        num_trainable_params=1000,
        limit_bytes=10**9,
        gpu_bytes=10**9 + 1,
    )


# --- what is kept -----------------------------------------------------------------------------


def test_a_new_field_of_the_plan_at_its_default_leaves_the_question_as_it_was(scripts: Any) -> None:
    before, after = case(scripts, "file/run"), case(scripts, "file/run", fresh=False)

    assert scripts.keep.question_id(before, {}) == scripts.keep.question_id(after, {"fresh": False})
    assert scripts.keep.question_id(before, {}) != scripts.keep.question_id(after, {"fresh": True})


def test_another_gpu_is_another_question(scripts: Any) -> None:
    asked = case(scripts, "file/run")
    smaller = replace(asked, limit_bytes=10**8)

    assert scripts.keep.question_id(asked, {}) != scripts.keep.question_id(smaller, {})


def test_comments_and_docstrings_are_no_part_of_the_code(scripts: Any, tmp_path: Path) -> None:
    path = tmp_path / "rule.py"

    def code_of(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        return str(scripts.keep.code_id([path]))

    plain = code_of("A = 1\ndef f(x):\n    return x + A\n")

    assert plain == code_of(
        'A = 1  # one\n"""Why."""\ndef f(x):\n    """Adds."""\n    return x + A\n'
    )
    assert plain != code_of("A = 1\ndef f(x):\n    return x - A\n")
    assert plain != code_of("A = 1.0\ndef f(x):\n    return x + A\n")


def test_the_code_reads_the_same_in_every_python(scripts: Any) -> None:
    """3.12 has a field `type_params` more than 3.11, which is empty here; 3.13 shows it no more."""
    import ast

    tree = ast.parse("def f(x):\n    return None\n")
    found = scripts.keep._text_of(tree)

    assert "type_params" not in found
    assert found == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='x')]),"
        "body=[Return(value=Constant())])])"
    )


def test_an_adapter_changes_with_what_it_imports(scripts: Any) -> None:
    paths = scripts.keep.adapter_paths("textbook_with_matrix")

    assert {path.stem for path in paths} == {"textbook_with_matrix", "textbook", "case", "variants"}
    assert {p.stem for p in scripts.keep.adapter_paths(NAME)} == {NAME, "case"}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {"a": {"fits": True}}),
        ({"code": "other"}, {}),
        ({"version": "3"}, {}),
        ({"questions": {"a": "another"}}, {}),
        ({"questions": {}}, {}),
    ],
)
def test_an_answer_holds_while_question_version_and_code_do(
    scripts: Any, changes: dict[str, Any], kept: dict[str, Any]
) -> None:
    tool = {"code": "c", "version": "2", "answers": {"a": {"fits": True}, "b": {"fits": False}}}
    before = {"runs": {"a": {"question": "qa"}, "b": {}}, "tools": {"t": tool}}
    today = {"code": "c", "version": "2", "questions": {"a": "qa", "b": "qb"}} | changes

    assert scripts.keep.still_hold(before, "t", **today) == kept
    assert scripts.keep.still_hold({}, "t", **today) == {}


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


HEADER = {"tool": NAME, "version": "2", "code": "c", "where": "a GPU", "source": "s"}


@pytest.mark.parametrize("told", [HEADER | {"code": "d"}, HEADER | {"where": "another"}])
def test_known_rows_are_those_of_the_same_adapter_machine_and_question(
    scripts: Any, tmp_path: Path, told: dict[str, Any]
) -> None:
    same = {"tool": NAME, "key": "a", "question": "qa", "allocated_bytes": 1}
    changed = same | {"key": "b", "question": "of yesterday"}
    path = lines(tmp_path / "rows.jsonl", HEADER, same, changed)
    questions = {"a": "qa", "b": "qb"}

    assert scripts.keep.known_rows(path, HEADER, questions) == [same]
    assert scripts.keep.known_rows(path, told, questions) == []


# --- several at a time ------------------------------------------------------------------------


def of_time(case: Any) -> Any:
    """A rival that takes as long as the plan says, and ends its process where it says so."""
    import os

    from rivals.case import Estimate, Refused  # type: ignore[import-not-found]

    if case.plan.get("ends"):
        os._exit(3)
    if case.plan.get("refuses"):
        raise Refused("no word for it")
    time.sleep(case.plan.get("seconds", 0))
    return Estimate(allocated_bytes=case.limit_bytes, process_bytes=None, fits=True)


@pytest.fixture
def stand_in(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("rivals.of_time")
    module.estimate = of_time  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rivals.of_time", module)
    # A process made by `fork` has the module above, and this process has used no GPU.
    context = scripts.many.multiprocessing.get_context("fork")
    monkeypatch.setattr(scripts.many, "_context", lambda: context)
    return scripts


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_case_has_a_row_whatever_its_process_does(stand_in: Any) -> None:
    cases = [
        case(stand_in, "quick"),
        case(stand_in, "refuses", refuses=True),
        case(stand_in, "ends", ends=True),
    ]

    found = {r.pop("key"): r for r in stand_in.many.rows("of_time", cases, jobs=2, timeout_s=60)}

    assert found.keys() == {c.key for c in cases}
    assert found["quick"]["allocated_bytes"] == 10**9
    assert found["refuses"] == {"refused": "no word for it"}
    assert found["ends"] == {"refused": "ends its process"}
    assert all(map(stand_in.many.is_final, found.values()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_takes_too_long_is_ended_and_may_be_asked_again(stand_in: Any) -> None:
    slow = case(stand_in, "slow", seconds=60)
    cases = [slow, replace(slow, key="limited", limit_bytes=7)]

    found = {r.pop("key"): r for r in stand_in.many.rows("of_time", cases, jobs=2, timeout_s=0.5)}

    assert found["slow"] == found["limited"] == {"refused": "not done within 0.5 s"}
    assert not stand_in.many.is_final(found["slow"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_runs_of_one_plan_are_asked_together_and_judged_apart(stand_in: Any) -> None:
    free = case(stand_in, "free", seconds=0.01)
    limited = replace(case(stand_in, "limited", seconds=0.01, memory_limit=1.0), limit_bytes=7)

    found = list(stand_in.many.rows("of_time", [free, limited], jobs=1, timeout_s=30))

    assert [(row["key"], row["allocated_bytes"]) for row in found] == [
        ("free", 10**9),
        ("limited", 7),
    ]
    assert found[0]["seconds"] == found[1]["seconds"]


def test_the_quick_ones_come_first(scripts: Any) -> None:
    cases = [
        case(scripts, "accumulates", accumulate_grad_batches=4),
        case(scripts, "large", num_params=9000),
        case(scripts, "checkpoints", act_ckpt=True),
        case(scripts, "small"),
    ]

    found = [c.key for c in sorted(cases, key=scripts.many.work_of)]

    assert found == ["small", "checkpoints", "accumulates", "large"]


# --- from a GPU and into the data -------------------------------------------------------------


def test_rows_are_taken_in_where_the_question_is_the_same(scripts: Any, tmp_path: Path) -> None:
    """A later row of a run counts; what has no row was not asked."""
    runs = {key: {"question": f"q{key}"} for key in "abcd"}
    data: dict[str, Any] = {"runs": runs, "tools": {}, "not_run": {NAME: "no GPU"}}
    row = {"tool": NAME, "key": "a", "question": "qa", "parts": {"Total": 1}, "why": "x"}
    path = lines(
        tmp_path / "rows.jsonl",
        HEADER,
        row | {"allocated_bytes": 5, "fits": True},
        row | {"key": "b", "question": "of yesterday", "allocated_bytes": 6},
        row | {"key": "c", "question": "qc", "refused": "not done within 2 s"},
        row | {"key": "c", "question": "qc", "allocated_bytes": 7},
        row | {"key": "gone", "question": "q"},
    )

    scripts.compare.take_in(data, path)

    not_asked = {"refused": scripts.compare.NOT_ASKED}
    assert data["not_run"] == {}
    assert data["tools"][NAME] == {
        "version": "2",
        "code": "c",
        "where": "a GPU",
        "source": "s",
        "answers": {
            "a": {"allocated_bytes": 5, "fits": True},
            "b": not_asked,
            "c": {"allocated_bytes": 7},
            "d": not_asked,
        },
    }


def test_answers_of_a_gpu_outlive_a_comparison_without_one(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.keep, "code_id", lambda _: "c")
    tool = {"version": "2", "code": "c", "where": "a GPU", "answers": {"a": {"fits": True}}}
    before = {"runs": {"a": {"question": "qa"}}, "tools": {NAME: tool}}

    def kept(before: dict[str, Any], questions: dict[str, str]) -> dict[str, Any]:
        data: dict[str, Any] = {"runs": dict.fromkeys(questions), "tools": {}, "not_run": {}}
        scripts.compare.keep_gpu_rows(data, before, NAME, questions)
        return data

    found = kept(before, {"a": "qa", "new": "qn"})
    assert found["not_run"] == {}
    assert found["tools"][NAME]["where"] == "a GPU"
    assert found["tools"][NAME]["answers"] == {
        "a": {"fits": True},
        "new": {"refused": scripts.compare.NOT_ASKED},
    }
    assert kept(before, {"a": "another"})["not_run"].keys() == {NAME}
    assert kept({}, {"a": "qa"})["not_run"].keys() == {NAME}


def test_only_what_has_no_answer_is_asked_on_the_gpu(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Known answers are copied; what took too long is asked again, and the new row comes last."""
    cases = [case(scripts, key) for key in ("answered", "too long", "new")]
    asked = []

    def rows(name: str, missing: list[Any], **_: Any) -> Iterator[dict[str, Any]]:
        asked.append((name, [c.key for c in missing]))
        yield from ({"key": c.key, "allocated_bytes": 3} for c in missing)

    told = {"version": "2", "source": "s", "predicts": "p"}
    monkeypatch.setattr(scripts.compare, "measured_cases", lambda: ({}, cases))
    monkeypatch.setattr(scripts.compare.many, "rows", rows)
    monkeypatch.setattr(scripts.compare.worker, "describe", lambda _: told)
    monkeypatch.setattr(scripts.keep, "code_id", lambda _: "c")
    monkeypatch.setitem(
        sys.modules, f"rivals.{NAME}", SimpleNamespace(where=lambda: "a GPU", __spec__=None)
    )
    questions = scripts.compare.question_ids(cases)
    row = {"tool": NAME, "key": "answered", "question": questions["answered"], "allocated_bytes": 1}
    late = {"tool": NAME, "key": "too long", "question": questions["too long"]}
    late |= {"refused": "not done within 90 s"}
    known = lines(tmp_path / "known.jsonl", HEADER, row, late)

    scripts.compare.write_gpu_rows(tmp_path / "out.jsonl", known=known, jobs=1, timeout_s=1)

    assert asked == [(NAME, ["too long", "new"])]
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    header, *written = map(json.loads, text.splitlines())
    assert (header["code"], header["where"], header["predicts"]) == ("c", "a GPU", "p")
    assert [r["key"] for r in written] == ["answered", "too long", "too long", "new"]
    assert written[:2] == [row, late]
    assert written[2]["allocated_bytes"] == 3
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- words for what a formula has no word for -------------------------------------------------


def test_all_linear_is_the_seven_names_where_a_layer_has_these_alone(scripts: Any) -> None:
    targets = scripts.variants.lora_targets
    everything = {"lora_target_modules": ("all-linear",)}

    assert targets(everything, "LlamaForCausalLM") == list(scripts.variants.SEVEN_TARGETS)
    assert targets(everything, "Phi3ForCausalLM") == ["all-linear"]
    assert targets({"lora_target_modules": ()}, "LlamaForCausalLM") == ["q_proj", "v_proj"]
    assert targets({"lora_target_modules": ("o_proj",)}, "LlamaForCausalLM") == ["o_proj"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, ""),
        ({"use_dora": True}, "DoRA: counted as plain LoRA"),
        (
            {"use_dora": True, "lora_bias": "all"},
            "DoRA and trained biases: counted as plain LoRA",
        ),
        (
            {"lora_modules_to_save": ("lm_head",)},
            "whole modules trained besides the adapters: counted as plain LoRA",
        ),
    ],
)
def test_more_than_plain_lora_is_said(scripts: Any, plan: dict[str, Any], said: str) -> None:
    assert scripts.variants.beyond_plain_lora(plan) == said
