"""Streams, events and the profiler of `torch.cuda`, for the virtual GPU."""

import sys
from typing import Any, ClassVar

import torch
from torch.autograd import profiler

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.gpu.timeline import MAIN, START, Time
from memest.estimator.tensors.patches import Patches, constant, refusing, unsupported
from memest.estimator.tensors.placement import GPU, resolve

PRIORITIES = (0, -3)  # least, greatest (`max_compile_time_stream_priorities`)


class CudaStream:
    """Replacement of `torch.cuda.Stream`. Its handle is its number, 0 for the default stream."""

    session: ClassVar[CudaSimMode]

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        resolve(device)
        number = options.get("number", options.get("stream_id"))
        if number is None:
            least, greatest = PRIORITIES
            number = self.session.timeline.new_stream(max(greatest, min(priority, least)))
        self.number = number
        self.device = GPU.device
        self.priority = priority
        self.device_index, self.device_type = GPU.device.index, 1  # `DeviceType::CUDA`
        self.cuda_stream = self.stream_id = self.native_handle = self.number
        self._contexts: list[Any] = []  # of `with` blocks that are open

    priority_range = staticmethod(constant(PRIORITIES))

    def wait_stream(self, other: "CudaStream") -> None:
        timeline = self.session.timeline
        timeline.stream_waits(self.number, timeline.event(other.number))

    def wait_event(self, event: "CudaEvent") -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.session.timeline.synchronize(self.number)

    def query(self) -> bool:
        return self.session.timeline.event(self.number) <= self.session.timeline.host_time

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, on any stream."""
        return self.session.timeline.is_capturing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __enter__(self) -> "CudaStream":
        self._contexts.append(self.session.timeline.on_stream(self.number))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop().__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={GPU.device} cuda_stream={self.number:#x}>"


class ExternalStream(CudaStream):
    """Replacement of `torch.cuda.ExternalStream`; raises if no `CudaStream` has the handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **options: Any) -> None:
        if not 0 <= stream_ptr < self.session.timeline.num_streams:
            raise unsupported("a CUDA stream that torch has not made")
        super().__init__(device, number=stream_ptr)


class CudaEvent:
    """Event of the virtual GPU, in place of `torch.cuda.Event`."""

    session: ClassVar[CudaSimMode]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.time: Time = START
        self.device = GPU.device
        self.cuda_event = self.event_id = 0

    def record(self, stream: CudaStream | None = None) -> None:
        timeline = self.session.timeline
        self.time = timeline.event(timeline.stream if stream is None else stream.number)

    def wait(self, stream: CudaStream | None = None) -> None:
        timeline = self.session.timeline
        timeline.stream_waits(timeline.stream if stream is None else stream.number, self.time)

    def synchronize(self) -> None:
        self.session.timeline.host_waits(self.time)

    def query(self) -> bool:
        timeline = self.session.timeline
        return timeline.at_pace(self.time) <= timeline.at_pace(timeline.host_time)

    def elapsed_time(self, end: "CudaEvent") -> float:
        """Return the simulated milliseconds from this event to `end`, at least 0.001."""
        at_pace = self.session.timeline.at_pace
        return max(1e-3, (at_pace(end.time) - at_pace(self.time)) / 1e3)


class StreamContext:
    """Replacement of `torch.cuda.StreamContext`: makes `stream` current; None has no effect."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


class _Generic(type):
    """Metaclass of the replacements of `torch.Stream` and `torch.Event`. Without a device, or for
    CUDA, a call makes an object of the virtual GPU, otherwise an object of torch."""

    of_cuda: type
    original: type

    def __call__(cls, device: Any = None, *args: Any, **options: Any) -> Any:
        target = GPU.device if device is None else resolve(device)
        if torch.device(target).type == "cuda":
            if cls.of_cuda.__name__ == "Event":  # which takes no device
                return cls.of_cuda(*args, **options)
            return cls.of_cuda(target, *args, **options)
        return cls.original(device, *args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.of_cuda | cls.original)


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Replace torch's streams, events and profiler by those of the virtual GPU of `mode`."""

    def of_session(base: type, name: str) -> Any:
        return type(name, (base,), {"session": mode, "__module__": "torch.cuda"})

    cuda: Any = torch.cuda
    stream, event = of_session(CudaStream, "Stream"), of_session(CudaEvent, "Event")
    external = of_session(ExternalStream, "ExternalStream")
    classes = {"Stream": stream, "Event": event, "ExternalStream": external}
    patches.set_all(classes, cuda, cuda.streams)
    context = type("StreamContext", (StreamContext,), {"__module__": "torch.cuda"})
    patches.set_all({"StreamContext": context, "stream": context}, cuda)
    for name, of_cuda in (("Stream", stream), ("Event", event)):
        original = getattr(torch, name)
        generic = _Generic(name, (), {"of_cuda": of_cuda, "original": original})
        patches.set(torch, name, generic)

    def current_stream(device: Any = None) -> Any:
        return stream(device, number=mode.timeline.stream)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            mode.timeline.switch(stream.number)

    functions = {"current_stream": current_stream, "set_stream": set_stream}
    patches.set_all(functions, cuda, getattr(torch, "accelerator", cuda))  # not in torch 2.5
    patches.set(cuda, "default_stream", lambda device=None: stream(device, number=MAIN))
    patches.set(cuda, "get_stream_from_external", cuda.ExternalStream)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index=0: mode.timeline.stream)
    _install_profiler(patches, mode)


NOTE = (
    "the profiler's CUDA activity has no kernels, no kernel times and no memory here; its CPU "
    "activity is of the simulation"
)


def _install_profiler(patches: Patches, mode: CudaSimMode) -> None:
    """Make the profiler record the CPU only, and add a note that kernels have no times."""

    @patches.wrap(profiler.profile, "__init__")
    def without_cuda(init: Any, self: Any, *args: Any, **options: Any) -> None:
        device = options.pop("use_device", None)
        if options.pop("use_cuda", False) or device == "cuda":
            is_enabled = args[0] if args else options.get("enabled", True)
            if is_enabled and NOTE not in mode.notes.texts:
                mode.notes.add(NOTE)
                sys.stderr.write(f"memest: {NOTE}\n")
            options["use_cpu"], device = True, None
        init(self, *args, use_device=device, **options)

    hint = "use `torch.cuda.memory._record_memory_history`, which torch recommends in its place"
    refused = refusing("a profiler's memory timeline", hint)
    patches.set(torch.profiler.profile, "export_memory_timeline", refused)
    supported = torch.autograd._supported_activities  # type: ignore[attr-defined]
    cuda = torch.profiler.ProfilerActivity.CUDA
    patches.set(torch.autograd, "_supported_activities", lambda: {*supported(), cuda})

    def enter(self: Any) -> Any:
        if self.enabled and self.entered:
            raise RuntimeError("NVTX annotation context manager is not reentrant")
        self.entered |= self.enabled
        return self if self.enabled else None

    patches.set(profiler.emit_nvtx, "__enter__", enter)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *exception: False)
