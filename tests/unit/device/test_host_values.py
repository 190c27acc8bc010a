"""Which tensors of the host have values: the script's own data; not weights, nor what is huge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import memest
from memest.errors import UnsupportedError
from memest.estimator import versions
from memest.estimator.gpu import host
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.tensors import placement
from memest.estimator.tensors.placement import Place
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def test_masks_of_a_large_batch_have_their_values(gpu: VirtualGpu) -> None:
    labels = torch.ones(512, 1024, dtype=torch.long)
    mask = torch.bernoulli(torch.full((512, 1024), 0.15)).bool()
    labels[~mask] = -100
    assert (labels == 1).sum().item() == mask.sum().item()
    assert mask.nonzero().shape[0] == mask.sum().item()
    assert abs(mask.float().mean().item() - 0.15) < 0.01


def test_preprocessing_of_large_arrays_is_real(gpu: VirtualGpu) -> None:
    images = torch.from_numpy(np.full((700, 28, 28), 51, dtype=np.uint8)).float() / 255
    assert math.isclose(images.mean().item(), 0.2, abs_tol=1e-6)
    assert math.isclose(float(images.numpy()[3, 2, 1]), 0.2, abs_tol=1e-6)
    points = torch.randn(20000, 16)
    nearest = torch.cdist(points, points[:8]).argmin(1)
    assert torch.bincount(nearest, minlength=8).sum().item() == 20000
    assert torch.equal(nearest[:8], torch.arange(8))


def test_a_tensor_above_the_bounds_has_no_data(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MAX_NOISE_BYTES", 1 << 20)
    monkeypatch.setattr(host, "REAL_BYTES", 5 << 20)
    place = gpu.mode.host.place
    assert place(torch.randn(2 << 18)) is Place.HOST
    kept = [torch.zeros(1 << 20) for _ in range(2)]  # 4 MiB each
    assert [place(tensor) for tensor in kept] == [Place.REAL, Place.HOST]
    kept.clear()
    assert place(torch.zeros(1 << 20)) is Place.REAL


def test_a_shape_without_a_bound_is_never_guessed(gpu: VirtualGpu) -> None:
    weight = nn.Linear(30, 20).weight.detach()
    assert (weight > 0).nonzero().shape == (600, 2)
    with pytest.raises(UnsupportedError, match="shape depends on values") as caught:
        weight[0].long().bincount()
    assert "has no values there" in caught.value.hint


def test_masks_of_the_script_pick_from_tensors_without_data(gpu: VirtualGpu) -> None:
    weight = nn.Linear(30, 20).weight.detach()
    rows = torch.arange(20) % 4 == 0
    assert weight[rows].shape == (5, 30)
    assert torch.masked_select(weight[:, 0], rows).shape == (5,)
    weight[rows] = 0.0


def test_a_small_parameter_keeps_its_value(gpu: VirtualGpu) -> None:
    scale = nn.Parameter(torch.tensor(0.5))
    assert scale.item() == 0.5
    assert scale.cuda().item() == 0.5
    with torch.no_grad():
        scale.fill_(3.0)
        scale.mul_(2)
    assert scale.item() == 6.0
    assert not gpu.guesses.counts


def test_parametrised_and_initialised_modules_work_on_both_sides(gpu: VirtualGpu) -> None:
    linear = nn.Linear(64, 64)
    nn.init.orthogonal_(linear.weight)
    nn.init.trunc_normal_(linear.weight)
    vector = nn.utils.parameters_to_vector(linear.parameters())
    nn.utils.vector_to_parameters(vector, linear.parameters())
    for make in (weight_norm, spectral_norm):
        for device in ("cpu", "cuda"):
            module = make(nn.Linear(64, 64)).to(device)
            module(torch.ones(2, 64, device=device)).sum().backward()


def test_a_module_goes_to_the_gpu_and_back(gpu: VirtualGpu) -> None:
    embedding, head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head]).cuda()
    assert model[0].weight is model[1].weight
    assert torch.cuda.memory_allocated() == 25_600
    model.cpu()
    assert model[1].weight.device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0
    assert model.to(torch.bfloat16)[0].weight.to("cpu").device.type == "cpu"
    assert model.to("meta")[0].weight.is_meta


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_module_with_gradients_goes_back(gpu: VirtualGpu, is_trained: bool) -> None:
    """As Lightning's teardown takes it, after a last step whose gradients were not freed."""
    linear = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(2, 64, device="cuda")).sum().backward()
    if is_trained:
        optimizer.step()
    linear.cpu()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in linear.parameters())
    linear.cuda()
    assert all(p.grad is not None and p.grad.is_cuda for p in linear.parameters())


def test_pinned_tensors_say_so(gpu: VirtualGpu) -> None:
    assert torch.zeros(4).pin_memory().is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert nn.Linear(600, 600).weight.detach().pin_memory().is_pinned()
    assert not torch.zeros(4).is_pinned()
    assert torch.zeros(4).pin_memory().to("cuda", non_blocking=True).is_cuda


def test_a_generator_of_the_gpu_draws_there(gpu: VirtualGpu) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = torch.randn(3, generator=generator, device="cuda")
    assert drawn.is_cuda
    assert torch.randperm(10, generator=generator, device="cuda").shape == (10,)
    assert drawn.abs().multinomial(2, generator=generator).shape == (2,)


def test_a_number_put_into_a_tensor_of_the_gpu_takes_no_memory_there() -> None:
    with memest.virtual_gpu("a100-40gb"):
        mask = torch.ones(8, 20, dtype=torch.long, device="cuda")
        requests = torch.cuda.memory_stats()["allocation.all.allocated"]

        mask[0, -4:] = 0

        assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests
        assert mask.sum().item() == 8 * 20 - 4


def test_a_list_of_positions_selects_known_values(gpu: VirtualGpu) -> None:
    """torch makes a tensor of the list on the GPU, which autograd keeps (YOLOv7's grid sizes)."""
    numbers = torch.arange(12.0, device="cuda").view(3, 4)
    mask = [True, False, True]

    numbers[:, np.array([0])] = 7.0

    assert numbers[[2, 0]].tolist() == [[7.0, 9.0, 10.0, 11.0], [7.0, 1.0, 2.0, 3.0]]
    assert numbers[:, [1, -1]].tolist() == [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]
    assert numbers[mask].shape == (2, 4)
    weight = torch.ones(7, 9, device="cuda", requires_grad=True)
    kept = []
    assert Requests(gpu).in_order(lambda: kept.append(weight[[2, 3]])) == [16, 72]


def test_a_list_of_tensors_becomes_a_tensor_of_their_numbers(gpu: VirtualGpu) -> None:
    """A batch's labels, each a tensor of one element, as `default_collate` leaves them."""
    one, wide = torch.ones(1), torch.tensor(2.0, dtype=torch.float64)
    on_gpu = torch.arange(3, device="cuda")[:1]

    assert torch.tensor([one, one]).tolist() == [1.0, 1.0]
    assert torch.tensor([[one, 3], [4, one]], device="cuda").shape == (2, 2)
    assert torch.tensor([one, wide, 1]).dtype is torch.float64
    assert torch.tensor([one.half(), 1]).dtype is torch.float16
    assert torch.as_tensor([on_gpu, on_gpu]).tolist() == [0, 0]
    assert torch.Tensor([one, one]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="only one element tensors"):
        torch.tensor([torch.ones(2), torch.ones(2)])


def test_legacy_constructors_and_sparse_indices_take_lists_of_tensors(gpu: VirtualGpu) -> None:
    """A `__getitem__` in Python makes tensors sequences for C++; its slot is cleared."""
    two, three = torch.tensor(2), torch.tensor(3)
    on_gpu = torch.randn(3, device="cuda")

    assert torch.LongTensor([two, three]).tolist() == [2, 3]
    assert torch.FloatTensor([[two, 1.5], [three, 2]]).tolist() == [[2, 1.5], [3, 2]]
    assert torch.BoolTensor([two, False]).tolist() == [True, False]
    assert two.new([two, three]).tolist() == [2, 3]
    sparse = torch.sparse_coo_tensor([[two], [three]], [1.0], (5, 5), check_invariants=False)
    assert sparse.shape == (5, 5)
    assert torch.FloatTensor([each for each in on_gpu]).shape == (3,)
    assert torch.BoolTensor([each > 0 for each in on_gpu]).shape == (3,)
    assert np.array([two, three]).tolist() == [2, 3]
    with pytest.raises(TypeError, match="len"):
        len(two)


def test_tensors_are_no_sequences_to_c_after_the_virtual_gpu() -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        assert torch.LongTensor([torch.tensor(2)]).tolist() == [2]
    assert torch.LongTensor([torch.tensor(2)]).tolist() == [2]


def test_a_transform_runs_while_the_host_has_tensors_without_values(gpu: VirtualGpu) -> None:
    on_host = torch.ones(1 << 20, device="cuda").cpu()
    rows = torch.ones(5, 64, device="cuda")

    drop = torch.vmap(lambda row: torch.nn.functional.dropout(row, 0.1), randomness="different")

    assert placement.host_storages
    assert drop(rows).shape == (5, 64)
    del on_host


def test_values_are_read_where_the_default_device_is_the_gpu(gpu: VirtualGpu) -> None:
    x = torch.arange(4, device="cuda")
    with torch.device("cuda"):
        made = torch.tensor([1.0, 2.0])
        read = [x.tolist(), made.tolist(), (x > 2).sum().item(), x.cpu().tolist()]
        shown = repr(x)
        order = torch.randperm(4).sort().values.tolist()
        ones = torch.nn.functional.one_hot(x).sum(1).tolist()

    assert read == [[0, 1, 2, 3], [1.0, 2.0], 1, [0, 1, 2, 3]]
    assert shown.startswith("tensor([0, 1, 2, 3]")
    assert (order, ones) == ([0, 1, 2, 3], [1, 1, 1, 1])


def test_a_tensor_without_elements_has_known_values(gpu: VirtualGpu) -> None:
    """Keras repeats segments by the product of the sizes after the first: none of a vector."""
    sizes = torch.tensor((), device="cuda")
    rows = torch.ones(5, device="cuda")

    assert torch.prod(sizes).item() == 1.0
    assert rows[:0].sum().item() == 0.0
    assert not torch.empty(0, 3, device="cuda").any()
    assert rows.repeat_interleave(torch.prod(sizes).long()).shape == (5,)
    assert not gpu.mode.guesses.counts


def test_the_gpu_does_not_index_a_tensor_of_the_host() -> None:
    """An H100 said so of ETSformer, whose frequencies stay on the host."""
    with memest.virtual_gpu("h100-80gb"):
        chosen = torch.arange(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same"):
            torch.arange(10.0)[chosen]
        assert torch.zeros(10, device="cuda")[torch.arange(3)].shape == (3,)


@pytest.mark.parametrize("installed", ["2.7.1+cu126", "2.13.0"])
def test_a_large_uint64_is_read(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_installed", lambda: installed)
    before = torch.Tensor.item
    with VirtualGpu(find_gpu("h100-80gb")):
        is_replaced = torch.Tensor.item != before
        made = torch.tensor([-1, 5, -(2**63)], device="cuda").view(torch.uint64)
        read = [one.item() for one in made]
        assert f"{made[0]}" == str(2**64 - 1)
        assert [float(made[2]), made[2].cpu().item()] == [2.0**63, 2**63]
        assert [torch.ones((), device="cuda").item(), float(torch.ones(()))] == [1.0, 1.0]

    assert read == [2**64 - 1, 5, 2**63]
    assert is_replaced is installed.startswith("2.7")
    assert torch.Tensor.item == before


LARGE = 20, 1_000_000  # floats that have no data on the host


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.stft(x, 1024, window=torch.hann_window(1024), return_complex=True),
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.5]), dim=1),
        lambda x: x.nanquantile(torch.tensor([0.1, 0.5]), dim=1),
        lambda x: torch.cdist(x, torch.randn(3, LARGE[1])),
        lambda x: torch.cosine_similarity(x, torch.randn(LARGE[1])),
        lambda x: nn.functional.cosine_similarity(x, torch.randn(LARGE[1]), dim=-1),
        lambda x: nn.GRU(1_000, 8)(x.view(20, 1_000, 1_000))[1],
        lambda x: nn.functional.scaled_dot_product_attention(
            *[x.view(200, 1_000, 100), torch.ones(200, 3, 100), torch.ones(200, 3, 100)],
            attn_mask=torch.ones(1_000, 3, dtype=torch.bool),
        ),
        lambda x: torch.istft(
            x.view(20, 25, 40_000)[:, :5].to(torch.cfloat), 8, window=torch.hann_window(8)
        ),
        lambda x: torch.istft(x.view(20, 25, 40_000)[:, :5].to(torch.cfloat), 8),
        lambda x: torch.take_along_dim(x, torch.zeros(20, 1, dtype=torch.long), 1),
        lambda x: torch.histogram(x, 10)[0],
        lambda x: torch.histogram(x, torch.linspace(-1, 1, 11)).hist,
        lambda x: (
            nn.utils.rnn.pack_padded_sequence(
                x.view(20, 1_000, 1_000), torch.arange(20, 0, -1), batch_first=True
            ).data
        ),
    ],
)
def test_small_tensors_with_data_meet_a_large_one_without(
    call: Callable[[torch.Tensor], torch.Tensor], gpu: VirtualGpu
) -> None:
    large = torch.randn(*LARGE)
    assert gpu.mode.host.place(large) is Place.HOST

    made = call(large)

    assert made.device.type == "cpu"
    assert made.numel() > 0
    assert gpu.mode.memory.history.peak_allocated_bytes == 0


def test_an_optimizer_that_is_resumed_reads_its_numbers(gpu: VirtualGpu) -> None:
    """NAdam keeps a product on the device of its weights, and writes a list of them in place."""
    layer = nn.Linear(4, 4, device="cuda")
    first = torch.optim.NAdam(layer.parameters(), foreach=True)
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    first.step()
    second = torch.optim.NAdam(layer.parameters(), foreach=True)
    second.load_state_dict(first.state_dict())
    second.step()

    products = [state["mu_product"].item() for state in second.state.values()]
    assert all(0 < product < 1 for product in products)
    assert products[0] == products[1]


def test_layers_results_are_equal_only_if_they_are_the_same_memory(gpu: VirtualGpu) -> None:
    """An attention compares its query with its key, and projects equal ones at once."""
    layer = nn.Linear(4, 4, device="cuda")
    x = torch.ones(1 << 18, 4, device="cuda")  # values of the results are not known
    query, key = layer(x), layer(x)

    assert torch.equal(query, query)
    assert torch.equal(query, query.detach())
    assert not torch.equal(query, key)
    assert not torch.equal(query, torch.zeros_like(query))
    assert torch.equal(nn.Linear(1024, 1024).cuda().weight, nn.Linear(1024, 1024).cuda().weight)


def test_a_fused_step_on_the_host_takes_tensors_with_and_without_data(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.rand(1 << 20)
    weight.grad = torch.rand(1 << 20)
    monkeypatch.setattr(host, "REAL_BYTES", 0)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()

    places = [gpu.mode.host.place(tensor) for tensor in optimizer.state[weight].values()]
    assert (gpu.mode.host.place(weight), *places) == (Place.REAL,) * 2 + (Place.HOST,) * 2
    optimizer.state[weight]["exp_avg"] = torch.zeros(1 << 20, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        optimizer.step()
