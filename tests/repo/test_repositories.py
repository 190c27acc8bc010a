"""Public repositories that can install memest beside their pins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from scripts import pinned
from scripts import repositories_page as repositories

ENTRIES = json.loads(repositories.LIST.read_text(encoding="utf-8"))
BESIDE = (
    "axolotl-ai-cloud/axolotl", "hiyouga/LLaMA-Factory", "volcengine/verl", "huggingface/open-r1",
    "karpathy/nanochat", "Lightning-AI/litgpt", "OpenRLHF/OpenRLHF", "huggingface/lerobot",
    "kohya-ss/sd-scripts", "mosaicml/composer",
)  # fmt: skip
"""Repositories whose pins pip's resolver gets together with memest's core."""


def test_the_page_has_the_stored_pins() -> None:
    text = repositories.PAGE.read_text(encoding="utf-8")

    assert repositories.page(text) == text


def test_the_page_has_the_stored_environments() -> None:
    text = pinned.PAGE.read_text(encoding="utf-8")

    assert pinned.page(text) == text, "run `python scripts/pinned.py`"


def test_memest_moves_nothing_in_the_environments_of_repositories() -> None:
    known = {item["repository"]: item["commit"] for item in ENTRIES}
    entries = [entry for entry in pinned.load() if "found" in entry]
    assert entries
    for entry in entries:
        assert known[entry["repository"]] == entry["commit"]
        assert entry["found"]["moved"] == []
        assert set(entry["found"]["added"]) <= {"click", "numpy", "tqdm"}


def test_most_repositories_can_install_the_core() -> None:
    core = repositories.memest_requires()
    fits = [not repositories.in_the_way(repositories.pins_of(entry), core) for entry in ENTRIES]

    assert len(fits) >= 64
    assert sum(fits) / len(fits) >= 0.85


@pytest.mark.parametrize(
    ("pin", "bound", "expected"),
    [
        ("==2.5.1", ">=2.6", False),
        ("<2.7,>=2.6", ">=2.6", True),
        (">=2.11,<=2.12.1", ">=2.12", True),
        ("~=4.53.0", ">=4.54", False),
        ("<4.48", ">=4.51.3,<6", False),
        ("!=2.9.*", ">=2.9,<2.10", False),
        ("==3.10.*", ">=3.11", False),
        ("", ">=1", True),
    ],
)
def test_a_pin_and_a_bound_go_together_if_a_version_satisfies_both(
    pin: str, bound: str, expected: bool
) -> None:
    assert repositories.go_together(SpecifierSet(pin), SpecifierSet(bound)) is expected


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_pip_keeps_the_pins_beside_the_core(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Resolve the pins alone, pin what pip chose, and resolve again with memest's core."""
    if not request.config.getoption("--every-run"):
        pytest.skip("pip downloads gigabytes: `pytest tests/repo/test_repositories.py --every-run`")
    core = repositories.memest_requires()
    entry = next(item for item in ENTRIES if item["repository"] == name)
    pins = repositories.pins_of(entry)
    if not pins["python"].contains(".".join(map(str, sys.version_info[:3]))):
        pytest.skip(f"{name} needs Python {pins['python']}")
    if repositories.in_the_way(pins, core):
        pytest.skip(f"{name} excludes {repositories.in_the_way(pins, core)}: see docs/versions.md")
    # wheels only, and no deepspeed: pip would build it to read its requirements
    lines = [line for line in entry["requires"] if not line.startswith("deepspeed")]
    try:
        alone = _resolved(lines, tmp_path / "alone.json")
    except AssertionError as error:
        pytest.skip(f"the registry cannot install {name} alone: {str(error)[-300:]}")
    chosen = [f"{package}=={version}" for package, version in alone.items()]

    beside = _resolved([*chosen, str(repositories.ROOT)], tmp_path / "beside.json")

    assert {package: beside[package] for package in alone} == alone
    assert "memest-gpu" in beside


def _resolved(requirements: list[str], report: Path) -> dict[str, str]:
    """Return the versions that pip would install into an empty environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q",
         "--report", str(report), *requirements],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}
