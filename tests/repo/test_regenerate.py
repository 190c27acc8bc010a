"""The check for stale pages sees a changed input, and covers every generated picture."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def regenerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, over a folder with one target."""
    spec = importlib.util.spec_from_file_location("regenerate", ROOT / "scripts" / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "regenerate", module)
    spec.loader.exec_module(module)
    return module


def test_a_changed_input_or_a_missing_file_is_stale(
    regenerate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = regenerate.Target(command=("x",), inputs=("in/*.txt",), outputs=("page.md",))
    monkeypatch.setattr(regenerate, "ROOT", tmp_path)
    monkeypatch.setattr(regenerate, "DIGESTS", tmp_path / "generated.json")
    monkeypatch.setattr(regenerate, "TARGETS", {"page": target})
    (tmp_path / "in").mkdir()
    source, page = tmp_path / "in" / "a.txt", tmp_path / "page.md"
    source.write_text("1")
    page.write_text("")
    assert regenerate.stale() == ["page"]

    (tmp_path / "generated.json").write_text(json.dumps({"page": regenerate.digest(target)}))
    assert regenerate.stale() == []
    source.write_text("2")
    assert regenerate.stale() == ["page"]
    source.write_text("1")
    page.unlink()
    assert regenerate.stale() == ["page"]


def test_every_picture_is_generated_and_has_inputs(regenerate: ModuleType) -> None:
    made = {output for target in regenerate.TARGETS.values() for output in target.outputs}
    pictures = {f"docs/img/{path.name}" for path in (ROOT / "docs" / "img").iterdir()}

    assert pictures <= made
    assert len(pictures) <= 8
    for target in regenerate.TARGETS.values():
        assert all(any(ROOT.glob(pattern)) for pattern in target.inputs)
