"""One step to hover, zoom and scrub: its data in Python, its moves in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memest import TrainingPlan
from memest.estimator.allocator.memory_history import Entry
from memest.estimator.predict import record_plan
from memest.estimator.replay.recording import (
    KINDS,
    Mark,
    Recording,
    kind_of,
    step_blocks,
    timeline,
)
from memest.estimator.tensors.storages import MemKind, Site, StorageTable
from memest.report import Phase
from memest.report import page as pages
from memest.report.page import instrument, page
from tests.browser import MAKER, browse, found_in, needs_browser, width_on_a_phone

MIB = 1 << 20
NUM_PAIRS = 50_000
SPIKE = 31_111
"""Pair whose block is a temporary of one event, higher than all others."""

SOURCE = "y = </script><b>x</b>"


def made(num_pairs: int) -> Recording:
    """A step whose forward allocates blocks and whose backward frees them, in pairs of events."""
    recording = Recording(StorageTable(), 8 << 30, "a100-80gb")
    actions, storages = recording.actions, recording.storages

    def entry(action: str, address: int, num_bytes: int, storage: int) -> Entry:
        return Entry(action, address, num_bytes, num_bytes, 0, 0, storage, "")

    def add(num_bytes: int, kind: MemKind, site: Site) -> Entry:
        index = storages.add(num_bytes, site, kind)
        return entry("alloc", 512 * index, num_bytes, index)

    def mark(phase: Phase) -> None:
        recording.marks.append(Mark(len(actions), 0, 0, phase))

    actions.append(entry("segment_alloc", 0, 4 << 30, -1))
    actions.append(add(1 << 30, MemKind.PARAMS, Site("aten.empty", "Net.fc", "", "train.py:2")))
    mark(Phase.BEFORE_FORWARD)
    live = []
    for i in range(num_pairs):
        site = Site("aten.addmm", f"Net.layers.{i % 7}", "forward", f"train.py:{3 + i % 40}")
        live.append(add(512 * (1 + i % 64), MemKind.ACTIVATIONS, site))
        actions.append(live[-1])
        if i == SPIKE % num_pairs:
            spike = add(2 << 30, MemKind.ACTIVATIONS, Site("aten.mm", "Net.fc", "backward"))
            actions += [spike, entry("free_requested", *spike[1:3], spike.stack)]
    mark(Phase.AFTER_FORWARD)
    actions += [entry("free_requested", *a[1:3], a.stack) for a in live]
    mark(Phase.AFTER_BACKWARD)
    return recording


def shown(recording: Recording) -> str:
    return instrument(
        recording, limit_bytes=8 << 30, gpu="a100-80gb", sources={"train.py:3": SOURCE}
    )


def planned(limit_bytes: int | None = None) -> Recording:
    return record_plan(TrainingPlan(model_name="gpt2", seq_len=16, memory_limit=limit_bytes))


@pytest.mark.parametrize(
    "make", [lambda: made(100), planned, lambda: planned(600 << 20)], ids=["made", "plan", "oom"]
)
def test_the_blocks_add_up_to_the_timeline(make: Callable[[], Recording]) -> None:
    recording = make()
    step, line = step_blocks(recording), timeline(recording)
    kinds = {kind: [0] * (step.num_points + 1) for kind in KINDS}
    for block in step.blocks:
        change = kinds[kind_of(recording.storages, block.storage)]
        change[block.start] += block.num_bytes
        change[block.stop] -= block.num_bytes
    levels = {}
    for kind, change in kinds.items():
        total = 0
        levels[kind] = [total := total + each for each in change][:-1]
    reserved, changes = [], dict(step.reserved)
    for point in range(step.num_points):
        reserved.append(changes.get(point, reserved[-1] if reserved else 0))

    assert levels == {kind: list(values) for kind, values in line.kinds.items()}
    assert reserved[1:] == list(line.reserved)[1:]
    assert (step.step, step.spans, step.refused_bytes) == (
        line.step, line.spans, line.refused_bytes,
    )  # fmt: skip


def test_a_page_of_100_000_events_is_below_5_mb() -> None:
    text = page("large", shown(made(NUM_PAIRS)))

    assert len(text.encode()) < 5_000_000
    assert re.findall(r"(?:src|href)=[\"'](?!data:)", text) == []
    assert "script-src 'sha256-" in text


def test_a_step_with_too_many_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_BLOCKS", 50)

    assert "has 102 blocks, more than 50, so this page has no timeline" in shown(made(100))


# ------------------------------------------------------------------ in the browser

PLAY = """
<iframe id="f" src="PAGE" style="width:WIDEpx;height:900px;border:0"></iframe>
<script>
addEventListener("load", async () => {
  const frame = document.getElementById("f").contentWindow, doc = frame.document, out = {}, ms = {};
  const by = id => doc.getElementById(id);
  while (!doc.body.dataset.ready) await new Promise(done => setTimeout(done, 20));
  const look = () => ({
    now: by("now").textContent, at: +by("at").value, value: by("at").getAttribute("aria-valuetext"),
    legend: by("legend").textContent, flame: [...by("flame").children].map(b => b.textContent),
    rows: [...by("live").tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent)),
    sorted: [...by("live").tHead.rows[0].cells].map(c => c.getAttribute("aria-sort")),
    focus: doc.activeElement.textContent, edges: edges(),
  });
  const edges = () => by("areas").dataset.view;
  const timed = (name, act) => {
    const start = performance.now();
    act();
    doc.body.offsetWidth;
    ms[name] = performance.now() - start;
    out[name] = look();
  };
  const send = (node, event) => node.dispatchEvent(event);
  const choose = (id, value) => {
    by(id).value = value;
    send(by(id), new frame.Event(id === "at" ? "input" : "change"));
  };
  const key = (node, name) =>
    send(node, new frame.KeyboardEvent("keydown", { key: name, bubbles: true }));
  const mouse = (name, x, y, buttons = 0) => by("areas").dispatchEvent(
    new frame.PointerEvent(name, { clientX: x, clientY: y, buttons, bubbles: true }));
  out.start = look();
  timed("slider", () => choose("at", 10));
  const { width, height } = by("areas"), pen = by("areas").getContext("2d");
  const image = pen.getImageData(0, 0, width, height).data;
  out.pink = 0;
  for (let i = 0; i < image.length; i += 4)
    out.pink += image[i] === 204 && image[i + 1] === 121 && image[i + 2] === 167;
  timed("phase", () => key(by("at"), "]"));
  timed("page down", () => key(by("at"), "PageDown"));
  timed("peak", () => key(by("at"), "p"));
  timed("zoom", () => key(by("at"), "+"));
  timed("whole", () => key(by("at"), "0"));
  const box = by("areas").getBoundingClientRect();
  timed("hover", () => mouse("pointermove", box.left + box.width / 2, box.top + box.height - 60));
  out.tip = by("tip").textContent;
  timed("drag", () => { mouse("pointerdown", box.left + 200, box.top + 90, 1);
    mouse("pointermove", box.left + 260, box.top + 90, 1);
    mouse("pointerup", box.left + 260, box.top + 90); });
  timed("sort", () => by("live").tHead.rows[0].cells[2].firstChild.click());
  timed("tensors", () => choose("rows", "tensors"));
  timed("mark", () => by("live").tBodies[0].rows[0].cells[0].querySelector("button").click());
  timed("line", () => choose("by", "line"));
  by("flame").children[0].focus();
  timed("down", () => key(doc.activeElement, "ArrowDown"));
  timed("open", () => doc.activeElement.click());
  timed("close", () => key(doc.activeElement, "Escape"));
  const found = Object.assign(document.createElement("pre"), { id: "found" });
  found.textContent = JSON.stringify({ out, ms });
  document.body.replaceChildren(found);
});
</script>
"""


def play(path: Path, recording: Recording, wide: int = 1100) -> tuple[dict[str, Any], str, Path]:
    path.write_text(page("a step", shown(recording)), encoding="utf-8")
    outer, log = path.with_name("play.html"), path.with_name("net.json")
    outer.write_text(PLAY.replace("PAGE", path.name).replace("WIDE", str(wide)))
    options = (f"--log-net-log={log}", "--window-size=1200,950", "--allow-file-access-from-files")
    dom, said = browse(outer.as_uri(), *options)
    return found_in(dom, said), said, log


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    return play(tmp_path_factory.mktemp("step") / "step.html", made(NUM_PAIRS))


def gib(line: Any, point: int) -> str:
    return f"{line.total(point) / (1 << 30):.3f} GiB"


@needs_browser
def test_the_slider_reads_every_event(played: Any) -> None:
    out, line = played[0]["out"], timeline(made(NUM_PAIRS))

    for name, point in (("start", line.peak), ("slider", 10), ("peak", line.peak)):
        assert out[name]["at"] == point
        assert (
            f"Event {point} of {len(line.reserved) - 1} (forward): {gib(line, point)}"
            in (out[name]["now"])
        )
        assert out[name]["flame"][0] == f"allocated {gib(line, point)}"
        assert f"event {point}, forward, {gib(line, point)} allocated" == out[name]["value"]
    assert "the peak; allocates 2.000 GiB temporaries, Net.fc, aten.mm" in out["peak"]["now"]
    assert "temporaries 2.000 GiB" in out["peak"]["legend"]


@needs_browser
def test_brackets_move_by_phases_and_pages_by_a_tenth_of_the_view(played: Any) -> None:
    out, spans = played[0]["out"], step_blocks(made(NUM_PAIRS)).spans

    assert out["phase"]["at"] == spans[0].stop
    assert out["phase"]["at"] - out["page down"]["at"] == 2 * NUM_PAIRS // 10


@needs_browser
def test_a_peak_of_one_event_is_drawn_among_100_000(played: Any) -> None:
    assert played[0]["out"]["pink"] > 50


@needs_browser
def test_zooming_keeps_the_cursor_and_a_drag_chooses_a_range(played: Any) -> None:
    out, last = played[0]["out"], len(timeline(made(NUM_PAIRS)).reserved) - 1

    low, high = map(int, out["zoom"]["edges"].split())
    assert high - low == pytest.approx(last / 2, abs=1)
    assert low <= out["peak"]["at"] <= high
    assert out["whole"]["edges"] == f"0 {last}"
    low, high = map(int, out["drag"]["edges"].split())
    assert high - low == pytest.approx(last * 60 / 1020, rel=0.1)


@needs_browser
def test_the_pointer_names_the_tensor_under_it(played: Any) -> None:
    assert (
        "1.000 GiB paramsNet.fcaten.emptytrain.py:2before the step to after the step"
        in (played[0]["out"]["tip"])
    )


@needs_browser
def test_the_table_sorts_and_has_every_tensor(played: Any) -> None:
    out = played[0]["out"]
    counts = [int(row[2]) for row in out["sort"]["rows"]]

    assert out["start"]["sorted"] == ["none", "descending", *["none"] * 5]
    assert out["sort"]["sorted"][2] == "descending"
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 1
    assert {row[2] for row in out["tensors"]["rows"]} == {"1"}
    assert any(row[3] == "Net.layers.*" for row in out["start"]["rows"])
    assert any(re.fullmatch(r"Net\.layers\.\d", row[3]) for row in out["tensors"]["rows"])


@needs_browser
def test_the_flame_graph_opens_and_closes_by_keys(played: Any) -> None:
    out = played[0]["out"]

    assert any(text.startswith("layers ") for text in out["peak"]["flame"])
    assert any(text.startswith("train.py:") for text in out["line"]["flame"])
    assert out["down"]["focus"] == out["line"]["flame"][1]
    assert out["open"]["flame"][:2] == out["line"]["flame"][:2]
    assert len(out["open"]["flame"]) < len(out["line"]["flame"])
    assert out["close"]["flame"] == out["line"]["flame"]


@needs_browser
def test_every_move_over_100_000_events_answers_within_100_ms(played: Any) -> None:
    assert {name: ms for name, ms in played[0]["ms"].items() if ms >= 100} == {}


@needs_browser
def test_nothing_leaves_the_page_and_the_console_is_silent(played: Any) -> None:
    _, said, log = played
    urls = set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8")))

    assert "CONSOLE" not in said
    assert [url for url in urls if url.startswith("http") and not MAKER.match(url)] == []


@needs_browser
def test_other_scripts_do_not_run(tmp_path: Path) -> None:
    path = tmp_path / "other.html"
    path.write_text(page("x", "<p>a</p><script>document.body.textContent = 'ran'</script>"))
    dom, said = browse(path.as_uri())

    assert "<p>a</p>" in dom
    assert "Content Security Policy" in said


@needs_browser
def test_the_page_is_as_wide_as_a_phone(tmp_path: Path) -> None:
    path = tmp_path / "phone.html"
    path.write_text(page("a step", shown(made(100))), encoding="utf-8")

    assert width_on_a_phone(path) <= 390
