"""Runs docs/gallery.ipynb from top to bottom and writes its outputs into it.

python scripts/gallery.py
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "gallery.ipynb"
DPI = 72
"""Of pictures: 960 pixels across, for a page on a screen."""


def result_of(source: str, names: dict[str, Any]) -> Any:
    """What a notebook would show under the cell: the value of its last expression."""
    tree = ast.parse(source)
    *statements, last = tree.body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr), "the cell shows nothing"
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def shown(value: Any) -> dict[str, Any]:
    """The value by MIME type: a picture, a table, or text."""
    if hasattr(value, "figure"):
        buffer = io.BytesIO()
        value.figure.savefig(
            buffer, format="png", dpi=DPI, metadata={"Software": None},
            facecolor=value.figure.get_facecolor(),
        )  # fmt: skip
        return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": ["chart"]}
    if hasattr(value, "_repr_html_"):
        return {"text/html": [value._repr_html_()], "text/plain": [type(value).__name__]}
    return {"text/plain": [repr(value)]}


def main() -> None:
    """Rewrite the notebook with what its cells show."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        value = result_of("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = [
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": shown(value),
            }
        ]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
