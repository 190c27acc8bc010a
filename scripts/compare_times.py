"""Compares estimated step times with those of an H100: validation/scripts/step_times.json.

    python scripts/compare_times.py [--given FOLDER] [--write] [NAMES...]

Each case runs under `memest run --gpu h100-80gb`. The measured figure is the median of its
steps after the first, each to the end of its kernels. `--write` stores the estimates, writes the
table of docs/time.md and validation/step-times.md; `--page` writes what is stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import compare_scripts as scripts
import pages

from memest.estimator.hardware.pace import SPREAD, SPREAD_ELSEWHERE

DATA = scripts.RESULTS / "step_times.json"
PAGE = scripts.ROOT / "docs" / "time.md"
CASES = scripts.ROOT / "validation" / "step-times.md"
START, END = "<!-- table: scripts/compare_times.py -->", "<!-- end of the table -->"
STEADY = {"origin": "ours", "script": "field/steady.py"}
"""Script of the cases whose memory was not measured."""

LEAST_S = 0.03
"""Steps that are shorter are not counted in the summary: the host decides their time."""

NEAR = 0.25
"""Largest error of a step that counts as near."""

GROUPS = {
    "first": ("memest's authors, while they made the rules", "2026-11-25", "all rules"),
    "second": (
        "memest's authors, after that", "2026-11-25",
        "the host's times; convolutions in three dimensions",
    ),
    "third": (
        "at random: GANs, dynamic programs, factorizing optimizers", "2026-11-26",
        "the host's times; pinned copies, broadcasts, factorizations, grouped convolutions; both"
        " directions of recurrent networks; products with a short side; added rows",
    ),
    "fourth": (
        "at random: scripts of more than 2 GB", "2026-11-26",
        "indexed rows; batch norm by layout",
    ),
    "fifth": (
        "at random: text and image models; the host took 1.3 times as long", "2026-11-26",
        "recurrent networks; operators on the host",
    ),
    "sixth": (
        "written for this table: text and image models, 26 steps; the host took 1.4 times as long",
        "2026-11-27",
        "means of hosts; convolutions, images, short rows, joined tensors; pauses; checkpointing",
    ),
}  # fmt: skip
"""Scripts of each group, the day of their first comparison, and the rules that followed from it."""

BLIND = (
    "public trainings that had not been tried, on an H200",
    "2026-11-29",
    "softmax, norms, products, convolutions: more sizes and layouts; the H200",
)
"""Words of the row of blind estimates, which are never made again."""

UNSEEN = (
    "models of torchvision, timm, transformers, PyTorch Geometric, diffusers and Lightning,"
    " on an H200",
    "2026-11-29",
    "lists of tensors; strided tensors, GELU, transposed copies, batch norms, attention",
)
"""Words of the row of `field/unseen.py`: its estimates were committed before its steps ran."""

FRESH = (
    "more models of torchvision, timm and transformers, on an H200",
    "2026-11-29",
    "windows of depthwise convolutions",
)
"""Words of the row of `field/fresh.py`: its estimates were committed before its steps ran."""

RECENT = (
    "further models of torchvision, timm, transformers and PEFT, on an H200",
    "2026-11-30",
    "windows of one element, and sequences, in groups",
)
"""Words of the row of `field/recent.py`: its estimates were committed before its steps ran."""

REALISTIC = (
    "fine-tunes of the sizes that recipes use on GPUs of 80 GB, on an H200",
    "2026-11-30",
    "batches of odd products, attention, batch norms; compiled kernels that update tensors",
)
"""Words of the row of `field/realistic.py`: its estimates were committed before its steps ran."""

PUBLIC = (
    "54 further public repositories, without three whose optimizers step unevenly, on an H200",
    "2026-11-29",
    "convolutions in groups, and those of gradients of gradients",
)
"""Words of the row of short loops of public repositories, estimated before they were measured."""

FIELDS = {"estimated_s": "seconds", "first_s": "first_seconds", "bound_by": "bound_by"}
"""Fields of an estimate that are stored, and their names in the report."""

FEW_NEW = 0.1
"""Largest share of a step that first calls take where its sizes count as not new."""

CASES_HEAD = """
## Groups 1 to 6

One NVIDIA H100 80GB ran the scripts one after another, with torch 2.11. The measured figure is the
median of the steps after the first. A step has one step of each optimizer. Times are in ms, sorted
by the measured one. *bound by* names the resource without which a step is shortest: the host,
operations, or memory. A cause is named where it was examined.
"""

BLIND_HEAD = """
## Blind

Trainings of public repositories on an NVIDIA H200. Their steps were estimated before they were
measured. The misses led to new measurements of kernels, which these estimates do not have. Each was
timed by itself. Here *bound by* is by an older rule: what takes most of a step.
"""


PUBLIC_HEAD = """
## Blind, of further repositories

Short loops on a model of a public repository and random data, on an NVIDIA H200. They were
estimated before they were measured. `validation/scripts/public.json` has their memory. The measured
figure is the median of three to five steps. Each ran alone on the GPU during these steps. Some draw
their data on one thread of the host.
"""

UNSEEN_HEAD = """
## Blind, of public libraries

`validation/scripts/field/unseen.py` has these trainings. One NVIDIA H200 ran each alone: four steps
to warm up, and eleven that count. The first estimate was committed before any of them ran. The
later one, and what binds, are of the present rules. They are not blind: eleven of these trainings
were examined, and all of them decided which kinds of kernels were merged.

| case | measured, ms | estimated, ms | error | later, ms | error | bound by | cause of a miss |
|---|--:|--:|--:|--:|--:|---|---|"""


FRESH_HEAD = """
## Blind, last

`validation/scripts/field/fresh.py` has these trainings. Their estimates were committed before any
of them ran, and stay as they were. One NVIDIA H200 ran each in a process of its own: five
steps to warm up, and twelve that count. The later estimate, and what binds, are of the present
rules. They are not blind: these trainings decided which kinds of kernels were merged. The last
column is a fixed loop of Python between the steps, in microseconds: its least time and its median.
Where something else uses the core, the loop takes up to 1.8 times as long.

| case | measured, ms | estimated, ms | error | later, ms | error | bound by | cause | loop |
|---|--:|--:|--:|--:|--:|---|---|--:|"""


RECENT_HEAD = """
## Blind, recent

`validation/scripts/field/recent.py` has these trainings. Their estimates were committed before any
of them ran. One NVIDIA H200 ran each in a process of its own: five steps to warm up, and twelve
that count. Columns are those of the table above.

| case | measured, ms | estimated, ms | error | later, ms | error | bound by | cause | loop |
|---|--:|--:|--:|--:|--:|---|---|--:|"""


REALISTIC_HEAD = """
## Blind, realistic

`validation/scripts/field/realistic.py` has these fine-tunes: geometries of public models, with the
batch sizes and lengths of recipes for GPUs of 80 GB. Their estimates were committed before any of
them ran. They ran as those above, and the compiled ones were compiled before. Times are in ms. The
last two columns are the peak of `torch.cuda.max_memory_reserved`, measured and estimated, in GiB.
One further step was profiled, and `kernels_ms` of step_times.json is the total of its kernels.

| case | measured | estimated | error | later | error | bound by | cause | loop | peak | estimated |
|---|--:|--:|--:|--:|--:|---|---|--:|--:|--:|"""


def main() -> None:
    """Simulate the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--given", type=Path, help="folder of scripts that are not ours")
    parser.add_argument("--write", action="store_true", help="store the estimates, write the pages")
    parser.add_argument("--page", action="store_true", help="write the pages of what is stored")
    options = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for name in [] if options.page else options.names or list(data["cases"]):
        found = estimated(name, options.given)
        if found is not None:
            data["cases"][name] |= found
        print(name, found)
    if options.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write or options.page:
        pages.write_part(PAGE, START, END, f"\n\n{blind_summary(data)}\n\n")
        pages.write_part(CASES, START, END, f"\n\n{summary(data)}\n{cases_page(data)}\n")
    print(summary(data))


def estimated(name: str, given: Path | None) -> dict[str, Any] | None:
    """Return the estimate of a case; None if its script is not there."""
    case = scripts.read("measured")["cases"].get(name) or STEADY | {"args": [name, "12"]}
    if not scripts.is_here(case, given):
        return None
    folder = scripts.RESULTS if case["origin"] == "ours" else given
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        arguments = [argument.replace("{out}", place) for argument in case["args"]]
        command = [sys.executable, "-m", "memest", "run", "--gpu", scripts.GPU]
        command += ["--max-steps", "12", "--json", str(report), str(Path(folder, case["script"]))]
        subprocess.run([*command, *arguments], cwd=place, capture_output=True, check=False)
        times = json.loads(report.read_text(encoding="utf-8"))["times"] if report.exists() else {}
    if scripts.GPU not in times:
        return None
    time = times[scripts.GPU]
    return {name: time[key] for name, key in FIELDS.items()}


def measured_s(case: dict[str, Any]) -> float:
    """Return the median of the measured steps after the first, each with all optimizers."""
    if "median_s" in case:
        return float(case["median_s"])
    count, each = case.get("optimizers", 1), case["measured_s"]
    steps = [sum(each[i : i + count]) for i in range(count - 1, len(each) - count + 1, count)]
    return statistics.median(steps[1:] if count == 1 else steps)


def cases_page(data: Mapping[str, Any]) -> str:
    """Return the tables of validation/step-times.md that have a row for each case."""
    numbers = {name: number for number, name in enumerate(GROUPS, start=1)}
    known = {name: case for name, case in data["cases"].items() if "estimated_s" in case}
    named = {name: case | {"group": numbers[case["group"]]} for name, case in known.items()}
    tables = ((CASES_HEAD, named), (BLIND_HEAD, data["blind"]))
    lines = [line for head, cases in tables for line in case_table(head, cases)]
    lines += [*unseen_table(data["unseen"]), *fresh_table(FRESH_HEAD, data["fresh"])]
    lines += fresh_table(RECENT_HEAD, data["recent"])
    lines += fresh_table(REALISTIC_HEAD, data["realistic"])
    lines += ["", *case_table(PUBLIC_HEAD.strip("\n") + "\n", data["public"])]
    return "\n".join(lines) + "\n"


def fresh_table(head: str, cases: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of blind estimates, and of those that did not run."""
    yield head
    measured = {name: case for name, case in cases.items() if "measured_s" in case}
    for name, case in sorted(measured.items(), key=lambda row: measured_s(row[1])):
        peaks = [case[key] for key in ("measured_bytes", "estimated_bytes") if key in case]
        ends = [" to ".join(map(str, case["python_us"])), *(f"{b / 2**30:.3f}" for b in peaks)]
        yield f"{blind_row(name, case)} {' | '.join(ends)} |"
    if len(measured) < len(cases):
        yield "\nNot measured:\n"
    for name, case in cases.items():
        if name not in measured:
            why = case.get("not_measured", "not yet")
            yield f"- {name}, {1e3 * case['estimated_s']:,.1f} ms: {why}"


def unseen_table(cases: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of blind estimates and of those with later kinds."""
    yield UNSEEN_HEAD
    for name, case in sorted(cases.items(), key=lambda row: measured_s(row[1])):
        yield blind_row(name, case)


def blind_row(name: str, case: Mapping[str, Any]) -> str:
    """Return a row with a blind estimate and a later one."""
    real = measured_s(case)
    made = (
        f"{1e3 * case[key]:,.1f} | {100 * (case[key] / real - 1):+.0f} %"
        for key in ("estimated_s", "later_s")
    )
    words = f"{' | '.join(made)} | {case['bound_by']} | {case.get('cause', '')}"
    return f"| {name} | {1e3 * real:,.1f} | {words} |"


def case_table(head: str, cases: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of cases, sorted by their measured time."""
    yield head
    yield "| case | group | measured, ms | estimated, ms | error | bound by | cause of a miss |"
    yield "|---|---|--:|--:|--:|---|---|"
    for name, case in sorted(cases.items(), key=lambda row: measured_s(row[1])):
        real, made = measured_s(case), case["estimated_s"]
        times = f"{1e3 * real:,.1f} | {1e3 * made:,.1f} | {100 * (made / real - 1):+.0f} %"
        group, cause = case.get("group", "blind"), case.get("cause", "")
        yield f"| {name} | {group} | {times} | {case['bound_by']} | {cause} |"


def blind_summary(data: Mapping[str, Any]) -> str:
    """Return the Markdown table of docs/time.md: errors of the blind groups."""
    lines = ["| blind group | trainings | median error | within 25 % | inside the interval |"]
    lines.append("|---|--:|--:|--:|--:|")
    for label, key, words in (
        ("blind", "blind", BLIND),
        ("new", "unseen", UNSEEN),
        ("last", "fresh", FRESH),
        ("public", "public", PUBLIC),
        ("recent", "recent", RECENT),
        ("realistic", "realistic", REALISTIC),
    ):
        num, *errors = errors_of(longer(data[key]), SPREAD_ELSEWHERE)
        lines.append(
            f"| *{label}*: {words[0].removesuffix(', on an H200')} | {num} | {' | '.join(errors)} |"
        )
    return "\n".join([*lines, "", kernels_summary(data)])


def longer(cases: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the measured cases whose steps take more than `LEAST_S`."""
    measured = (case for case in cases.values() if {"measured_s", "median_s"} & {*case})
    return [case for case in measured if measured_s(case) > LEAST_S]


def summary(data: Mapping[str, Any]) -> str:
    """Return the Markdown table of errors by group, for steps of `LEAST_S` or more."""
    head = ("", "scripts", "chosen by", "compared", "led to times of", "median error",
            "within 25 %", "inside the interval")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|--:|--:|---|---|---|--:|--:|--:|"]
    cases = [
        case
        for case in data["cases"].values()
        if "estimated_s" in case and measured_s(case) > LEAST_S
    ]
    for number, (name, words) in enumerate(GROUPS.items(), start=1):
        num, *errors = errors_of(case for case in cases if case["group"] == name)
        lines.append(f"| {' | '.join([str(number), num, *words, *errors])} |")
    known = (case for case in cases if case["first_s"] <= FEW_NEW * case["estimated_s"])
    for name, some in (("all", cases), ("without new sizes", known)):
        num, *errors = errors_of(some)
        lines.append(f"| {name} | {' | '.join([num, '', '', '', *errors])} |")
    for label, some, words in (
        ("blind", data["blind"], BLIND),
        ("blind, new", data["unseen"], UNSEEN),
        ("the same later", later(data["unseen"]), ("", "", "")),
        ("blind, last", data["fresh"], FRESH),
        ("the same later", later(data["fresh"]), ("", "", "")),
        ("blind, public", data["public"], PUBLIC),
        ("blind, recent", data["recent"], RECENT),
        ("the same later", later(data["recent"]), ("", "", "")),
        ("blind, realistic", data["realistic"], REALISTIC),
        ("the same later", later(data["realistic"]), ("", "", "")),
    ):
        num, *errors = errors_of(longer(some), SPREAD_ELSEWHERE)
        lines.append(f"| {label} | {' | '.join([num, *words, *errors])} |")
    return "\n".join(lines)


def later(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return cases with their later estimates."""
    known = {name: case for name, case in cases.items() if "later_s" in case}
    return {name: case | {"estimated_s": case["later_s"]} for name, case in known.items()}


def kernels_summary(data: Mapping[str, Any]) -> str:
    """Return a sentence on the kernels' total: measured by validation/scripts/kernel_times.py."""
    errors = [c["estimated_s"] / c["measured_s"] - 1 for c in data["kernels"].values()]
    median = statistics.median(map(abs, errors))
    num_near = sum(abs(error) <= 0.1 for error in errors)
    return (
        "Kernels alone are closer. `validation/scripts/kernel_times.py` measures their total. In "
        f"{len(errors)} trainings\nthe median error is {100 * median:.0f} %, {num_near} are within "
        f"10 %, and the worst is {100 * max(errors, key=abs):+.0f} %."
    )


def errors_of(
    cases: Iterable[Mapping[str, Any]], spread: tuple[float, float] = SPREAD
) -> list[str]:
    """Return the number of cases, their median error, and those near and inside the interval."""
    errors, num_inside = [], 0
    for case in cases:
        ratio = measured_s(case) / case["estimated_s"]
        errors.append(abs(1 / ratio - 1))
        num_inside += spread[0] <= ratio <= spread[1]
    return [
        str(len(errors)),
        f"{100 * statistics.median(errors):.0f} %",
        str(sum(error <= NEAR for error in errors)),
        str(num_inside),
    ]


if __name__ == "__main__":
    main()
