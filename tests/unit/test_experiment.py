"""The Lightning side of a measured run, on the CPU: the order of its phases and what they see."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch

from memest.errors import PlanError
from memest.loops import data
from memest.loops.job import Job, Listener, RunOptions, make_optimizer
from memest.loops.probe import PhaseRecorder, Reading
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome, Phase
from memest.validate import experiment
from memest.validate.experiment import Device

H200 = Device(
    name="NVIDIA H200", memory_bytes=143_155 << 20, capability=(9, 0), num_sms=132, driver="580.65"
)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 37,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
BLIP2 = {
    "model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"],
    "num_query_tokens": 3, "image_token_index": 40,
    "vision_config": {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "qformer_config": {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "encoder_hidden_size": 16, "vocab_size": 30},
    "text_config": {"model_type": "opt", "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "vocab_size": 41, "max_position_embeddings": 32,
                    "word_embed_proj_dim": 16},
}  # fmt: skip


class HostMemory:
    """A memory whose every reading is one higher, so that rows can be told apart."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.count = 1000

    def read(self) -> Reading:
        self.count += 1
        return Reading(
            allocated_bytes=self.count,
            peak_allocated_bytes=2 * self.count,
            reserved_bytes=3 * self.count,
            peak_reserved_bytes=4 * self.count,
        )


Run = Callable[..., Measurement]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a plan with Lightning on the CPU, quietly."""
    monkeypatch.setattr(experiment, "process_figures", lambda before, index: {"a test": 10**6})

    def run(options: RunOptions | None = None, **values: Any) -> Measurement:
        plan = TrainingPlan.from_dict({"seq_len": 5, "batch_size": 2, **values})
        recorder = PhaseRecorder(HostMemory(), plan.accumulate_grad_batches)
        job = Job(plan, recorder, Listener(on_end=lambda: None), options or RunOptions())
        state = experiment._Run(job, H200, None, time.perf_counter())
        delivered: list[Measurement] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice on workers and devices
            experiment.execute(state, where="cpu", deliver=delivered.append, accelerator="cpu")
        (measurement,) = delivered
        return measurement

    return run


@pytest.fixture
def model(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    def write(config: dict[str, Any]) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


def test_the_phases_come_in_the_order_of_a_step(
    run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    """Two steps of two micro-batches: the optimizer's row follows the last backward of each."""
    measured = run(model_name=model(LLAMA), accumulate_grad_batches=2, precision="32-true")

    micro = (Phase.BEFORE_FORWARD, Phase.AFTER_FORWARD, Phase.AFTER_BACKWARD)
    step = [(0, p) for p in micro] + [(1, p) for p in micro] + [(1, Phase.AFTER_OPTIMIZER_STEP)]
    assert [(r.step, r.micro_batch, r.phase) for r in measured.phases] == [
        (number, micro_batch, phase) for number in (0, 1) for micro_batch, phase in step
    ]
    assert measured.verdict is Outcome.FITS


def test_gradients_live_until_zero_grad_which_comes_after_the_forward(
    run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    measured = run(model_name=model(LLAMA), accumulate_grad_batches=2, precision="32-true")

    whole = 4 * measured.model["num_params"]
    grads = [r.grads_bytes for r in measured.phases]
    assert grads[:7] == [0, 0, whole, whole, whole, whole, whole]
    # The second step: there before its forward, gone after it, back after the backward.
    assert grads[7:] == [whole, 0, whole, whole, whole, whole, whole]


@pytest.mark.parametrize("config", [LLAMA, BLIP2], ids=["llama", "blip-2"])
def test_states_are_summed_in_their_own_dtype(
    config: dict[str, Any], run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    measured = run(model_name=model(config), precision="bf16-true", optim="sgd", momentum=0.9)

    count = measured.model["num_params"]
    last = measured.phases[-1]
    assert (last.params_bytes, last.grads_bytes, last.optimizer_bytes) == (2 * count,) * 3
    assert last.activations_bytes == last.allocated_bytes - 6 * count


def test_peaks_are_the_highest_of_all_rows(
    run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    measured = run(model_name=model(LLAMA), precision="32-true")

    # One reading to start, eight rows, one for the report.
    assert measured.peak_allocated_bytes == 2 * 1010
    assert measured.peak_reserved_bytes == 4 * 1010
    assert measured.context_bytes == 10**6 - 3 * 1010
    assert measured.process_bytes == 4 * 1010 + measured.context_bytes


def test_the_report_holds_the_sizes_that_were_used(
    run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    measured = run(model_name=model(BLIP2), precision="32-true")

    assert measured.gpu == "h200"
    assert (measured.plan["seq_len"], measured.plan["image_size"]) == (5, 28)
    assert measured.plan["padded"] is True
    assert Measurement.from_dict(json.loads(measured.to_json())) == measured


def test_out_of_memory_is_a_verdict_with_the_phases_so_far(
    run: Run, model: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)

    measured = run(model_name=model(LLAMA), precision="32-true")

    assert measured.verdict is Outcome.OOM
    assert [r.phase for r in measured.phases][-1] is Phase.AFTER_BACKWARD
    assert measured.note.startswith("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_another_error_is_raised(
    run: Run, model: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, closure: Any = None) -> None:
        raise RuntimeError("no memory of it")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)

    with pytest.raises(RuntimeError, match="no memory of it"):
        run(model_name=model(LLAMA), precision="32-true")


def test_initialisation_leaves_no_weight_as_it_was() -> None:
    module = torch.nn.Linear(300, 200)
    torch.nn.init.constant_(module.weight, float("nan"))

    data.initialise(module)

    assert module.weight.std().item() == pytest.approx(data.INIT_STD, rel=0.05)


@pytest.mark.parametrize(
    ("optim", "cls", "defaults"),
    [
        ("adamw", torch.optim.AdamW, {"foreach": None, "fused": None}),
        ("adamw_single", torch.optim.AdamW, {"foreach": False, "fused": False}),
        ("adam_fused", torch.optim.Adam, {"fused": True}),
        ("adafactor", torch.optim.Adafactor, {"foreach": None}),
    ],
)
def test_optimizers_have_the_defaults_of_torch(
    optim: str, cls: type, defaults: dict[str, Any]
) -> None:
    plan = TrainingPlan(model_name="gpt2", optim=optim)

    optimizer = make_optimizer(plan, [torch.nn.Parameter(torch.ones(2))])

    assert type(optimizer) is cls
    assert {k: optimizer.defaults[k] for k in defaults} == defaults


@pytest.mark.parametrize("mebibytes", [16_000, 40_330, 80_548, 143_154])
def test_a_fraction_gives_the_limit_back_to_the_byte(mebibytes: int) -> None:
    limit, total = mebibytes * 2**20, 143_155 * 2**20

    assert int(experiment.memory_fraction(limit, total) * total) == limit


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (PlanError("CUDA out of memory"), False),
    ],
)
def test_only_an_end_of_memory_is_out_of_memory(error: Exception, is_oom: bool) -> None:
    assert experiment.is_out_of_memory(error) is is_oom


@pytest.mark.gpu
def test_a_run_on_a_gpu_reads_the_allocator(model: Callable[[dict[str, Any]], str]) -> None:
    plan = TrainingPlan(model_name=model(LLAMA), seq_len=5, batch_size=2)
    delivered: list[Measurement] = []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment.run_experiment(plan, RunOptions(), delivered.append)

    (measured,) = delivered
    assert measured.verdict is Outcome.FITS
    assert all(r.allocated_bytes <= r.peak_allocated_bytes for r in measured.phases)
    assert measured.peak_allocated_bytes <= measured.peak_reserved_bytes < measured.process_bytes
    # The last step begins with what the first left, less the two scalars of the closure.
    ends = [r for r in measured.phases if r.phase is Phase.AFTER_OPTIMIZER_STEP]
    begins = [r for r in measured.phases if r.phase is Phase.BEFORE_FORWARD]
    assert begins[1].allocated_bytes == ends[0].allocated_bytes - 1024
