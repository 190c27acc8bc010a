"""The simulated rank among several, and messages between simulated ranks."""

import hashlib
import os
import pickle
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import COMMUNICATOR_BYTES, COMMUNICATOR_OF_ONE_BYTES

MAX_NUMEL = 1 << 20  # elements of the largest posted tensor; larger ones are weights, not read
MASTER_PORT = 29500  # the default of `torchrun`
POLL_SECONDS = 0.002  # between two looks for the message of a running rank


class PeerEnded(UnsupportedError):
    """Error: a rank waits for a message of a rank that has ended without posting it."""


class Mailbox:
    """Exchange of messages between simulated ranks, by files in a folder that all processes share.
    A `key` is any object whose `repr` is equal in all ranks, such as ("send", 0, 1, tag)."""

    def __init__(self) -> None:
        self._together: frozenset[int] = frozenset()
        self._rank = 0
        self._folder: Path | None = None
        self._counts: Counter[str] = Counter()
        self._peers: set[int] = set()
        self._expected: list[tuple[Path, int, str]] = []
        """Messages for which a GPU operator waits: their files, the other rank, the line."""

    def open(self) -> None:
        """Create the folder of messages, unless this mailbox already has one. The process that has
        created the folder removes it when the mailbox is deleted, or else when the process ends."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="memest-ranks-"))
            weakref.finalize(self, _remove, str(self._folder), os.getpid())

    def join(self, ranks: Collection[int]) -> None:
        """Declare that `ranks` are simulated at the same time, so they can wait for each other."""
        self._together = frozenset(ranks)

    def begin_rank(self, rank: int) -> None:
        """Begin to simulate `rank` from its start: count the messages of each key from 0."""
        self._rank = rank
        self._counts.clear()
        self._peers.clear()
        self._expected.clear()

    def post(self, key: object, value: Any) -> None:
        """Write `value` (None: unknown) as the next message under `key`, unless its file exists."""
        self.open()
        path = self._take_path(key)
        if not path.exists():  # else the rank runs again
            part_file = path.with_suffix(f".{os.getpid()}")
            part_file.write_bytes(_packed(value))
            part_file.replace(path)

    def fetch(self, key: object, source: int) -> Any:
        """Return the next message under `key`, from rank `source`; None if its value is unknown.

        A message that was posted is returned at once. Otherwise there are three cases:

        - This rank has called `meet(source)`. Wait until `source` posts the message or ends.
        - `source` is simulated at the same time, without a call of `meet`. Wait for the message.
          Return None if `source` ends without posting it. Return None also in a deadlock, in which
          `source` itself waits for a message that was not posted.
        - `source` is not simulated at the same time. Return None, without waiting.

        Raises:
            PeerEnded: `meet(source)` was called, and `source` has ended without the message.
        """
        if self._folder is None:
            return None
        path = self._take_path(key)
        if source in self._peers:
            self._wait(path, source)
        elif not self._is_posted_in_time(path, source):
            return None
        with _disable_current_modes():
            return pickle.loads(path.read_bytes())

    def _poll(self, path: Path, gives_up: Callable[[], bool]) -> bool:
        """Wait until the file `path` exists; return False if `gives_up()` is True before that."""
        while not path.exists():
            if gives_up() and not path.exists():
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _wait(self, path: Path, source: int, line: str = "") -> None:
        if not self._poll(path, self._state_file("ended", source).exists):
            location = f"{line}: " if line else ""
            raise PeerEnded(
                f"{location}rank {source} ended before it sent or took what this rank waits for",
                hint="on GPUs this rank waits for ever, if that rank ends without an error",
            )

    def has(self, key: object) -> bool:
        """Return whether the next message under `key` was posted."""
        return self._folder is not None and self._path_of(key).exists()

    def arrive(self, key: object, ranks: Collection[int]) -> None:
        """Wait until other ranks have called `arrive` with the same `key`. Wait only for those of
        `ranks` that are simulated at the same time as this rank. Do not wait for a rank that has
        ended."""
        if self._companions:
            self.post((key, self._rank), None)
        for peer in self._companions.intersection(ranks):
            self._is_posted_in_time(self._take_path((key, peer)), peer)

    @property
    def _companions(self) -> frozenset[int]:
        """Other ranks that are simulated at the same time as this one; empty if it runs alone."""
        is_together = self._rank in self._together
        return self._together - {self._rank} if is_together else frozenset()

    def _is_posted_in_time(self, path: Path, source: int) -> bool:
        """Return whether rank `source` posts the message file `path`. Wait for the file if `source`
        is simulated at the same time. Return False if `source` has ended without posting the file.
        Also return False in a deadlock: `source` itself is waiting for a message that was not
        posted."""
        if path.exists() or source not in self._companions:
            return path.exists()
        wait_file, peer_wait_file = (
            self._state_file("waits", self._rank),
            self._state_file("waits", source),
        )
        end_file = self._state_file("ended", source)

        def gives_up() -> bool:
            with suppress(FileNotFoundError):
                name = peer_wait_file.read_text()
                if name and not peer_wait_file.with_name(name).exists():
                    return True  # a deadlock
            return end_file.exists()

        wait_file.write_text(path.name)
        try:
            return self._poll(path, gives_up)
        finally:
            wait_file.unlink(missing_ok=True)

    def expect(self, key: object, source: int, line: str) -> None:
        """Make `finish` wait for `key` from rank `source`; errors name the script's line `line`."""
        self.open()
        self._expected.append((self._take_path(key), source, line))

    def finish(self) -> None:
        """Wait for all expected messages; `PeerEnded` if a rank has ended without one of them."""
        for path, source, line in self._expected:
            self._wait(path, source, line)

    def meet(self, rank: int) -> None:
        """Request that `rank` is simulated at the same time as this one."""
        if rank not in self._peers:
            self.open()
            self._peers.add(rank)
            self._state_file("requested", rank).touch()

    def requested(self) -> set[int]:
        """Return the ranks for which `meet` was called."""
        paths = () if self._folder is None else self._folder.glob("requested.*")
        return {int(path.suffix.removeprefix(".")) for path in paths}

    def end(self, rank: int) -> None:
        """Record that `rank` has ended and posts nothing more."""
        self.open()
        self._state_file("ended", rank).touch()

    def _state_file(self, kind: str, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{kind}.{rank}"

    def _path_of(self, key: object) -> Path:
        assert self._folder is not None
        name = _name(key)
        return self._folder / f"{name}-{self._counts[name]}"

    def _take_path(self, key: object) -> Path:
        """Return the file of the next message under `key`, and count the message."""
        path = self._path_of(key)
        self._counts[_name(key)] += 1
        return path


def _name(key: object) -> str:
    return hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()


def _packed(value: Any) -> bytes:
    with _disable_current_modes():
        if not isinstance(value, Tensor) or value.numel() <= MAX_NUMEL:
            try:
                return pickle.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
                pass  # the real run raises too, or the value is on the GPU
        return pickle.dumps(None)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Simulated rank (process of a distributed run) of `world_size`, with `num_local` per host."""

    rank: int = 0
    world_size: int = 1
    num_local: int = 1  # GPUs of each host, one rank each
    is_launched: bool = False  # `torchrun` starts the script: even one rank can join a group
    mailbox: Mailbox = field(default_factory=Mailbox, compare=False, repr=False)
    """Messages of this rank and of ranks that were simulated before."""

    @property
    def may_wait(self) -> bool:
        """True if the script can make a process group, whose collectives can delay frees."""
        return self.world_size > 1 or self.is_launched

    @property
    def communicator_bytes(self) -> int:
        """NCCL's bytes per GPU for the default group, without the script's other groups."""
        if self.world_size > 1:
            return COMMUNICATOR_BYTES
        return COMMUNICATOR_OF_ONE_BYTES if self.is_launched else 0

    @property
    def local_rank(self) -> int:
        """Number of the rank among the ranks of its host."""
        return self.rank % self.num_local

    def environment(self, port: int = MASTER_PORT) -> dict[str, str]:
        """Return torchrun's variables (`local_elastic_agent.py`); `port` is `MASTER_PORT`."""
        host, num_nodes = self.rank // self.num_local, self.world_size // self.num_local
        variables: dict[str, Any] = {
            "LOCAL_RANK": self.local_rank, "RANK": self.rank, "GROUP_RANK": host,
            "ROLE_RANK": self.rank, "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": self.num_local,
            "WORLD_SIZE": self.world_size, "GROUP_WORLD_SIZE": num_nodes,
            "ROLE_WORLD_SIZE": self.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        return {name: str(value) for name, value in variables.items()}


ALONE = Rank()  # a run on one GPU
