"""vLLM in the process of the training: what its engine holds, and TRL's trainers with it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import memest
from memest.errors import UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.integrations.vllm import files_bytes
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import Outcome, RunReport
from memest.units import GIB, MIB
from tests import forked
from tests.command import memest_here

GPU = "a100-80gb"
SHARE = 0.3
ROUNDING = 4 << 20
"""Two blocks, each a segment of whole 2 MiB."""


def held(gpu: str = GPU, share: float = SHARE) -> int:
    return math.ceil(share * find_gpu(gpu).memory_bytes)


def train(layer: Any) -> None:
    for _ in range(2):
        layer(torch.ones(8, 1024, device="cuda")).sum().backward()


def report_of(share: float, num_bytes: int = GIB) -> RunReport:
    gpu = memest.virtual_gpu(GPU)
    with gpu:
        weights = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        if share:
            from vllm import LLM

            llm = LLM("no-such-model", gpu_memory_utilization=share)
            assert llm.reset_prefix_cache()
        train(torch.nn.Linear(1024, 1024).cuda())
        del weights
    return gpu.report()


def test_an_engine_holds_its_share_of_each_gpu() -> None:
    alone, beside = report_of(0).verdicts, report_of(SHARE).verdicts

    assert set(alone) == set(beside)
    for name, verdict in beside.items():
        assert verdict.verdict is Outcome.FITS
        assert abs(verdict.needs_bytes - alone[name].needs_bytes - held(name)) <= ROUNDING, name


@pytest.mark.parametrize(("gib", "outcome"), [(54, Outcome.FITS), (55, Outcome.OOM)])
def test_the_verdict_is_that_by_hand(gib: int, outcome: Outcome) -> None:
    """0.7 of 79.15 GiB are left, less a context of 0.49 GiB and a linear layer of 16 MiB: 54.9."""
    gpu = memest.virtual_gpu(GPU)
    with contextlib.suppress(torch.OutOfMemoryError), gpu:
        from vllm import LLM

        llm = LLM("no-such-model", gpu_memory_utilization=SHARE)
        weights = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")
        train(torch.nn.Linear(1024, 1024).cuda())
        del weights, llm
    assert gpu.report().verdicts[GPU].verdict is outcome


def test_grpo_beside_another_process_has_the_verdict_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds 0.3 x 80 GB; then all that the script leaves, 1 MiB less or more."""
    fields = Path(__file__).resolve().parents[3] / "validation" / "scripts" / "field"
    text = (fields / "s04_grpo.py").read_text(encoding="utf-8")
    sizes = "V, D, H, L = 16384, 768, 12, 8\nPROMPT, GEN, GROUP, NPROMPT, MICRO = 64, 128, 8, 4, 8"
    assert sizes in text
    small = "V, D, H, L = 512, 64, 4, 1\nPROMPT, GEN, GROUP, NPROMPT, MICRO = 8, 4, 8, 4, 8"
    (tmp_path / "grpo.py").write_text(text.replace(sizes, small), encoding="utf-8")

    monkeypatch.chdir(tmp_path)

    def verdict(beside: int) -> dict[str, Any]:
        command = ["run", "--gpu", GPU, "--json", "run.json", "--beside", f"{beside}B", "grpo.py"]
        memest_here(*command)
        report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
        found: dict[str, Any] = report["verdicts"][GPU]
        return found

    gpu = find_gpu(GPU)
    beside = int(0.3 * 80e9)
    found = verdict(beside)
    assert found["verdict"] == "fits"
    assert found["limit_bytes"] == gpu.memory_bytes - gpu.context_bytes - beside
    needs = found["limit_bytes"] - found["margin_bytes"]
    assert needs <= found["reserved_bytes"] < 100 << 20
    left = gpu.memory_bytes - gpu.context_bytes - needs
    assert verdict(left - MIB)["verdict"] == "fits"
    assert verdict(left + MIB)["verdict"] == "oom"


def test_an_engine_that_has_no_room_is_counted_on_other_gpus_too() -> None:
    gpu = memest.virtual_gpu(GPU)
    with contextlib.suppress(torch.OutOfMemoryError), gpu:
        from vllm import LLM

        weights = torch.empty(30 * GIB, dtype=torch.uint8, device="cuda")
        LLM("no-such-model", gpu_memory_utilization=0.9)
        del weights

    verdicts = gpu.report().verdicts
    for name in ("a100-40gb", GPU):
        assert verdicts[name].verdict is Outcome.OOM
        needs = verdicts[name].limit_bytes - verdicts[name].margin_bytes
        assert abs(needs - 30 * GIB - held(name, 0.9)) <= ROUNDING


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_gpu_and_wake_up_takes_it_again(level: int, tmp_path: Path) -> None:
    weights = 8 * GIB
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(weights)
    gpu = VirtualGpu(find_gpu(GPU))
    with gpu:
        from vllm import LLM

        before = torch.cuda.mem_get_info()[0]
        llm = LLM(str(tmp_path), gpu_memory_utilization=SHARE, enable_sleep_mode=True)
        assert abs(before - torch.cuda.mem_get_info()[0] - held()) <= ROUNDING
        on_host = gpu.mode.host.num_bytes
        llm.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] == before
        assert gpu.mode.host.num_bytes - on_host == (weights if level == 1 else 0)
        llm.wake_up(tags=["weights"])
        assert before - torch.cuda.mem_get_info()[0] == weights
        assert gpu.mode.host.num_bytes == on_host
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert abs(before - torch.cuda.mem_get_info()[0] - held()) <= ROUNDING
        torch.zeros(1, device="cuda")
    assert any("asleep, it holds nothing" in note for note in gpu.notes)


def test_sleep_without_sleep_mode_frees_nothing() -> None:
    gpu = VirtualGpu(find_gpu(GPU))
    with gpu:
        from vllm import LLM

        llm = LLM("no-such-model", gpu_memory_utilization=SHARE)
        free = torch.cuda.mem_get_info()[0]
        llm.sleep()
        assert torch.cuda.mem_get_info()[0] == free
    assert any("enable_sleep_mode" in note for note in gpu.notes)


def test_weights_beyond_the_share_leave_no_cache(tmp_path: Path) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(9 * GIB)
    assert files_bytes(str(tmp_path)) == 9 * GIB
    with memest.virtual_gpu(GPU):
        from vllm import LLM

        with pytest.raises(ValueError, match="No available memory for the cache blocks"):
            LLM(str(tmp_path), gpu_memory_utilization=0.1)


def test_completions_are_as_long_as_they_may_be() -> None:
    gpu = VirtualGpu(find_gpu(GPU))
    with gpu:
        from vllm import LLM, SamplingParams

        llm = LLM("no-such-model", gpu_memory_utilization=SHARE, max_model_len=20)
        prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(14))}]
        params = SamplingParams(n=2, max_tokens=8, logprobs=1, temperature=0.9)
        found = llm.generate(prompts, sampling_params=params, use_tqdm=False)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        assert model.load_weights([("w", torch.zeros(2, device="cuda"))]) == {"w"}
        with pytest.raises(UnsupportedError, match=r"`vllm\.LLM\.encode` cannot be simulated"):
            llm.encode("text")
        other = LLM("no-such-model", gpu_memory_utilization=SHARE)
        with pytest.raises(UnsupportedError, match="without a limit"):
            other.generate([[1]], SamplingParams(max_tokens=None))
    assert [len(c.token_ids) for output in found for c in output.outputs] == [8, 8, 6, 6]
    assert [output.prompt_token_ids for output in found] == [[5, 6, 7], list(range(14))]
    assert set(found[0].outputs[0].token_ids) == {6}
    assert [len(row) for row in found[0].outputs[0].logprobs] == [2] * 8
    assert any("all of its 8 tokens" in note for note in gpu.notes)


def test_other_names_of_vllm_are_refused_when_they_are_called() -> None:
    with memest.virtual_gpu(GPU):
        from vllm.distributed.utils import StatelessProcessGroup

        with pytest.raises(UnsupportedError, match=r"vllm\.distributed\.utils\.Stateless"):
            StatelessProcessGroup()
    assert "vllm" not in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_other_libraries_find_no_vllm_where_there_is_none() -> None:
    code = "import importlib.util\ndef has(): return importlib.util.find_spec('vllm') is not None\n"
    library, trl = types.ModuleType("library"), types.ModuleType("trl.import_utils")
    for module in (library, trl):
        exec(compile(code, "site-packages/x.py", "exec"), vars(module))
    with memest.virtual_gpu(GPU):
        assert not library.has()
        assert trl.has()


TRAIN = """
import sys
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

words = {f"w{i}": i for i in range(2, 100)} | {"</s>": 0, "<pad>": 1}
plain = Tokenizer(models.WordLevel(words, unk_token="</s>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>")
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=100, pad_token_id=1, bos_token_id=0, eos_token_id=0,
))
model.save_pretrained("model")
kind, mode = sys.argv[1:]
config, trainer = (GRPOConfig, GRPOTrainer) if kind == "grpo" else (RLOOConfig, RLOOTrainer)
trainer(
    model=LlamaForCausalLM.from_pretrained("model"), processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"prompt": f"w{i} w3 w4 w5"} for i in range(2, 18)]),
    reward_funcs=lambda completions, **others: [float(len(c)) for c in completions],
    args=config(
        output_dir="out", max_steps=2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=16, report_to=[], save_strategy="no", bf16=True,
        use_vllm=mode != "none", vllm_mode="server" if mode == "server" else "colocate",
        vllm_gpu_memory_utilization=0.3, vllm_enable_sleep_mode=mode == "sleep",
    ),
).train()
"""

with_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: `pip install trl`"
)


def run_trl(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    command = ["run", "--gpu", GPU, "--json", "run.json", "train.py", *options]
    ran = forked.run(
        [sys.executable, "-m", "memest", *command], cwd=folder, capture_output=True, text=True,
        check=False, env=os.environ | {"COLUMNS": "500"}, imports=("transformers.trainer",),
    )  # fmt: skip
    return ran.stdout + ran.stderr, json.loads((folder / "run.json").read_text(encoding="utf-8"))


@with_trl
@pytest.mark.parametrize(("kind", "mode"), [("grpo", "awake"), ("rloo", "sleep")])
def test_trl_trains_with_an_engine_in_its_process(kind: str, mode: str, tmp_path: Path) -> None:
    text, report = run_trl(tmp_path, kind, mode)

    assert report["verdicts"][GPU]["verdict"] == "fits", text
    assert len(report["steps"]) == 2, text
    assert held() < report["peak_allocated_bytes"] < held() + (64 << 20)
    notes = " ".join(report["notes"])
    assert "`vllm.LLM` holds 23.75 GiB" in notes
    assert "all of its 16 tokens" in notes
    assert ("asleep, it holds nothing" in notes) is (mode == "sleep")


@with_trl
def test_trls_client_of_a_server_is_refused_by_name(tmp_path: Path) -> None:
    text, _ = run_trl(tmp_path, "grpo", "server")
    assert '`vllm_mode="server"` of TRL cannot be simulated' in text
