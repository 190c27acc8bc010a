"""The tree of files in docs/architecture.md: adds new files, and removes those that are gone.

python scripts/architecture_page.py    # a second

The words of a file are written by hand on the page. A new file gets the first words of its
docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from pages import ROOT, with_part

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: scripts/architecture_page.py -->\n", "<!-- end of tree -->\n"
COLUMN = 34
MAX_WORDS = 8


def glosses(text: str) -> dict[str, str]:
    """Return the words of each path of the tree in `text`; folders end with a slash."""
    found, folders = {}, list[str]()
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        name = line[:COLUMN].rstrip()
        if not name or name.startswith("`"):
            continue
        depth = (len(name) - len(name.lstrip())) // 2
        folders[depth:] = [name.strip()]
        found["".join(folders)] = line[COLUMN:].strip()
    return found


def first_words(path: Path) -> str:
    """Return a module's first words, up to its first colon."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    words = re.split(r"[.:;](?: |$)", " ".join(text.split("\n\n")[0].split()))[0]
    return " ".join(words.split()[:MAX_WORDS])


def tree(folder: Path, known: Mapping[str, str], above: str = "") -> list[str]:
    """Return a line for each folder and module, folders first."""
    lines = []
    indent = "  " * above.count("/")
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith(("_", ".")))
    for path in inside:
        if path.is_dir() and (path / "__init__.py").is_file():
            key = f"{above}{path.name}/"
            words = known.get(key) or first_words(path / "__init__.py")
            lines.append(f"{indent + path.name + '/':<{COLUMN}}{words}")
            lines += tree(path, known, key)
    for path in inside:
        if path.suffix == ".py":
            words = known.get(above + path.name) or first_words(path)
            lines.append(f"{indent + path.name:<{COLUMN}}{words}")
    return lines


def page(text: str) -> str:
    """Return the page with a tree of the files as they are now."""
    made = "\n".join(tree(ROOT / "memest", glosses(text)))
    return with_part(text, BEGIN, END, f"```\n{made}\n```\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
