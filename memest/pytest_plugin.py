"""pytest plugin: tests on a virtual GPU, limits of their memory, and a file of stored peaks.

Nothing heavy is imported before a test uses the plugin.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memest.report import RunReport, StoredPeak
    from memest.run.session import Session

PEAKS = "memest-peaks.json"  # file of stored peaks in pytest's root folder
SCHEMA = "memest.peaks/1"
_PEAK, _NOTE = "memest_peak", "memest_note"  # user properties of a test's report, for xdist
_SESSION = pytest.StashKey["Session"]()
_STORED = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--memest-update` and `--memest-fail-on-increase` to pytest's options."""
    group = parser.getgroup("memest", "GPU memory, on a virtual GPU")
    group.addoption("--memest-update", action="store_true", help=f"Store peaks in {PEAKS}.")
    text = f"Fail tests whose peak is above the one in {PEAKS}."
    group.addoption("--memest-fail-on-increase", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark `gpu_memory`, and the collector of peaks."""
    config.addinivalue_line(
        "markers",
        'gpu_memory(limit, gpu="a100-40gb"): run the test on a virtual GPU, and fail it if it'
        " needs more memory than `limit`",
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config), "memest-collector")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Request the fixture `virtual_gpu` for a test with the mark `gpu_memory`. It is set up before
    other fixtures of function scope."""
    names = getattr(item, "fixturenames", None)
    if names is None or item.get_closest_marker("gpu_memory") is None:
        return
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    if "virtual_gpu" in names:
        names.remove("virtual_gpu")
    outer_names = [n for n in names if n in fixtures and fixtures[n][-1].scope != "function"]
    position = max((names.index(name) + 1 for name in outer_names), default=0)
    names.insert(position, "virtual_gpu")


@pytest.fixture
def virtual_gpu(request: pytest.FixtureRequest) -> "Iterator[Session]":
    """Virtual GPU on which the test runs, as a `Session` with peaks and a report. The GPU is the
    one that the mark `gpu_memory` names, else that of `[tool.memest]`, else the default."""
    from memest.errors import MemestError
    from memest.run.session import virtual_gpu as simulate
    from memest.units import parse_bytes

    try:
        limit, gpu = _limit_and_gpu(request.node)
        if limit:
            parse_bytes(limit)  # raises for an invalid limit
        simulation = simulate(gpu) if gpu else simulate()
    except MemestError as error:
        pytest.fail(f"{error}\nhint: {error.hint}", pytrace=False)
    with simulation as session:
        request.node.stash[_SESSION] = session
        for name in [name for name in sys.modules if name.startswith("memest.estimator.")]:
            vars(sys.modules[name])["__tracebackhide__"] = True  # pytest leaves out the frames
        yield session


def _limit_and_gpu(item: pytest.Item) -> tuple[str | int, str]:
    """Return (memory limit, GPU) for a test; "" is none. With the mark `gpu_memory`, both are from
    the mark, and a value that the mark lacks is from the project. Without the mark, the limit is ""
    and the GPU is from the project."""
    from memest.project import find_project

    mark, project = item.get_closest_marker("gpu_memory"), find_project(item.config.rootpath)
    if mark is None:
        return "", project.gpu
    if len(mark.args) > 1 or set(mark.kwargs) - {"gpu", "limit"}:
        arguments = ", ".join([*map(repr, mark.args), *mark.kwargs])
        pytest.fail(
            f'gpu_memory({arguments}): write gpu_memory("20GiB", gpu="a100-40gb")', pytrace=False
        )
    limit = mark.kwargs.get("limit", mark.args[0] if mark.args else project.limit)
    return limit, mark.kwargs.get("gpu", project.gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test; fail it if its peak on the virtual GPU is too high."""
    try:
        result = yield
    except BaseException:
        if _SESSION in item.stash:
            report = item.stash[_SESSION].report()
            item.add_report_section("call", "memest", "\n".join(_peak_lines(report)))
        raise
    if _SESSION in item.stash:
        from memest.report import Ending

        report = replace(item.stash[_SESSION].report(), ending=Ending.FINISHED)
        faults = list(_faults(item, report))
        if faults:
            pytest.fail("\n".join(faults), pytrace=False)
    return result


def _faults(item: pytest.Item, report: "RunReport") -> Iterator[str]:
    """Yield lines on why the peak in `report` fails the test, if it does; record the peak."""
    from memest.report import StoredPeak, read_as
    from memest.report.difference import changes, grown, other_versions, peaks_text
    from memest.units import format_bytes, parse_bytes

    config, (limit, _) = item.config, _limit_and_gpu(item)
    if not report.peak_allocated_bytes:
        if item.get_closest_marker("gpu_memory") is not None:
            yield "the test has not used the GPU"
        return
    peak = _peak_of(report)
    item.user_properties.append((_PEAK, json.dumps(asdict(peak))))
    values = _stored_peaks(config).get(item.nodeid)
    old: StoredPeak | None = None if values is None else read_as(StoredPeak, values)
    growth = [] if old is None else [f"  {row}" for row in grown(changes(old.lines, peak.lines))]
    versions = "" if old is None else other_versions(old.versions, peak.versions)
    needs = report.verdicts[report.gpu].needs_bytes
    if limit and needs > parse_bytes(limit):
        excess = format_bytes(needs - parse_bytes(limit))
        yield f"needs {format_bytes(needs)} on {report.gpu}, {excess} more than {limit}"
        yield from _peak_lines(report)
        if growth:
            yield from ("grown since the stored peak:", *growth)
    if not config.getoption("memest_fail_on_increase"):
        return
    if old is None or old.gpu != report.gpu:
        suffix = "" if old is None else f" on {report.gpu}"
        text = f"no stored peak{suffix}; `--memest-update` stores one"
        item.user_properties.append((_NOTE, text))
        return
    if versions:
        item.user_properties.append((_NOTE, versions))
    names = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
    pairs = [(name, getattr(old, key), getattr(peak, key)) for name, key in names.items()]
    if any(after > before for _, before, after in pairs):
        yield "the peak grew: " + ", ".join(peaks_text(*pair) for pair in pairs)
        yield from growth
        if versions:
            yield versions


def _peak_of(report: "RunReport") -> "StoredPeak":
    from memest.report import StoredPeak

    return StoredPeak(
        gpu=report.gpu,
        peak_allocated_bytes=report.peak_allocated_bytes,
        peak_reserved_bytes=report.peak_reserved_bytes,
        versions={name: report.versions.get(name, "") for name in ("memest", "torch")},
        lines=report.lines,
    )


def _peak_lines(report: "RunReport") -> list[str]:
    from memest.units import format_bytes

    lines = [f"  {format_bytes(r.num_bytes)}  {r.name}  {r.source}" for r in report.lines[:8]]
    return [report.summary(), *lines] if report.peak_allocated_bytes else []


def _stored_peaks(config: pytest.Config) -> dict[str, Any]:
    """Return {test id: stored peak}; the first call reads the file."""
    if _STORED not in config.stash:
        path = config.rootpath / PEAKS
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError as error:
            raise pytest.UsageError(f"{path} is no JSON: {error}") from error
        schema = content.get("schema") if isinstance(content, dict) else None
        if content is not None and (schema != SCHEMA or "peaks" not in content):
            raise pytest.UsageError(f"{path} has the schema {schema}, not {SCHEMA}, or no peaks")
        config.stash[_STORED] = {} if content is None else content["peaks"]
    return config.stash[_STORED]


class _Collector:
    """Collector of tests' peaks and notes; with xdist, in the controller process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.peaks: dict[str, Any] = {}
        self.notes: dict[str, int] = {}  # note -> number of tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the peak and the note that `_faults` recorded in a test."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == _PEAK and report.passed:
                self.peaks[report.nodeid] = json.loads(str(value))
            elif name == _NOTE:
                self.notes[str(value)] = self.notes.get(str(value), 0) + 1

    def pytest_sessionfinish(self) -> None:
        """Write the collected peaks for `--memest-update`; peaks of tests that did not run stay."""
        if not (self.config.getoption("memest_update") and self.peaks):
            return
        from memest.writing import write_whole

        peaks = dict(sorted((_stored_peaks(self.config) | self.peaks).items()))
        text = json.dumps({"schema": SCHEMA, "peaks": peaks}, indent=1) + "\n"
        write_whole(self.config.rootpath / PEAKS, text)
        self.notes[f"stored in {PEAKS}"] = len(self.peaks)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print each note, and the number of tests that have it, at the end of the session."""
        for note, count in self.notes.items():
            tests = f"{count} test{'' if count == 1 else 's'}"
            terminalreporter.write_line(f"memest: {tests}: {note}")
