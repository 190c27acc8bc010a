"""Links and lengths of the pages, and files outside of the package."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import architecture_page
finally:
    sys.path.pop(0)

PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "validation/*.md",
        "validation/scripts/*.md",
        "tests/**/*.md",
        "docs/tutorials/*.md",
        "examples/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_has_its_file(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_link_check_reads_the_pages() -> None:
    assert len(PAGES) > 15
    assert LINK.findall("[a](b.md#c), [d](https://e.f), ![g](h/i.png)") == ["b.md", "h/i.png"]


def test_the_sdist_leaves_validation_out() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert "validation" not in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert (ROOT / "validation" / "runs").is_dir()


def test_architecture_has_a_tree_of_every_file() -> None:
    text = architecture_page.PAGE.read_text(encoding="utf-8")
    words = architecture_page.glosses(text)

    assert architecture_page.page(text) == text, "run `python scripts/architecture_page.py`"
    assert len(words) > 200
    assert [path for path, gloss in words.items() if not 0 < len(gloss.split()) <= 8] == []


def test_architecture_is_short_and_names_files_that_exist() -> None:
    text = architecture_page.PAGE.read_text(encoding="utf-8")
    prose = text.partition(architecture_page.BEGIN)[0]
    files = {path.name for folder in ("memest", "scripts") for path in (ROOT / folder).rglob("*.*")}
    named = re.findall(r"`(?:[\w./]*/)?(\w+\.(?:py|json|yaml))`", prose)

    assert len(prose.split()) <= 900
    assert len(named) > 40
    assert set(named) - files <= {"NAME.json", "mistakes.json"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_an_entry_of_the_changelog_has_at_most_three_lines() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.M)

    assert len(entries) > 50
    assert [entry.splitlines()[0] for entry in entries if entry.count("\n") > 2] == []
