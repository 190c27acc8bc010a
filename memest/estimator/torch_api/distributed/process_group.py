"""`torch.distributed` of one rank: groups of torch's `fake` backend, without communication."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.gpu.pending import DoneWork
from memest.estimator.gpu.worlds import Rank
from memest.estimator.tensors.patches import Patches, setting
from memest.estimator.tensors.placement import GPU
from memest.estimator.torch_api.distributed import ddp, fsdp

FAKE = "fake"  # torch's own backend without communication
NCCL_VERSION = (2, 28, 9)  # torch 2.11 for CUDA 13 (`.ci/docker/ci_commit_pins/nccl.txt`)


class _DistributedFunctions:
    """Replacements of functions of `torch.distributed`, by their names, for one simulated rank.
    Groups have torch's backend `fake`, but report the backend that the script requested. An object
    that this rank gets from another rank, as by `all_gather_object`, is assumed to equal this
    rank's own. An exception is an object that another simulated rank has sent, broadcast or
    scattered. Simulated ranks exchange such objects through files, the mailbox
    (`gpu/worlds.py`)."""

    def __init__(self, mode: CudaSimMode, rank: Rank) -> None:
        self._mode, self._works, self._rank, self._mailbox = mode, mode.works, rank, rank.mailbox
        self._true_init: Any = c10d.init_process_group
        self._true_new_group, self._true_backend = c10d.new_group, c10d.get_backend
        self._true_batch = c10d.batch_isend_irecv
        self._backend_by_group: dict[int, str] = {}
        self._default = "nccl"
        self._store: Any = None  # store of the default group, kept alive for its C++ object
        self._barrier_tensors: list[Tensor] = []

    def init_process_group(
        self, backend: str | None = None, init_method: str | None = None, timeout: Any = None,
        world_size: int = -1, rank: int = -1, store: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        import_module("torch.testing._internal.distributed.fake_pg")  # registers `FAKE`

        this_rank = self._rank
        size = world_size if world_size >= 0 else int(os.environ.get("WORLD_SIZE") or 1)
        number = rank if rank >= 0 else int(os.environ.get("RANK") or 0)
        if (size, number) != (this_rank.world_size, this_rank.rank):
            raise UnsupportedError(
                f"`init_process_group` is called for rank {number} of {size}, and this is rank"
                f" {this_rank.rank} of {this_rank.world_size}",
                hint=f"simulate as many: `memest run --nproc-per-node {size} ...`",
            )
        self._works.is_eager = kwargs.get("device_id") is not None
        self._store = Store(this_rank, self._mode.attribution.lines.current)
        self._true_init(backend=FAKE, rank=this_rank.rank, world_size=size, store=self._store)
        self._default = self._record(c10d._get_default_group(), backend)
        self._mailbox.arrive("init_process_group", range(size))

    def new_group(
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        kwargs.pop("device_id", None)
        group = self._true_new_group(ranks, None, FAKE, None, *args, **kwargs)
        self._record(group, backend)
        return group

    def get_backend(self, group: Any = None) -> Any:
        name = self._backend_by_group.get(id(group or c10d._get_default_group()))
        return name or self._true_backend(group)

    def _record(self, group: Any, backend: Any) -> str:
        """Record and return the name of `backend`, which `group` reports; None is the default
        group's backend. If `init_process_group` got a `device_id`, create NCCL's communicator
        immediately (`eager_connect_single_device`)."""
        name = str(backend or self._default).lower()
        if "nccl" in name or name == FAKE:  # also "cpu:gloo,cuda:nccl"
            name = "nccl"
        self._backend_by_group[id(group)] = name
        if self._works.is_eager and name == "nccl" and isinstance(group, dist.ProcessGroup):
            self._works.create(group)
        return name

    def batch_isend_irecv(self, operations: Any) -> Any:
        with setting(self._works, "is_batch", True):
            return self._true_batch(operations)

    def is_nccl_available(self) -> bool:
        return True

    def barrier(self, group: Any = None, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        """Sum a tensor of one element and make the host wait, as NCCL's barrier does. Return a
        finished `Work` if `async_op`, else None. Simulated ranks wait here for each other, so that
        each finds the files that others wrote before. The tensor is freed at the next barrier
        (`ProcessGroup::barrier` in ProcessGroup.hpp, `ProcessGroupNCCL::barrier`, torch 2.11)."""
        group = group or c10d._get_default_group()
        self._works.communicate(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        self._mailbox.arrive(("barrier", ranks), ranks)
        self._barrier_tensors[:] = [torch.empty(1, dtype=torch.uint8, device=GPU.device)]
        torch.zeros(1, device=GPU.device)
        self._mode.timeline.synchronize()
        return DoneWork() if async_op else None

    monitored_barrier = barrier

    def _broadcast_object(self, obj: Any, src: Any, group: Any, group_src: Any) -> Any:
        """On rank `src`, post the object `obj` and return it. On other ranks return what rank
        `src` posted, or None if it posted nothing. `src` None is rank 0; `group_src`, the number of
        a rank in `group`, replaces `src` unless it is None."""
        if group_src is not None:
            src = dist.get_global_rank(group or c10d._get_default_group(), group_src)
        key = ("objects", tuple(dist.get_process_group_ranks(group)), src)
        if self._rank.rank == (src or 0):
            self._mailbox.post(key, obj)
            return obj
        return self._mailbox.fetch(key, src or 0)

    def broadcast_object_list(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None,
        group_src: Any = None,
    ) -> None:  # fmt: skip
        posted = self._broadcast_object(object_list, src, group, group_src)
        if posted is not None:
            object_list[:] = posted

    def all_gather_object(self, object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * dist.get_world_size(group)

    def gather_object(
        self, obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None,
        group_dst: Any = None,
    ) -> None:  # fmt: skip
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * dist.get_world_size(group)

    def scatter_object_list(
        self, scatter_object_output_list: Any, scatter_object_input_list: Any = None,
        src: Any = None, group: Any = None, group_src: Any = None,
    ) -> None:  # fmt: skip
        objects = self._broadcast_object(scatter_object_input_list, src, group, group_src)
        if not objects:
            raise UnsupportedError(
                f"rank {self._rank.rank} waits for an object that another rank has",
                hint="give every rank the list, or simulate the rank that sends it",
            )
        scatter_object_output_list[0] = objects[dist.get_rank(group)]

    def _peer(self, name: str, rank: Any, group: Any, group_rank: Any, is_batch: bool) -> int:
        """Record a message to or from another rank, and simulate that rank up to the message.
        Return the other rank's global number. `name` is "send" or "recv". `rank` is the other
        rank's global number, or None if `group_rank`, its number in `group`, is given. `is_batch`
        is True for a message sent as in `batch_isend_irecv`. Such a message uses the communicator
        of the group, not one for the pair of ranks."""
        group = group or c10d._get_default_group()
        if group_rank is None:
            group_rank = dist.get_group_rank(group, rank)
        rank = dist.get_global_rank(group, group_rank)
        with setting(self._works, "is_batch", is_batch):
            self._works.communicate(group, name, group_rank)
        self._mailbox.meet(rank)
        return int(rank)

    def send_object_list(
        self, object_list: Any, dst: Any = None, group: Any = None, device: Any = None,
        group_dst: Any = None, use_batch: bool = False,
    ) -> None:  # fmt: skip
        target = self._peer("send", dst, group, group_dst, use_batch)
        self._mailbox.post(("object", self._rank.rank, target), object_list)

    def recv_object_list(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None,
        group_src: Any = None, use_batch: bool = False,
    ) -> int:  # fmt: skip
        if src is None and group_src is None:
            raise UnsupportedError(
                "`recv_object_list` from any rank: which one sends first is not known",
                hint="name the rank: `recv_object_list(object_list, src=...)`",
            )
        source = self._peer("recv", src, group, group_src, use_batch)
        received = self._mailbox.fetch(("object", source, self._rank.rank), source)
        if received is None:
            raise UnsupportedError(f"rank {source} sent an object that cannot be pickled", hint="")
        object_list[:] = received
        return source


def check(rank: Rank) -> None:
    """Raise `UnsupportedError` if `rank` is one of several ranks and this process is in a process
    group already. A simulated rank has to join its group itself (`init_process_group`)."""
    if rank.world_size > 1 and dist.is_available() and dist.is_initialized():
        raise UnsupportedError(
            "this process belongs to a group of `torch.distributed` already",
            hint="predict in a process of its own, or before `init_process_group`",
        )


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks, rank: Rank) -> None:
    """Replace functions of `torch.distributed`, so that the script runs as `rank` of a process
    group. `hooks` patches DTensor, FSDP and checkpoints when they are imported."""
    if not dist.is_available():
        return
    was_initialized = dist.is_initialized()
    mode.works.install(patches)
    patches.set(sys, "excepthook", sys.excepthook)  # `init_process_group` replaces it

    functions = _DistributedFunctions(mode, rank)
    for name in [name for name in vars(_DistributedFunctions) if not name.startswith("_")]:
        # libraries read the signature, such as DeepSpeed for `device_id`
        function = wraps(getattr(c10d, name))(partial(getattr(functions, name)))
        for owner in (c10d, dist, device_mesh):  # a mesh may call `init_process_group`
            if hasattr(owner, name):
                patches.set(owner, name, function)
    patches.set(torch.cuda.nccl, "version", lambda: NCCL_VERSION)
    if not was_initialized:
        patches.on_undo(_leave)
    ddp.install(patches, mode)
    hooks.after("torch.distributed.tensor", lambda module: fsdp.install_dtensors(patches, mode))
    hooks.after("torch.distributed.fsdp", lambda module: fsdp.install(patches, mode))
    if rank.world_size > 1:
        planner = "torch.distributed.checkpoint.default_planner"
        hooks.after(planner, partial(_accept_plans, patches))


def _accept_plans(patches: Patches, planner: Any) -> None:
    """Make distributed checkpoints valid although all simulated ranks have the same shards.
    `planner` is torch's module of that name. Only rank 0 writes; torch's `dedup_save_plans` would
    spread equal shards over the ranks."""

    def empty_all_but_first(plans: list[Any], *args: Any) -> list[Any]:
        return [plans[0], *(replace(plan, items=[]) for plan in plans[1:])]

    accepted = planner._validate_global_plan([], planner.Metadata({}))  # True, or no errors
    patches.set(planner, "_validate_global_plan", lambda plan, metadata: accepted)
    patches.set(planner, "dedup_save_plans", empty_all_but_first)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Store(c10d.Store):
    """Key-value store of the default group, with what this rank (`rank`) and rank 0 have set.
    `line()` returns the running line of the script, for errors."""

    def __init__(self, rank: Rank, line: Callable[[], str]) -> None:
        super().__init__()
        self._mailbox = rank.mailbox
        self._line = line
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._mailbox.post(("store", key), self._values[key])

    def get(self, key: str) -> bytes:
        """Return the value of `key`. Raise `UnsupportedError` if neither this rank nor rank 0 has
        set it so far."""
        value = self._values.get(key)
        if value is None:
            value = self._mailbox.fetch(("store", key), 0)
        if value is None:
            raise UnsupportedError(
                f"{self._line()}: this rank waits for `{key.rpartition('/')[2]}` of the store,"
                " which no rank has set",
                hint="simulate without it: a rank finds what the first one has set",
            )
        self._values[key] = value
        return value

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Raise `UnsupportedError` unless all `keys` are set, since no rank sets them later."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values or self._mailbox.has(("store", key)) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, as if there were no other rank; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total
