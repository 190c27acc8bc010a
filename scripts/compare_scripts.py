"""Measured scripts on the virtual GPU: what torch.cuda said on an H100, and what it says there.

python scripts/compare_scripts.py [--given FOLDER] [--jobs N] [--write] [NAMES...]

Runs the cases of validation/scripts/measured.json under `memest run --gpu h100-80gb`, all or
those named (a `*` at the end stands for the rest), and prints how far they are off. Scripts that
are not this project's are looked for in FOLDER (validation/scripts/README.md says what it holds);
without it only our own run, and what is not there is left out. `--write` stores the
figures in validation/scripts/simulated.json and writes validation/scripts.md; `--page` writes only
the page.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import scripts_page

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "validation" / "scripts"
PAGE = ROOT / "validation" / "scripts.md"
GPU = "h100-80gb"
TIMEOUT_S = 600
MISSING = "ModuleNotFoundError"
"""Of a package that a case needs; what was simulated where it is there is kept."""

FOLDERS = {
    "given": ".",
    "teaching-on-testbeds/llm-chi": "prepared",
    "karpathy/nanoGPT": "nanoGPT",
    "pytorch/examples": "word_language_model",
}
"""Where in FOLDER the scripts of an origin lie."""

STAYS_THERE = ("teaching-on-testbeds/llm-chi", "karpathy/nanoGPT", "pytorch/examples")
"""Origins whose scripts read data beside them, so they run in their own folder."""

COMPILED = ("field-compile-*", "field-e65-selective-ckpt")
"""Cases that the installed torch compiles. The measured torch writes the measured programs."""

MEASURED = os.environ["MEMEST_TORCH"]

Case = Mapping[str, Any]


def main() -> int:
    """Run what is asked for; 1 where a case could not be run."""
    options, given = parsed(__doc__)
    cases = read("measured")["cases"]
    wanted = {} if options.page else chosen(cases, options.names, has_given=bool(given))
    absent = [name for name, case in wanted.items() if not is_here(case, given)]
    if absent:
        print(f"left out, for what they run is not in {given}: {', '.join(absent)}")
    wanted = {name: case for name, case in wanted.items() if name not in absent}
    if not metadata.version("torch").startswith(f"{MEASURED}."):
        compiled = [n for n in wanted if any(fnmatch.fnmatchcase(n, c) for c in COMPILED)]
        wanted = {name: case for name, case in wanted.items() if name not in compiled}
        if compiled:
            print(f"left out, for they need torch {MEASURED}: {', '.join(compiled)}")
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda item: (item[0], simulate(item[1], given)), wanted.items())
        done = {}
        for name, figures in runs:
            done[name] = figures
            if options.write and MISSING not in figures["error"]:
                keep({name: figures})
            print(scripts_page.line_of(name, cases[name], figures), flush=True)
    if options.write or options.page:
        PAGE.write_text(page(), encoding="utf-8")
    return int(any(figures["status"] == "failed" for figures in done.values()))


def parsed(doc: str) -> tuple[argparse.Namespace, Path | None]:
    """The options of the command line, and the folder of scripts that are not ours."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--given", type=Path, help="the folder of scripts that are not ours")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--write", action="store_true", help="keep the figures, write the page")
    parser.add_argument("--page", action="store_true", help="write the page of what is kept")
    options = parser.parse_args()
    return options, options.given and options.given.resolve()


def read(name: str) -> dict[str, Any]:
    """A file of validation/scripts/."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def page() -> str:
    """The text of validation/scripts.md, of what is kept."""
    return scripts_page.page_of(read("measured"), read("simulated"), read("misses"), read("public"))


def chosen(cases: Mapping[str, Case], names: Iterable[str], *, has_given: bool) -> dict[str, Case]:
    """The cases of those names that can run here."""
    names = list(names) or ["*"]
    return {
        name: case
        for name, case in cases.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        and (has_given or case["origin"] == "ours")
    }


def is_here(case: Case, given: Path | None) -> bool:
    """Whether FOLDER, or this repository, holds what the case runs."""
    if given is None or case["origin"] == "ours":
        return True
    needs = [given / "prepared"] if any("{prepared}" in arg for arg in case["args"]) else []
    if case["origin"] != "litgpt":
        needs.append(given / FOLDERS.get(case["origin"], ".") / case["script"])
    return all(path.exists() for path in needs)


def simulate(case: Case, given: Path | None = None) -> dict[str, Any]:
    """What torch.cuda says of a case on the virtual GPU, as `watch.py` writes it, and the cost."""
    with tempfile.TemporaryDirectory() as folder:
        out, report = Path(folder, "figures.json"), Path(folder, "report.json")
        command = [sys.executable, "-m", "memest", "run", "--gpu", GPU, "--json", str(report)]
        command += [str(RESULTS / "watch.py"), "--out", str(out), *watched(case, given, folder)]
        done = run(command, case, given, folder)
        if not out.is_file():
            return {"status": "failed", "error": done.stderr[-400:], "steps": []}
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        figures.pop("torch")
        figures.pop("gpu")
        if report.is_file():
            told = json.loads(report.read_text(encoding="utf-8"))
            figures["unmodelled"] = told["coverage"]["unmodelled"]
        return figures


def run(
    command: Sequence[str], case: Case, given: Path | None, folder: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on a case, in `folder` or where its script has to stay."""
    stays = given is not None and case["origin"] in STAYS_THERE
    return subprocess.run(
        command,
        cwd=given / FOLDERS[case["origin"]] if given and stays else folder,
        env={**environment(case, given), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def watched(case: Case, given: Path | None, out: str) -> list[str]:
    """The arguments of `watch.py`."""
    places = {"out": out, "prepared": str(given / "prepared") if given else ""}
    args = [_placed(arg, places) for arg in case["args"]]
    limit = ["--limit", str(case["limit_gib"])] if "limit_gib" in case else []
    if case["origin"] == "litgpt":
        return [*limit, "-m", "litgpt", *args]
    folder = RESULTS if given is None or case["origin"] == "ours" else given
    return [*limit, str(folder / FOLDERS.get(case["origin"], ".") / case["script"]), *args]


def _placed(arg: str, places: Mapping[str, str]) -> str:
    for name, path in places.items():
        arg = arg.replace(f"{{{name}}}", path)
    return arg


def environment(case: Case, given: Path | None) -> dict[str, str]:
    """Offline, with the checkout and what the case sets, such as `PYTORCH_CUDA_ALLOC_CONF`; for the
    lab's script with the stand-ins of FOLDER.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if given is not None and FOLDERS.get(case["origin"]) == "prepared":
        paths.append(str(given / "prepared" / "stubs"))
    return {
        **os.environ,
        **case.get("env", {}),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "TOKENIZERS_PARALLELISM": "false",
    }


def keep(done: Mapping[str, Mapping[str, Any]], of: str = "") -> None:
    """Put simulated figures into simulated.json, in the order of measured.json.

    With `of`, such as `_ranks`, the files are simulated_ranks.json and measured_ranks.json.
    """
    path = RESULTS / f"simulated{of}.json"
    kept = read(path.stem)["cases"] if path.is_file() else {}
    kept |= done
    rows = [
        f"  {json.dumps(name)}: {json.dumps(kept[name])}"
        for name in read(f"measured{of}")["cases"]
        if name in kept
    ]
    path.write_text('{\n "cases": {\n' + ",\n".join(rows) + "\n }\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
