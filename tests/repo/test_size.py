"""The size budget: a file that passes it asks for a name, a function for a second one."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "memest").rglob("*.py"))
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 50
MAX_LINES = 50_917
"""Lines of all files of the package. The number only goes down: lower it with the lines."""

MAX_LINES_WITHOUT_DOCSTRINGS = 43_334
"""The same without docstrings; this number only goes down too."""

MAX_FILES = 205
"""Files of the package; the number only goes down."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of string statements: docstrings, and those under fields and constants."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@cache
def code_lines(source: str) -> set[int]:
    """Lines that hold code: no blank lines, comments or docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENDMARKER, tokenize.ENCODING}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source))


def functions(source: str) -> dict[str, int]:
    """Code lines of every function, signature included."""
    lines = code_lines(source)
    return {
        f"{node.name} (line {node.lineno})": sum(
            node.lineno <= line <= (node.end_lineno or 0) for line in lines
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_within_the_budget(path: Path) -> None:
    source = path.read_text(encoding="utf-8")

    assert len(code_lines(source)) <= MAX_FILE_LINES
    assert {n: size for n, size in functions(source).items() if size > MAX_FUNCTION_LINES} == {}


def test_the_package_is_within_its_budget() -> None:
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    num_lines = sum(len(source.splitlines()) for source in sources)
    num_docstring_lines = sum(len(docstring_lines(ast.parse(source))) for source in sources)

    assert num_lines <= MAX_LINES
    assert num_lines - num_docstring_lines <= MAX_LINES_WITHOUT_DOCSTRINGS
    assert len(FILES) <= MAX_FILES


def total() -> str:
    """The size of the package, as CI prints it."""
    sizes = {
        path.relative_to(ROOT): len(code_lines(path.read_text(encoding="utf-8"))) for path in FILES
    }
    largest = max(sizes, key=lambda name: sizes[name])
    lines = sum(sizes.values())
    return f"{lines} code lines in {len(sizes)} files, largest {largest} ({sizes[largest]})"


def test_the_total_is_reported() -> None:
    assert re.match(r"\d+ code lines in \d+ files, largest memest/", total())


def test_docstrings_comments_and_blank_lines_do_not_count() -> None:
    head = '"""Doc\nstring."""\n\n# comment\nx = (\n    1,\n)\n\n"""About x."""\n\n\n'
    source = head + 'def f():\n    """Doc."""\n    return x\n'

    assert code_lines(source) == {5, 6, 7, 12, 14}
    assert functions(source) == {"f (line 12)": 2}


if __name__ == "__main__":
    print(total())  # noqa: T201
