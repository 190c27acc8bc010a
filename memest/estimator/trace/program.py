"""What a trace leaves: the event streams of a run, and in which order they are played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from memest.estimator.device.storages import Coverage, StorageTable


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The three sums that a probe reads off the model and the optimizer."""

    params: int
    grads: int
    optimizer: int


@dataclass(slots=True)
class MicroBatch:
    """The event streams of one micro-batch."""

    forward: list[int]
    """From the batch's arrival to the result of the closure, before `zero_grad`."""

    backward: list[int]

    release: list[int]
    """What dies when Lightning drops the result of the closure."""

    scaling: list[int] = field(default_factory=list)
    """What a loss scaler makes, after `zero_grad` and before the backward."""


@dataclass(frozen=True, slots=True)
class Played:
    """One micro-batch of a run, as it is replayed: event streams in order, and what is read."""

    forward: Sequence[int]
    zero_grad: Sequence[int]
    """With the scaling of the loss, which comes after it."""

    backward: Sequence[int]
    optimizer: Sequence[int] | None
    """None where no step of the optimizer follows."""

    release: Sequence[int]
    states: tuple[StateBytes, StateBytes, StateBytes, StateBytes]
    """Before the forward, after it, after the backward, after the optimizer's step."""

    def streams(self) -> Iterator[Sequence[int]]:
        """All events in order."""
        yield self.forward
        yield self.zero_grad
        yield self.backward
        yield self.optimizer or ()
        yield self.release


@dataclass(slots=True)
class Program:
    """Everything that replay needs: storages, event streams, and what the probes read."""

    storages: StorageTable
    setup: list[int] = field(default_factory=list)
    first: MicroBatch | None = None
    accumulating: MicroBatch | None = None
    optimizer_first: list[int] = field(default_factory=list)
    optimizer_next: list[int] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)
    """Storage ids of the gradients, in the order in which `zero_grad` frees them."""

    before: StateBytes = StateBytes(0, 0, 0)
    """Before the first forward."""

    after: StateBytes = StateBytes(0, 0, 0)
    """After the first optimizer step; nothing changes from there on."""

    coverage: Coverage = field(default_factory=Coverage)

    ranges_stay: bool = False
    """What `AddressSpace` asks; true of a rank among several GPUs."""

    num_known_steps: int | None = None
    """Steps that were traced one by one; None where the later ones repeat the second."""

    def play(self, step: int, micro: int, num_micro_batches: int) -> Played:
        """Micro-batch `micro` of `step`."""
        batch = self.accumulating if micro else self.first
        assert batch is not None
        optimizer = None
        if micro == num_micro_batches - 1:
            optimizer = self.optimizer_next if step else self.optimizer_first
        return Played(
            forward=batch.forward,
            zero_grad=[*(() if micro else (~index for index in self.grads)), *batch.scaling],
            backward=batch.backward,
            optimizer=optimizer,
            release=batch.release,
            states=self._states(step, micro),
        )

    def _states(
        self, step: int, micro: int
    ) -> tuple[StateBytes, StateBytes, StateBytes, StateBytes]:
        before, after = self.before, self.after
        made = after if step else replace(after, optimizer=before.optimizer)
        if micro:
            return made, made, made, after
        return after if step else before, replace(made, grads=0), made, after
