"""Atomic writes, where a file exists whole or not at all, and the user's cache folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memest.errors import PlanError


def cache_folder() -> Path:
    """Return memest's folder in the user's cache folder (`XDG_CACHE_HOME`); it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "memest")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`. For a file, write a new file next to `path`, then rename it to
    `path`. If `path` is a pipe or a device, write to it directly.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        sys.stdout.flush()
        is_stdout = os.path.samestat(path.stat(), os.fstat(1))  # stdout keeps its position
        with open(1 if is_stdout else path, "ab", closefd=not is_stdout) as file:
            file.write(data)
        return
    path = path.resolve()  # keep a link
    temporary = _temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe or a device, such as `/dev/stdout`: it cannot be replaced."""
    is_descriptor = path.parent in (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
    return path.exists() and (is_descriptor or not (path.is_file() or path.is_dir()))


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")


def why_not_writable(path: Path) -> str:
    """Return the system's reason why `path` cannot be written; an empty text if it can be.

    The check makes a file next to it, since permissions are not enough (`/proc`, a full disk).
    """
    if is_stream(path):
        return "" if os.access(path, os.W_OK) else "Permission denied"
    if path.is_dir():
        return "Is a directory"
    temporary = _temporary_path(path.resolve())
    try:
        temporary.open("xb").close()
        temporary.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def writing(path: Path, hint: str) -> Iterator[None]:
    """Turn a system error in the block into a `PlanError` that names `path` and has `hint`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise PlanError(f"`{path}` cannot be written: {reason}", hint=hint) from error


def write_output(path: Path, content: str | bytes) -> None:
    """Write `content` to a file that the user named; `PlanError` if it cannot be written."""
    with writing(path, "name another file"):
        write_whole(path, content)
