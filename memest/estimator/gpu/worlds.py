"""The simulated rank, messages between simulated ranks, and child processes."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import COMMUNICATOR_BYTES, COMMUNICATOR_OF_ONE_BYTES
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import is_meta

MAX_NUMEL = 1 << 20  # elements of the largest posted tensor; larger ones are weights, not read
MASTER_PORT = 29500  # the default of `torchrun`
POLL_SECONDS = 0.002  # between two looks for the message of a running rank


class PeerEnded(UnsupportedError):
    """A rank ended before it posted a message that another rank waits for."""


class Mailbox:
    """Messages between ranks of one run, as files; a fork or a pickle of it shares the folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._counts: Counter[str] = Counter()
        self._peers: set[int] = set()
        self._expected: list[tuple[Path, int, str]] = []
        """Messages that end an operator on the GPU: their files, the other rank, the line."""

    def open(self) -> None:
        """Make the folder. This process removes it when the mailbox is freed."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="memest-ranks-"))
            weakref.finalize(self, _remove, str(self._folder), os.getpid())

    def begin_rank(self) -> None:
        """Number the messages from 0 again, as another rank begins."""
        self._counts.clear()
        self._peers.clear()
        self._expected.clear()

    def post(self, key: object, value: Any) -> None:
        """Post `value` under `key`; None if the value is not known."""
        self.open()
        path = self._next(key)
        if path.exists():
            return  # the rank runs again
        packed = _packed(value)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(packed)
        unfinished.replace(path)

    def fetch(self, key: object, source: int) -> Any:
        """Message of rank `source`, or None if the value is not known.

        Waits if `source` runs at the same time.

        Raises:
            PeerEnded: `source` has ended without that message.
        """
        if self._folder is None:
            return None
        path = self._next(key)
        if source not in self._peers and not path.exists():
            return None
        self._wait(path, source)
        with _disable_current_modes():
            return pickle.loads(path.read_bytes())

    def _wait(self, path: Path, source: int, line: str = "") -> None:
        while not path.exists():
            if self._path("ended", source).exists() and not path.exists():
                raise PeerEnded(
                    f"{line}: " * bool(line)
                    + f"rank {source} ended before it sent or took what this rank waits for",
                    hint="on GPUs this rank waits for ever, if that rank ends without an error",
                )
            time.sleep(POLL_SECONDS)

    def expect(self, key: object, source: int, line: str) -> None:
        """Expect a message of rank `source` by the end of the script, at `line`."""
        self.open()
        self._expected.append((self._next(key), source, line))

    def finish(self) -> None:
        """Wait for all expected messages; `PeerEnded` if a rank has ended without one of them."""
        for path, source, line in self._expected:
            self._wait(path, source, line)

    def meet(self, rank: int) -> None:
        """Request that `rank` runs at the same time as this one."""
        if rank not in self._peers:
            self.open()
            self._peers.add(rank)
            self._path("wanted", rank).touch()

    def requested(self) -> set[int]:
        """Ranks that some rank has requested by `meet`."""
        folder = self._folder
        names = () if folder is None else folder.glob("wanted.*")
        return {int(path.suffix[1:]) for path in names}

    def end(self, rank: int) -> None:
        """Record that `rank` has ended and will post nothing more."""
        self.open()
        self._path("ended", rank).touch()

    def _path(self, kind: str, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{kind}.{rank}"

    def _next(self, key: object) -> Path:
        assert self._folder is not None
        name = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
        number = self._counts[name]
        self._counts[name] += 1
        return self._folder / f"{name}-{number}"


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
    """The rank that this process is, real or simulated; others are assumed to do the same."""

    rank: int = 0
    world_size: int = 1
    num_local: int = 1  # GPUs of each host, one rank each
    is_launched: bool = False  # `torchrun` starts the script: even one rank can join a group
    mailbox: Mailbox = field(default_factory=Mailbox, compare=False, repr=False)
    """Messages of ranks that were run before, and of this one."""

    @property
    def may_wait(self) -> bool:
        """Return whether the time at which blocks return may depend on collectives."""
        return self.world_size > 1 or self.is_launched

    @property
    def communicator_bytes(self) -> int:
        """Bytes of NCCL per GPU for the group of all ranks, without a script's other groups."""
        if self.world_size > 1:
            return COMMUNICATOR_BYTES
        return COMMUNICATOR_OF_ONE_BYTES if self.is_launched else 0

    @property
    def local_rank(self) -> int:
        """Number of the rank among the ranks of its host."""
        return self.rank % self.num_local

    def environment(self, port: int = MASTER_PORT) -> dict[str, str]:
        """Return the variables that `torchrun` sets (`local_elastic_agent.py` of torch 2.11)."""
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


# Child processes of the script, which do not simulate, such as DataLoader workers.
#
# Tensors without data cross between processes as placeholders (`torch_api/files/checkpoints.py`).

IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""Message of `torch.cuda._lazy_init`."""


OWN_PROCESS = (
    "the script starts processes of its own (`{name}`): they have no GPU here, and what they would"
    " allocate is not in the report"
)


def install_processes(patches: Patches, note: Callable[[str], object]) -> None:
    """Let tensors without data cross between processes; note processes that may use a GPU."""
    start = BaseProcess.start

    def noted_start(self: Any) -> None:
        """Start the process."""
        target = getattr(self, "_target", None) or type(self).run
        home = str(getattr(target, "__module__", "")).partition(".")[0]
        if home not in ("torch", "multiprocessing", "concurrent"):  # workers, servers and pools
            note(OWN_PROCESS.format(name=getattr(target, "__qualname__", target)))
        start(self)

    patches.set(BaseProcess, "start", noted_start)
    pickler: Any = ForkingPickler
    reducers = pickler._extra_reducers
    changed = dict(reducers)
    for kind in (Tensor, torch.nn.Parameter):
        changed[kind] = _between_processes(reducers[kind])
    patches.set(pickler, "_extra_reducers", changed)
    from torch.utils.data._utils import collate

    collate_tensors: Any = collate.collate_tensor_fn

    def collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if is_meta(batch[0]):  # a worker would put it into shared memory
            return torch.stack(batch)
        return collate_tensors(batch, collate_fn_map=collate_fn_map)

    changed_map = {**collate.default_collate_fn_map, Tensor: collate_tensor_fn}
    patches.set(collate, "default_collate_fn_map", changed_map)


def refuse_in_child(kwargs: dict[str, Any]) -> None:
    """Raise torch's `RuntimeError` in a forked process, which has no GPU."""
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        raise RuntimeError(IN_CHILD)


_sent: deque[Any] = deque(maxlen=256)  # placeholders, kept until the receiver has started


def _between_processes(reduce: Any) -> Any:
    def reduced(tensor: Any) -> Any:
        if not is_meta(tensor):
            return reduce(tensor)
        made = tensor.detach().__reduce_ex__(2)
        _sent.append(made)
        return made

    return reduced
