"""Regenerates every page, picture and notebook of docs/; names which are stale.

    python scripts/regenerate.py            # the stale ones
    python scripts/regenerate.py --check    # only name them, in a second; exit code 1 if any is
    python scripts/regenerate.py NAMES...   # these, stale or not; --all for all

validation/generated.json stores a digest of the inputs of each. Inputs are the data, the code that
writes or draws, and memest's version. Comments of the code do not count, and docstrings only if the
page prints them. The engine is not an input: its changes would mark all.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = ROOT / "validation" / "generated.json"
MEMEST = ("-m", "memest")
DRAWING = ("memest/plots/*.py", "memest/units.py", "memest/__init__.py")
SCREENSHOT = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    "--virtual-time-budget=4000",
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one command writes."""

    command: tuple[str, ...]
    """Arguments of Python; `{out}` is a temporary folder."""

    inputs: tuple[str, ...]
    """Globs below the repository."""

    outputs: tuple[str, ...]
    made: str = ""
    """File in the temporary folder that becomes the only output; a page is photographed."""

    height: int = 900
    """Height of a photographed page, pixels."""

    prints_docstrings: bool = False
    """True if the page has docstrings of the inputs, so that these count too."""


def _chart(made: str, picture: str, *arguments: str, inputs: tuple[str, ...] = ()) -> Target:
    return Target(
        command=(*MEMEST, "chart", *arguments, "--out", "{out}"), inputs=(*DRAWING, *inputs),
        outputs=(f"docs/img/{picture}.png",), made=f"{made}.png",
    )  # fmt: skip


_SUITES = "memest/validate/suites/{}.yaml"
TARGETS = {
    "accuracy": Target(
        command=("scripts/make_docs.py", "--stored"),
        inputs=("scripts/make_docs.py", "scripts/stored_predictions.py", "validation/runs/*.jsonl",
                "validation/runs/predictions.jsonl.gz", "memest/report/difference.py"),
        outputs=("docs/accuracy.md", "validation/accuracy-tables.md"),
    ),
    "plan": Target(
        command=("scripts/plan_page.py",),
        inputs=("scripts/plan_page.py", "memest/plan/*.py"), outputs=("docs/plan.md",),
        prints_docstrings=True,
    ),
    "kernels": Target(
        command=("scripts/kernels_page.py",),
        inputs=("scripts/kernels_page.py", "memest/estimator/ops/**/*.py"),
        outputs=("docs/kernels.md",), prints_docstrings=True,
    ),
    "labs": Target(
        command=("scripts/make_labs.py",),
        inputs=("scripts/make_labs.py", "scripts/lab_rows.py", "scripts/labs_page.py",
                "scripts/labs/*", "docs/labs/**/*.py", "memest/__init__.py",
                "scripts/compare_host.py", "validation/scripts/*_host.json"),
        outputs=("docs/labs.md",),
    ),
    "scripts": Target(
        command=("scripts/compare_scripts.py", "--page"),
        inputs=("scripts/scripts_page.py", "validation/scripts/measured.json"),
        outputs=("validation/scripts.md",),
    ),
    "versions": Target(
        command=("scripts/repositories_page.py",),
        inputs=("scripts/repositories_page.py", "validation/repositories.json", "pyproject.toml"),
        outputs=("docs/versions.md",),
    ),
    "matrix": Target(
        command=("scripts/matrix.py",),
        inputs=("scripts/matrix.py", "scripts/smoke.py", "tests/smoke/figures.json",
                "validation/matrix.json"),
        outputs=("docs/versions.md",),
    ),
    "rivals": Target(
        command=("scripts/compare_rivals.py", "--render"),
        inputs=("scripts/compare_rivals.py", "scripts/rivals/*.py", "validation/rivals.json"),
        outputs=("docs/rivals.md", "docs/img/rivals.png"),
    ),
    "notebook": Target(
        command=("scripts/gallery.py",),
        inputs=("scripts/gallery.py", *DRAWING, "memest/report/*.py"),
        outputs=("docs/gallery.ipynb",),
    ),
    "explorer": Target(
        command=(*MEMEST, "explore", "--suite", "lab-a100", "-o", "{out}/explorer.html"),
        inputs=("memest/report/explorer.*", "memest/estimator/search/sweep.py",
                "memest/__init__.py", _SUITES.format("lab-a100")),
        outputs=("docs/img/explorer.png",), made="explorer.html", height=889,
    ),
    "report": Target(
        command=(*MEMEST, "run", "--gpu", "t4", "--max-steps", "3", "--html", "{out}/report.html",
                 "examples/repository/train.py"),
        inputs=("memest/report/instrument.*", "memest/report/page.*", "memest/__init__.py",
                "examples/repository/*.py"),
        outputs=("docs/img/report.png",), made="report.html", height=1900,
    ),
    "lab-a100": _chart(
        "lab-a100", "lab-a100", "lab", inputs=(_SUITES.format("lab-a100"),)
    ),
    "lab-multi": _chart(
        "lab-multi", "lab-multi", "lab", "--suite", "lab-multi",
        inputs=(_SUITES.format("lab-multi"),),
    ),
    "ranks-64": _chart(
        "ranks", "ranks-64", "ranks", "validation/scripts/ranks-64.json",
        inputs=("validation/scripts/ranks-64.json",),
    ),
    "scaling": _chart(
        "scaling", "scaling-llama-3.1-8b", "scaling", "--model", "Llama-3.1-8B",
        inputs=("memest/estimator/search/many_plans.py",),
    ),
    "fragmentation": _chart(
        "fragmentation", "fragmentation", "fragmentation", "--model", "gpt2", "--loop", "plain",
        "--precision", "32-true", "--bs", "6", "--lengths", "validation/lengths.txt",
        "--gpu-memory", "9.4GiB", "--setting", "default", "--setting", "expandable_segments:True",
        inputs=("memest/estimator/search/many_plans.py", "validation/lengths.txt"),
    ),
}  # fmt: skip


def digest(target: Target) -> str:
    """Digest of a target's command and inputs."""
    found = hashlib.sha256("\0".join(target.command).encode())
    for pattern in target.inputs:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + content(path, target))
    return found.hexdigest()[:16]


def content(path: Path, target: Target) -> bytes:
    """The bytes of a file that count for `target`."""
    if path.suffix != ".py" or target.prints_docstrings:
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not is_text(part)]
    return ast.unparse(tree).encode()


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone, such as a docstring."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def stale() -> list[str]:
    """Targets whose inputs have changed since they were made, or whose files are missing."""
    stored = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {}
    return [
        name
        for name, target in TARGETS.items()
        if stored.get(name) != digest(target)
        or not all((ROOT / output).is_file() for output in target.outputs)
    ]


def make(target: Target) -> None:
    """Run a target's command and put what it made in its place."""
    with tempfile.TemporaryDirectory() as out:
        command = [part.replace("{out}", out) for part in target.command]
        tree = os.environ | {"PYTHONPATH": str(ROOT)}  # not an installed memest
        subprocess.run([sys.executable, *command], cwd=ROOT, env=tree, check=True)
        made = Path(out, target.made)
        if made.suffix == ".html":
            browser = next(filter(None, map(shutil.which, BROWSERS)))
            picture = made.with_suffix(".png")
            size = f"--window-size=1200,{target.height}"
            options = (*SCREENSHOT, size, f"--screenshot={picture}", made.as_uri())
            subprocess.run([browser, *options], check=True)
            made = picture
        if target.made:
            shutil.copyfile(made, ROOT / target.outputs[0])


def main() -> int:
    """Regenerate what is asked for; with `--check`, 1 if something is stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAMES", help=", ".join(TARGETS))
    parser.add_argument("--all", action="store_true", help="the ones that are not stale too")
    parser.add_argument("--check", action="store_true", help="only name the stale ones")
    options = parser.parse_args()
    if unknown := set(options.names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    old = stale()
    if options.check:
        print(f"stale: {', '.join(old)}" if old else "nothing is stale")
        return int(bool(old))
    for name in options.names or (TARGETS if options.all else old):
        print(f"making {name}", flush=True)
        make(TARGETS[name])
        stored = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {}
        stored[name] = digest(TARGETS[name])
        DIGESTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
