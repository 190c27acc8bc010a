"""`torch.cuda.Stream`, `torch.cuda.Event` and torch's generic ones on the virtual GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memest.errors import UnsupportedError
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, resolve
from memest.estimator.device.timeline import MAIN, START, Time

PRIORITIES = (0, -3)
"""The least and the greatest, since `max_compile_time_stream_priorities` (c10/cuda/CUDAStream.h)
is 4.
"""


class CudaStream:
    """`torch.cuda.Stream` of the virtual GPU; its handle is its number, 0 the default stream."""

    session: ClassVar[CudaSimMode]

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        resolve(device)
        number = options.get("number", options.get("stream_id"))
        if number is None:
            number = self.session.timeline.new_stream(max(PRIORITIES[1], min(priority, 0)))
        self.number = number
        self.device = CARD.device
        self.priority = priority
        self.device_index, self.device_type = CARD.device.index, 1
        self.cuda_stream = self.stream_id = self.native_handle = self.number
        self._contexts: list[StreamContext] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return PRIORITIES

    def wait_stream(self, other: CudaStream) -> None:
        """Let this stream wait for the work of `other` so far."""
        timeline = self.session.timeline
        timeline.stream_waits(self.number, timeline.event(other.number))

    def wait_event(self, event: CudaEvent) -> None:
        """Let this stream wait for `event`."""
        self.session.timeline.stream_waits(self.number, event.time)

    def record_event(self, event: Any = None) -> Any:
        """Record an event on this stream."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        timeline = self.session.timeline
        timeline.host_waits(timeline.event(self.number))

    def query(self) -> bool:
        """Whether all work is done."""
        return self.session.timeline.event(self.number) <= self.session.timeline.host_time

    def is_capturing(self) -> bool:
        """Whether what runs is captured as a graph."""
        return self.session.timeline.is_capturing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __enter__(self) -> CudaStream:
        context = torch.cuda.StreamContext(self)  # type: ignore[arg-type]
        context.__enter__()  # type: ignore[no-untyped-call]
        self._contexts.append(context)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop().__exit__(*exception)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={CARD.device} cuda_stream={self.number:#x}>"


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`, of a stream that torch itself has made."""

    def __init__(self, stream_ptr: int, device: Any = None, **options: Any) -> None:
        if not 0 <= stream_ptr < self.session.timeline.num_streams:
            raise UnsupportedError(
                "a CUDA stream that torch has not made cannot be simulated",
                hint="run the script without it; see docs/run.md",
            )
        super().__init__(device, number=stream_ptr)


class CudaEvent:
    """`torch.cuda.Event` of the virtual GPU."""

    session: ClassVar[CudaSimMode]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.time: Time = START
        self.device = CARD.device
        self.cuda_event = self.event_id = 0

    def record(self, stream: CudaStream | None = None) -> None:
        """Record the work of `stream`, or of the current one, so far."""
        timeline = self.session.timeline
        self.time = timeline.event(timeline.stream if stream is None else stream.number)

    def wait(self, stream: CudaStream | None = None) -> None:
        """Let `stream`, or the current one, wait for this event."""
        timeline = self.session.timeline
        timeline.stream_waits(timeline.stream if stream is None else stream.number, self.time)

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        self.session.timeline.host_waits(self.time)

    def query(self) -> bool:
        """Whether the GPU has passed the event."""
        return self.session.timeline.has_passed(self.time)

    def elapsed_time(self, end: CudaEvent) -> float:
        """Simulated milliseconds between two events; at least a microsecond."""
        at_pace = self.session.timeline.at_pace
        return max(1e-3, (at_pace(end.time) - at_pace(self.time)) / 1e3)


class StreamContext:
    """`torch.cuda.StreamContext`; nothing happens for None."""

    session: ClassVar[CudaSimMode]

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._inside: list[Any] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            inside = self.session.timeline.on_stream(self.stream.number)
            inside.__enter__()
            self._inside.append(inside)

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self._inside.pop().__exit__(None, None, None)


class _Generic(type):
    """Of `torch.Stream` and `torch.Event`: those of the GPU are among them, and made for it."""

    of_cuda: type
    original: type

    def __call__(cls, device: Any = None, *args: Any, **options: Any) -> Any:
        where = CARD.device if device is None else resolve(device)
        if torch.device(where).type == "cuda":
            if cls.of_cuda.__name__ == "Event":
                return cls.of_cuda(*args, **options)
            return cls.of_cuda(where, *args, **options)
        return cls.original(device, *args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.of_cuda | cls.original)


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let torch's streams and events be those of `mode`."""

    def of_session(made: type, name: str) -> Any:
        return type(name, (made,), {"session": mode, "__module__": "torch.cuda"})

    tc: Any = torch.cuda
    stream, event = of_session(CudaStream, "Stream"), of_session(CudaEvent, "Event")
    context = of_session(StreamContext, "StreamContext")
    for owner in (tc, tc.streams):
        patches.set(owner, "Stream", stream)
        patches.set(owner, "Event", event)
        patches.set(owner, "ExternalStream", of_session(ExternalStream, "ExternalStream"))
    patches.set(tc, "StreamContext", context)
    patches.set(tc, "stream", context)
    for name, of_cuda in (("Stream", stream), ("Event", event)):
        original = getattr(torch, name)
        generic = _Generic(name, (), {"of_cuda": of_cuda, "original": original})
        patches.set(torch, name, generic)

    def current_stream(device: Any = None) -> Any:
        resolve(device)
        return stream(number=mode.timeline.stream)

    def default_stream(device: Any = None) -> Any:
        resolve(device)
        return stream(number=MAIN)

    def set_stream(chosen: Any) -> None:
        if chosen is not None:
            mode.timeline.switch(chosen.number)

    for owner in (tc, torch.accelerator):
        patches.set(owner, "current_stream", current_stream)
        patches.set(owner, "set_stream", set_stream)
    patches.set(tc, "default_stream", default_stream)
    patches.set(tc, "get_stream_from_external", tc.ExternalStream)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index=0: mode.timeline.stream)
