"""A script's memory now and on the base branch of its git repository."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memest.errors import MemestError
from memest.report import RunReport


@dataclass(frozen=True, slots=True)
class BothReports:
    """Reports of one script in the current folder (`now`) and on the base branch (`base`)."""

    exit_code: int  # exit code of `memest run --check` now
    now: RunReport | None  # None if the run ended without a report
    base: RunReport | None
    notes: tuple[str, ...] = ()  # reasons why there is no report of the base


def run_both(arguments: Sequence[str], base: str) -> BothReports:
    """Run `memest run` on a script in the current folder, then on its version in branch `base`.
    `arguments` are the options, the script and its arguments. The run in the current folder has the
    option `--check` too, so that it exits with 5 if the script does not fit. The run on `base` is
    left out if `base` is empty or the run before it writes no report."""
    with tempfile.TemporaryDirectory(prefix="memest-") as name:
        folder = Path(name)
        code, now = _run_memest(arguments, Path.cwd(), folder / "now.json", "--check")
        if not base or now is None:
            return BothReports(code, now, None)
        try:
            with _work_tree(base, folder / "tree") as work_tree:
                base_code, base_report = _run_memest(arguments, work_tree, folder / "base.json")
        except MemestError as error:
            return BothReports(code, now, None, (str(error),))
    notes = () if base_report else (f"the script ends with exit code {base_code} on `{base}`",)
    return BothReports(code, now, base_report, notes)


def repository() -> Path:
    """Return the root of the current folder's git repository; without one, the current folder."""
    return Path(_git("rev-parse", "--show-toplevel") or Path.cwd())


def _run_memest(
    arguments: Sequence[str], folder: Path, report: Path, *options: str
) -> tuple[int, RunReport | None]:
    command = [sys.executable, "-P", "-m", "memest", "run", *options, "--json", str(report)]
    sys.stdout.flush()
    code = subprocess.run([*command, *arguments], cwd=folder, check=False).returncode
    return code, RunReport.read(report)


@contextmanager
def _work_tree(base: str, folder: Path) -> Iterator[Path]:
    """Check `base` out into `folder` for the block; yield the current folder's path within it."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None:
        raise MemestError("git finds no repository here, so there is no base to compare with")
    verify = ("rev-parse", "--verify", "--quiet")
    commit = _git(*verify, f"origin/{base}^{{commit}}") or _git(*verify, f"{base}^{{commit}}")
    if not commit and _git("fetch", "--depth", "1", "origin", base) is not None:  # a shallow clone
        commit = _git("rev-parse", "FETCH_HEAD")
    if not commit:
        raise MemestError(f"git has no branch or commit `{base}` to compare with")
    if _git("worktree", "add", "--detach", str(folder), commit) is None:
        raise MemestError(f"git cannot check `{base}` out in a second work tree")
    try:
        yield folder / os.path.relpath(Path.cwd(), top)
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    process = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else None
