"""Keeps and restores files that a simulated script overwrites, changes or deletes."""

import builtins
import hashlib
import io
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import Any

import torch

from memest.estimator.tensors.patches import Patches, setting
from memest.writing import cache_folder

FOLDER = "MEMEST_KEPT_FILES"  # environment variable with the journal, for ranks and for workers
PREFIX = "memest-kept-"
OWN_FILES = os.path.join(tempfile.gettempdir(), "memest-")  # prefix of memest's own temporary paths
WAIT_MS = 30_000  # longest wait for another rank that moves a file
MAX_COPIED_BYTES = 1 << 28  # larger files that are changed in place are not kept


class _ThreadState(threading.local):
    is_moving = False  # True while this module itself moves files


_thread = _ThreadState()


class KeptFiles:
    """The user's files that are moved aside before a script changes them, and put back at the end.
    The folder `journal` has an entry for each file."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.not_kept: list[str] = []
        """Paths of large files that are changed in place, and of those that cannot move."""

        self._start = Path.cwd()
        self._seen: set[str] = set()
        self._made: set[str] = set()  # paths that the script created

    def opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        """Move `file` aside before `open` opens it, if it is a path and `mode` can write."""
        if not isinstance(file, int) and set("wa+") & set(mode):
            self._keep(os.path.realpath(os.fsdecode(file)), has_copy="w" not in mode)

    def opened_by_flags(
        self, path: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None
    ) -> None:
        """Move the file at `path` aside before `os.open` (same arguments), if `flags` can write."""
        fails = flags & os.O_EXCL and os.path.lexists(path)
        if flags & (os.O_WRONLY | os.O_RDWR) and not fails and dir_fd is None:
            self.opened(path, "w" if flags & os.O_TRUNC else "a")

    def removed(self, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        """Move the file at `path`, or all files in that folder, aside before a deletion. Do nothing
        with `dir_fd`, an open folder to which `path` is relative."""
        if dir_fd is None:
            for name in _files_of(path):
                self._keep(name, is_linked=True)

    def renamed(self, src: Any, dst: Any, **dir_fds: int | None) -> None:
        """Move the files at `src` and `dst` aside before a rename. Do nothing if one of `dir_fds`
        (`src_dir_fd`, `dst_dir_fd`) is not None."""
        if any(dir_fd is not None for dir_fd in dir_fds.values()):
            return
        before, after = (os.path.abspath(os.fsdecode(path)) for path in (src, dst))
        if os.path.lexists(after):
            self.removed(after)
        for name in _files_of(before):
            self._keep(name, is_linked=True)
            if name in self._made:
                self._note_made(after + name.removeprefix(before))

    def _keep(self, path: str, *, is_linked: bool = False, has_copy: bool = False) -> None:
        """Move the file at `path` aside, unless it was moved before or the script made it. With
        `is_linked` a hard link stays at `path`, with `has_copy` a copy; without both, no file."""
        own_paths = OWN_FILES, str(cache_folder())  # other processes of memest write the cache, too
        if path in self._seen or path.endswith(".pyc") or path.startswith(own_paths):
            return
        with self._lock():
            entry = self._entry(path)
            if not entry.exists():  # else another rank has moved it or created it
                self._move(path, entry, is_linked, has_copy)
        self._seen.add(path)

    def _move(self, path: str, entry: Path, is_linked: bool, has_copy: bool) -> None:
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            self._note_made(path)
            return
        if not (S_ISREG(info.st_mode) or S_ISLNK(info.st_mode)):
            return
        if has_copy and info.st_size > MAX_COPIED_BYTES:
            self.not_kept.append(path)
            return
        try:
            # on the file's file system: the start folder, or the outermost writable folder above
            folders = (p for p in (*Path(path).parents, self._start) if os.access(p, os.W_OK))
            folder = [p for p in folders if p.stat().st_dev == info.st_dev][-1]
            kept_path = folder / f".{PREFIX}{entry.name}"
            entry.write_text(json.dumps([path, str(kept_path)]), encoding="utf-8")
            if is_linked:
                try:
                    os.link(path, kept_path, follow_symlinks=False)
                except (OSError, NotImplementedError):
                    shutil.copy2(path, kept_path, follow_symlinks=False)
                return
            os.rename(path, kept_path)
            if has_copy:
                shutil.copy2(kept_path, path)
        except (OSError, IndexError):  # no folder can be written to
            entry.unlink(missing_ok=True)
            self.not_kept.append(path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold a lock against other processes in the block; after `WAIT_MS` ms, do without it."""
        lock = self.journal / "lock"
        for _ in range(WAIT_MS):
            with suppress(FileExistsError):
                lock.mkdir()
                break
            time.sleep(1e-3)
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                lock.rmdir()

    def _note_made(self, path: str) -> None:
        self._seen.add(path)
        self._made.add(path)
        self._entry(path).touch()

    def _entry(self, path: str) -> Path:
        return self.journal / hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()

    @property
    def paths(self) -> list[str]:
        """Paths of the user's files that were moved aside."""
        return sorted(path for path, _ in self._entries())

    def _entries(self) -> Iterator[tuple[str, str]]:
        for entry in self.journal.glob("[0-9a-f]*"):
            text = entry.read_text(encoding="utf-8")
            if text:  # else the entry of a file that the script made
                path, kept_path = json.loads(text)
                yield path, kept_path

    def restore(self) -> None:
        """Put all files back and remove the journal; warn of files that cannot be put back."""
        is_done = True
        for path, kept_path in self._entries():
            if not os.path.lexists(kept_path):  # already restored by an incomplete run
                continue
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.replace(kept_path, path)
            except OSError as error:
                is_done = False
                text = f"warning: `{path}` is not put back, but in `{kept_path}`"
                sys.stderr.write(f"{text}: {error.strerror or repr(error)}\n")
        if is_done:  # else the next run tries again
            shutil.rmtree(self.journal, ignore_errors=True)


def _files_of(path: Any) -> list[str]:
    name = os.path.abspath(os.fsdecode(path))
    if not os.path.isdir(name) or os.path.islink(name):
        return [name]
    return [os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files]


@contextmanager
def kept_files() -> Iterator[KeptFiles]:
    """Move the user's files aside before the block changes them, and put them back at its end. A
    block within another one moves files aside, but leaves it to the outer block to put them back.
    The outer block may be in a parent process."""
    outer = os.environ.get(FOLDER)
    if not outer and os.name == "posix":  # Windows has no test of which processes live
        for journal in _journals().glob("*"):
            if not _is_alive(int(journal.name)):  # journal of a killed run
                KeptFiles(journal).restore()
    files = KeptFiles(Path(outer) if outer else _new_journal())
    patches = Patches()
    for owner, names, hook in (
        (builtins, ("open",), files.opened), (io, ("open",), files.opened),
        (os, ("open",), files.opened_by_flags),
        (os, ("truncate",), lambda path, length: files.opened(path, "a")),
        (os, ("remove", "unlink"), files.removed), (os, ("rename", "replace"), files.renamed),
        (shutil, ("rmtree",), files.removed),
        (torch.serialization, ("save",), lambda obj, f, *args, **kwargs: files.opened(f, "w")),
    ):  # fmt: skip
        for name in names:
            patches.set(owner, name, _with_hook(hook, getattr(owner, name)))
    if not outer:
        os.environ[FOLDER] = str(files.journal)
    try:
        yield files
    finally:
        patches.undo()
        if not outer:
            del os.environ[FOLDER]
            files.restore()


def _with_hook(hook: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `function` that first calls `hook` with the same arguments."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _thread.is_moving:
            with setting(_thread, "is_moving", True), suppress(OSError, TypeError, ValueError):
                hook(*args, **kwargs)  # the call itself reports errors
        return function(*args, **kwargs)

    return call


def _new_journal() -> Path:
    """Create and return this process's journal folder, in the user's cache or a temporary one."""
    folder = _journals() / str(os.getpid())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    return folder


def _journals() -> Path:
    """Return the folder of this machine's journals; several machines may share the user's cache."""
    return cache_folder() / "kept-files" / platform.node()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
