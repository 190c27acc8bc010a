"""The commands of the labs, and what was published of each; `make_labs.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SUITES = ROOT / "memest" / "validate" / "suites"

MAX_STEPS = 3
OOM, FITS = "out of memory", "fits"

LITGPT = "Single GPU, LitGPT, A100 80GB"
FOUR = "Four GPUs, LitGPT in a LightningModule, A100 80GB"
BLIP2 = "Single GPU, BLIP-2"
FOUR_BLIP2 = "Four GPUs, BLIP-2"
LABS = (LITGPT, FOUR, BLIP2, FOUR_BLIP2)

MISSES = {
    ("a100-80gb: opt-2.7b on 4 GPUs, FSDP", "reserved"): (
        "the plan builds the model on the GPU before FSDP divides it, and the script on the host;"
        " blocks cached by then differ, and so do remainders that are not split off"
    )
}
"""Row and peak of a plan that is over 0.5 % from its script, and the cause."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One command of a lab."""

    lab: str
    gpu: str
    what: str
    target: tuple[str, ...]
    """Script or module with its arguments."""

    published: str

    num_gpus: int = 1
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The same experiment as `memest predict` takes it; empty where there is none."""

    ends: str = ""
    """How it ends where its inputs are not the lab's; empty is as published."""

    lightning: str = ""
    """Release of Lightning in a folder of its own; empty is the installed one."""

    @property
    def name(self) -> str:
        """As the key of its figures."""
        return f"{self.gpu}: {self.what}"

    @property
    def packages(self) -> str:
        """Folder of packages that go before the installed ones."""
        return f"lightning-{self.lightning}" if self.lightning else ""

    @property
    def command(self) -> tuple[str, ...]:
        """What is typed after `memest`."""
        several = ("--nproc-per-node", str(self.num_gpus)) if self.num_gpus > 1 else ()
        options = (*several, "--gpu", self.gpu, "--max-steps", str(MAX_STEPS))
        return ("run", *options, *self.target)


def rows() -> list[Row]:
    """All of them, in the order of the page."""
    found = [*_litgpt(), *_one_of_four()]
    for lab, gpu, suite in (
        (BLIP2, "a100-80gb", "lab-a100"),
        (BLIP2, "h100-80gb", "lab-h100"),
        (FOUR_BLIP2, "a100-80gb", "lab-multi"),
    ):
        found += _blip2(lab, gpu, suite)
    return found


def models() -> dict[str, tuple[str, ...]]:
    """The layout to the Hub ids whose checkpoints the rows read."""
    return {
        "litgpt": (
            "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
            "openlm-research/open_llama_3b",
            "openlm-research/open_llama_7b",
            "openlm-research/open_llama_13b",
        ),
        "hf": (
            "Salesforce/blip2-opt-2.7b",
            "Salesforce/blip2-opt-6.7b",
            "Salesforce/blip2-flan-t5-xxl",
        ),
    }


BF16 = ("--precision", "bf16-true")
_FULL = (
    ("TinyLlama, 32-true, batch 32", "tiny-llama", 32, 32, (), OOM),
    ("TinyLlama, batch 8", "tiny-llama", 8, 8, (), FITS),
    ("TinyLlama, accumulation 32/8", "tiny-llama", 32, 8, (), FITS),
    ("TinyLlama, bf16-true, 32/8", "tiny-llama", 32, 8, BF16, FITS),
    ("TinyLlama, bf16-mixed, 32/8", "tiny-llama", 32, 8, ("--precision", "bf16-mixed"), FITS),
    ("OpenLLaMA 3B, bf16-true, 32/8", "open-llama-3b", 32, 8, BF16, FITS),
    ("OpenLLaMA 7B, bf16-true, 16/4", "open-llama-7b", 16, 4, BF16, FITS),
    ("OpenLLaMA 13B, bf16-true, 1/1", "open-llama-13b", 1, 1, BF16, OOM),
    (
        "OpenLLaMA 13B, SGD, 1/1", "open-llama-13b", 1, 1,
        (*BF16, "--optimizer", "SGD", "--train.max_steps", "25"), FITS,
    ),
)  # fmt: skip
_LORA = (
    ("TinyLlama, LoRA", "tiny-llama", ()),
    ("OpenLLaMA 3B, LoRA", "open-llama-3b", ()),
    ("OpenLLaMA 7B, LoRA", "open-llama-7b", ()),
    ("OpenLLaMA 7B, LoRA on nf4", "open-llama-7b", ("--quantize", "bnb.nf4")),
    ("OpenLLaMA 13B, LoRA", "open-llama-13b", ()),
)


def _litgpt() -> Iterator[Row]:
    for what, recipe, batch, micro, options, published in _FULL:
        batches = ("--train.global_batch_size", str(batch), "--train.micro_batch_size", str(micro))
        config = ("--config", f"config/{recipe}-full.yaml")
        target = ("-m", "litgpt", "finetune_full", *config, *batches, *options)
        yield Row(lab=LITGPT, gpu="a100-80gb", what=what, target=target, published=published)
    for what, recipe, options in _LORA:
        target = ("-m", "litgpt", "finetune", "--config", f"config/{recipe}-lora.yaml", *options)
        yield Row(lab=LITGPT, gpu="a100-80gb", what=what, target=target, published=FITS)


ONE_GPU = (
    "7B on one GPU, batch 4",
    "the same, accumulation over 4",
    "the same, rows of up to 421 tokens",
)
"""The last is the length of which 61.97 GiB would be printed."""

OF_DDP, OF_FSDP = "69.62 to 73.98, 78.06 to 78.30", "31.96 to 36.33, 55.76 to 56.00"
OF_FSDP_8 = "59.51 to 62.95, 62.71 to 67.67"

BATCH_8 = "7B on 4 GPUs, FSDP, batch 8"
BATCH_8_AS_PUBLISHED = "the same, batch 8, Lightning 2.4.0, rows of up to 455 tokens"
OLD_LIGHTNING = "2.4.0"
"""Without the fix of Lightning 2.5.0 that casts a module before FSDP divides it (#20323)."""


def _one_of_four() -> Iterator[Row]:
    checkpoint = "checkpoints/openlm-research/open_llama_7b"
    options_and_published = (
        (("4",), "61.97, 71.35"), (("4", "4"), "61.99, 73.30"), (("4", "1", "421"), "61.97, 71.35")
    )  # fmt: skip
    for what, (options, published) in zip(ONE_GPU, options_and_published, strict=True):
        target = ("config/one_gpu.py", checkpoint, *options)
        yield Row(lab=FOUR, gpu="a100-80gb", what=what, target=target, published=published)
    for what, options, published in (
        ("7B on 4 GPUs, DDP", ("4", "ddp"), OF_DDP),
        ("the same, DDP, rows of up to 421 tokens", ("4", "ddp", "421"), OF_DDP),
        ("7B on 4 GPUs, FSDP FULL_SHARD", ("4", "fsdp"), OF_FSDP),
        ("the same, FSDP, rows of up to 421 tokens", ("4", "fsdp", "421"), OF_FSDP),
        (BATCH_8, ("8", "fsdp"), OF_FSDP_8),
        (BATCH_8_AS_PUBLISHED, ("8", "fsdp", "455"), OF_FSDP_8),
        ("13B on 4 GPUs, ZeRO-3, optimizer offloaded", ("4", "deepspeed"), FITS),
    ):
        weights = checkpoint.replace("7b", "13b") if "deepspeed" in options else checkpoint
        yield Row(
            lab=FOUR, gpu="a100-80gb", what=what, published=published, num_gpus=4,
            target=("config/four_gpus.py", weights, *options),
            ends=OOM if options == ("4", "ddp") else "",  # the lab's rows are shorter
            lightning=OLD_LIGHTNING if what == BATCH_8_AS_PUBLISHED else "",
        )  # fmt: skip


_DEFAULTS: Mapping[str, Any] = {"accumulate_grad_batches": 1, "optim": "adamw", "act_ckpt": False}
_OF_ADAPTERS = ("use_lora", "use_qlora", "lora_r", "lora_alpha", "lora_dropout")
_NOT_GIVEN = (
    "name", "expected", "note", "seq_len", "lora_target_modules", "num_workers", "wrap_classes",
    "gradient_as_bucket_view",
)  # fmt: skip


def _blip2(lab: str, gpu: str, suite: str) -> Iterator[Row]:
    given = yaml.safe_load((SUITES / f"{suite}.yaml").read_text(encoding="utf-8"))
    for experiment in given["experiments"]:
        cfg = {**given["defaults"], **experiment}
        if lab == FOUR_BLIP2 and cfg["model_name"] != "blip2-opt-2.7b":
            continue  # OpenLLaMA is in `FOUR`, the row of offload in `BLIP2`
        has_adapters = bool(cfg.get("use_lora") or cfg.get("use_qlora"))
        cfg["model_name"] = f"Salesforce/{cfg['model_name']}"
        if cfg.get("use_qlora"):
            cfg |= {"use_lora": False, "accumulate_grad_batches": 1}
        edits = tuple(
            f"{key}={value}"
            for key, value in cfg.items()
            if key not in _NOT_GIVEN and (has_adapters or _DEFAULTS.get(key) != value)
        )
        script = "fine_tune_lora.py" if has_adapters else "fine_tune.py"
        yield Row(
            lab=lab,
            gpu=gpu,
            what=experiment["name"],
            target=(script, *edits),
            plan={**given["defaults"], **experiment, "gpu": [gpu], "steps": MAX_STEPS},
            published=OOM if cfg.get("expected") == "oom" else FITS,
            num_gpus=cfg.get("devices", 1),
        )
