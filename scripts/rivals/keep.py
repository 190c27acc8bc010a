"""What of an earlier comparison still holds, so that only what is missing is asked again.

An answer holds while three things are as they were: the question (plan, model, card), the version
of the tool, and the code that asked it, comments and docstrings aside.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rivals.case import Case

HERE = Path(__file__).resolve().parent

Data = dict[str, Any]


def question_id(case: Case, defaults: Mapping[str, Any]) -> str:
    """A digest of everything that a tool is told; fields of the plan at their default, not."""
    plan = {k: v for k, v in case.plan.items() if k not in defaults or v != defaults[k]}
    return _digest([json.dumps(asdict(case) | {"plan": plan}, sort_keys=True)])


def code_id(paths: Iterable[Path]) -> str:
    """A digest of Python files without comments and docstrings, and of other files whole."""
    return _digest(
        _code_alone(path) if path.suffix == ".py" else path.read_text(encoding="utf-8")
        for path in sorted(paths)
    )


def adapter_paths(name: str) -> list[Path]:
    """The module of a rival and those of this package that it imports, directly or not."""
    found: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        if (module := waiting.pop()) not in found:
            found[module] = HERE / f"{module}.py"
            waiting += _imported_rivals(found[module])
    return list(found.values())


def known_rows(path: Path, told: Data, questions: Mapping[str, str]) -> list[Data]:
    """The rows of a file of `--gpu-rows` that hold for the rival which `told` describes."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    same = ("tool", "code", "version", "where")
    is_held, held = False, []
    for row in lines:
        if "key" not in row:
            is_held = all(row.get(name) == told[name] for name in same)
        elif is_held and questions.get(row["key"]) == row["question"]:
            held.append(row)
    return held


def still_hold(
    before: Data, name: str, *, code: str, version: str, questions: Mapping[str, str]
) -> dict[str, Any]:
    """The answers of `name` in `before` to questions that are the same today."""
    tool = before.get("tools", {}).get(name, {})
    if (tool.get("code"), tool.get("version")) != (code, version):
        return {}
    asked = {key: run.get("question") for key, run in before["runs"].items()}
    return {
        key: answer
        for key, answer in tool["answers"].items()
        if key in questions and asked.get(key) == questions[key]
    }


def _imported_rivals(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == HERE.name:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{HERE.name}."):
            found.append(str(node.module).removeprefix(f"{HERE.name}."))
    return found


def _code_alone(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [part for part in body if not _is_text(part)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return _text_of(tree)


def _text_of(node: Any) -> str:
    """A syntax tree in words that are the same in every Python from 3.11 on.

    `ast.dump` is not: a later one has more fields, or leaves out those that are empty.
    """
    if isinstance(node, list):
        return f"[{','.join(map(_text_of, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    told = ",".join(f"{name}={_text_of(value)}" for name, value in fields)
    return f"{type(node).__name__}({told})"


def _is_text(node: ast.AST) -> bool:
    """A docstring, or the text under a constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode())
        found.update(b"\0")
    return found.hexdigest()[:12]
