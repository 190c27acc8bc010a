"""Hook of mkdocs: files outside of docs/ that a page links to are in the site too.

mkdocs.yml names it. `mkdocs build` writes the site to build/site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ that pages link to, and those that they link to in turn."""
    from mkdocs.structure.files import File, InclusionLevel

    todo = [Path(file.abs_src_path) for file in files.documentation_pages()]
    known = {path.resolve() for path in todo}
    while todo:
        page = todo.pop()
        for target in linked(page):
            if target in known or target.is_dir() or DOCS in target.parents:
                continue
            known.add(target)
            files.append(
                File.generated(
                    config, uri(target), abs_src_path=str(target),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )  # fmt: skip
            if target.suffix == ".md":
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write links as the site has them; a folder without a page keeps its name alone."""
    source = Path(page.file.abs_src_path).resolve()
    folder = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups(default="")
        path = (source.parent / target).resolve()
        if path.is_dir():
            path = path / "README.md"
            if not path.exists():
                return text
        return f"{image}[{text}]({os.path.relpath(uri(path), folder or '.')}{anchor})"

    return outside_of_code(LINK, link, markdown)


def linked(page: Path) -> Iterator[Path]:
    """Yield the files that a page links to."""
    for _, _, target, _ in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield (page.parent / target).resolve()


def uri(path: Path) -> str:
    """Return the place of a file in the site: within docs/, or within the repository."""
    return path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()


def outside_of_code(pattern: re.Pattern[str], change: Any, text: str) -> str:
    """Apply `change` to the matches of `pattern` that are in no block of code."""
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [pattern.sub(change, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, pattern.sub(change, text[end:])])
