"""`TrainingPlan`, the description of a fine-tune to predict, and the files that hold plans.

The comment or docstring of a key is its text in docs/plan.md, which `python scripts/regenerate.py`
writes. The rest of its row is in `keys.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memest.errors import PlanError, closest, shown
from memest.plan import keys
from memest.plan.checks import check
from memest.plan.optimizers import optimizer_name
from memest.plan.other_names import other_names, read_other_names
from memest.plan.reading import parse_yaml, read_limited


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Description of a fine-tune to predict or to measure; its fields are the keys of plan files.

    Raises:
        PlanError: a value is not allowed, or contradicts another.
    """

    model_name: str  # Bundled model, folder or file with a Hugging Face config, or Hub id
    name: str = ""  # Label for reports; the model's name where empty
    batch_size: int = 1  # Samples per micro-batch and GPU
    accumulate_grad_batches: int = 1  # Micro-batches per optimizer step
    precision: str = "bf16-true"  # Precision in Lightning's words: one of `PRECISIONS`
    loop: str = "lightning"
    """Training loop, one of `LOOPS`: Lightning's Trainer, the Trainer of transformers, or a plain
    loop. See [the loop](#the-loop)."""

    optim: str = "adamw"
    """Optimizer: a class of `torch.optim` or `bitsandbytes.optim`, or a name of
    `TrainingArguments`. See [optimizers](#optimizers)."""

    optim_options: tuple[tuple[str, Any], ...] = ()
    """More options of the optimizer's class: a mapping, such as `{amsgrad: true}`, or
    `amsgrad=true,eps=1e-6`."""

    weight_decay: float | None = None
    """Weight decay of the optimizer. The multi-tensor paths of SGD and Adam copy the gradients for
    it."""

    gradient_clip_val: float | None = None
    """Norm, or value, to which gradients are clipped. 0 clips nothing."""

    gradient_clip_algorithm: str = "norm"  # Way of clipping in Lightning's words: one of `CLIPPING`
    momentum: float = 0.0
    """Momentum of `sgd`, `rmsprop`, `muon` and of bitsandbytes' counterparts. Above 0 it adds a
    buffer of the size of the trainable parameters."""

    nesterov: bool = False
    """Nesterov momentum of `sgd`. `sgd_single` needs a copy of one more gradient for it."""

    act_ckpt: bool = False
    """Activation checkpointing by `gradient_checkpointing_enable()` of transformers."""

    strategy: str = "auto"
    """Strategy, one of `STRATEGIES`. `auto` is Lightning's choice: DDP on several GPUs. See
    [strategies](strategies.md)."""

    devices: int = 1  # GPUs of each node. `auto` is taken as 1, with a note in the report
    num_nodes: int = 1  # Nodes
    gradient_as_bucket_view: bool = False  # DDP: gradients are views of the buckets
    bucket_cap_mb: int | None = None  # DDP: MiB of gradients in a bucket
    sharding_strategy: str = "FULL_SHARD"  # FSDP: one of `SHARDINGS`. `fsdp2` has no `NO_SHARD`
    shard_size: int | None = None  # FSDP, `HYBRID_SHARD`: GPUs that share one copy
    wrap_classes: tuple[str, ...] = ()  # FSDP: classes of the layers that are wrapped
    activation_checkpointing_policy: tuple[str, ...] = ()
    """FSDP: classes of the layers whose activations are recomputed in the backward."""

    reduce_bucket_size: int = 200_000_000  # DeepSpeed: elements of gradients summed at once
    allgather_bucket_size: int = 200_000_000
    """DeepSpeed 1 and 2: elements of updated parameters gathered at once."""

    use_lora: bool = False  # Train low-rank adapters of peft on a frozen base
    use_qlora: bool = False
    """Train adapters on a base quantised by bitsandbytes in the format `quant`."""

    quant: str = "nf4"
    """QLoRA: `nf4` (4 bits) or `int8` (LLM.int8; activations without outliers are assumed)."""

    kbit_ckpt: bool | None = None
    """QLoRA: `use_gradient_checkpointing` of peft's `prepare_model_for_kbit_training`. It turns
    activation checkpointing on, whatever the value of `act_ckpt`.
    """

    quant_load: str = keys.FROM_PRETRAINED
    """QLoRA: `from_pretrained` quantises weights while they are loaded. `in_place` replaces the
    layers of a model that is on the GPU in 16 bits one by one."""

    lora_r: int = 16  # Rank of the adapters
    lora_alpha: float = 32  # Scale of the adapters; no effect on memory
    lora_dropout: float = 0.05  # Dropout before the adapters. Above 0 it saves a mask
    lora_target_modules: tuple[str, ...] = ()
    """Names of the modules that get adapters, or `all-linear`."""

    lora_modules_to_save: tuple[str, ...] = ()
    """Names of modules that are copied and trained whole besides the adapters."""

    lora_bias: str = "none"
    """Biases that train: `none`, `all` of the model, or `lora_only`, those of adapted layers."""

    use_rslora: bool = False  # Scale adapters by the square root of the rank; no effect on memory
    use_dora: bool = False
    """Train a magnitude per output besides the adapters (DoRA). Every forward computes the norm of
    the whole weight."""

    double_quant: bool = False  # QLoRA: quantise the scales too (`bnb_4bit_use_double_quant`)
    quant_skip: tuple[str, ...] = ()
    """QLoRA: modules that stay unquantised (`llm_int8_skip_modules`). transformers skips the output
    head, weights tied to it, and the last module. Except in place, modules that the model's class
    keeps in fp32 stay unquantised in any case."""

    seq_len: int | None = None  # Tokens per sample, padding included. A list is read as `lengths`
    lengths: tuple[int, ...] = ()
    """Tokens per sample of each micro-batch in turn, in place of `seq_len`: a list, `512,96,300`,
    or a file with a number per line. See [lengths that change](#lengths-that-change)."""

    padded: bool | None = None  # Some row is shorter than the longest, so masks are materialised
    image_size: int | None = None  # Height and width of images, pixels
    attn_implementation: str | None = None
    """Attention, one of `ATTENTIONS`. See [attention](#attention)."""

    freeze: tuple[str, ...] = ()
    """Globs of parameter names that are not trained, such as `vision_model.*`."""

    tie_word_embeddings: bool | None = None
    """The output head shares the embeddings. Published flan-t5 checkpoints are untied: `false`."""

    gpu: tuple[str, ...] = ()  # Names of GPUs to judge
    gpu_memory: int | None = None  # Memory of a GPU that is not in the catalogue
    memory_limit: int | None = None
    """Memory that the allocator may reserve, as `set_per_process_memory_fraction` caps it."""

    beside: int | None = None
    """Memory of each GPU that other processes hold: a colocated vLLM, a display, another job."""

    alloc_conf: str = ""
    """Settings of the allocator, as in `PYTORCH_ALLOC_CONF`: `expandable_segments:True`. See
    [run.md](run.md#the-allocators-settings)."""

    host_memory: int | None = None  # Host memory of the node, for a verdict of its own
    limit_val_batches: int = 0
    """Batches of each validation, which is a phase of its own in the report. A share of the batches
    is taken as 2."""

    val_batch_size: int | None = None  # Samples of a validation batch and GPU
    val_check_interval: int | None = None  # Micro-batches between validations
    trainer_options: tuple[tuple[str, Any], ...] = ()
    """`loop: transformers`: options of its logging, of `LOGGING` in `TrainingArguments`. Each line
    of a log makes some scalars. A mapping in files."""

    steps: int = 2  # Optimizer steps to simulate. From the third on only fragmentation can grow
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Assumptions made while the plan was read, for the report; not a key of the plan."""

    trust_remote_code: bool = field(default=False, repr=False)
    """Run code that comes with the model. It is not a key of the plan, so no file turns it on."""

    def __post_init__(self) -> None:
        if isinstance(self.optim, str):
            object.__setattr__(self, "optim", optimizer_name(self.optim))
        for name in _MAPPINGS:
            object.__setattr__(self, name, keys.read_options(name, getattr(self, name)))
        object.__setattr__(self, "lengths", keys.read_lengths(self.lengths) if self.lengths else ())
        check(self, PLAN_KEYS)

    @property
    def is_ddp(self) -> bool:
        """True if DDP runs: every GPU holds the whole model and gradients are summed in buckets."""
        return self.strategy.startswith("ddp") or (self.strategy == "auto" and self.world_size > 1)

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP1 or FSDP2 shards the model."""
        return self.strategy in ("fsdp", "fsdp2")

    @property
    def is_hybrid(self) -> bool:
        """True if FSDP shards the model over some of the GPUs, and replicates it over others."""
        return self.is_fsdp and self.sharding_strategy == "HYBRID_SHARD"

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed shards optimizer state, gradients or parameters: ZeRO stages 1 to 3."""
        return self.strategy.startswith("deepspeed")

    @property
    def offloads(self) -> bool:
        """True if DeepSpeed keeps the optimizer state in host memory."""
        return self.strategy.endswith("_offload")

    @property
    def is_distributed(self) -> bool:
        """True if the strategy is DDP, FSDP or DeepSpeed, even on one GPU."""
        return self.is_ddp or self.is_fsdp or self.is_deepspeed

    @property
    def world_size(self) -> int:
        """Number of GPUs over all nodes."""
        return self.devices * self.num_nodes

    @property
    def validates(self) -> bool:
        """True if the plan has batches of validation."""
        return self.limit_val_batches > 0

    @property
    def uses_adapters(self) -> bool:
        """True if low-rank adapters are trained on a frozen model, by LoRA or QLoRA."""
        return self.use_lora or self.use_qlora

    @property
    def loads_quantized(self) -> bool:
        """True if QLoRA quantises weights while they are loaded, not on the GPU afterwards."""
        return self.use_qlora and self.quant_load == keys.FROM_PRETRAINED

    @property
    def kbit_checkpoints(self) -> bool:
        """True if peft's `prepare_model_for_kbit_training` turns activation checkpointing on."""
        return self.use_qlora and self.kbit_ckpt is not False

    @property
    def checkpoints_activations(self) -> bool:
        """True if activations are checkpointed, by `act_ckpt` or by peft's default for QLoRA."""
        return self.act_ckpt or self.kbit_checkpoints

    @property
    def clip_norm(self) -> float | None:
        """`gradient_clip_val`, or else the default of the training loop; None if neither is set."""
        default = PLAN_KEYS["gradient_clip_val"].in_loops.get(self.loop)
        return default if self.gradient_clip_val is None else self.gradient_clip_val

    @property
    def is_padded(self) -> bool:
        """True if batches have padded rows: `padded`, or by default if `batch_size` is above 1."""
        return self.batch_size > 1 if self.padded is None else self.padded

    @property
    def label(self) -> str:
        """Name of the plan in reports: `name`, or else `model_name`."""
        return self.name or self.model_name

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values by key, which `from_dict` reads back."""
        values = {name: getattr(self, name) for name in PLAN_KEYS}
        values |= {name: dict(values[name]) for name in _MAPPINGS}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> TrainingPlan:
        """Make a plan from the keys and values of a training config.

        Args:
            values: plan keys, or names of Lightning and `TrainingArguments`. Settings that do not
                affect memory, such as `lr`, are ignored.
            overrides: values by plan key that replace those of `values`; None replaces nothing.

        Raises:
            PlanError: a key does not exist, or a value is not allowed.
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"a plan is a mapping of keys to values, not {shown(values)}",
                hint="write one `key: value` per line, `model_name` among them",
            )
        settings = {**values, **{k: v for k, v in overrides.items() if v is not None}}
        settings, assumed = read_other_names(settings, PLAN_KEYS)
        names = PLAN_KEYS.keys() | keys.IGNORED_KEYS
        if unknown := [shown(name) for name in settings if name not in names]:
            near = closest(unknown[0].strip("`"), other_names(PLAN_KEYS) | PLAN_KEYS.keys())
            listing = ", ".join(f"`{key}`" for key in near or sorted(PLAN_KEYS))
            hint = f"{'the closest keys' if near else 'keys'}: {listing}"
            raise PlanError(f"{unknown[0]} is not a key of a plan", hint=hint)
        fields = {
            name: row.read(settings[name])
            for name, row in PLAN_KEYS.items()
            if settings.get(name) is not None
        }
        if isinstance(fields.get("seq_len"), list | tuple):
            fields["lengths"] = keys.read_lengths(fields.pop("seq_len"))
        if fields.get("lengths") and "steps" not in fields:
            num_micro_batches = fields.get("accumulate_grad_batches", 1)
            fields["steps"] = keys.steps_of(fields["lengths"], num_micro_batches)
        if "model_name" not in fields:
            raise PlanError("the plan names no model", hint="give `model_name`, or `--model NAME`")
        return cls(**fields, assumed=assumed)


PLAN_KEYS = keys.rows_of(TrainingPlan)  # Rows of the keys of a plan by name, in order

_MAPPINGS = tuple(name for name, row in PLAN_KEYS.items() if row.is_mapping)


def read_config(path: Path, overrides: Mapping[str, Any]) -> TrainingPlan:
    """Return the plan in a file, with values replaced by `overrides`; `PlanError` if invalid."""
    return TrainingPlan.from_dict({**_read_mapping(path), **overrides})


def read_suite(path: Path, overrides: Mapping[str, Any]) -> list[TrainingPlan]:
    """Return the plans in the file `path`, in order, each with values replaced by `overrides`.

    The file is a mapping: optional `defaults` of all plans, then `experiments`, a list of plans
    with a `name` each.

    Raises:
        PlanError: the file cannot be read, or an experiment is invalid or not unique by name.
    """
    suite = _read_mapping(path)
    unknown = sorted(map(str, set(suite) - {"defaults", "experiments"}))
    if unknown:
        raise PlanError(
            f"`{path}` has the key `{unknown[0]}`", hint="a suite has `defaults` and `experiments`"
        )
    defaults = suite.get("defaults") or {}
    experiments = suite.get("experiments")
    if not isinstance(defaults, dict):
        raise PlanError(f"`defaults` in `{path}` is not a mapping", hint="write `key: value` lines")
    if not isinstance(experiments, list) or not experiments:
        raise PlanError(
            f"`{path}` lists no `experiments`", hint="write a list of plans with a `name` each"
        )
    plans: list[TrainingPlan] = []
    names: set[str] = set()
    for number, values in enumerate(experiments, 1):
        name = _experiment_name(path, number, values, names)
        try:
            plans.append(TrainingPlan.from_dict({**defaults, **values, **overrides}))
        except PlanError as error:
            raise PlanError(f"experiment `{name}`: {error}", hint=error.hint) from error
    return plans


def _experiment_name(path: Path, number: int, values: Any, names: set[str]) -> str:
    """Return the name in `values`, the plan of experiment `number` in the file `path`, and add it
    to `names`. `PlanError` if it is missing, or in `names` already."""
    if not isinstance(values, dict):
        raise PlanError(
            f"experiment {number} in `{path}` is not a mapping", hint="write `name: ...`"
        )
    name = values.get("name")
    if not isinstance(name, str) or not name:
        raise PlanError(f"experiment {number} in `{path}` has no `name`", hint="give each its own")
    if name in names:
        raise PlanError(f"`{path}` names two experiments `{name}`", hint="give each its own name")
    names.add(name)
    return name


def _read_mapping(path: Path) -> dict[Any, Any]:
    content = parse_yaml(read_limited(path), path)
    if not isinstance(content, dict):
        raise PlanError(f"`{path}` holds no mapping", hint="write `key: value` lines")
    return content
