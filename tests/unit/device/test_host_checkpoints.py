"""What a script writes and reads: stand-ins on the disk, whole tensors in memory."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from memest.estimator.gpu.timeline import KERNEL_SPREAD
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.hardware.pace import table_of
from memest.estimator.hardware.work import by_bytes
from memest.estimator.torch_api.files import checkpoints
from memest.estimator.virtual_gpu import VirtualGpu

BYTES = 4_000_256
"""1000 x 1000 float32, rounded up to 512."""

LARGE_BYTES = 16_000_000


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def weight() -> torch.Tensor:
    return torch.ones(1000, 1000, device="cuda")


def taken(gpu: VirtualGpu, make: Any) -> tuple[Any, int]:
    gpu.mode.memory.settle()
    before = gpu.allocator.allocated_bytes
    made = make()
    gpu.mode.memory.settle()
    return made, gpu.allocator.allocated_bytes - before


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_is_small_and_reads_back_at_its_size(
    gpu: VirtualGpu, tmp_path: Path, is_zip: bool
) -> None:
    path = tmp_path / "c.pt"
    torch.save({"w": weight()}, path, _use_new_zipfile_serialization=is_zip)
    assert path.stat().st_size < 4096
    loaded, num_bytes = taken(gpu, lambda: torch.load(path))
    assert loaded["w"].device == torch.device("cuda", 0)
    assert loaded["w"].stride() == (1000, 1)
    assert num_bytes == BYTES
    assert any("hold zeros" in note for note in gpu.notes)


def test_the_host_waits_for_the_copy_of_what_it_saves(gpu: VirtualGpu, tmp_path: Path) -> None:
    saved = weight()
    before = gpu.mode.timeline.host_time[0]
    torch.save({"w": saved}, tmp_path / "c.pt")

    waited = gpu.mode.timeline.host_time[0] - before
    table, copy = table_of(gpu.gpu), by_bytes("to_host_pageable", saved.nbytes)
    assert waited >= 1e6 * KERNEL_SPREAD[0] * table.kernel_s(copy)


@pytest.mark.parametrize(
    ("where", "device", "num_bytes"),
    [
        (None, "cuda", BYTES),
        ("cpu", "cpu", 0),
        ("cuda", "cuda", BYTES),
        ({"cuda:0": "cpu"}, "cpu", 0),
        (lambda storage, place: storage, "cpu", 0),
        (lambda storage, place: storage.cuda(0), "cuda", BYTES),
        ("meta", "meta", 0),
    ],
)
def test_map_location_says_where_it_goes(
    gpu: VirtualGpu, tmp_path: Path, where: Any, device: str, num_bytes: int
) -> None:
    path = tmp_path / "c.pt"
    torch.save(weight(), path)
    loaded, found = taken(gpu, lambda: torch.load(path, map_location=where))
    assert loaded.device.type == device
    assert found == num_bytes


def test_plain_torch_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with VirtualGpu(find_gpu("h100-80gb")):
        model = nn.Linear(300, 200).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 300, device="cuda")).sum().backward()
        optimizer.step()
        ids = torch.arange(5, device="cuda")
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "ids": ids}, path)
    loaded = torch.load(path, map_location="cpu")
    plain = nn.Linear(300, 200)
    plain.load_state_dict(loaded["m"])
    torch.optim.AdamW(plain.parameters()).load_state_dict(loaded["o"])
    assert loaded["ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_storage_that_two_tensors_share_is_shared_again(gpu: VirtualGpu) -> None:
    file = io.BytesIO()
    base = weight()
    torch.save({"a": base, "b": base.t()}, file)
    file.seek(0)
    loaded, num_bytes = taken(gpu, lambda: torch.load(file))
    assert num_bytes == BYTES
    assert loaded["b"].stride() == (1, 1000)


def test_a_checkpoint_of_stand_ins_by_hand_stays_one_number(
    gpu: VirtualGpu, tmp_path: Path
) -> None:
    path = tmp_path / "c.pt"
    torch.save(torch.zeros(1).expand(1000, 1000), path)
    loaded, num_bytes = taken(gpu, lambda: torch.load(path, map_location="cuda"))
    assert (loaded.stride(), num_bytes) == ((0, 0), 512)


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memest.estimator.torch_api.files.checkpoints.MAPPED_BYTES", 1 << 20)
    path = tmp_path / "c.pt"
    torch.save({"w": torch.ones(2000, 2000), "few": torch.arange(3.0)}, path)
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        loaded = torch.load(path)
        assert gpu.mode.host.num_bytes == LARGE_BYTES
        assert loaded["w"].device.type == "cpu"
        assert loaded["few"].tolist() == [0.0, 1.0, 2.0]
        with path.open("r+b") as file:  # what was read does not lie in the file
            file.write(bytes(path.stat().st_size))
        assert loaded["few"].sum() == 3


def test_copies_of_modules_and_tensors_lie_on_the_gpu(gpu: VirtualGpu) -> None:
    model = nn.Linear(1000, 1000, bias=False).cuda()
    assert taken(gpu, lambda: copy.deepcopy(model))[1] == BYTES
    assert taken(gpu, lambda: copy.deepcopy(model.weight.detach()))[1] == BYTES
    loaded, num_bytes = taken(gpu, lambda: pickle.loads(pickle.dumps(model)))
    assert num_bytes == BYTES
    assert loaded.weight.is_cuda


def test_older_safetensors_check_while_they_flatten(gpu: VirtualGpu) -> None:
    """Releases up to safetensors 0.6 check tensors so; the data are not read."""
    from safetensors.torch import save

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        seen.extend(module._tobytes(tensor, name) for name, tensor in tensors.items())

    seen: list[bytes] = []
    module: Any = ModuleType("safetensors.torch")
    vars(module).update(_tobytes=None, _flatten=flatten, save=save, save_file=None)
    header, places = checkpoints.Writer(module, gpu.mode)._header({"w": weight()}, {})

    assert seen == [b""]
    assert places == {"w": (0, weight().nbytes)}
    assert b'"w"' in header


def test_safetensors_files_are_sparse_and_come_back(gpu: VirtualGpu, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = str(tmp_path / "m.safetensors")
    save_file({"w": weight(), "few": torch.arange(3.0), "ids": torch.arange(4)}, path)
    assert os.path.getsize(path) > 4_000_000
    assert os.stat(path).st_blocks * 512 < 100_000
    loaded, num_bytes = taken(gpu, lambda: load_file(path, device="cuda"))
    assert num_bytes == BYTES + 2 * 512
    assert loaded["few"].tolist() == [0.0, 1.0, 2.0]
    with safe_open(path, "pt", device="cuda:0") as file:
        part, num_bytes = taken(gpu, lambda: file.get_slice("w")[:10])
        assert part.shape == (10, 1000)
        assert num_bytes == 40_448
    assert load_file(path)["ids"].tolist() == [0, 1, 2, 3]


def test_plain_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "m.safetensors"
    with VirtualGpu(find_gpu("h100-80gb")):
        save_file({"w": torch.ones(7, 3, device="cuda").bfloat16()}, path)
    loaded = load_file(path)
    assert loaded["w"].shape == (7, 3)
    assert loaded["w"].dtype is torch.bfloat16


def test_torch_is_as_before_afterwards() -> None:
    before = torch.save, torch.load, torch.device, torch.UntypedStorage.clone
    with VirtualGpu(find_gpu("h100-80gb")):
        assert isinstance(torch.device(0), torch.device)
        assert torch.device(0) == torch.device("cuda:0")
    assert (torch.save, torch.load, torch.device, torch.UntypedStorage.clone) == before


def test_a_copy_of_a_tensor_has_the_same_storage(gpu: VirtualGpu) -> None:
    """`copy.copy` makes a tensor over the storage, as MAML++ copies its statistics."""
    weight = nn.Parameter(torch.ones(1000, 1000, device="cuda"), requires_grad=False)
    before = torch.cuda.memory_allocated()

    copied, plain = copy.copy(weight), copy.copy(weight * 2)

    assert torch.cuda.memory_allocated() == before + BYTES
    assert type(copied) is nn.Parameter
    assert not copied.requires_grad
    assert copied.data_ptr() == weight.data_ptr()
    assert plain.is_cuda
    assert copy.copy(torch.ones(3)).tolist() == [1, 1, 1]
