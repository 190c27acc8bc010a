"""`TrainingPlan`: the whole request. A lab config dictionary can be pasted into it, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from memest.errors import PlanError, closest, shown
from memest.plan.checks import check, suggest
from memest.plan.lengths import read_lengths, steps_of
from memest.plan.optimizers import optimizer_name
from memest.plan.other_names import OTHER_NAMES, read_other_names
from memest.plan.values import FROM_PRETRAINED, IGNORED_KEYS, PRECISION_ALIASES
from memest.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """One fine-tune, as Lightning would be asked to run it.

    Raises:
        PlanError: a value does not exist, is out of range, or contradicts another.
    """

    model_name: str
    """A bundled model, a folder or file with a Hugging Face config, or a Hub id."""

    name: str = ""
    """A label for reports; the model's name where empty."""

    batch_size: int = 1
    """Samples per micro-batch and GPU."""

    accumulate_grad_batches: int = 1
    """Micro-batches per optimizer step."""

    precision: str = "bf16-true"
    """One of `PRECISIONS`, as Lightning names them."""

    loop: str = "lightning"
    """One of `LOOPS`: whose training loop runs. Lightning frees gradients after the forward of the
    next step, the others before it."""

    optim: str = "adamw"
    """One of `OPTIMIZERS`, a class of `torch.optim` or `bitsandbytes.optim`, or a name of
    `TrainingArguments`."""

    optim_options: tuple[tuple[str, Any], ...] = ()
    """Further options of the optimizer's class, such as `amsgrad: true`; a mapping in files."""

    weight_decay: float | None = None
    """Of the optimizer; None is its own default. The multi-tensor path of SGD and Adam copies the
    gradients for it."""

    gradient_clip_val: float | None = None
    """Norm (or value) to which gradients are clipped; None is the loop's default: none in Lightning
    and a plain loop, 1.0 in the Trainer of transformers. 0 clips nothing."""

    gradient_clip_algorithm: str = "norm"
    """`norm` or `value`, as Lightning names them."""

    momentum: float = 0.0
    """Of `sgd` and `rmsprop`; above 0 it adds a buffer of the size of the trainable parameters."""

    nesterov: bool = False
    """Of `sgd` with `momentum`; `sgd_single` needs a copy of one gradient more for it."""

    act_ckpt: bool = False
    """Activation checkpointing, as `gradient_checkpointing_enable()` of transformers does it."""

    strategy: str = "auto"
    """One of `STRATEGIES`; `auto` is Lightning's choice: DDP on several GPUs."""

    devices: int = 1
    """GPUs of each node; where `num_nodes` is left at 1, of all. `auto` is taken as 1."""

    num_nodes: int = 1
    """Nodes."""

    gradient_as_bucket_view: bool = False
    """DDP: gradients lie in the buckets that are summed, instead of beside them."""

    bucket_cap_mb: int | None = None
    """DDP: MiB of gradients in a bucket; None is torch's: 25, and 1 in the first."""

    sharding_strategy: str = "FULL_SHARD"
    """FSDP: one of `SHARDINGS`."""

    shard_size: int | None = None
    """FSDP, `HYBRID_SHARD`: GPUs that share one copy; None is the 8 of a node, or all."""

    wrap_classes: tuple[str, ...] = ()
    """FSDP: classes of the layers that are wrapped; empty is what the model says must not be split
    (`_no_split_modules`)."""

    activation_checkpointing_policy: tuple[str, ...] = ()
    """FSDP: classes of the layers whose activations are computed anew in the backward."""

    reduce_bucket_size: int = 200_000_000
    """DeepSpeed: elements of the buffer in which gradients are summed; Lightning's default."""

    allgather_bucket_size: int = 200_000_000
    """DeepSpeed 1 and 2: elements of updated parameters gathered at once; Lightning's default."""

    use_lora: bool = False
    """Train low-rank adapters of peft on a frozen base."""

    use_qlora: bool = False
    """The same on a base quantised by bitsandbytes, as `quant` says."""

    quant: str = "nf4"
    """QLoRA: `nf4` (4 bits, the paper's) or `int8` (LLM.int8)."""

    kbit_ckpt: bool | None = None
    """QLoRA: whether `prepare_model_for_kbit_training` of peft turns activation checkpointing on,
    whatever `act_ckpt` says (its `use_gradient_checkpointing`); None is its default: on."""

    quant_load: str = FROM_PRETRAINED
    """QLoRA: one of `QUANT_LOADS`."""

    lora_r: int = 16
    """Rank of the adapters."""

    lora_alpha: float = 32
    """Scale of the adapters; no effect on memory."""

    lora_dropout: float = 0.05
    """Dropout before the adapters; above 0 it keeps a mask."""

    lora_target_modules: tuple[str, ...] = ()
    """Names of the modules that get adapters, or `all-linear`; empty is q and v, or peft's choice
    for the model."""

    lora_modules_to_save: tuple[str, ...] = ()
    """Names of modules that are copied and trained whole beside the adapters."""

    lora_bias: str = "none"
    """Which biases train: `none`, `all` of the model, or `lora_only`, those of adapted layers."""

    use_rslora: bool = False
    """Scale adapters by the square root of the rank; no effect on memory."""

    use_dora: bool = False
    """Train a magnitude per output beside the adapters (DoRA); it weighs the whole weight anew in
    every forward."""

    double_quant: bool = False
    """QLoRA: quantise the scales too (`bnb_4bit_use_double_quant`)."""

    quant_skip: tuple[str, ...] = ()
    """QLoRA: modules that stay unquantised (`llm_int8_skip_modules`); empty is the choice of
    transformers: the output head, what is tied to it, and the last module. What the model's class
    keeps in fp32 stays unquantised in any case, except in place."""

    seq_len: int | None = None
    """Tokens per sample, padding included; None is the modality's default, as the report states."""

    lengths: tuple[int, ...] = ()
    """Tokens per sample of each micro-batch in turn, in place of `seq_len`; from a list, or a file
    with a number per line. Every micro-batch is run, and `steps` are as many as there are lengths
    for, unless it is given."""

    padded: bool | None = None
    """Some row is shorter than the rest, so masks are material; None is `batch_size > 1`."""

    image_size: int | None = None
    """Height and width of images; None is the model's own."""

    attn_implementation: str | None = None
    """`sdpa`, `eager` or `flash_attention_2`; None is what transformers picks."""

    freeze: tuple[str, ...] = ()
    """Glob patterns over parameter names that are not trained, such as `vision_model.*`."""

    tie_word_embeddings: bool | None = None
    """Whether the output head shares the embeddings; None is as transformers builds the config."""

    gpu: tuple[str, ...] = ()
    """Names of GPUs to judge; empty is the default set."""

    gpu_memory: int | None = None
    """Bytes of a GPU that is not in the catalogue."""

    memory_limit: int | None = None
    """Bytes that the allocator may reserve, as `set_per_process_memory_fraction` caps it."""

    alloc_conf: str = ""
    """Settings of the allocator, as in `PYTORCH_ALLOC_CONF`: `expandable_segments:True`."""

    host_memory: int | None = None
    """Bytes of host memory of the node, for a verdict of its own."""

    limit_val_batches: int = 0
    """Batches of each validation; 0 runs none."""

    val_batch_size: int | None = None
    """Samples of a validation batch and GPU; None is `batch_size`."""

    val_check_interval: int | None = None
    """Micro-batches between validations; None validates at the end."""

    trainer_options: tuple[tuple[str, Any], ...] = ()
    """`loop: transformers`: how it logs, in the words of `TrainingArguments`, such as
    `logging_steps: 1`; each line of a log makes some scalars. A mapping in files."""

    steps: int = 2
    """Optimizer steps to simulate; from the third on only fragmentation can grow."""

    assumed: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """What was read into the plan, for the report; no key of it."""

    def __post_init__(self) -> None:
        if isinstance(self.optim, str):
            object.__setattr__(self, "optim", optimizer_name(self.optim))
        for key in _OPTIONS:
            object.__setattr__(self, key, _options(key, getattr(self, key)))
        object.__setattr__(self, "lengths", read_lengths(self.lengths) if self.lengths else ())
        check(self)

    @property
    def is_ddp(self) -> bool:
        """Whether every GPU holds the whole model and gradients are summed in buckets."""
        return self.strategy.startswith("ddp") or (self.strategy == "auto" and self.world_size > 1)

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP1 or FSDP2 divides the model."""
        return self.strategy in ("fsdp", "fsdp2")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed divides the training state."""
        return self.strategy.startswith("deepspeed")

    @property
    def offloads(self) -> bool:
        """Whether the optimizer works in the host's memory."""
        return self.strategy.endswith("_offload")

    @property
    def is_distributed(self) -> bool:
        """Whether anything but Lightning's single-device strategy runs."""
        return self.is_ddp or self.is_fsdp or self.is_deepspeed

    @property
    def world_size(self) -> int:
        """GPUs over all nodes."""
        return self.devices * self.num_nodes

    @property
    def validates(self) -> bool:
        """Whether there is a validation."""
        return self.limit_val_batches > 0

    @property
    def uses_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.use_lora or self.use_qlora

    @property
    def loads_quantized(self) -> bool:
        """Whether weights are quantised while they are loaded."""
        return self.use_qlora and self.quant_load == FROM_PRETRAINED

    @property
    def kbit_checkpoints(self) -> bool:
        """Whether `prepare_model_for_kbit_training` turns activation checkpointing on."""
        return self.use_qlora and self.kbit_ckpt is not False

    @property
    def is_padded(self) -> bool:
        """`padded` with its default applied."""
        return self.batch_size > 1 if self.padded is None else self.padded

    @property
    def label(self) -> str:
        """The name for reports."""
        return self.name or self.model_name

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; `from_dict` reads it back."""
        values = {name: getattr(self, name) for name in PLAN_KEYS}
        values |= {key: dict(values[key]) for key in _OPTIONS}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> TrainingPlan:
        """A plan from a lab config dictionary.

        Args:
            values: keys of `TrainingPlan`; those of a lab config that do not touch memory are
                passed over.
            overrides: values that win over `values`, None excepted.

        Raises:
            PlanError: a key does not exist, or a value is of the wrong kind.
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"a plan is a mapping of keys to values, not {shown(values)}",
                hint="write one `key: value` per line, `model_name` among them",
            )
        merged = {**values, **{k: v for k, v in overrides.items() if v is not None}}
        merged, assumed = read_other_names(merged)
        known = set(PLAN_KEYS)
        for key in merged:
            if not isinstance(key, str) or (key not in known and key not in IGNORED_KEYS):
                raise PlanError(
                    f"{shown(key)} is not a key of a plan",
                    hint=_near_keys(shown(key).strip("`"), known),
                )
        given = {k: _normalise(k, v) for k, v in merged.items() if k in known and v is not None}
        if isinstance(given.get("seq_len"), list | tuple):
            given["lengths"] = read_lengths(given.pop("seq_len"))
        if given.get("lengths") and "steps" not in given:
            given["steps"] = steps_of(given["lengths"], given.get("accumulate_grad_batches", 1))
        if "model_name" not in given:
            raise PlanError("the plan names no model", hint="give `model_name`, or `--model NAME`")
        return cls(**given, assumed=assumed)


PLAN_KEYS = tuple(f.name for f in dataclasses.fields(TrainingPlan) if f.name != "assumed")
"""The keys of a plan, in order."""


_TUPLES = frozenset(
    {
        "lora_target_modules", "lora_modules_to_save", "freeze", "gpu", "quant_skip",
        "wrap_classes", "activation_checkpointing_policy",
    }
)  # fmt: skip
_OPTIONS = ("optim_options", "trainer_options")
_SIZES = frozenset({"gpu_memory", "memory_limit", "host_memory"})


def _normalise(key: str, value: Any) -> Any:
    if key in _SIZES:
        return parse_bytes(value)
    if key in _TUPLES:
        return _names(key, value)
    if key == "lengths":
        return read_lengths(value) if value else ()
    if key == "precision" and isinstance(value, int | str) and not isinstance(value, bool):
        text = value if isinstance(value, str) else shown(value).strip("`")
        return PRECISION_ALIASES.get(text, text)
    return value


def _near_keys(key: str, known: set[str]) -> str:
    near = closest(key, known | OTHER_NAMES)
    return suggest(key, known | OTHER_NAMES if near else known, "keys")


def _options(key: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """A mapping, pairs, or text such as `amsgrad=true,eps=1e-6`."""
    hint = "write `name: value` lines, or `name=value` separated by commas"
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): _literal(text.strip()) for name, _, text in pairs}
    if isinstance(value, list | tuple):
        are_pairs = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        value = dict(value) if are_pairs else shown(value)
    plain = (bool, int, float, str, type(None))
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and k.isidentifier() and isinstance(v, plain) for k, v in value.items()
    ):
        raise PlanError(f"`{key}` is {shown(value)}", hint=hint)
    return tuple(value.items())


def _literal(text: str) -> Any:
    if text.casefold() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.casefold()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _names(key: str, value: Any) -> tuple[str, ...]:
    items: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) and i for i in items):
        raise PlanError(f"`{key}` is {shown(value)}", hint="give a list of names")
    parts = (part.strip() for item in items for part in item.split(","))
    return tuple(part for part in parts if part)
