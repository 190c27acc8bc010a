"""The virtual GPU, as a session around a script."""

import contextlib
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, so that forked ranks share it
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memest.errors import MemestError, UnsupportedError
from memest.estimator import integrations
from memest.estimator.allocator.settings import AllocatorSettings, settings_from
from memest.estimator.allocator.statistics import CountingAllocator, allow_share
from memest.estimator.gpu import branches, processes
from memest.estimator.gpu.guesses import Guesses
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.gpu.worlds import ALONE, Rank
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import encoder, recurrent, sparse
from memest.estimator.ops.autograd_ops import CASTS, decisions_of, follow_autocast
from memest.estimator.ops.registry import Args, Kwargs, Op
from memest.estimator.tensors import placement
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import GPU, local_part, tensors_in
from memest.estimator.tensors.storages import MemKind
from memest.estimator.torch_api import saved_hooks
from memest.estimator.torch_api.attributes import constructors, host_values, moves
from memest.estimator.torch_api.cuda import driver, graphs, memory, nvml, streams
from memest.estimator.torch_api.distributed import process_group
from memest.estimator.torch_api.files import checkpoints, pretrained

GRADS_LIVE_ON = (
    "gradients live through the forward of the next step, since the script frees them after it: "
    "`zero_grad()` before the forward would give their memory to the activations"
)

ALL_ON_ONE = (
    "no rank selects its GPU, so all ranks of a host would share the memory of GPU 0; the figures "
    'are of one GPU a rank: call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first'
)


class StepLimit(SystemExit):
    """Exception by which a `VirtualGpu` ends the script after `max_steps` optimizer steps."""


class VirtualGpu:
    """Virtual GPU on which torch code runs within a `with` block; one at a time in a process.

    Args:
        gpu: the GPU to simulate.
        limit_bytes: bytes that its allocator may reserve; None: what CUDA and NCCL leave free.
        max_steps: optimizer steps after which `StepLimit` ends the script; None is unlimited.
        is_strict: True raises an error if the script reads an unknown value, such as
            `loss.item()`. False returns a guess of the value.
        roots: folders whose code counts as the script's, not as a library's.
        lines: finder of the running line of the script; None makes one with `roots`.
        rank: rank of this GPU in a run on several; `ALONE` is a run on one.
        settings: settings of the allocator; None reads the environment at the first use.
        is_immediate: True frees blocks at once; False waits for other streams that use them.
    """

    _active: "VirtualGpu | None" = None

    def __init__(
        self, gpu: Gpu, *, limit_bytes: int | None = None, max_steps: int | None = None,
        is_strict: bool = False, roots: tuple[Path, ...] = (), lines: ScriptLines | None = None,
        rank: Rank = ALONE, settings: AllocatorSettings | None = None, is_immediate: bool = False,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        self.rank = rank
        self.limit_bytes = limit_bytes
        self.max_steps = max_steps
        self.num_steps = 0
        self._has_backward = False  # a backward ran since the last step
        self._has_stepped = False  # hooks of weights took steps in the running backward
        self._optimizers: set[int] = set()  # ids of those that took part in the last counted step
        usable = gpu.limit_bytes - rank.communicator_bytes
        self.allocator = CountingAllocator(
            usable if limit_bytes is None else limit_bytes, gpu_bytes=gpu.limit_bytes
        )
        if limit_bytes is not None and limit_bytes < gpu.limit_bytes:
            self.allocator.allowed_bytes = limit_bytes
        self.allocator.use_late(lambda: self._read_settings(settings))
        lines = lines or ScriptLines(roots)
        self.guesses = Guesses(is_strict, lines.current)
        self.guesses.loops = branches.WaitingLoops(lambda: self.allocator.total_bytes)
        self.mode = CudaSimMode(gpu, self.allocator, self.guesses, lines)
        self.mode.rank = rank
        self._own_steps = OwnSteps(self.mode, self._count_own_step)
        rank.mailbox.begin_rank(rank.rank)
        self.mode.timeline.is_slow = rank.may_wait
        self.mode.memory.is_immediate = is_immediate
        self._patches = Patches()
        self._stack = contextlib.ExitStack()

    def _read_settings(self, given: AllocatorSettings | None) -> AllocatorSettings:
        settings = settings_from(os.environ) if given is None else given
        if settings.memory_fraction < 1:
            limit = self.gpu.limit_bytes if self.limit_bytes is None else self.limit_bytes
            allow_share(self.allocator, settings.memory_fraction, self.gpu.memory_bytes, limit)
        return settings

    @property
    def notes(self) -> list[str]:
        """Notes for the report, each once; warnings come first."""
        return [*self.mode.notes.warnings, *self.mode.notes.texts]

    @property
    def depends_on_time(self) -> bool:
        """True if NCCL's watchdog or the ranks' speed decides when blocks are freed."""
        storages = self.mode.memory.storages
        return bool(storages.stashed) or (self.mode.timeline.is_slow and storages.depends_on_time)

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest allocated bytes since the start; resets of torch's peaks have no effect."""
        return self.allocator.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest reserved bytes since the start; resets of torch's peaks have no effect."""
        return self.allocator.peak_reserved_bytes

    def __enter__(self) -> "VirtualGpu":
        if VirtualGpu._active is not None:
            raise MemestError("a virtual GPU is active already", hint="leave it first")
        process_group.check(self.rank)
        VirtualGpu._active = self
        try:
            self._install()
        except BaseException:
            self._close()
            raise
        return self

    def _install(self) -> None:
        GPU.device = torch.device("cuda", self.rank.local_rank)
        GPU.is_chosen = False
        GPU.num_visible = self.rank.num_local
        mode, patches = self.mode, self._patches
        devices = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # or hidden: real GPUs, not this one
        if devices is not None:
            patches.on_undo(partial(os.environ.__setitem__, "CUDA_VISIBLE_DEVICES", devices))
        for module in (
            moves, constructors, host_values, driver, streams, graphs, memory, nvml, encoder,
        ):  # fmt: skip
            module.install(patches, mode)
        follow_autocast(patches)
        placement.install_layouts(patches, mode.attribution.lines.current)
        recurrent.install(patches)
        sparse.install(patches)
        DeviceThread(self._after_backward, mode.attribution.lines.current).install(patches)
        self._own_steps.install(patches)
        mode.host.rng.install(patches)
        hooks = ImportHooks(mode.notes.add)
        hooks.install()
        self._stack.callback(hooks.remove)
        saved_hooks.install(patches, hooks, mode.work)
        branches.install(patches, hooks, mode.guesses)
        processes.install(patches, mode.notes.add, self.rank)
        for module in (checkpoints, pretrained, integrations):
            module.install(patches, mode, hooks)
        process_group.install(patches, mode, hooks, self.rank)
        patches.within(threading.Thread, "_bootstrap_inner", self.in_this_thread)
        self._install_steps()
        patches.set(torch, "clear_autocast_cache", CASTS.clear)
        for handle in mode.attribution.modules.hooks():
            self._stack.callback(handle.remove)
        self._stack.enter_context(self.in_this_thread())
        mode.memory.pace.start()

    def __exit__(self, exception_type: Any, *exception: Any) -> None:
        try:
            if exception_type is None and self._own_steps.has_written:
                self.max_steps = None  # else the end of this step may raise `StepLimit`
                self._own_steps.end()
            self.mode.memory.settle()
            self.mode.attribution.label_models()
            self.mode.memory.history.fold()
            is_given = GPU.is_chosen or "CUDA_VISIBLE_DEVICES" in os.environ
            if self.rank.local_rank and not is_given:
                self.mode.notes.warnings.append(ALL_ON_ONE)
        finally:
            self._close()

    def _close(self) -> None:
        self._stack.close()
        try:
            self._patches.undo()
        finally:  # resetting torch's compiler raises if warnings are errors
            self.mode.memory.pace.stop()
            self.mode.is_off = True
            placement.host_storages.clear()
            CASTS.clear()
            GPU.device, GPU.num_visible = torch.device("cuda", 0), 1
            VirtualGpu._active = None

    @contextlib.contextmanager
    def in_this_thread(self, *thread: Any) -> Iterator[None]:
        """Simulate the GPU for code of the current thread, within a `with` block. Each new
        `threading.Thread` runs in such a block. `Patches.within` passes the new thread as `thread`,
        which is unused."""
        with decisions_of(self.gpu), self.mode:
            yield

    @property
    def communicators_bytes(self) -> int:
        """Bytes of GPU memory of NCCL's communicators, for the process groups that were used."""
        return self.mode.works.library_bytes(self.rank)

    def _install_steps(self) -> None:
        mode = self.mode
        optimizers: dict[int, weakref.ref[Any]] = {}  # by thread; gradients of other threads differ

        def on_call(model: Any, is_new: bool) -> None:
            if is_new:
                mode.attribution.label_model(model)
            self._own_steps.end()
            if optimizers and model.training and torch.is_grad_enabled():
                reference = optimizers.pop(threading.get_ident(), None)
                optimizer = None if reference is None else reference()
                grads = [] if optimizer is None else _grads_of(optimizer)
                if any(mode.memory.id_of(grad) is not None for grad in grads):
                    mode.notes.add(GRADS_LIVE_ON)

        mode.attribution.modules.on_call = on_call

        def pre_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._own_steps.stop()
            mode.attribution.label_optimizer(optimizer, with_grads=True)
            mode.attribution.phase_given = "optimizer"
            mode.work.is_in_optimizer = True
            values = (*args, kwargs.get("closure"))
            mode.attribution.has_closure = any(a is not None and a is not optimizer for a in values)
            # A closure runs forward and backward within the step; hooks step within a backward.
            if not (mode.attribution.has_closure or self._is_part(optimizer) or _in_backward()):
                mode.memory.log.mark("before_optimizer_step")
            mode.attribution.has_started = True

        def post_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            mode.attribution.phase_given = ""
            mode.work.is_in_optimizer = False
            mode.memory.settle()
            mode.attribution.label_optimizer(optimizer, with_grads=False)
            num_params, has_backward = len(_grads_of(optimizer)), self._has_backward
            mode.work.stepped(id(optimizer), num_params, has_backward=has_backward)
            is_part, self._has_backward = self._is_part(optimizer), False
            if _in_backward():  # by a hook of each weight: one step, which ends with the backward
                self._has_stepped = True
                return
            optimizers[threading.get_ident()] = weakref.ref(optimizer)
            self._optimizers = self._optimizers | {id(optimizer)} if is_part else {id(optimizer)}
            if not is_part:
                self._count_step()

        self._stack.callback(register_optimizer_step_pre_hook(pre_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(post_step).remove)

    def _is_part(self, optimizer: Any) -> bool:
        """Return whether the step of `optimizer` belongs to the last counted step: no backward ran
        since. It is another optimizer, or another parameter group of DeepSpeed's engine."""
        is_other = bool(self._optimizers) and id(optimizer) not in self._optimizers
        return not self._has_backward and (self.mode.work.is_in_engine or is_other)

    def _count_step(self) -> None:
        """Count an optimizer step; raise `StepLimit` after `max_steps`."""
        mode = self.mode
        mode.memory.log.mark("after_optimizer_step")
        mode.guesses.stepped()
        mode.attribution.modules.forget()
        mode.memory.history.stepped()
        self.num_steps += 1
        self.rank.mailbox.arrive("optimizer step", range(self.rank.world_size))
        if self.max_steps is not None and self.num_steps >= self.max_steps:
            raise StepLimit(0)

    def _count_own_step(self) -> None:
        """Count a step of a script that trains without a torch optimizer, as `_count_step` does."""
        self.mode.memory.settle()
        self.mode.work.stepped()
        self._count_step()

    def _after_backward(self, outputs: Any) -> None:
        self._has_backward = True
        self.guesses.loops.steady.clear()
        self._own_steps.follow(outputs)
        if self._has_stepped:
            self._has_stepped = False
            self.mode.memory.settle()
            self._count_step()


class OwnSteps:
    """Finder of the optimizer steps of a script without a torch optimizer. After each step it calls
    `at_end()`.

    A leaf tensor of a backward is one that gets a gradient, such as a weight. A step begins when an
    operator writes to a leaf tensor of the last backward. The step ends before the next call of a
    model, or the next operator that autograd records. `mode` gets every operator of the script.
    Memory of the step that is alive at its end is the optimizer's state.
    """

    def __init__(self, mode: CudaSimMode, at_end: Callable[[], None]) -> None:
        self.has_written = False
        self._mode, self._at_end = mode, at_end
        self._leaves: set[int | None] = set()
        self._made = range(0)  # ids of storages from the backward to the step's last write
        self._has_optimizer = False

    def install(self, patches: Patches) -> None:
        """Observe the script's operators, by `patches`, until it creates a torch optimizer."""
        request = self._mode.request

        @patches.wrap(Optimizer, "__init__")
        def init(make: Any, *args: Any, **kwargs: Any) -> None:
            self.stop()
            make(*args, **kwargs)

        def follow(op: Op, args: Args, kwargs: Kwargs, *rest: Any) -> None:
            if self._leaves:
                self._observe(op, args, kwargs)
            request(op, args, kwargs, *rest)

        patches.set(self._mode, "request", follow)

    def stop(self) -> None:
        """Stop observing, because the script has an optimizer of torch."""
        self._has_optimizer, self.has_written = True, False
        self._leaves.clear()

    def follow(self, outputs: Any) -> None:
        """Record the leaf tensors of the backward from `outputs` that has just run."""
        if self._has_optimizer:
            return
        self._leaves.clear()
        self._made = range(len(self._mode.memory.storages.kinds), 0)
        for leaf in _leaf_tensors(outputs):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has no storage
                self._leaves.add(self._mode.memory.id_of(local_part(leaf)))
        self._leaves.discard(None)

    def end(self) -> None:
        """End the step and call `at_end`, if a step has begun."""
        if self.has_written:
            self.has_written = False
            self._leaves.clear()
            kinds = self._mode.memory.storages.kinds
            for index in filter(self._made.__contains__, self._mode.memory.live.values()):
                if kinds[index] is MemKind.ACTIVATIONS:
                    kinds[index] = MemKind.OPTIMIZER
            self._at_end()

    def _observe(self, op: Op, args: Args, kwargs: Kwargs) -> None:
        if op.is_mutable:
            target = next(tensors_in(args), None)
            if target is not None and self._mode.memory.id_of(target) in self._leaves:
                self.has_written = True
                self._made = range(self._made.start, len(self._mode.memory.storages.kinds))
        elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args)):
            self.end()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _grads_of(optimizer: Any) -> list[Any]:
    """Return the gradients of the parameters of `optimizer`, without None."""
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def _forget_in_child() -> None:
    """Turn the virtual GPU off in a forked process, such as a worker of a DataLoader."""
    if VirtualGpu._active is not None:
        VirtualGpu._active.mode.is_off = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


_WRAPPED = torch._C._functorch

_HOST_GRADIENT = "expected device cpu but got meta"  # error of input_metadata.cpp
RENUMBERED = 1 << 40  # offset of the virtual GPU's sequence numbers, which torch's do not reach


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


class DeviceThread:
    """Patch of torch's backward, with which autograd nodes run in the same order as on a GPU. This
    order decides which tensors are alive at once.

    Autograd gives each node a sequence number, and runs the node with the highest number first.
    Each thread has its own counter (`at::sequence_number`). On a GPU, a backward runs in autograd's
    device thread. So nodes that are made in a backward, as with `create_graph=True`, get numbers of
    that thread's counter. Without a GPU, a backward runs in the calling thread, and all nodes get
    numbers of one counter. The class therefore gives nodes the numbers that they have on a GPU.

    `at_end(outputs)` is called after a backward of `outputs`. `line()` returns the running line of
    the script.
    """

    def __init__(self, at_end: Callable[[Any], None], line: Callable[[], str]) -> None:
        self._at_end, self._line = at_end, line
        self._is_running = False
        self._is_mixed = False
        self._num_made = 0  # sequence numbers that the device thread assigned during backward
        self._starts = [0]
        self._skipped = [_next_number()]  # sequence numbers where stretches between backwards begin

    def install(self, patches: Patches) -> None:
        """Replace `_engine_run_backward` of torch, which runs each backward, by `_run`."""
        run = partial(self._run, torch.autograd.graph._engine_run_backward)
        patches.set_all({"_engine_run_backward": run}, torch.autograd.graph, torch.autograd)

    def _run(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of a backward of `outputs` by `engine`, torch's
        `_engine_run_backward`. Renumber the autograd nodes made during it; call `at_end`."""
        if self._is_running:  # a nested backward runs in the same thread
            return engine(outputs, *args, **kwargs)
        grad_outputs, _retains_graph, creates_graph, *_ = args
        if self._is_mixed:
            self._renumber([*outputs, *grad_outputs], RENUMBERED)
        self._is_running = True
        first_number = _next_number()
        try:
            grads = engine(outputs, *args, **kwargs)
        except RuntimeError as error:
            if _HOST_GRADIENT not in str(error):
                raise
            raise UnsupportedError(
                f"{self._line() or 'the script'}: a host tensor needs a gradient through weights"
                " on the host, which have no values",
                hint="move the layer and the tensor to the GPU",
            ) from error
        finally:
            self._is_running = False
            last_number = _next_number()
        if last_number > first_number:
            if creates_graph:
                self._is_mixed = True
                accumulates = kwargs["accumulate_grad"]
                new_grads = [leaf.grad for leaf in _leaf_tensors(outputs)] if accumulates else grads
                self._renumber(new_grads, first_number)
            self._num_made += last_number - first_number
            self._starts.append(last_number)
            self._skipped.append(self._skipped[-1] + last_number - first_number)
        self._at_end(outputs)
        return grads

    def _renumber(self, tensors: Iterable[Any], first: int) -> None:
        """Give the autograd nodes that computed `tensors` the numbers that they have on a GPU.

        On a GPU there are two counts: one of the nodes made in backwards, one of all other nodes.

        - A node with number `first` or more was made in the last backward. Its new number is its
          place in the count of nodes made in backwards.
        - A node with a lower number was made outside of backwards. Its new number is its place in
          the count of all other nodes.

        `RENUMBERED`, an offset of 2**40, is added to each new number. It marks renumbered nodes,
        since numbers of torch do not reach it. A node that is already marked keeps its number.
        """
        for node in _nodes_below(tensors, lambda node: node._sequence_nr() < RENUMBERED):
            number = node._sequence_nr()
            if number < first:
                number -= self._skipped[bisect_right(self._starts, number) - 1]
            else:
                number += self._num_made - first
            node._set_sequence_nr(number + RENUMBERED)


def _nodes_below(tensors: Iterable[Any], selects: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield each autograd node that computed `tensors`. A node for which `selects(node)` is False
    is left out, and so are nodes reached only through it."""
    todo = [node for tensor in tensors for node in _nodes(tensor)]
    seen = set()
    while todo:
        node = todo.pop()
        if node not in seen and selects(node):
            seen.add(node)
            todo += [next_node for next_node, _ in node.next_functions if next_node is not None]
            yield node


def _nodes(output: Any) -> Iterator[Any]:
    """Yield the autograd node of `output`, a tensor or `GradientEdge`. For a tensor wrapped by
    `torch.func`, also yield the node of each tensor inside."""
    if isinstance(output, torch.autograd.graph.GradientEdge):
        yield output.node
    while isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
        if not _WRAPPED.is_functorch_wrapped_tensor(output):
            return
        output = _WRAPPED.get_unwrapped(output)


def _leaf_tensors(outputs: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the leaf tensors to whose gradients a backward from `outputs` adds."""
    for node in _nodes_below(outputs, lambda node: True):
        if hasattr(node, "variable"):
            yield node.variable
