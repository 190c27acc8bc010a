"""JSON schemas of reports, made of the dataclasses that write and read them."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from memest.plan import TrainingPlan
from memest.plan.training_plan import PLAN_KEYS
from memest.report import SCHEMA, JsonReport, Measurement, Prediction, RunReport, StoredPeak

REPORTS: dict[str, type] = {
    "run": RunReport, "predicted": Prediction, "measured": Measurement, "plan": TrainingPlan,
    "peak": StoredPeak,
}  # fmt: skip
"""Name -> class, for `memest schema NAME`."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of report files of type `name`, a key of `REPORTS`.

    >>> schema_of("run")["properties"]["kind"]
    {'const': 'run'}
    """
    kind, definitions = REPORTS[name], dict[str, Any]()
    found: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    found |= _object(kind, definitions)
    if issubclass(kind, JsonReport):
        head = {"schema": {"const": SCHEMA}, "kind": {"const": kind.kind}}
        found["properties"] = head | found["properties"]
        found["required"] = [*head, *found["required"]]
    return found | {"$defs": definitions}


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of dataclass `kind`; add those of nested classes to `definitions`."""
    hints: dict[str, Any] = get_type_hints(kind)
    docs = field_docs(kind)
    if kind is TrainingPlan:  # schema of plan files, since fields hold the values after reading
        docs |= {name: row.help_text for name, row in PLAN_KEYS.items() if row.flag}
        hints |= {name: Mapping[str, Any] for name, row in PLAN_KEYS.items() if row.is_mapping}
        hints |= {name: hints[name] | str for name, row in PLAN_KEYS.items() if row.is_size}
    rows = {row.name: row for row in fields(kind)}
    properties = {
        name: _of(hints[name], definitions) | ({"description": docs[name]} if name in docs else {})
        for name in rows
    }
    if "plan" in properties:
        properties["plan"] = _of(TrainingPlan, definitions)
    required = [
        name
        for name, row in rows.items()
        if row.init and row.default is row.default_factory is MISSING
    ]
    text = inspect.getdoc(kind) or ""
    return {"title": kind.__name__, "description": text.partition("\n\n")[0],
            "type": "object", "properties": properties, "required": required}  # fmt: skip


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_of(each, definitions) for each in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if origin is tuple:
        kinds = {each for each in arguments if each is not Ellipsis}
        return {"type": "array", "items": _of(kinds.pop(), definitions) if len(kinds) == 1 else {}}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [str(each) for each in hint]}
    if isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a type may refer to itself
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def field_docs(kind: type) -> dict[str, str]:
    """Return descriptions of the fields of class `kind` by name: the comment or string of each."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(each))
        (made,), lines = ast.parse(source).body, source.splitlines()
        assert isinstance(made, ast.ClassDef)
        for field, text in zip(made.body, [*made.body[1:], None], strict=True):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            comment = lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
            if comment:
                found[field.target.id] = f"{comment}."
            elif isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found
