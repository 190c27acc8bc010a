"""Types of tensors as before torch 0.4, and the default type and device, on the virtual GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memest
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu

KIND = "torch.cuda.FloatTensor"


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb")) as virtual:
        yield virtual


@pytest.mark.parametrize("is_name", [True, False])
def test_the_default_type_can_be_one_of_the_gpu(gpu: VirtualGpu, is_name: bool) -> None:
    """NeRF's code sets it, and then never names a device."""
    torch.set_default_tensor_type(KIND if is_name else torch.cuda.FloatTensor)

    model = nn.Linear(3, 5)
    far = torch.Tensor([1e10]).expand(2, 1)
    x = torch.cat([torch.rand(2, 2), far], -1)
    loss = model(x).pow(2).mean()
    loss.backward()

    assert {t.device.type for t in (model.weight, far, x, loss)} == {"cuda"}
    assert torch.get_default_device().type == "cuda"
    assert torch.Tensor(2, 3).type() == torch.Tensor(torch.Size([2])).type() == KIND
    assert torch.Tensor(x).data_ptr() == x.data_ptr()
    assert torch.FloatTensor([1]).device.type == "cpu"


def test_a_dataloader_that_shuffles_fails_as_on_a_gpu(gpu: VirtualGpu) -> None:
    torch.set_default_tensor_type(KIND)
    loader = torch.utils.data.DataLoader(range(4), shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_type_can_go_back_to_the_host(gpu: VirtualGpu) -> None:
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    assert torch.zeros(1).type() == torch.Tensor(1).type() == "torch.cuda.HalfTensor"
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.zeros(1).type() == torch.Tensor(1).type() == "torch.FloatTensor"
    with pytest.raises(TypeError, match="only floating-point types"):
        torch.set_default_tensor_type(torch.cuda.LongTensor)


@pytest.mark.parametrize("kind", ["type", "device"])
def test_a_default_ends_with_the_virtual_gpu(kind: str) -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        if kind == "type":
            torch.set_default_tensor_type(KIND)
        else:
            torch.set_default_device("cuda")
        assert nn.Linear(1, 1).weight.is_cuda
    assert torch.zeros(1).device == torch.get_default_device() == torch.device("cpu")
    assert torch.Tensor([2.0]).tolist() == [2.0]


def test_constructors_take_sizes_data_and_tensors(gpu: VirtualGpu) -> None:
    x = torch.randn(2, 3, device="cuda")
    before = gpu.allocator.allocated_bytes
    held = torch.cuda.FloatTensor(600, 3).fill_(1)

    assert gpu.allocator.allocated_bytes == before + 7680
    assert held.type() == KIND
    assert torch.cuda.FloatTensor(torch.Size([2, 3])).shape == (2, 3)
    assert torch.cuda.LongTensor([2, 3]).dtype == torch.int64
    assert torch.cuda.FloatTensor().numel() == 0
    assert torch.cuda.FloatTensor(x).data_ptr() == x.data_ptr()
    with pytest.raises(TypeError, match="expected cuda"):
        torch.cuda.FloatTensor(torch.ones(2))


def test_types_are_names_and_classes(gpu: VirtualGpu) -> None:
    x = torch.randn(2, 3)
    half = x.type("torch.cuda.HalfTensor")

    assert half.type() == "torch.cuda.HalfTensor"
    assert x.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
    assert half.type(torch.FloatTensor).type() == "torch.FloatTensor"
    assert isinstance(half, torch.cuda.HalfTensor)
    assert not isinstance(half, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.FloatTensor)
    assert repr(torch.cuda.HalfTensor) == "<class 'torch.cuda.HalfTensor'>"


def test_new_is_on_the_gpu_of_its_tensor(gpu: VirtualGpu) -> None:
    x = torch.randn(2, 3, device="cuda")
    before = gpu.allocator.allocated_bytes
    held = x.new(600, 3).zero_()

    assert held.is_cuda
    assert gpu.allocator.allocated_bytes == before + 7680
    assert x.new([1.0, 2.0]).type() == KIND
    assert torch.ones(1).new(2).device.type == "cpu"


@pytest.mark.parametrize(("kind", "dtype"), [(float, torch.float64), (bool, torch.bool)])
def test_a_type_of_python_is_a_dtype(gpu: VirtualGpu, kind: type, dtype: torch.dtype) -> None:
    """`to(bool)`, as the decision transformer of CORL masks."""
    host = torch.ones(4)

    assert host.to(kind).dtype == host.cuda().to(dtype=kind).dtype == dtype
    assert host.to("cuda", kind).dtype == dtype
    assert host.to("cuda", dtype=kind).device.type == "cuda"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's own
def test_a_list_of_numbers_of_the_gpu_is_read(gpu: VirtualGpu) -> None:
    """The loss of a mip-NeRF returns `torch.Tensor(psnrs)`."""
    losses = [nn.Linear(3, 5, device="cuda").weight.sum() for _ in range(2)]

    read = torch.Tensor(losses)

    assert (read.device.type, read.shape) == ("cpu", (2,))
    assert torch.Tensor([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]


def test_a_subclass_is_made_of_numbers(gpu: VirtualGpu) -> None:
    class Points(torch.Tensor):
        pass

    assert type(Points([1, 2])) is Points
    assert Points([1, 2]).tolist() == [1, 2]


def test_a_tensor_without_names_is_renamed_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brevitas calls it. Up to torch 2.12 `rename` refuses tensors on meta."""

    def refuse(tensor: torch.Tensor, *names: Any) -> torch.Tensor:
        raise RuntimeError("NYI: named tensors only support CPU, CUDA")

    monkeypatch.setattr(torch.Tensor, "rename", refuse, raising=False)
    with memest.virtual_gpu("h100-80gb"):
        x: Any = torch.ones(4, 64, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        x.t().rename(None).sum().backward()

        assert torch.cuda.memory_allocated() - before == 64 * 4 * 4
        with pytest.raises(RuntimeError, match="named tensors"):
            x.rename("rows", "columns")
