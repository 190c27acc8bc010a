"""The stored results of releases of torch, and their page."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from memest.estimator.versions import RELEASES
from scripts import matrix

CONTENT = matrix.load()


def test_the_page_has_the_stored_results() -> None:
    text = matrix.PAGE.read_text(encoding="utf-8")

    assert matrix.page(text) == text, "run `python scripts/matrix.py`"


def test_the_oldest_row_has_the_lowest_release() -> None:
    assert next(iter(matrix.REQUIREMENTS)) == RELEASES[0].name
    assert set(CONTENT["rows"]) <= set(matrix.REQUIREMENTS)


def test_the_oldest_row_has_the_bounds_of_the_metadata() -> None:
    project = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["plans"]]
    bounds = {
        requirement.name: Version(specifier.version)
        for requirement in map(Requirement, needed)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    oldest = next(iter(matrix.PINS.values())).split()
    pins = dict(zip(matrix.LIBRARIES, map(Version, oldest), strict=True))

    assert {name: pin.base_version for name, pin in pins.items() if name in bounds} == {
        name: ".".join(map(str, (*bounds[name].release, 0)[:3])) for name in pins if name in bounds
    }


@pytest.mark.parametrize("row", CONTENT["rows"])
def test_every_difference_has_a_cause(row: str) -> None:
    cases = CONTENT["rows"][row]["cases"]
    different = {name for name, case in cases.items() if matrix.differs(name, case)}

    assert set(cases) <= set(matrix.developed())
    assert different == {name for name, case in cases.items() if "cause" in case}
    assert all(set(cases[name]["cause"]) <= set(CONTENT["causes"]) for name in different)


def test_every_cause_is_used() -> None:
    cases = [case for row in CONTENT["rows"].values() for case in row["cases"].values()]

    assert set(CONTENT["causes"]) == set("".join(case.get("cause", "") for case in cases))


def test_a_cause_stays_with_its_result(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(matrix, "STORED", tmp_path / "matrix.json")
    same = {"peaks": list(matrix.developed()["predict"])}
    row = {"date": "2026-01-01", "versions": {}}

    def cause_after(case: dict[str, object]) -> str | None:
        matrix.store("2.6", {**row, "cases": {"predict": dict(case)}})
        cause = matrix.load()["rows"]["2.6"]["cases"]["predict"].get("cause")
        return None if cause is None else str(cause)

    assert cause_after(same) is None
    assert cause_after({"failed": "no"}) == matrix.UNKNOWN
    content = matrix.load()
    content["rows"]["2.6"]["cases"]["predict"]["cause"] = "a"
    matrix.STORED.write_text(matrix.json.dumps(content), encoding="utf-8")
    assert cause_after({"failed": "no"}) == "a"
    assert cause_after({"peaks": [1, 2]}) == matrix.UNKNOWN
    assert cause_after(same) is None
