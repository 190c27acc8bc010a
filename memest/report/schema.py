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
    cls, definitions = REPORTS[name], dict[str, Any]()
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= _object(cls, definitions)
    if issubclass(cls, JsonReport):
        head = {"schema": {"const": SCHEMA}, "kind": {"const": cls.kind}}
        schema["properties"] = head | schema["properties"]
        schema["required"] = [*head, *schema["required"]]
    return schema | {"$defs": definitions}


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of dataclass `cls`; add those of nested classes to `definitions`."""
    hints: dict[str, Any] = get_type_hints(cls)
    docs = field_docs(cls)
    if cls is TrainingPlan:  # schema of plan files, since fields hold the values after reading
        docs |= {name: row.help_text for name, row in PLAN_KEYS.items() if row.flag}
        hints |= {name: Mapping[str, Any] for name, row in PLAN_KEYS.items() if row.is_mapping}
        hints |= {name: hints[name] | str for name, row in PLAN_KEYS.items() if row.is_size}
    properties = {
        row.name: _type_schema(hints[row.name], definitions)
        | ({"description": docs[row.name]} if row.name in docs else {})
        for row in fields(cls)
    }
    if "plan" in properties:
        properties["plan"] = _type_schema(TrainingPlan, definitions)
    rows = [row for row in fields(cls) if row.init]
    required = [row.name for row in rows if row.default is row.default_factory is MISSING]
    text = inspect.getdoc(cls) or ""
    return {"title": cls.__name__, "description": text.partition("\n\n")[0],
            "type": "object", "properties": properties, "required": required}  # fmt: skip


def _type_schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(argument, definitions) for argument in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if origin is tuple:
        item_types = {argument for argument in arguments if argument is not Ellipsis}
        return {
            "type": "array",
            "items": _type_schema(item_types.pop(), definitions) if len(item_types) == 1 else {},
        }
    if origin is not None and issubclass(origin, Mapping):
        _, value_type = arguments
        return {"type": "object", "additionalProperties": _type_schema(value_type, definitions)}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [str(member) for member in hint]}
    if isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a type may refer to itself
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def field_docs(cls: type) -> dict[str, str]:
    """Return descriptions of the fields of class `cls` by name: the comment or string of each."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        (tree,), lines = ast.parse(source).body, source.splitlines()
        assert isinstance(tree, ast.ClassDef)
        for node, next_node in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            comment = lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
            if comment:
                docs[node.target.id] = f"{comment}."
            elif isinstance(next_node, ast.Expr) and isinstance(next_node.value, ast.Constant):
                docs[node.target.id] = inspect.cleandoc(str(next_node.value.value))
    return docs
