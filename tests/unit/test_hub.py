"""A simulated script sends nothing to the Hugging Face Hub, nor to services that record runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi

from memest import virtual_gpu
from memest.estimator.integrations.hub import NOT_SENT
from memest.report import RunReport
from tests import forked


def _report(block: object) -> RunReport:
    with virtual_gpu("h100-80gb") as virtual:
        torch.zeros(8, device="cuda")
        block()  # type: ignore[operator]
    return virtual.report()


def test_uploads_have_the_results_that_the_hub_would_give(tmp_path: Path) -> None:
    api = HfApi()

    def block() -> None:
        assert api.create_repo("me/data", repo_type="dataset").repo_id == "me/data"
        assert huggingface_hub.create_repo("me/model", exist_ok=True).repo_id == "me/model"
        later = api.upload_folder(repo_id="me/model", folder_path=tmp_path, run_as_future=True)
        assert later.result().repo_url.repo_id == "me/model"
        assert api.create_branch("me/model", branch="main") is None

    before = HfApi.create_repo, huggingface_hub.create_repo

    assert NOT_SENT in _report(block).notes
    assert (HfApi.create_repo, huggingface_hub.create_repo) == before


def test_a_model_of_transformers_is_not_pushed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)

    def block() -> None:
        model = transformers.GPT2Model(config).to("cuda")
        assert model.push_to_hub("me/model").oid == "0" * 40

    assert NOT_SENT in _report(block).notes


def test_a_run_without_uploads_has_no_note() -> None:
    assert NOT_SENT not in _report(lambda: None).notes


@pytest.mark.parametrize(("given", "mode"), [(None, "disabled"), ("offline", "offline")])
def test_trackers_are_off_unless_their_mode_is_given(
    tmp_path: Path, given: str | None, mode: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['WANDB_MODE'])", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"}
    environment |= {"WANDB_MODE": given} if given else {}

    ran = forked.run(
        [sys.executable, "-m", "memest", "run", str(script)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip

    assert ran.stdout.splitlines()[0] == mode
