"""Devices, streams, switches and profilers of `torch.cuda` on the virtual GPU."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import MULTIPROCESSORS, find_gpu, list_gpus
from memest.estimator.ops.cudnn_library import DEVICE_PROPERTIES, device_properties
from memest.estimator.torch_api.cuda.driver import properties_of
from memest.estimator.virtual_gpu import VirtualGpu

KEYWORDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb")) as virtual:
        yield virtual


@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.memory, torch.accelerator, torch])
def test_functions_take_the_keywords_of_torch(module: Any) -> None:
    originals = {name: value for name, value in vars(module).items() if callable(value)}
    lacking = {}
    with VirtualGpu(find_gpu("a100-80gb")):
        for name, original in originals.items():
            if (function := getattr(module, name)) is original:
                continue
            try:
                keywords = inspect.signature(original).parameters
                accepted = inspect.signature(function).parameters
            except ValueError:
                continue  # a builtin without a signature
            if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
                lacking[name] = {n for n, p in keywords.items() if p.kind in KEYWORDS} - {
                    n for n, p in accepted.items() if p.kind in KEYWORDS
                }
    assert not {name: missing for name, missing in lacking.items() if missing}


def test_properties_are_those_of_the_gpu(gpu: VirtualGpu) -> None:
    found = torch.cuda.get_device_properties("cuda")

    assert found.name == torch.cuda.get_device_name(0) == "NVIDIA A100-SXM4-80GB"
    assert (found.major, found.minor) == torch.cuda.get_device_capability("cuda:0")
    assert (found.major, found.minor) == torch.cuda.get_device_capability(torch.cuda.device(0))
    assert found.L2_cache_size == 40 << 20
    assert found.shared_memory_per_block_optin == 166912
    assert "L2_cache_size=40MB" in repr(found)
    with pytest.raises(AssertionError, match="Invalid device id"):  # torch's own check
        torch.cuda.get_device_properties(1)


def test_every_gpu_of_the_catalogue_has_a_multiprocessor() -> None:
    assert {gpu.capability for gpu in list_gpus()} <= set(MULTIPROCESSORS)


@pytest.mark.parametrize("name", list(json.loads(DEVICE_PROPERTIES.read_text())))
def test_torch_and_cudnn_read_the_same_cache(name: str) -> None:
    found = device_properties(name)
    assert found is not None
    assert json.loads(found[0])["l2CacheSize"] == properties_of(find_gpu(name)).L2_cache_size


def test_devices_can_be_selected(gpu: VirtualGpu) -> None:
    held = torch.empty(1, device="cuda")
    torch.cuda.set_device("cuda:0")
    with torch.cuda.device(0), torch.cuda.device("cuda"), torch.cuda.device_of(held):
        assert torch.cuda.current_device() == 0
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


def test_the_build_is_that_of_the_wheels_for_cuda_13(gpu: VirtualGpu) -> None:
    assert "sm_80" in torch.cuda.get_arch_list()
    assert torch.cuda.is_bf16_supported(including_emulation=False)
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("installed", "cuda", "compiled", "driver"),
    [
        (None, "13.0", 13000, 13000),  # a CPU build
        ("12.6", "12.6", 12060, 13000),
        ("13.2", "13.2", 13020, 13020),
    ],
)
def test_a_build_for_cuda_keeps_its_own_version(
    installed: str | None, cuda: str, compiled: int, driver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision refuses to be imported where `torch.version.cuda` is not its own."""
    monkeypatch.setattr(torch.version, "cuda", installed)
    with VirtualGpu(find_gpu("a100-80gb")):
        assert torch.version.cuda == cuda
        assert torch._C._cuda_getCompiledVersion() == compiled
        assert torch._C._cuda_getDriverVersion() == driver
    assert torch.version.cuda == installed


def test_generic_streams_and_events_are_the_gpu_s(gpu: VirtualGpu) -> None:
    stream, event = torch.Stream(device="cuda"), torch.Event(device="cuda", enable_timing=True)
    with stream:
        event.record()
    event.synchronize()

    assert isinstance(stream, torch.cuda.Stream)
    assert isinstance(event, torch.cuda.Event)
    assert isinstance(torch.cuda.current_stream(), torch.Stream)
    assert isinstance(torch.cuda.Event(), torch.Event)
    assert torch.Stream(device="cpu").device.type == "cpu"
    assert torch.cuda.Stream.priority_range() == (0, -3)


def test_streams_of_other_libraries_are_refused(gpu: VirtualGpu) -> None:
    current = torch.cuda.current_stream()

    assert torch.cuda.ExternalStream(current.cuda_stream) == current
    with pytest.raises(UnsupportedError, match="torch has not made"):
        torch.cuda.ExternalStream(123456)


def test_a_stream_context_can_be_asked_for_by_its_class(gpu: VirtualGpu) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
    assert isinstance(torch.cuda.stream(None), torch.cuda.StreamContext)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_switches_keep_what_they_are_set_to(gpu: VirtualGpu) -> None:
    backends: Any = torch.backends
    with backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        assert backends.cudnn.benchmark
    backends.cuda.preferred_linalg_library("cusolver")
    assert "Cusolver" in str(backends.cuda.preferred_linalg_library())
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    assert any("set_sync_debug_mode" in note for note in gpu.notes)


def test_ranges_mean_nothing_and_do_no_harm(gpu: VirtualGpu) -> None:
    with torch.cuda.nvtx.range("step"), torch.autograd.profiler.emit_nvtx():
        torch.cuda.nvtx.mark("here")
    with torch.cuda.profiler.profile():
        torch.zeros(3, device="cuda")


@pytest.mark.parametrize(
    "call",
    [
        torch.cuda.current_blas_handle,
        lambda: torch.cuda.cudart().cudaMalloc(3),
    ],
)
def test_what_has_no_simulation_is_refused(gpu: VirtualGpu, call: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot be simulated"):
        call()


@pytest.mark.filterwarnings("ignore")  # as an error one of them ends torch's C++ (2.13, CPU alone)
def test_a_profiler_of_cuda_runs_and_says_that_it_has_no_kernels(
    gpu: VirtualGpu, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = nn.Linear(20, 20).cuda()
    traces: list[Path] = []

    def ready(profiler: Any) -> None:
        traces.append(tmp_path / f"{len(traces)}.json")
        profiler.export_chrome_trace(str(traces[-1]))

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert set(activities) <= torch.profiler.supported_activities()
    with profile(
        activities=activities,
        profile_memory=True,
        record_shapes=True,
        with_stack=True,
        schedule=schedule(wait=1, warmup=1, active=1, repeat=2),
        on_trace_ready=ready,
    ) as profiler:
        for _ in range(6):
            with record_function("forward"):
                model(torch.zeros(3, 20, device="cuda")).sum().backward()
            profiler.step()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=3)

    assert len(traces) == 2
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert "forward" in names
    assert "Self CPU" in table
    assert capsys.readouterr().err.count("memest: the profiler's CUDA activity") == 1
    assert any("no kernel times" in note for note in gpu.notes)
    with pytest.raises(UnsupportedError, match="memory timeline"):
        profiler.export_memory_timeline(str(tmp_path / "timeline.html"))


@pytest.mark.parametrize("options", [{"use_device": "cuda"}, {"use_cuda": True}])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_older_profiler_runs_too(gpu: VirtualGpu, options: dict[str, Any]) -> None:
    with torch.autograd.profiler.profile(profile_memory=True, **options) as profiler:
        torch.zeros(3, device="cuda") + 1

    assert "aten::add" in profiler.key_averages().table()
