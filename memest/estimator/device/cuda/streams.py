"""`torch.cuda.Stream`, `torch.cuda.Event` and torch's generic ones on the virtual GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memest.errors import UnsupportedError
from memest.estimator.device.live import LiveRecorder
from memest.estimator.device.patches import Patches
from memest.estimator.device.streams import MAIN, Event, Stream
from memest.estimator.device.tensors import CARD, resolve

PRIORITIES = (0, -3)
"""The least and the greatest, since `max_compile_time_stream_priorities` (c10/cuda/CUDAStream.h)
is 4.
"""


class CudaStream(Stream):
    """`torch.cuda.Stream` of the virtual GPU; its handle is its number, 0 the default stream."""

    session: ClassVar[LiveRecorder]

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        resolve(device)
        number = options.get("number", options.get("stream_id"))
        if number is None:
            number = self.session.new_stream(max(PRIORITIES[1], min(priority, 0)))
        super().__init__(self.session, number)
        self.device = CARD.device
        self.priority = priority
        self.device_index, self.device_type = CARD.device.index, 1
        self.cuda_stream = self.stream_id = self.native_handle = self.number
        self._contexts: list[StreamContext] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return PRIORITIES

    def record_event(self, event: Any = None) -> Any:
        """A point in this stream."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done: the GPU lags."""
        return self.session.event(self.number) <= self.session._host

    def is_capturing(self) -> bool:
        """Whether what runs is captured as a graph."""
        return self.session.is_capturing

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
        if not 0 <= stream_ptr < self.session._num_streams:
            raise UnsupportedError(
                "a CUDA stream that torch has not made cannot be simulated",
                hint="run the script without it; see docs/run.md",
            )
        super().__init__(device, number=stream_ptr)


class CudaEvent(Event):
    """`torch.cuda.Event` of the virtual GPU."""

    session: ClassVar[LiveRecorder]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(self.session)
        self.device = CARD.device
        self.cuda_event = self.event_id = 0

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        return self.session.has_passed(self.time)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two by the model of time; at least a microsecond."""
        pace = self.session.is_slow
        return max(1e-3, (end.time[pace] - self.time[pace]) / 1e3)


class StreamContext:
    """`torch.cuda.StreamContext`; nothing happens for None."""

    session: ClassVar[LiveRecorder]

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._inside: list[Any] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            inside = self.session.on_stream(self.stream.number)
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


def install(patches: Patches, recorder: LiveRecorder) -> None:
    """Let torch's streams and events be those of `recorder`."""

    def of_session(made: type, name: str) -> Any:
        return type(name, (made,), {"session": recorder, "__module__": "torch.cuda"})

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
        return stream(number=recorder.stream)

    def default_stream(device: Any = None) -> Any:
        resolve(device)
        return stream(number=MAIN)

    def set_stream(chosen: Any) -> None:
        if chosen is not None:
            recorder._switch(chosen.number)

    for owner in (tc, torch.accelerator):
        patches.set(owner, "current_stream", current_stream)
        patches.set(owner, "set_stream", set_stream)
    patches.set(tc, "default_stream", default_stream)
    patches.set(tc, "get_stream_from_external", tc.ExternalStream)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index=0: recorder.stream)
