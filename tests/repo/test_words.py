"""Docstrings, comments, messages and pages follow the rules of plain English.

A docstring begins with a noun or a verb. A sentence has at most 25 words. Words of the glossary
that are personification, archaic or not the field's term occur nowhere.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memest"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "validation/**/*.md")
    for path in ROOT.glob(pattern)
)

MAX_WORDS = 25

HEADLESS = re.compile(
    r"(Of|What|Whatever|As|That|Whether|Those|These|Who|Whoever|Whom|Whose|How|Where|When|Which|Why"
    r"|By|Not|So|Likewise|And|But|Beside|One that|Ones that)\b(?! (?:is|are) )"
)

BANNED = re.compile(
    r"\b(?:(?<!model )cards?|anew|beside|born|dies|lies|lie|laid|twins?|whoever|nobody|thrice"
    r"|asks?|asked|asking|hears?|heard|tells?|told|says?|said|saying|knows|wants?|wanted|believes?"
    r"|stand-ins?|supposed|but for|hangs on|kin|without end|scratch|shel(?:f|ve|ved|ves)"
    r"|thereof|therein|whereof|wherein|thereby|henceforth|aforesaid|upon|till|ere)\b",
    re.IGNORECASE,
)
"""See the glossary of CONTRIBUTING.md for the word to use."""

CODE = re.compile(r"``[^`]+``|`[^`]*`|https?://\S+|\"[^\"\n]{1,60}\"")
PARENTHESIS = re.compile(r"\([^()]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z`\"'(\d])")
LIST_ITEM = re.compile(r"\s*(?:[-*|>#]|\d+\.\s|[\w`., *]+:\s*$)")


def prose(text: str) -> str:
    """The text with every code span as one word, and without code blocks and tables."""
    lines, is_example = [], False
    for line in text.splitlines():
        is_example = line.strip() != "" and (is_example or line.startswith("\b"))
        is_code = line.startswith("    ") or line.lstrip().startswith((">>>", "|", "..."))
        lines.append("" if is_code or is_example else line)
    return CODE.sub("Code", "\n".join(lines))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items of a text."""
    part: list[str] = []
    for line in [*prose(text).splitlines(), ""]:
        if not line.strip() or re.match(r"\s*(?:[-*#]|\d+\.)\s", line):
            if part:
                yield " ".join(part)
            part = [line.strip()] if line.strip() else []
        else:
            part.append(line.strip())
    if part:
        yield " ".join(part)


def num_words(sentence: str) -> int:
    """Words of a sentence, without what is in parentheses and bare numbers and signs."""
    bare = PARENTHESIS.sub("", PARENTHESIS.sub("", sentence))
    return sum(any(char.isalpha() for char in word) for word in bare.split())


def faults_of_prose(text: str) -> list[str]:
    """Banned words and long sentences of a text."""
    faults = [f"`{found[0]}`" for found in BANNED.finditer(prose(text))]
    for paragraph in paragraphs(text):
        for sentence in SENTENCE_END.split(paragraph):
            if (count := num_words(sentence)) > MAX_WORDS:
                faults.append(f"{count} words: {sentence[:60]}...")
    return faults


def faults_of_docstring(text: str) -> list[str]:
    """Faults of a docstring, its head included."""
    head = [f"begins with `{found[1]}`"] if (found := HEADLESS.match(text)) else []
    return head + faults_of_prose(text)


HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, also those of attributes and constants."""
    for node in ast.walk(tree):
        for child in node.body if isinstance(node, HOLDERS) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, inspect_clean(child.value.value)


def inspect_clean(text: str) -> str:
    """The text without the indentation of its later lines."""
    first, _, rest = text.partition("\n")
    lines = rest.splitlines()
    margin = min((len(li) - len(li.lstrip()) for li in lines if li.strip()), default=0)
    return "\n".join([first, *(line[margin:] for line in lines)]).strip()


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every block of comments."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:noqa|type:|fmt:)", token.string):
            continue
        row, is_alone = token.start[0], not token.line[: token.start[1]].strip()
        if block and is_alone and row == last + 1:
            block.append(token.string.lstrip("# "))
        else:
            if block:
                yield start, "\n".join(block)
            block, start = [token.string.lstrip("# ")], row
        last = row
    if block:
        yield start, "\n".join(block)


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every other string of at least three words."""
    skip = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in skip:
            continue
        if isinstance(node.value, str) and len(re.findall(r"[a-z]+ [a-z]+", node.value)) > 1:
            yield node.lineno, node.value


def faults_of_module(source: str) -> list[str]:
    """Faults of a module with their lines."""
    tree = ast.parse(source)
    found = [(line, f) for line, text in docstrings(tree) for f in faults_of_docstring(text)]
    found += [(line, f) for line, text in comments(source) for f in faults_of_prose(text)]
    found += [
        (line, f"message: `{word[0]}`")
        for line, text in messages(tree)
        for word in BANNED.finditer(CODE.sub("code", text))
    ]
    return [f"{line}: {fault}" for line, fault in sorted(found)]


def without_code(page: str) -> str:
    """A page without its code blocks and the names whose docstrings it has."""
    return re.sub(r"```.*?```|^:::[^\n]*$", "", page, flags=re.DOTALL | re.MULTILINE)


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_is_written_in_plain_english(path: Path) -> None:
    assert faults_of_module(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_in_plain_english(name: str) -> None:
    assert faults_of_prose(without_code((ROOT / name).read_text(encoding="utf-8"))) == []


def test_the_check_finds_each_kind_of_fault() -> None:
    source = '''"""Of that, for a card."""
X = 1
"""Bytes per block."""
# nobody reads this
def f():
    """Return the bytes."""
    raise ValueError("a model that is laid on it")
'''
    assert faults_of_module(source) == [
        "1: `card`", "1: begins with `Of`", "4: `nobody`", "7: message: `laid`"
    ]  # fmt: skip
    assert faults_of_prose("A " + "word " * 25 + ". Short `of code in a span`.") != []
    assert faults_of_prose("A " + "word " * 23 + ". Short.") == []
    assert faults_of_prose("- A " + "word " * 20 + "\n- " + "word " * 20) == []
