"""The folder of a stand-in: it says what it is, and nothing that is not one is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memest.errors import PlanError, shown

MARKER = "STAND-IN.md"
"""What a folder of ours holds, and a real checkpoint does not."""

_HEAD = "# Not a model: a stand-in written by memest"
_FILE = "- "


@contextmanager
def stand_in_folder(folder: Path, about: str) -> Iterator[None]:
    """A folder for the files of a stand-in: emptied of an earlier one, and marked in the end.

    Args:
        about: what the marker says of the model, in Markdown.

    Raises:
        PlanError: there is something at `folder` that memest has not written, or it cannot be
            written to.
    """
    try:
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        try:
            yield
        finally:  # what was written in part is a stand-in's, too
            names = sorted(path.name for path in folder.iterdir() if path.name != MARKER)
            (folder / MARKER).write_text(_text(about, names), encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"{shown(str(folder))} cannot be written: {error.strerror or error}",
            hint="name a folder that you may write to",
        ) from error


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but a stand-in.

    Raises:
        PlanError: it does, or it is a file.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise PlanError(f"{shown(str(folder))} is a file", hint="name a folder")
    present = {path.name for path in folder.iterdir()}
    foreign = sorted(present - {MARKER, *_written(folder / MARKER)})
    if foreign:
        raise PlanError(
            f"{shown(str(folder))} holds {shown(foreign[0])}, which is not of a stand-in: "
            "nothing was written",
            hint="name a new or an empty folder",
        )


def _written(marker: Path) -> set[str]:
    """The files that `marker` lists."""
    if not marker.is_file():
        return set()
    lines = marker.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0] != _HEAD:
        return set()
    return {line.removeprefix(_FILE) for line in lines if line.startswith(_FILE)}


def _text(about: str, names: Iterable[str]) -> str:
    files = "".join(f"{_FILE}{name}\n" for name in names)
    return f"{_HEAD}\n\n{about}\n\nFiles:\n\n{files}"
