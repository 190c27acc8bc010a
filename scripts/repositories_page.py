"""The table of docs/versions.md: public repositories that can install memest beside their pins.

python scripts/repositories_page.py    # a second; reads validation/repositories.json

A repository's pins were read from the named file at the named commit. Only requirements of
packages that memest needs too are stored. A pin and a bound go together if some version satisfies
both. Versions that either names decide that, and their successors.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pages import ROOT, table, with_part

LIST = ROOT / "validation" / "repositories.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- repositories: scripts/repositories_page.py -->\n"
END = "<!-- end of repositories -->\n"
FLOORS = ("2.5", "2.9", "2.11")
"""Lowest releases of torch whose shares are stated."""

Bounds = Mapping[str, SpecifierSet]


def go_together(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Return whether some version satisfies both.

    >>> go_together(SpecifierSet(">=2.6"), SpecifierSet("<=2.5.1"))
    False
    >>> go_together(SpecifierSet(">4.66"), SpecifierSet(">=4.66,<5"))
    True
    """
    both = one & other
    return any(both.contains(version) for version in _candidates(both))


def _candidates(specifiers: SpecifierSet) -> Iterator[Version]:
    yield Version("999")
    for specifier in specifiers:
        release = Version(specifier.version.removesuffix(".*")).release
        for last in (release[-1], release[-1] + 1):
            yield Version(".".join(map(str, (*release[:-1], last))))
        yield Version(".".join(map(str, (*release, 1))))


def memest_requires(extra: str = "") -> Bounds:
    """Return the bounds of the core, or of an extra, in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    python = {} if extra else {"python": SpecifierSet(project["requires-python"])}
    return {**python, **bounds_of(lines)}


def bounds_of(lines: Iterable[str]) -> Bounds:
    """Return the bounds of requirements by normalised name."""
    found = map(Requirement, lines)
    return {re.sub(r"[-_.]+", "-", item.name).lower(): item.specifier for item in found}


def pins_of(entry: Mapping[str, Any]) -> Bounds:
    """Return the pins of a repository, its Python's among them."""
    return {"python": SpecifierSet(entry["python"]), **bounds_of(entry["requires"])}


def in_the_way(pins: Bounds, bounds: Bounds) -> list[str]:
    """Return the names of packages whose pin and bound do not go together."""
    return [n for n in bounds if n in pins and not go_together(pins[n], bounds[n])]


def share(entries: list[dict[str, Any]], bounds: Bounds) -> str:
    """Return how many repositories can install memest, and their share."""
    count = sum(not in_the_way(pins_of(entry), bounds) for entry in entries)
    return f"{count} of {len(entries)} ({count / len(entries):.0%})"


def section(entries: list[dict[str, Any]]) -> str:
    """Return the generated part of the page."""
    core, plans = memest_requires(), memest_requires("plans")
    shares, rows = [], []
    for floor in FLOORS:
        bounds = {**core, "torch": SpecifierSet(f">={floor}")}
        shares.append([floor, share(entries, bounds), share(entries, {**bounds, **plans})])
    every = {**core, "torch": SpecifierSet(f">={FLOORS[0]}"), **plans}
    for entry in sorted(entries, key=lambda e: e["repository"].casefold()):
        pins = pins_of(entry)
        named = [
            f"{'Python' if name == 'python' else name} `{pins[name]}`"
            for name in ("python", "torch", "transformers", "numpy")
            if str(pins.get(name, ""))
        ]
        path = entry["file"] and f"`{entry['file']}`"
        found = ", ".join(in_the_way(pins, every))
        rows.append([entry["repository"], entry["date"], path, ", ".join(named), found])
    head = ["repository", "date", "file", "Python, torch, transformers, NumPy", "in the way"]
    return f"{table(['lowest torch', 'core', '`[plans]`'], shares)}\n{table(head, rows)}"


def page(text: str) -> str:
    """Return the text of the page with its table made again."""
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    return with_part(text, BEGIN, END, f"\n{section(entries)}")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
