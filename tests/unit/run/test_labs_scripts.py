"""The labs' BLIP-2 scripts run as they are, on a model of their kind that is small."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import Blip2Config, Blip2QFormerConfig, Blip2VisionConfig, T5Config

from memest.estimator.hardware.gpus import find_gpu
from memest.report import Ending, RunReport
from memest.run.dummy_checkpoints import write_checkpoint
from memest.run.session import Session, run_target
from memest.run.target import find_script

pytest.importorskip("lightning")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lightning, of what it is built on

SCRIPTS = Path(__file__).resolve().parents[3] / "docs" / "labs" / "blip2"
PHASES = ("before forward", "after forward", "after backward", "after optimizer step")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(num_attention_heads=4, image_size=56, **sizes),
        qformer_config=Blip2QFormerConfig(num_attention_heads=4, encoder_hidden_size=64, **sizes),
        text_config=T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        num_query_tokens=4,
        image_token_index=32100,
        architectures=["Blip2ForConditionalGeneration"],
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    write_checkpoint(str(folder / "config.json"), folder / "small-blip2", layout="hf")
    return folder


def run(script: str, lab: Path, monkeypatch: pytest.MonkeyPatch, *edits: str) -> RunReport:
    monkeypatch.chdir(lab)
    monkeypatch.delitem(sys.modules, "fine_tune", raising=False)
    args = ("model_name=small-blip2", "batch_size=4", "num_train_samples=16", *edits)
    session = Session(find_gpu("a100-80gb"), max_steps=3)
    ran = run_target(find_script(str(SCRIPTS / script), args), session)
    assert not ran.error_text, ran.error_text
    assert ran.report is not None
    assert ran.report.ending == Ending.STOPPED
    return ran.report


def test_a_step_prints_its_four_phases(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = ("precision=bf16-true", "optim=adam_8bit", "act_ckpt=True", "accumulate_grad_batches=2")
    report = run("fine_tune.py", lab, monkeypatch, *edits)

    printed = re.findall(r"step (\d), ([a-z ]+): params ([\d.]+)", capsys.readouterr().out)
    assert [phase for step, phase, _ in printed if step == "0"][:7] == [
        *PHASES[:3],
        *PHASES,
    ]
    assert report.num_steps == 3


def test_qlora_holds_its_base_in_four_bits(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("fine_tune_lora.py", lab, monkeypatch, "num_workers=0")
    four_bit = run("fine_tune_lora.py", lab, monkeypatch, "use_lora=False", "use_qlora=True")

    held = [{row.name: row.num_bytes for row in report.terms} for report in (whole, four_bit)]
    assert held[1]["params"] < held[0]["params"]
    assert held[0]["optimizer"] < held[0]["params"] / 10


def test_an_unknown_key_is_told_with_the_known_ones(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab)
    target = find_script(str(SCRIPTS / "fine_tune.py"), ("batchsize=4",))
    ran = run_target(target, Session(find_gpu("a100-80gb")))

    assert ran.exit_code == 1
    assert ran.error_text.startswith("no such key: batchsize; there are model_name, batch_size")
