"""The gallery notebook runs from top to bottom, and every cell ends in something to see."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "gallery.ipynb"


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])


def result_of(source: str, names: dict[str, Any]) -> Any:
    """What a notebook would show under the cell: the value of its last expression."""
    tree = ast.parse(source)
    *statements, last = tree.body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr), "the cell shows nothing"
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
def test_every_cell_runs_and_shows_something() -> None:
    names: dict[str, Any] = {}
    shown: list[str] = []
    for cell in cells():
        if cell["cell_type"] != "code":
            continue
        value = result_of("".join(cell["source"]), names)
        for method in ("_repr_html_", "_repr_svg_"):
            if hasattr(value, method):
                shown.append(method)
                assert getattr(value, method)().startswith("<")
                break
        else:
            shown.append("repr")
            assert all(value)

    assert shown.count("_repr_html_") == 2
    assert shown.count("_repr_svg_") == 5
    assert shown.count("repr") == 1


def test_the_notebook_is_committed_with_its_outputs() -> None:
    """As `python scripts/gallery.py` writes them."""
    found = [
        {mime for output in cell["outputs"] for mime in output["data"]}
        for cell in cells()
        if cell["cell_type"] == "code"
    ]

    assert sum("image/png" in mimes for mimes in found) == 5
    assert sum("text/html" in mimes for mimes in found) == 2
    assert all("text/plain" in mimes for mimes in found)


def test_the_notebook_has_the_form_that_jupyter_opens() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
