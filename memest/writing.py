"""Atomic writes, where a file exists whole or not at all, and the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from memest.errors import PlanError


def cache_folder() -> Path:
    """Return memest's folder in the user's cache folder (`XDG_CACHE_HOME`); it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "memest")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to a temporary file in the same folder, and rename it.

    Raises:
        OSError: the file cannot be written; what was there before stays.
    """
    data = content.encode() if isinstance(content, str) else content
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user named.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise PlanError(
            f"`{path}` cannot be written: {error.strerror}", hint="name another file"
        ) from error
