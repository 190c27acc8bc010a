"""What a sim sees: storages that live and die, who made them, and what is not modelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memest.estimator.gpu import kernel_calls
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.autograd_ops import decisions_of
from memest.estimator.tensors.storages import MemKind, Site
from memest.estimator.virtual_gpu import VirtualGpu
from tests.requested import Requests
from tests.sim import SimGpu

# Shapes: B batch, T tokens, D width in, F width out. Pairwise different, so none can cancel.
B, T, D, F_ = 2, 3, 5, 7
BF16 = torch.bfloat16


def new_recorder() -> SimGpu:
    return SimGpu()


@contextmanager
def recording(model: nn.Module | None = None) -> Iterator[SimGpu]:
    """A sim over the traced code; the parameters of `model` are known to it."""
    sim = new_recorder()
    for parameter in () if model is None else model.parameters():
        sim.adopt(parameter, MemKind.PARAMS)
    with decisions_of(sim.gpu), sim:
        yield sim


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def alive(sim: SimGpu, kind: MemKind = MemKind.ACTIVATIONS) -> list[tuple[str, int]]:
    """Operator and bytes of what is alive, in order of birth; of one kind."""
    ids: dict[int, None] = {}
    for event in sim.events:
        if event >= 0:
            ids[event] = None
        else:
            del ids[~event]
    table = sim.storages
    return [
        (table.sites[index].op.removeprefix("aten."), table.num_bytes[index])
        for index in ids
        if table.kinds[index] is kind
    ]


def sizes(sim: SimGpu) -> list[int]:
    """The bytes of every event, negative for a death."""
    table = sim.storages.num_bytes
    return [table[e] if e >= 0 else -table[~e] for e in sim.events]


def test_linear_keeps_its_input_and_not_its_output() -> None:
    """A trainable Linear saves x (B,T,D) for the weight's gradient and nothing of the output."""
    layer = nn.Linear(D, F_, bias=False, device="meta", dtype=BF16)
    with recording(layer) as sim:
        x = meta(B, T, D)
        y = layer(x)
        loss = y.sum()
        del x, y

    assert alive(sim) == [("empty.memory_format", B * T * D * 2), ("sum", 2)]
    assert loss.grad_fn is not None


def test_a_frozen_linear_keeps_nothing_of_its_input() -> None:
    """The gradient of the input needs the weight alone."""
    layer = nn.Linear(D, F_, bias=False, device="meta", dtype=BF16).requires_grad_(False)
    with recording(layer) as sim:
        x = meta(B, T, D, grad=True)
        y = layer(x * 1)
        loss = y.sum()
        del y

    assert alive(sim) == [("empty.memory_format", B * T * D * 2), ("sum", 2)]
    assert loss.grad_fn is not None


def test_without_gradients_nothing_is_kept() -> None:
    layer = nn.Linear(D, F_, device="meta", dtype=BF16)
    with recording(layer) as sim, torch.no_grad():
        loss = layer(meta(B, T, D)).sum()

    assert alive(sim) == [("sum", 2)]
    assert loss.shape == ()


def test_dropout_keeps_a_mask_of_one_byte_per_element() -> None:
    with recording() as sim:
        x = meta(B, T, D, grad=True)
        loss = F.dropout(x * 1, 0.1, training=True).sum()

    assert alive(sim) == [
        ("empty.memory_format", B * T * D * 2),
        ("native_dropout", B * T * D),
        ("sum", 2),
    ]
    assert loss.grad_fn is not None


def test_gelu_keeps_its_input_and_relu_its_output() -> None:
    with recording() as sim:
        x = meta(B, T, D, grad=True)
        loss = F.gelu(x * 1).sum()
    assert alive(sim)[1:] == [("mul.Tensor", B * T * D * 2), ("sum", 2)]

    with recording() as sim:
        y = meta(B, T, D, grad=True)
        loss = F.relu(y * 1).sum()
    assert alive(sim)[1:] == [("relu", B * T * D * 2), ("sum", 2)]
    assert loss.grad_fn is not None


def test_the_backward_frees_what_the_forward_kept() -> None:
    layer = nn.Linear(D, F_, bias=False, device="meta", dtype=BF16)
    with recording(layer) as sim:
        layer(meta(B, T, D)).sum().backward()

    assert alive(sim) == [("mm", D * F_ * 2)]
    assert layer.weight.grad is not None
    assert sim.id_of(layer.weight.grad) is not None


def test_a_second_gradient_is_added_in_place() -> None:
    """AccumulateGrad keeps the first storage; the second gradient dies."""
    layer = nn.Linear(D, F_, bias=False, device="meta", dtype=BF16)
    with recording(layer) as sim:
        layer(meta(B, T, D)).sum().backward()
        assert layer.weight.grad is not None
        first = sim.id_of(layer.weight.grad)
        layer(meta(B, T, D)).sum().backward()

    assert sim.id_of(layer.weight.grad) == first
    assert alive(sim) == [("mm", D * F_ * 2)]


class Checkpointed(nn.Module):
    def __init__(self, use: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, F_), nn.GELU(), nn.Linear(F_, D))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False) if self.use else self.block(x)
        return out


@pytest.mark.parametrize("use", [True, False])
def test_checkpointing_keeps_the_input_of_the_block_alone(use: bool) -> None:
    """Without it the inner width F is kept twice: the GELU's input and its output."""
    model = Checkpointed(use).to("meta", BF16)
    with recording(model) as sim:
        x = meta(B, T, D)
        loss = model(x).sum()
        del x

    inner = [] if use else [("addmm", B * T * F_ * 2), ("gelu", B * T * F_ * 2)]
    kept = alive(sim)
    # the checkpoint saves the random state of the CPU, which is no memory of the GPU
    assert kept == [("empty.memory_format", B * T * D * 2), *inner, ("sum", 2)]
    assert loss.grad_fn is not None


def test_checkpointing_and_plain_training_end_with_the_same_gradients() -> None:
    ends = []
    for use in (True, False):
        model = Checkpointed(use).to("meta", BF16)
        with recording(model) as sim:
            model(meta(B, T, D)).sum().backward()
        ends.append(Counter(n for _, n in alive(sim)))

    assert ends[0] == ends[1] == Counter([D * F_ * 2, F_ * 2, D * F_ * 2, D * 2])


def test_a_view_is_no_storage() -> None:
    with recording() as sim:
        x = meta(B, T, D)
        num_events = len(sim.events)
        views = [x.view(-1), x[0], x.transpose(0, 1), x.expand(4, B, T, D), x.detach()]

    assert len(sim.events) == num_events == 1
    assert len({sim.id_of(v) for v in views}) == 1


def test_a_storage_lives_as_long_as_one_of_its_views() -> None:
    with recording() as sim:
        x = meta(B, T, D)
        view = x[0, 0, :1]
        del x
        assert sizes(sim) == [B * T * D * 2]
        del view
        assert sizes(sim) == [B * T * D * 2, -B * T * D * 2]


def test_writing_in_place_makes_nothing() -> None:
    with recording() as sim:
        x = meta(B, T, D)
        x.add_(1).mul_(2).zero_()

    assert sizes(sim) == [B * T * D * 2]


def test_births_and_deaths_are_in_the_order_of_the_code() -> None:
    with recording() as sim:
        a = meta(3)
        b = a + 1
        del a
        c = torch.cat([b, b])
        del b, c

    assert sizes(sim) == [6, 6, -6, 12, -6, -12] or sizes(sim) == [6, 6, -6, 12, -12, -6]
    assert sim.events[:3] == [0, 1, ~0]


def test_events_are_taken_once() -> None:
    with recording() as sim:
        meta(3)
        assert sim.take_events() == [0, ~0]
        assert sim.take_events() == []


def test_a_shared_storage_is_adopted_once() -> None:
    """Tied embeddings: two parameters, one storage."""
    sim = new_recorder()
    weight = nn.Parameter(meta(D, F_))

    sim.adopt(weight, MemKind.PARAMS)
    sim.adopt(nn.Parameter(weight.detach()), MemKind.PARAMS)

    assert sim.events == [0]
    assert sim.storages.num_bytes == [D * F_ * 2]


def test_a_label_says_what_a_storage_is_held_for() -> None:
    sim = new_recorder()
    x = meta(3)
    sim.adopt(x, MemKind.ACTIVATIONS, op="made")

    sim.memory.label(x, MemKind.GRADS)

    assert sim.storages.kinds == [MemKind.GRADS]


def test_unrecorded_tensors_have_no_id() -> None:
    sim = new_recorder()

    assert sim.memory.id_of(meta(3)) is None
    sim.memory.label(meta(3), MemKind.GRADS)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, F_, bias=False)
        self.body = nn.Sequential(nn.GELU(), nn.Linear(F_, D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.first(x)) * 2
        return out


def sites_of_a_step() -> list[Site]:
    """Of forward and backward on the virtual GPU."""
    with VirtualGpu(find_gpu("h200")) as gpu:
        model = Two().to("cuda", BF16)
        model(torch.empty(B, T, D, dtype=BF16, device="cuda")).sum().backward()
        return list(gpu.mode.memory.storages.sites)


def test_storages_are_owned_by_the_module_that_ran() -> None:
    owners = {(s.op, s.module) for s in sites_of_a_step() if s.phase == "forward"}

    assert ("aten.mm", "Two.first") in owners
    assert ("aten.gelu", "Two.body.0") in owners
    assert ("aten.mm", "Two.body.1") in owners
    assert ("aten.mul.Tensor", "Two") in owners
    assert ("aten.sum", "") in owners


def test_the_backward_belongs_to_the_module_whose_forward_it_undoes() -> None:
    owners = [(s.op, s.module) for s in sites_of_a_step() if s.phase == "backward"]

    assert ("aten.gelu_backward", "Two.body.0") in owners
    assert owners.count(("aten.mm", "Two.body.1")) >= 2  # of the weight, and of the input
    assert ("aten.mm", "Two.first") in owners
    modules = {"", "Two", "Two.first", "Two.body.0", "Two.body.1"}
    assert {module for _, module in owners} <= modules


def test_a_gradient_belongs_to_the_module_of_its_parameter() -> None:
    with VirtualGpu(find_gpu("h200")) as gpu:
        model = Two().to("cuda", BF16)
        model(torch.empty(B, T, D, dtype=BF16, device="cuda"))
        owner_of = gpu.mode.attribution.modules.owner_of

        assert [owner_of(p) for p in model.parameters()] == ["Two.first", "Two.body.1"]
        assert owner_of(meta(3)) == ""


def test_the_hooks_are_gone_after_the_run() -> None:
    before = len(nn.modules.module._global_forward_pre_hooks)
    with VirtualGpu(find_gpu("h200")):
        assert len(nn.modules.module._global_forward_pre_hooks) == before + 1

    assert len(nn.modules.module._global_forward_pre_hooks) == before


@pytest.fixture
def mystery() -> Iterator[torch._ops.OpOverload]:
    """An operator of which no table knows anything."""
    with torch.library._scoped_library("memest_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", torch.empty_like, "Meta")
        yield torch.ops.memest_test.mystery.default


def test_an_unknown_operator_is_counted(mystery: torch._ops.OpOverload) -> None:
    """Its output is recorded; that its scratch is not known is part of the result."""
    with recording() as sim:
        x = meta(3)
        kept = [mystery(x), mystery(x)]

    assert sim.coverage.unmodelled == Counter({"memest_test.mystery": 2})
    assert sim.coverage.num_ops == 3
    assert [n for op, n in alive(sim) if "mystery" in op] == [6, 6]
    assert len(kept) == 2


def test_known_operators_are_not_counted() -> None:
    layer = nn.Linear(D, F_, device="meta", dtype=BF16)
    with recording(layer) as sim:
        F.cross_entropy(layer(meta(B * T, D)).float(), meta(B * T, dtype=torch.int64)).backward()

    assert sim.coverage.unmodelled == Counter()
    assert sim.coverage.num_ops > 5


def test_torchs_own_error_is_kept() -> None:
    with pytest.raises(RuntimeError, match=r"3.?, ?4|3x4"), recording():
        torch.mm(meta(3, 4), meta(5, 6))


class Tiny(nn.Module):
    """Operators of many kinds: embedding, norm, attention, dropout, tuple outputs, loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.head = nn.Linear(64, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            q, k, v = self.qkv(self.norm(x)).view(B, 8, 3, 1, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.dropout(y.transpose(1, 2).reshape(B, 8, 64), 0.1)
            top, index = x.topk(2, -1)
            x = x + top.sum(-1, keepdim=True) * index.sum(-1, keepdim=True)
        return F.cross_entropy(self.head(x).float().view(-1, 11), ids.view(-1))


def trace_tiny() -> SimGpu:
    model = Tiny().to("meta", BF16)
    with recording(model) as sim:
        for _ in range(2):
            ids = meta(B, 8, dtype=torch.int64)
            sim.values.adopt(ids, torch.zeros(B, 8, dtype=torch.int64))
            loss = model(ids)
            loss.backward()
            del loss, ids
    return sim


def test_two_traces_are_identical() -> None:
    first, second = trace_tiny(), trace_tiny()

    assert first.events == second.events
    assert first.storages == second.storages
    assert first.coverage == second.coverage


def test_a_repeated_call_does_what_the_first_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the recipes of earlier calls the events are the same."""
    quick = trace_tiny()
    assert quick.mode.kernels.recipes
    monkeypatch.setattr(kernel_calls, "_can_repeat", lambda *args: False)
    full = trace_tiny()
    assert not full.mode.kernels.recipes

    assert quick.events == full.events
    assert quick.storages == full.storages
    assert quick.coverage == full.coverage


def test_other_shapes_are_not_taken_for_a_repetition() -> None:
    with recording() as sim:
        for n in (3, 4, 3):
            assert (meta(n) + 1).shape == (n,)
        assert (meta(3, dtype=torch.float32) + 1).dtype is torch.float32
        assert (meta(3, 4).t() + 1).stride() == (1, 4)

    births = [n for n in sizes(sim) if n > 0]
    assert births == [6, 6, 8, 8, 6, 6, 12, 12, 24, 24]


def test_scalars_of_another_type_are_not_taken_for_a_repetition() -> None:
    """1, 1.0 and True are equal and promote differently."""
    with recording():
        dtypes = [(meta(3, dtype=torch.bool) + s).dtype for s in (1, 1.0, True, 1)]

    assert dtypes == [torch.int64, torch.float32, torch.bool, torch.int64]


def test_a_call_without_a_dtype_is_no_repetition_under_another_default() -> None:
    with recording() as sim:
        for dtype in (torch.float16, torch.float32):
            torch.set_default_dtype(dtype)
            assert torch.empty(3, device="meta").dtype is dtype

    assert [n for n in sizes(sim) if n > 0] == [3 * 2, 3 * 4]


def test_workspaces_that_are_cleared_are_taken_anew() -> None:
    with recording() as sim:
        for _ in range(2):
            left, right = meta(B, D), meta(D, F_)
            del left, right
            product = torch.mm(meta(B, D), meta(D, F_))
            del product
        sim.mode.kernels.clear_workspaces()
        torch.mm(meta(B, D), meta(D, F_))

    workspace = 32 * 2**20
    assert [n for n in sizes(sim) if abs(n) == workspace] == [workspace, -workspace, workspace]


def test_the_gradient_of_a_norms_input_is_contiguous_whatever_came_in() -> None:
    x, statistics = meta(B, T, D), meta(B, T, 1, dtype=torch.float32)
    weight = meta(D)
    with recording():
        grads = torch.ops.aten.native_layer_norm_backward(
            meta(B, D, T).transpose(1, 2), x, [D], statistics, statistics, weight, weight,
            [True, False, False],
        )  # fmt: skip

    assert grads[0].stride() == (T * D, D, 1)


def test_a_view_that_its_schema_denies_is_no_storage_either_time() -> None:
    """`_unsafe_view` follows each product of 3 dimensions; the second call repeats the first."""
    x = meta(B, T, D)
    with recording() as sim:
        first = torch.ops.aten._unsafe_view.default(x.clone(), [B * T, D])
        second = torch.ops.aten._unsafe_view.default(x.clone(), [B * T, D])

        assert alive(sim) == [("clone", B * T * D * 2)] * 2
    del first, second


def test_what_a_model_keeps_on_the_cpu_takes_no_gpu_memory() -> None:
    """OPT draws a random number for each layer on the CPU."""
    with recording() as sim:
        drawn = torch.rand([]) < 0.5

    assert (drawn.device.type, sim.events) == ("cpu", [])


def test_temporaries_are_freed_last_made_first() -> None:
    """A bias gradient stages partial rows, then the counters of its blocks."""
    x = meta(4096, 30522)
    with recording() as sim:
        total = x.sum(0)

        result, rows, counters, *freed = sizes(sim)
    assert (result, freed) == (30522 * 2, [-counters, -rows])
    del total


def test_autocast_casts_the_last_argument_first() -> None:
    """C++ arguments are evaluated from right to left: bias, weight, then the input."""
    with VirtualGpu(find_gpu("h200")) as gpu:
        x, weight, bias = (torch.empty(*size).cuda() for size in ((B, D), (F_, D), (F_,)))
        with torch.autocast("cuda", BF16):
            born = Requests(gpu).made(lambda: F.linear(x, weight, bias))

    assert born[:4] == [F_ * 2, F_ * D * 2, B * D * 2, B * F_ * 2]


def test_a_call_in_place_runs_the_meta_kernel_once() -> None:
    """The numbers of a later call may differ; a call that resizes always runs."""
    with recording(Tiny().to("meta", BF16)) as sim:
        recipes = sim.mode.kernels.recipes
        x = meta(4, 8)
        before = len(recipes)
        for low in (0.1, 0.2):
            assert x.clamp_(low) is x
        assert len(recipes) == before + 1
        for size in ((4, 7), (2, 3), (2, 2)):
            torch.ops.aten._resize_output_(x, size, "meta")
            assert x.shape == size
        assert len(recipes) == before + 1
