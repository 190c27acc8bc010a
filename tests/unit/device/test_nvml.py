"""NVML, through nvidia-ml-py and through torch, on the virtual GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture(params=["installed", "not installed", "broken"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGpu]:
    if request.param == "not installed":
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    elif request.param == "broken":  # as the abandoned package of the same name can be
        monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    elif "pynvml" not in sys.modules:
        pytest.skip("nvidia-ml-py is not installed")
    with VirtualGpu(find_gpu("a100-80gb")) as virtual:
        yield virtual


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a script of a shell")
def test_nvidia_smi_is_a_program_of_the_script(
    gpu: VirtualGpu, capfd: pytest.CaptureFixture[str]
) -> None:
    held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    used = str(held.nbytes + gpu.gpu.context_bytes >> 20)
    query = ["nvidia-smi", "--query-gpu=index,memory.used,fan.speed"]

    def output(words: list[str] | str, **options: bool) -> str:
        return subprocess.check_output(words, text=True, **options)

    assert output([*query, "--format=csv,noheader,nounits"]) == f"0, {used}, [N/A]\n"
    assert output(f"{shlex.join([*query, '--format=csv'])} | head -1", shell=True) == (
        "index, memory.used [MiB], fan.speed\n"
    )
    assert f"{used}MiB / 81049MiB" in output(["nvidia-smi"])
    for selected in (["-i", "0"], ["-i=0"], ["--id", "0"]):
        assert output([*query[:1], *selected, query[1], "--format=csv,noheader"]).startswith("0, ")
    assert output(["nvidia-smi", "--id=7"]) == "No devices were found\n"
    assert os.system("nvidia-smi -L") == 0
    assert capfd.readouterr().out.startswith("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-")
    assert os.waitstatus_to_exitcode(os.system(b"nvidia-smi -L > /dev/null; exit 3")) == 3
    assert os.waitstatus_to_exitcode(os.system("kill -9 $$ # nvidia-smi")) == -9


def test_nvml_tells_of_one_gpu_and_its_memory(gpu: VirtualGpu) -> None:
    import pynvml

    held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    process = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[0]
    pynvml.nvmlShutdown()

    assert pynvml.nvmlDeviceGetCount() == 1
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA A100-SXM4-80GB"
    assert tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) == (8, 0)
    assert memory.total == gpu.gpu.memory_bytes == memory.used + memory.free
    assert memory.used == gpu.gpu.context_bytes + held.numel()
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), memory.used)


def test_a_gpu_at_rest_has_nothing_to_do(gpu: VirtualGpu) -> None:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)

    assert (rates.gpu, rates.memory) == (0, 0)
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 0


def test_what_is_not_simulated_is_not_supported(gpu: VirtualGpu) -> None:
    import pynvml

    with pytest.raises(pynvml.NVMLError_NotSupported if gpu is None else pynvml.NVMLError) as found:
        pynvml.nvmlDeviceGetEnforcedPowerLimit(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert found.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlDeviceGetHandleByIndex(1)


def test_torch_asks_nvml_of_the_virtual_gpu(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    held = torch.empty(1, device="cuda")

    assert torch.cuda.device_memory_used() == gpu.gpu.context_bytes + (2 << 20)
    assert f"process {os.getpid():>10d} uses" in torch.cuda.list_gpu_processes(held.device)
    assert torch.cuda._get_nvml_device_index("cuda") == 3  # as on the machine of the script
    rest = (
        torch.cuda.utilization(), torch.cuda.memory_usage(), torch.cuda.temperature(),
        torch.cuda.power_draw(), torch.cuda.clock_rate(),
    )  # fmt: skip
    assert rest == (0, 0, 0, 0, 0)


def test_libraries_find_the_module(gpu: VirtualGpu) -> None:
    assert importlib.util.find_spec("pynvml") is not None


def test_a_library_may_keep_the_module_from_one_rank_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed's `cuda_accelerator` imports `pynvml` once and uses it in every rank."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with VirtualGpu(find_gpu("a100-80gb")):
        kept = importlib.import_module("pynvml")
    with VirtualGpu(find_gpu("h100-80gb")) as second:
        memory = kept.nvmlDeviceGetMemoryInfo(kept.nvmlDeviceGetHandleByIndex(0))

        assert memory.total == second.gpu.memory_bytes
        assert importlib.import_module("pynvml") is kept


def test_afterwards_all_is_as_it_was() -> None:
    before = sys.modules.pop("pynvml", None)
    try:
        with VirtualGpu(find_gpu("a100-80gb")):
            assert "pynvml" in sys.modules
        assert "pynvml" not in sys.modules
    finally:
        if before is not None:
            sys.modules["pynvml"] = before
    with VirtualGpu(find_gpu("a100-80gb")):
        pass
    assert before is None or before.nvmlInit.__module__ == "pynvml"


@pytest.mark.parametrize("named", ["", "-1", "3,5"])
def test_names_of_real_gpus_do_not_apply(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """DeepSpeed translates its index by the variable, and fails on an empty one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with VirtualGpu(find_gpu("a100-80gb")):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        os.environ["CUDA_VISIBLE_DEVICES"] = "2"  # as scripts do
        import pynvml

        assert pynvml.nvmlDeviceGetHandleByIndex(2) == pynvml.nvmlDeviceGetHandleByIndex(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == named
