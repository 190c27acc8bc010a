"""LitGPT's own commands and its API, as its users type them, on the smallest of its models.

Each runs to its end: sanity check, training, validation and a sample with a KV cache at each step,
the saved checkpoint. Where LitGPT is missing none can: docs/labs.md says how it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.litgpt import MEASURED_RELEASE
from memest.run.dummy_checkpoints import write_checkpoint
from memest.run.session import RunResult, Session, run_target
from memest.run.target import find_module, find_script

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("litgpt") is None,
        reason="LitGPT is not installed: `pip install --no-deps litgpt==0.5.13`",
    ),
    pytest.mark.filterwarnings(
        "ignore"
    ),  # LitGPT's own, of packages that it has not caught up with
]

WEIGHTS = 14_067_712
"""Of pythia-14m: two tables of 50304 x 128, and six layers of 198,016 and a norm of 256."""

LEFT = {"aten.convolution", "aten.convolution_backward"}
"""Not modelled: of LoRA on three parts of a fused projection, whose adapters are a convolution."""

COMMON = (
    "--train.max_steps", "2", "--train.global_batch_size", "4", "--train.micro_batch_size", "2",
    "--train.max_seq_length", "64", "--eval.interval", "1", "--eval.max_iters", "1",
    "--eval.max_new_tokens", "3", "--eval.final_validation", "false", "--out_dir", "out",
)  # fmt: skip
DATA = ("--data", "JSON", "--data.json_path", "rows.json", "--data.val_split_fraction", "0.5",
        "--data.num_workers", "0")  # fmt: skip

TOKENS = """
import torch
from torch.utils.data import DataLoader
from litgpt.data import DataModule

class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None, **kwargs):
        self.batch_size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        rows = list(torch.randint(0, 1000, (16, self.length + 1)))
        return DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader
"""

API = """
import lightning as L
import torch
from litgpt import LLM
from litgpt.data import JSON

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.llm = LLM.load("checkpoints/pythia-14m", distribute=None)

    def setup(self, stage):
        self.llm.trainer_setup()

    def training_step(self, batch):
        return self.llm(input_ids=batch["input_ids"], target_ids=batch["labels"])[1]

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.llm.model.parameters())

from pathlib import Path
lit, data = Lit(), JSON(Path("rows.json"), val_split_fraction=0.5, num_workers=0)
data.connect(lit.llm.tokenizer, batch_size=2, max_seq_length=64)
L.Trainer(accelerator="gpu", precision="bf16-true", max_steps=2, logger=False,
          enable_checkpointing=False, enable_progress_bar=False).fit(lit, data)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    write_checkpoint("pythia-14m", folder / "checkpoints" / "pythia-14m", layout="litgpt")
    row = {"instruction": "say a word", "input": "", "output": "a word and then another " * 8}
    (folder / "rows.json").write_text(json.dumps([row] * 24))
    (folder / "lab_tokens.py").write_text(TOKENS)
    (folder / "api.py").write_text(API)
    return folder


@pytest.fixture(autouse=True)
def folder(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab)
    return lab


def litgpt(*args: str, max_steps: int | None = None) -> RunResult:
    session = Session(find_gpu("h100-80gb"), max_steps=max_steps)
    return run_target(find_module("litgpt", args), session)


def tuned(command: str, *options: str) -> dict[str, int]:
    """Bytes at the peak by kind, after a command that ran to its end."""
    ran = litgpt(command, "checkpoints/pythia-14m", *DATA, *COMMON, *options)

    assert (ran.exit_code, ran.error_text) == (0, "")
    assert ran.report is not None
    assert ran.report.num_steps == 2
    assert set(ran.report.coverage["unmodelled"]) <= LEFT
    phases = {phase.name for phase in ran.report.phases}
    assert {"forward", "backward", "optimizer", "evaluation"} <= phases
    return {term.name: term.num_bytes for term in ran.report.terms}


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-true", 2), ("bf16-mixed", 4)])
def test_a_full_fine_tune_holds_four_times_its_weights(precision: str, itemsize: int) -> None:
    held = tuned("finetune_full", "--precision", precision)

    assert held["params"] == held["grads"] == WEIGHTS * itemsize
    assert held["optimizer"] == 2 * held["params"]


def test_sgd_keeps_nothing_between_steps() -> None:
    held = tuned("finetune_full", "--precision", "32-true", "--optimizer", "SGD")

    assert held["params"] == WEIGHTS * 4
    assert "optimizer" not in held


def test_lora_trains_its_adapters_alone_and_a_base_is_quantised() -> None:
    whole = tuned("finetune_lora", "--precision", "bf16-true")
    four_bit = tuned("finetune", "--precision", "bf16-true", "--quantize", "bnb.nf4")
    twice = tuned("finetune", "--precision", "bf16-true", "--quantize", "bnb.nf4-dq")

    assert whole["grads"] < whole["params"] / 50
    # so few layers that Python does not look for what the first quantisation left in cycles
    assert four_bit["params"] == twice["params"]
    assert sum(twice.values()) < sum(four_bit.values())


def test_pretraining_is_compiled() -> None:
    config = yaml.safe_load(Path("checkpoints/pythia-14m/model_config.yaml").read_text())
    few = json.dumps(config | {"n_layer": 1})
    ran = litgpt(
        "pretrain", "pythia-14m", "--data", "lab_tokens.Tokens", "--logger_name", "csv",
        "--train.max_tokens", "512", "--train.lr_warmup_steps", "1",
        "--precision", "bf16-true", "--devices", "1", "--out_dir", "pretrained",
        "--model_config", few, *COMMON[2:12],
    )  # fmt: skip

    assert (ran.exit_code, ran.error_text) == (0, "")
    assert ran.report is not None
    assert any("compiled the script" in note for note in ran.report.notes)


def test_a_sample_is_generated_with_a_cache_of_keys_and_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = litgpt("generate", "checkpoints/pythia-14m", "--prompt", "hello", "--max_new_tokens", "4")

    assert (ran.exit_code, ran.error_text) == (0, "")
    assert ran.report is not None
    assert "generation" in {phase.name for phase in ran.report.phases}
    assert "Memory used" in capsys.readouterr().err


def test_the_api_trains_in_a_lightning_module() -> None:
    ran = run_target(find_script("api.py", ()), Session(find_gpu("a100-80gb")))

    assert (ran.exit_code, ran.error_text) == (0, "")
    assert ran.report is not None
    held = {term.name: term.num_bytes for term in ran.report.terms}
    assert held["params"] == WEIGHTS * 2


def test_a_sample_is_compiled_with_cuda_graphs() -> None:
    ran = litgpt("generate", "checkpoints/pythia-14m", "--compile", "true")

    assert (ran.exit_code, ran.error_text) == (0, "")


def test_a_folder_without_a_checkpoint_gets_the_offer_of_a_stand_in() -> None:
    ran = litgpt("finetune_full", "checkpoints/missing", *DATA)

    assert ran.exit_code == 1
    assert "is not a checkpoint directory" in ran.error_text
    assert "`memest checkpoint NAME --format litgpt FOLDER`" in ran.error_text


def test_an_unknown_key_of_a_recipe_is_told_by_litgpt(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text("checkpoint_dir: checkpoints/pythia-14m\ntrane: 3\n")
    ran = litgpt("finetune_full", "--config", "recipe.yaml")

    assert ran.exit_code == 2
    assert "trane" in capsys.readouterr().err


def test_another_release_is_named_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from memest.estimator.integrations import litgpt as stand_in

    monkeypatch.setattr(stand_in, "installed_versions", lambda name: {name: "0.5.7"})
    ran = litgpt("generate", "checkpoints/pythia-14m", "--max_new_tokens", "1")

    assert ran.report is not None
    assert f"measured on a GPU is {MEASURED_RELEASE}" in " ".join(ran.report.notes)


def test_thunder_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    thunder = ModuleType("thunder")
    thunder.jit = lambda model: model  # type: ignore[attr-defined]
    thunder.__spec__ = importlib.util.spec_from_loader("thunder", None)
    monkeypatch.setitem(sys.modules, "thunder", thunder)
    Path("jitted.py").write_text(
        "import thunder, torch\nthunder.jit(torch.nn.Linear(2, 2).cuda())\n"
    )
    ran = run_target(find_script("jitted.py", ()), Session(find_gpu("h200")))

    assert isinstance(ran.refusal, UnsupportedError)
    assert "`thunder.jit`" in str(ran.refusal)
