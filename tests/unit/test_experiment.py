"""The Lightning side of a measured run, on the CPU: the order of its phases and what they see."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import time
import types
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
from memest.models_meta.registry import resolve_config
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


def test_published_weights_take_the_memory_of_random_ones(
    run: Run, model: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """A checkpoint made on the spot."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "checkpoint"
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)

    random = run(model_name=str(folder), precision="bf16-true")
    loaded = run(RunOptions(weights="pretrained"), model_name=str(folder), precision="bf16-true")

    def states(measured: Measurement) -> list[tuple[int, int, int]]:
        return [(r.params_bytes, r.grads_bytes, r.optimizer_bytes) for r in measured.phases]

    assert states(random) == states(loaded)
    assert random.model == loaded.model


def test_a_folder_without_weights_is_said_so(
    run: Run, model: Callable[[dict[str, Any]], str]
) -> None:
    with pytest.raises(PlanError, match="has no weights"):
        run(RunOptions(weights="pretrained"), model_name=model(LLAMA))


class _Rows(list[dict[str, Any]]):
    """A data set as `datasets` gives it."""

    column_names = ("image", "text")


class _Image:
    def convert(self, mode: str) -> _Image:
        assert mode == "RGB"
        return self


class _Processor:
    """Words are tokens; a batch is padded to its longest."""

    def image_processor(self, images: list[_Image], return_tensors: str) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(len(images), 3, 28, 28)}

    def tokenizer(self, texts: list[str], **options: Any) -> dict[str, Any]:
        assert options == {"padding": "longest", "max_length": 50, "truncation": True,
                           "return_tensors": "pt"}  # fmt: skip
        counts = [len(text.split()) for text in texts]
        mask = torch.tensor([[int(i < n) for i in range(max(counts))] for n in counts])
        return {"input_ids": mask * 7, "attention_mask": mask}


def test_a_data_set_is_taken_in_turn_and_its_longest_caption_counts() -> None:
    rows = _Rows({"image": _Image(), "text": "word " * n} for n in (2, 2, 5))
    plan = TrainingPlan(
        model_name="gpt2", batch_size=2, accumulate_grad_batches=2, precision="bf16-true"
    )

    feed = data._feed_of_captions(rows, plan, _Processor())

    # Rows 0 1, 2 0, 1 2, 0 1: two steps of two micro-batches.
    assert [tuple(b["input_ids"].shape) for b in feed.batches] == [(2, 2), (2, 5), (2, 5), (2, 2)]
    assert (feed.seq_len, feed.padded, feed.image_size) == (5, True, 28)
    assert feed.notes == ("micro-batches of 2 to 5 tokens",)
    assert feed.batches[0]["pixel_values"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("columns", "message"),
    [(("image", "caption"), "has no column `text`"), (("image", "text"), "has no rows")],
)
def test_a_data_set_without_the_columns_is_refused(
    columns: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _Rows()
    rows.column_names = columns  # type: ignore[assignment]
    library: Any = types.ModuleType("datasets")
    library.__spec__ = importlib.machinery.ModuleSpec("datasets", None, origin="datasets.py")
    library.load_from_disk = lambda path: rows
    monkeypatch.setitem(sys.modules, "datasets", library)

    with pytest.raises(PlanError, match=message) as caught:
        data.dataset_feed(TrainingPlan(model_name="gpt2"), resolve_config("gpt2"), Path("lab"))
    assert f"`{columns[1]}`" in caught.value.hint


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
