"""The documentation site: it builds without a warning, and its first result comes early."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import memest
from memest.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import check_readme
finally:
    sys.path.pop(0)


def test_the_first_result_comes_within_300_words() -> None:
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    before = page.partition("\n```\nfits")[0]

    assert before != page
    assert len(before.split()) <= 300


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE)

    assert sorted(name for _, name in named) == sorted(memest.__all__)
    for module, name in named:
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        source = file.read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), name


def test_every_picture_is_in_the_gallery_with_a_command() -> None:
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    figures = re.findall(r"<figure markdown>\n!\[[^\]]+\]\((\S+)\)\n.*: `(\w+) ", page)

    assert {name for name, _ in figures} == {f"img/{p.name}" for p in (DOCS / "img").iterdir()}
    assert {command for _, command in figures} == {"memest", "python"}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_are_understood(page: Path) -> None:
    blocks = check_readme.blocks_of(page.read_text(encoding="utf-8"))
    commands = [command for block in blocks for command in block.commands]

    assert commands[0].startswith("pip install ")
    assert len(commands) >= 3
    for line in commands[1:]:
        program, *arguments = shlex.split(line)
        assert program in ("memest", "pytest")
        if program == "memest":
            command: click.Command | None = main
            while isinstance(command, click.Group):
                command = command.get_command(click.Context(command), arguments.pop(0))
            assert command is not None
            command.make_context(command.name, arguments)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="no mkdocs: pip install 'memest-gpu[docs]' installs it",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    lists = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")

    assert done.returncode == 0, done.stderr
    assert "write different programs.<ul>" in "".join(lists.split("\n"))
    for page in ("index.html", "api/index.html", "validation/scripts/index.html"):
        assert (tmp_path / page).is_file()
    assert (tmp_path / "memest" / "validate" / "suites" / "lab-a100.yaml").is_file()
