"""`torch.compile` compiles; what else would be runs as written, or is refused by its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.compilers import SCRIPTED, TUNED, TUNING
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


def test_a_compiled_module_is_the_one_it_was_made_of(gpu: VirtualGpu) -> None:
    layer = nn.Linear(4, 4).cuda()

    @torch.compile(fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled: Any = torch.compile(layer)
    out = double(compiled(torch.zeros(2, 4, device="cuda")))

    assert out.is_cuda
    assert compiled._orig_mod is layer
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert [note.partition(":")[0] for note in gpu.notes] == ["`torch.compile`"]


def peak_of(function: Callable[..., Any], *args: Any) -> int:
    """Bytes at the peak of a call, above those before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(*args)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("gpu")
def test_fused_operators_keep_no_temporaries() -> None:
    """Four passes over 4 MiB: written out two are alive at once, fused the result alone is."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.exp(x * 2) + 1)

    x = torch.zeros(1024, 1024, device="cuda")
    size = 4 * x.numel()
    fused = torch.compile(chain)
    fused(x)  # the first call times the kernel with an array of the size of the cache

    assert peak_of(chain, x) == 2 * size
    assert peak_of(fused, x) == size


def test_a_logger_breaks_a_graph_in_two(gpu: VirtualGpu) -> None:
    """The first graph returns what is computed before the call."""
    logger = logging.getLogger("of.a.model")

    @torch.compile
    def chain(x: torch.Tensor, talks: bool) -> torch.Tensor:
        made = torch.exp(x * 2)
        if talks:
            logger.debug("no graph goes on")
        return torch.sigmoid(made + 1)

    x = torch.zeros(1024, 1024, device="cuda")
    for talks in (False, True):
        chain(x, talks)

    assert peak_of(chain, x, False) == 4 * x.numel()
    assert peak_of(chain, x, True) == 2 * 4 * x.numel()
    assert gpu.mode.notes.warnings == []


def test_autocast_goes_on_after_a_graph_break(gpu: VirtualGpu) -> None:
    @torch.compile
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            made = x @ x
            logging.getLogger("of.a.model").info("multiplied")
            return made @ x

    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    assert cast(x).dtype == torch.bfloat16
    assert gpu.mode.notes.warnings == []


@pytest.mark.usefixtures("gpu")
def test_parts_of_a_model_learn_as_one() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)
            logging.getLogger("of.a.model").warning("which loss?")
            return {"loss": out.square().mean(), "out": out}

    model: Any = torch.compile(Loss().cuda())
    made = model(torch.zeros(4, 8, device="cuda"))
    made["loss"].backward()

    assert made["out"].shape == (4, 8)
    assert model.layer.weight.grad.shape == (8, 8)


def test_a_compiled_backward_computes_again_what_is_cheap(gpu: VirtualGpu) -> None:
    """The eager one keeps three arrays of the chain, the compiled one its input."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.exp(x * self.scale)).sum()

    x = torch.zeros(1024, 1024, device="cuda")
    kept = []
    for make in (lambda model: model, torch.compile):
        model: Any = make(Chain().cuda())
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            loss = model(x)
            after = torch.cuda.memory_allocated()
            loss.backward()
            del loss
        kept.append((after - before) // (4 * x.numel()))
        assert model.scale.grad is not None

    assert kept == [2, 0]


def test_what_a_compiled_function_asks_for_is_asked_for_by_its_line(gpu: VirtualGpu) -> None:
    twice = torch.compile(lambda x: 2 * x)
    kept = twice(torch.zeros(4, device="cuda"))

    site = gpu.mode.memory.storages.sites[gpu.mode.memory.id_of(kept) or 0]
    assert site.line.startswith("test_libraries_compilers.py:")


@pytest.mark.usefixtures("gpu")
def test_a_kernel_is_timed_before_its_first_run() -> None:
    """With an array of the 50 MiB of an H100's cache, and copies of what it reads and changes."""

    @torch.compile
    def step(x: torch.Tensor) -> None:
        x.mul_(2)

    x = torch.zeros(1024, 1024, device="cuda")

    assert peak_of(step, x) == (50 << 20) + 2 * 4 * x.numel()
    assert peak_of(step, x) == 0


def test_a_product_with_the_integer_zero_is_folded(gpu: VirtualGpu) -> None:
    """The orthogonalization of heavyball's Muon has one."""
    scale = torch.compile(lambda x: x.sin() + x * 0, fullgraph=True)

    assert scale(torch.ones(64, 64, device="cuda")).is_cuda
    assert not gpu.guesses.notes.warnings


def test_reading_a_value_breaks_a_graph(gpu: VirtualGpu) -> None:
    """What is computed before and after the read is fused."""

    @torch.compile
    def chain(x: torch.Tensor) -> torch.Tensor:
        made = torch.exp(torch.sin(x))
        return torch.cos(torch.sigmoid(made * made.max().item()))

    x = torch.zeros(1024, 1024, device="cuda")
    for _ in range(2):
        chain(x)  # another assumed number: compiled again, for any number

    assert peak_of(chain, x) - 2 * 4 * x.numel() < 1 << 17
    assert gpu.mode.notes.warnings == []


def test_a_compiled_checkpoint_recomputes_activations(gpu: VirtualGpu) -> None:
    """The output of each of three layers is saved, and none of what is computed within."""

    class Layers(nn.Module):
        def __init__(self, is_checkpointed: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
            self.is_checkpointed = is_checkpointed

        def part(self, i: int, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[4 * i : 4 * i + 4]:
                x = torch.sigmoid(layer(x))
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(3):
                if self.is_checkpointed:
                    x = torch.utils.checkpoint.checkpoint(self.part, i, x, use_reentrant=False)
                else:
                    x = self.part(i, x)
            return x.sum()

    x = torch.zeros(1 << 14, 64, device="cuda")
    saved = []
    for is_checkpointed in (False, True):
        model = torch.compile(Layers(is_checkpointed).cuda())
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            loss = model(x)
            after = torch.cuda.memory_allocated()
            loss.backward()
        saved.append((after - before) // (4 * x.numel()))

    assert saved == [12, 2]
    assert gpu.mode.notes.warnings == []


@pytest.mark.usefixtures("gpu")
def test_the_second_length_makes_a_graph_for_any_length() -> None:
    """A graph that is compiled times its kernel with an array of 50 MiB."""
    double = torch.compile(lambda x: 2 * x)
    peaks = [peak_of(double, torch.zeros(n << 18, device="cuda")) >> 20 for n in (4, 8, 12)]

    assert peaks == [54, 58, 12]


def test_what_a_function_makes_on_the_gpu_is_there(gpu: VirtualGpu) -> None:
    @torch.compile
    def positions(x: torch.Tensor) -> torch.Tensor:
        made = torch.arange(4, device="cuda") + torch.ones(4, device=x.device)
        return (x + made.to("cuda")).cuda()

    assert positions(torch.zeros(4, device="cuda")).is_cuda
    assert gpu.mode.notes.warnings == []


class Pair:
    """Holds tensors, and pytree does not know it."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows
        self.name = "pair"


def test_an_object_that_is_returned_has_the_tensors_of_its_call(gpu: VirtualGpu) -> None:
    twice = torch.compile(lambda x: {"pair": Pair([2 * x, 3 * x]), "other": 5})
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1024, 1024, device="cuda")
    first, second = twice(x), twice(x)

    assert first["pair"].rows[1].is_cuda
    assert (second["pair"].name, second["other"]) == ("pair", 5)
    assert first["pair"].rows[0] is not second["pair"].rows[0]
    assert (torch.cuda.memory_allocated() - before) // (4 * x.numel()) == 5
    assert gpu.mode.notes.warnings == []


def test_an_object_may_be_given(gpu: VirtualGpu) -> None:
    pair = Pair([torch.zeros(4, device="cuda")])

    assert torch.compile(lambda given: given.rows[0] + 1)(pair).is_cuda
    assert gpu.mode.notes.warnings == []


def test_a_compiled_module_keeps_a_tensor(gpu: VirtualGpu) -> None:
    """As mixtures of experts do with the loss of their routers."""

    class Keeps(nn.Module):
        kept: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x.mean()
            return 2 * x

    model = torch.compile(Keeps().cuda())
    out = model(torch.ones(4, device="cuda"))

    assert (out.sum() + model.kept).is_cuda
    assert gpu.mode.notes.warnings == []


def test_the_script_can_say_that_nothing_is_compiled(gpu: VirtualGpu) -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        torch.compile(torch.exp)(torch.zeros(4, device="cuda"))
    assert gpu.notes == []


def test_modules_that_are_built_alike_are_compiled_once(gpu: VirtualGpu) -> None:
    """A kernel is timed once, with an array of 50 MiB."""
    x = torch.zeros(1024, 1024, device="cuda")
    layers = [nn.LeakyReLU(0.1), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)]
    peaks = [peak_of(torch.compile(layer), x) >> 20 for layer in layers]

    assert peaks == [54, 4, 54]


@pytest.mark.usefixtures("gpu")
def test_a_method_is_compiled_for_each_module() -> None:
    class Half(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

        @torch.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    small, large = Half(2).cuda(), Half(3).cuda()
    out = small(torch.ones(2, device="cuda")).sum() + large(torch.ones(3, device="cuda")).sum()
    out.backward()

    assert [part.weight.grad.shape for part in (small, large)] == [(2,), (3,)]


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_that_tunes_compiles_with_defaults_and_says_so(gpu: VirtualGpu, mode: str) -> None:
    torch.compile(nn.Linear(4, 4).cuda(), mode=mode)(torch.ones(4, device="cuda"))
    assert gpu.mode.notes.warnings == [TUNED]


@pytest.mark.parametrize("name", TUNING)
def test_an_option_that_tunes_is_taken_out_of_the_options(gpu: VirtualGpu, name: str) -> None:
    options = {name: True, "epilogue_fusion": False}
    torch.compile(nn.Linear(4, 4).cuda(), options=options)(torch.ones(4, device="cuda"))

    assert gpu.mode.notes.warnings == [TUNED]
    assert options == {name: True, "epilogue_fusion": False}


def test_an_option_that_turns_tuning_off_is_no_warning(gpu: VirtualGpu) -> None:
    options = {"max_autotune": False, "epilogue_fusion": True}
    torch.compile(nn.Linear(4, 4).cuda(), options=options)(torch.ones(4, device="cuda"))

    assert gpu.mode.notes.warnings == []


@pytest.mark.usefixtures("gpu")
def test_the_backend_for_cuda_graphs_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedError, match="backend='cudagraphs'"):
        torch.compile(nn.Linear(4, 4).cuda(), backend="cudagraphs")


def test_compiled_autograd_traces_a_backward_as_on_a_gpu(gpu: VirtualGpu) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda()

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layers(x).square().mean()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        step(torch.ones(2, 8, device="cuda"))

    assert all(p.grad is not None and p.grad.is_cuda for p in layers.parameters())
    assert gpu.mode.notes.warnings == []


def test_a_compiled_mask_of_known_labels_chooses_as_many_rows_as_on_a_gpu(gpu: VirtualGpu) -> None:
    @torch.compile
    def chosen(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = labels[:, 1:] != -100
        return hidden[:, :-1][mask], (hidden > 0).any(-1)

    labels = torch.full((2, 8), -100)
    labels[:, :5] = 1
    rows, unknown = chosen(torch.zeros(2, 8, 65536, device="cuda"), labels.cuda())

    assert rows.shape == (8, 65536)
    assert not gpu.mode.values.is_known(unknown)


def test_another_backend_gets_the_graph(gpu: VirtualGpu) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nn.Linear(4, 4).cuda(), backend=backend)
    assert compiled(torch.ones(4, device="cuda")).is_cuda
    assert len(graphs) == 1
    assert gpu.mode.notes.warnings == []


def test_a_module_compiled_in_place_owns_its_parameters(gpu: VirtualGpu) -> None:
    model = nn.Linear(4, 4).cuda()
    model.compile()
    model(torch.ones(4, device="cuda"))

    assert gpu.mode.attribution.modules.owner_of(model.weight) == "Linear"


def test_a_part_that_is_first_called_on_the_host_is_named_by_its_model(gpu: VirtualGpu) -> None:
    """Policies of stable-baselines3 do so, to compute the width of their features."""
    features = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    features(torch.ones(2, 4))
    model = nn.Sequential(features, nn.Linear(4, 2)).cuda()
    model[0](torch.ones(2, 4, device="cuda"))
    modules = gpu.mode.attribution.modules
    assert modules.path_of(features[0]) == "Sequential.0"
    model(torch.ones(2, 4, device="cuda"))

    assert modules.path_of(features[0]) == modules.owner_of(features[0].weight)
    assert modules.path_of(features[0]) == "Sequential.0.0"


def test_scripted_and_traced_functions_run_as_they_are(gpu: VirtualGpu) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.zeros(3, device="cuda")
    assert torch.jit.script(double)(x).is_cuda
    assert torch.jit.trace(double, x)(x).is_cuda
    assert SCRIPTED in gpu.notes
    with pytest.raises(UnsupportedError, match="`save` of a scripted module"):
        torch.jit.script(nn.Linear(2, 2)).save("model.pt")


def test_the_check_of_a_traced_module_holds_two_copies_of_its_inputs(gpu: VirtualGpu) -> None:
    x = torch.ones(1 << 20, device="cuda")

    def peak_of(func: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        torch.jit.trace(func, (x,))
        return torch.cuda.max_memory_allocated() // x.nbytes

    assert peak_of(nn.Identity()) == 1 + 1 + 3  # the copies of three calls are their outputs
    assert peak_of(lambda x: x) == 1 + 3


def test_a_script_module_runs_its_methods_as_they_are(gpu: VirtualGpu) -> None:
    class Block(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

        @torch.jit.script_method
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    block = Block().cuda()
    assert block(torch.ones(1, 3, 8, 8, device="cuda")).is_cuda
    assert SCRIPTED in gpu.notes
    assert not isinstance(nn.Linear(2, 2), torch.jit.ScriptModule)


def test_a_trace_calls_the_function_and_its_check_four_times_more(gpu: VirtualGpu) -> None:
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x + x

    x = torch.ones(8, device="cuda")
    torch.jit.trace(double, (x,))
    assert calls == [True, False, False, False, False]
    torch.jit.trace(double, None, example_kwarg_inputs={"x": x}, check_trace=False)
    assert calls == [True, False, False, False, False, True]


def test_tensorboard_gets_an_empty_graph(gpu: VirtualGpu, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = nn.Linear(4, 4).cuda()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_graph(model, torch.ones(2, 4, device="cuda"))
    assert model.training
    assert SCRIPTED in gpu.notes


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("load", {"name": "my_kernels", "sources": ["bind.cpp", "kernels.cu"]}),
        ("load_inline", {"name": "my_kernels", "cpp_sources": "", "cuda_sources": "x"}),
        ("CUDAExtension", {"name": "my_kernels", "sources": ["kernels.cu"]}),
    ],
)
def test_an_extension_in_cuda_is_refused_by_its_name(
    gpu: VirtualGpu, function: str, arguments: dict[str, Any]
) -> None:
    from torch.utils import cpp_extension

    with pytest.raises(UnsupportedError, match=r"`my_kernels` is an extension in CUDA"):
        getattr(cpp_extension, function)(**arguments)


def test_an_extension_for_the_cpu_with_flags_by_position_is_built(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "_jit_compile", lambda *args, **options: "built")

    assert cpp_extension.load("my_kernels", ["bind.cpp"], ["-O3"]) == "built"


def test_a_script_that_imports_flash_attn_finds_the_mirror(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_func

    q = torch.zeros(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flash_attn_func(q, q, q, causal=True).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert any("flash_attn" in note for note in gpu.notes)


def test_transformers_finds_flash_attention_2_where_it_asks_for_it(gpu: VirtualGpu) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="flash_attention_2", dtype=torch.bfloat16
    ).cuda()
    ids = torch.zeros(2, 40, dtype=torch.int64, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.config._attn_implementation == "flash_attention_2"


def test_modules_go_to_a_device_by_its_number(gpu: VirtualGpu) -> None:
    assert nn.Linear(2, 2).to(0).weight.is_cuda
    assert nn.Linear(2, 2).to(device=0, dtype=torch.float16).weight.dtype is torch.float16
    with torch.device("cuda"):
        assert torch.tensor([1, 2]).is_cuda


def test_a_count_of_classes_is_as_long_as_the_script_says(gpu: VirtualGpu) -> None:
    predicted = torch.randn(1 << 20, 5, device="cuda").argmax(-1)
    assert torch.bincount(predicted, minlength=5).shape == (5,)


def test_the_buffer_of_log_sigmoid_is_not_allocated_on_a_gpu(gpu: VirtualGpu) -> None:
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = nn.functional.logsigmoid(x)
    assert torch.cuda.memory_allocated() - before == out.numel() * 4
