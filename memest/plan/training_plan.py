"""`TrainingPlan`: the whole request, with one row per key, and the files that hold plans.

The comment or docstring of a key is its text in docs/plan.md, which `python scripts/regenerate.py`
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from memest.errors import PlanError, closest, shown
from memest.plan import keys
from memest.plan.checks import check
from memest.plan.keys import Bounds, Key, Need, key, of_strategy, whole
from memest.plan.optimizers import optimizer_name
from memest.plan.other_names import other_names, read_other_names
from memest.plan.reading import parse_yaml, read_limited

of_training, of_inputs = partial(key, section="Training"), partial(key, section="Inputs")
of_adapters = partial(key, section="Adapters and quantisation")
of_gpus, of_several = partial(key, section="GPUs"), partial(key, section="Several GPUs and offload")
"""Variants of `key` for other sections of `--help` and docs/plan.md than `Plan`."""

FROM_0 = Bounds(0, float("inf"), "give a number from 0 on", without_high=True)
SIZE = Bounds(0, float("inf"), "write it as `78.4GiB`", without_low=True)

WITH_ADAPTERS = Need(
    lambda plan: plan.uses_adapters, "`{key}` is given for a full fine-tune",
    "add `use_lora: true` (`--lora`) or leave it out",
)  # fmt: skip
WITH_QLORA = Need(
    lambda plan: plan.use_qlora, "`{key}` is given without QLoRA",
    "add `use_qlora: true` (`--qlora`)",
)  # fmt: skip
WITH_QLORA_OR_ACT_CKPT = replace(
    WITH_QLORA, hint=f"{WITH_QLORA.hint}; without it `act_ckpt` checkpoints"
)
WITH_VALIDATION = Need(
    lambda plan: plan.validates,
    "`{key}` is given and `limit_val_batches` is 0: nothing is validated",
    "give `limit_val_batches`, or leave it out",
)
WITH_DDP = of_strategy(lambda plan: plan.is_ddp, "`strategy: ddp`", "ddp")
WITH_FSDP = of_strategy(lambda plan: plan.is_fsdp, "`strategy: fsdp`", "fsdp")
WITH_HYBRID_SHARD = of_strategy(
    lambda plan: plan.is_fsdp and plan.sharding_strategy == "HYBRID_SHARD",
    "`sharding_strategy: HYBRID_SHARD` of FSDP", "fsdp",
)  # fmt: skip
WITH_DEEPSPEED = of_strategy(lambda plan: plan.is_deepspeed, "a DeepSpeed strategy", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The request for one fine-tune, with the keys of Lightning.

    Raises:
        PlanError: a value does not exist, is out of range, or contradicts another.
    """

    # fmt: off
    model_name: str = field(
        metadata={
            "key": Key(
                flag="--model", help="Bundled name, folder, config.json or Hub id.",
                is_always_written=True, sweep="Models, as a list: gpt2,opt-125m.",
            )
        }
    )  # Bundled model, folder or file with a Hugging Face config, or Hub id
    name: str = key("")  # Label for reports; the model's name where empty
    batch_size: int = key(
        1, "--bs", "Samples per micro-batch.", bounds=whole(1, 1 << 16), is_always_written=True,
        other_names=("per_device_train_batch_size", "per_gpu_train_batch_size"),
        sweep="Batch sizes: 1:64, 8:64:8 or 1,2,4.",
    )  # Samples per micro-batch and GPU
    accumulate_grad_batches: int = key(
        1, "--acc", "Micro-batches per step.", bounds=whole(1, 1 << 16),
        other_names=("gradient_accumulation_steps",), sweep="Micro-batches per step.",
    )  # Micro-batches per optimizer step
    precision: str = key(
        "bf16-true", "--precision", "Precision: {choices}.", choices=keys.PRECISIONS,
        aliases=keys.PRECISION_ALIASES, is_always_written=True, sweep="Precisions.",
    )  # Precision in Lightning's words: one of `PRECISIONS`
    loop: str = of_training("lightning", "--loop", "Training loop: {choices}.", choices=keys.LOOPS)
    """Training loop, one of `LOOPS`: Lightning's Trainer, the Trainer of transformers, or a plain
    loop. See [the loop](#the-loop)."""

    optim: str = of_training(
        "adamw", "--optim", "A name of docs/plan.md, such as adamw or paged_adamw_8bit, or a class"
        " of torch.optim or bitsandbytes.optim.", is_always_written=True, sweep="Optimizers.",
    )
    """Optimizer: a class of `torch.optim` or `bitsandbytes.optim`, or a name of
    `TrainingArguments`. See [optimizers](#optimizers)."""

    optim_options: tuple[tuple[str, Any], ...] = of_training(
        (), "--optim-options", "Options of the optimizer: amsgrad=true,eps=1e-6.",
        other_names=("optim_args",),
    )
    """More options of the optimizer's class: a mapping, such as `{amsgrad: true}`, or
    `amsgrad=true,eps=1e-6`."""

    weight_decay: float | None = of_training(
        None, "--weight-decay", "Weight decay of the optimizer.", bounds=FROM_0,
        unset="the optimizer's",
    )
    """Weight decay of the optimizer. The multi-tensor paths of SGD and Adam copy the gradients for
    it."""

    gradient_clip_val: float | None = of_training(
        None, "--clip", "Clip gradients to this norm.", bounds=FROM_0, unset="none",
        in_loops={"transformers": 1.0}, other_names=("max_grad_norm",),
    )
    """Norm, or value, to which gradients are clipped. 0 clips nothing."""

    gradient_clip_algorithm: str = of_training(
        "norm", "--clip-algorithm", "Clip by: {choices}.", choices=keys.CLIPPING,
    )  # Way of clipping in Lightning's words: one of `CLIPPING`
    momentum: float = of_training(
        0.0, "--momentum", "Momentum of sgd, rmsprop and muon.",
        bounds=Bounds(0, 1, "give 0 <= momentum < 1", without_high=True),
    )
    """Momentum of `sgd`, `rmsprop`, `muon` and of bitsandbytes' counterparts. Above 0 it adds a
    buffer of the size of the trainable parameters."""

    nesterov: bool = of_training(False, "--nesterov", "Nesterov momentum of sgd.")
    """Nesterov momentum of `sgd`. `sgd_single` needs a copy of one more gradient for it."""

    act_ckpt: bool = of_training(
        False, "--act-ckpt", "Activation checkpointing.", other_names=("gradient_checkpointing",),
        sweep="true, false or both.",
    )  # Activation checkpointing by `gradient_checkpointing_enable()` of transformers
    strategy: str = of_several(
        "auto", "--strategy", "Strategy: {choices}.", choices=keys.STRATEGIES, sweep="Strategies.",
    )
    """Strategy, one of `STRATEGIES`. `auto` is Lightning's choice: DDP on several GPUs. See
    [strategies](strategies.md)."""

    devices: int = of_several(
        1, "--devices", "GPUs of each node.", bounds=whole(1, 1 << 14),
        sweep="Numbers of GPUs: 1,2,4,8.",
    )
    """GPUs of each node. `auto` is taken as 1, with a note in the report."""

    num_nodes: int = of_several(1, "--num-nodes", "Number of nodes.", bounds=whole(1, 1 << 12))
    """Nodes."""

    gradient_as_bucket_view: bool = of_several(
        False, "--bucket-view", "DDP: gradients are views of the buckets.", need=WITH_DDP,
    )  # DDP: gradients are views of the buckets
    bucket_cap_mb: int | None = of_several(
        None, "--bucket-cap-mb", "DDP: MiB of gradients in a bucket.", bounds=whole(1, 1 << 20),
        need=WITH_DDP, unset="25, the first 1",
    )  # DDP: MiB of gradients in a bucket
    sharding_strategy: str = of_several(
        "FULL_SHARD", "--sharding", "FSDP: {choices}.", choices=keys.SHARDINGS, need=WITH_FSDP,
    )
    """FSDP: one of `SHARDINGS`. `fsdp2` has no `NO_SHARD`."""

    shard_size: int | None = of_several(
        None, "--shard-size", "FSDP, HYBRID_SHARD: GPUs that share a copy.",
        bounds=whole(1, 1 << 14), need=WITH_HYBRID_SHARD, unset="8, or all",
    )  # FSDP, `HYBRID_SHARD`: GPUs that share one copy
    wrap_classes: tuple[str, ...] = of_several(
        (), "--wrap", "FSDP: layer class to wrap.", need=WITH_FSDP,
        unset="the model's `_no_split_modules`",
    )  # FSDP: classes of the layers that are wrapped
    activation_checkpointing_policy: tuple[str, ...] = of_several(
        (), "--ckpt-policy", "FSDP: layer class to checkpoint.", need=WITH_FSDP,
    )  # FSDP: classes of the layers whose activations are recomputed in the backward
    reduce_bucket_size: int = of_several(
        200_000_000, "--reduce-bucket-size", "DeepSpeed: elements summed at once.",
        bounds=whole(1, 1 << 40), need=WITH_DEEPSPEED,
    )  # DeepSpeed: elements of gradients summed at once
    allgather_bucket_size: int = of_several(
        200_000_000, "--allgather-bucket-size", "DeepSpeed: elements gathered at once.",
        bounds=whole(1, 1 << 40), need=WITH_DEEPSPEED,
    )  # DeepSpeed 1 and 2: elements of updated parameters gathered at once
    use_lora: bool = of_adapters(
        False, "--lora", "Train LoRA adapters only.", sweep="true, false or both.",
    )  # Train low-rank adapters of peft on a frozen base
    use_qlora: bool = of_adapters(
        False, "--qlora", "LoRA on a quantised base.", sweep="true, false or both.",
    )  # Train adapters on a base quantised by bitsandbytes in the format `quant`
    quant: str = of_adapters(
        "nf4", "--quant", "QLoRA: {choices}.", choices=keys.QUANTISATIONS, need=WITH_QLORA,
    )  # QLoRA: `nf4` (4 bits) or `int8` (LLM.int8; activations without outliers are assumed)
    kbit_ckpt: bool | None = of_adapters(
        None, "--kbit-ckpt", "QLoRA: checkpointing by prepare_model_for_kbit_training, on by"
        " default.", need=WITH_QLORA_OR_ACT_CKPT, unset="true, peft's default",
    )
    """QLoRA: `use_gradient_checkpointing` of peft's `prepare_model_for_kbit_training`. It turns
    activation checkpointing on, whatever the value of `act_ckpt`.
    """

    quant_load: str = of_adapters(
        keys.FROM_PRETRAINED, "--quant-load", "QLoRA: {choices}.", choices=keys.QUANT_LOADS,
        need=WITH_QLORA,
    )
    """QLoRA: `from_pretrained` quantises weights while they are loaded. `in_place` replaces the
    layers of a model that is on the GPU in 16 bits one by one."""

    lora_r: int = of_adapters(
        16, "--lora-r", "Rank of the adapters.", bounds=whole(1, 1 << 14),
        sweep="Ranks of the adapters.",
    )  # Rank of the adapters
    lora_alpha: float = of_adapters(
        32, "--lora-alpha", "Scale of the adapters.",
        bounds=Bounds(0, 1e6, "give a positive number", without_low=True),
    )  # Scale of the adapters; no effect on memory
    lora_dropout: float = of_adapters(
        0.05, "--lora-dropout", "Dropout before the adapters.",
        bounds=Bounds(0, 1, "give 0 <= p < 1", without_high=True),
    )
    """Dropout before the adapters. Above 0 it saves a mask."""

    lora_target_modules: tuple[str, ...] = of_adapters(
        (), "--lora-target", "Module that gets an adapter, or all-linear.", need=WITH_ADAPTERS,
        unset="q and v, or peft's choice for the model",
    )  # Names of the modules that get adapters, or `all-linear`
    lora_modules_to_save: tuple[str, ...] = of_adapters(
        (), "--lora-save", "Module trained whole besides the adapters.", need=WITH_ADAPTERS,
    )  # Names of modules that are copied and trained whole besides the adapters
    lora_bias: str = of_adapters(
        "none", "--lora-bias", "Biases that train: {choices}.", choices=keys.LORA_BIASES,
        need=WITH_ADAPTERS,
    )  # Biases that train: `none`, `all` of the model, or `lora_only`, those of adapted layers
    use_rslora: bool = of_adapters(False, "--rslora", "Rank-stable scale.", need=WITH_ADAPTERS)
    """Scale adapters by the square root of the rank; no effect on memory."""

    use_dora: bool = of_adapters(False, "--dora", "Weight-decomposed LoRA.", need=WITH_ADAPTERS)
    """Train a magnitude per output besides the adapters (DoRA). Every forward computes the norm of
    the whole weight."""

    double_quant: bool = of_adapters(
        False, "--double-quant", "Quantise nf4's scales too.", need=WITH_QLORA,
    )  # QLoRA: quantise the scales too (`bnb_4bit_use_double_quant`)
    quant_skip: tuple[str, ...] = of_adapters(
        (), "--quant-skip", "Module that stays unquantised.", need=WITH_QLORA,
        unset="the choice of transformers",
    )
    """QLoRA: modules that stay unquantised (`llm_int8_skip_modules`). transformers skips the output
    head, weights tied to it, and the last module. Except in place, modules that the model's class
    keeps in fp32 stay unquantised in any case."""

    seq_len: int | None = of_inputs(
        None, "--seq-len", "Tokens per sample, padding included.", bounds=whole(1, 1 << 22),
        unset="25 image-text, 512 text, 128 audio", sweep="Tokens per sample.",
    )
    """Tokens per sample, padding included. A list is read as `lengths`."""

    lengths: tuple[int, ...] = of_inputs(
        (), "--lengths", "Tokens of each micro-batch in turn: 512,96,300 or a file.",
    )
    """Tokens per sample of each micro-batch in turn, in place of `seq_len`: a list, `512,96,300`,
    or a file with a number per line. See [lengths that change](#lengths-that-change)."""

    padded: bool | None = of_inputs(
        None, "--padded", "Some rows are shorter than the longest.", unset="true above batch 1",
    )  # Some row is shorter than the longest, so masks are materialised
    image_size: int | None = of_inputs(
        None, "--image-size", "Pixels per side.", bounds=whole(1, 1 << 14), unset="the model's",
        sweep="Pixels per side.",
    )  # Height and width of images, pixels
    attn_implementation: str | None = key(
        None, "--attn", "Attention: {choices}.", choices=keys.ATTENTIONS, sweep="sdpa, eager.",
        unset="transformers' choice",
    )
    """Attention, one of `ATTENTIONS`. See [attention](#attention)."""

    freeze: tuple[str, ...] = key((), "--freeze", "Glob of parameter names not to train.")
    """Globs of parameter names that are not trained, such as `vision_model.*`."""

    tie_word_embeddings: bool | None = key(
        None, "--tie-embeddings/--untie-embeddings", "The output head shares the embeddings.",
        unset="as transformers builds the config",
    )
    """The output head shares the embeddings. Published flan-t5 checkpoints are untied: `false`."""

    gpu: tuple[str, ...] = of_gpus(
        (), "--gpu", "GPU to judge; repeat for more.",
        unset="a100-40gb, a100-80gb, h100-80gb, h200",
    )  # Names of GPUs to judge
    gpu_memory: int | None = of_gpus(
        None, "--gpu-memory", "Memory of a GPU not in the catalogue: 24GiB.", bounds=SIZE,
        is_size=True,
    )  # Memory of a GPU that is not in the catalogue
    memory_limit: int | None = of_gpus(
        None, "--memory-limit", "Cap on the allocator: 78.4GiB.", bounds=SIZE, is_size=True,
        sweep="Caps on the allocator: 23GiB,39GiB.",
    )  # Memory that the allocator may reserve, as `set_per_process_memory_fraction` caps it
    beside: int | None = of_gpus(
        None, "--beside", "Memory that other processes hold: 24GiB.", bounds=SIZE, is_size=True,
        sweep="Memory that other processes hold: 8GiB,24GiB.",
    )  # Memory of each GPU that other processes hold: a colocated vLLM, a display, another job
    alloc_conf: str = of_gpus(
        "", "--alloc-conf", "The allocator's settings: expandable_segments:True.",
    )
    """Settings of the allocator, as in `PYTORCH_ALLOC_CONF`: `expandable_segments:True`. See
    [run.md](run.md#the-allocators-settings)."""

    host_memory: int | None = of_gpus(
        None, "--host-memory", "Host memory of the node to judge: 256GiB.", bounds=SIZE,
        is_size=True,
    )  # Host memory of the node, for a verdict of its own
    limit_val_batches: int = of_training(
        0, "--val-batches", "Batches of a validation.", bounds=whole(0, 1000, "; they are alike"),
    )
    """Batches of each validation, which is a phase of its own in the report. A share of the batches
    is taken as 2."""

    val_batch_size: int | None = of_training(
        None, "--val-bs", "Samples of a validation batch.", bounds=whole(1, 1 << 16),
        need=WITH_VALIDATION, unset="`batch_size`", other_names=("per_device_eval_batch_size",),
    )  # Samples of a validation batch and GPU
    val_check_interval: int | None = of_training(
        None, "--val-interval", "Micro-batches between validations.", bounds=whole(1, 1 << 20),
        need=WITH_VALIDATION, unset="all: one validation at the end",
    )  # Micro-batches between validations
    trainer_options: tuple[tuple[str, Any], ...] = of_training(())
    """`loop: transformers`: options of its logging, of `LOGGING` in `TrainingArguments`. Each line
    of a log makes some scalars. A mapping in files."""

    steps: int = of_training(
        2, "--steps", "Optimizer steps to simulate.", bounds=whole(1, 1000),
        unset="2, or as many as there are `lengths` for",
    )
    """Optimizer steps to simulate. From the third on only fragmentation can grow."""

    # fmt: on
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
        """True if every GPU holds the whole model and gradients are summed in buckets."""
        return self.strategy.startswith("ddp") or (self.strategy == "auto" and self.world_size > 1)

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP1 or FSDP2 shards the model."""
        return self.strategy in ("fsdp", "fsdp2")

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed shards the training state."""
        return self.strategy.startswith("deepspeed")

    @property
    def offloads(self) -> bool:
        """True if the optimizer state is in host memory."""
        return self.strategy.endswith("_offload")

    @property
    def is_distributed(self) -> bool:
        """True if any strategy except Lightning's single-device one runs."""
        return self.is_ddp or self.is_fsdp or self.is_deepspeed

    @property
    def world_size(self) -> int:
        """GPUs over all nodes."""
        return self.devices * self.num_nodes

    @property
    def validates(self) -> bool:
        """True if the plan runs validations."""
        return self.limit_val_batches > 0

    @property
    def uses_adapters(self) -> bool:
        """True if only adapters are trained."""
        return self.use_lora or self.use_qlora

    @property
    def loads_quantized(self) -> bool:
        """True if weights are quantised while they are loaded."""
        return self.use_qlora and self.quant_load == keys.FROM_PRETRAINED

    @property
    def kbit_checkpoints(self) -> bool:
        """True if `prepare_model_for_kbit_training` turns activation checkpointing on."""
        return self.use_qlora and self.kbit_ckpt is not False

    @property
    def checkpoints_activations(self) -> bool:
        """True if activations are checkpointed, by `act_ckpt` or by peft's default for QLoRA."""
        return self.act_ckpt or self.kbit_checkpoints

    @property
    def clip_norm(self) -> float | None:
        """`gradient_clip_val` of the plan, or the default of its loop."""
        default = PLAN_KEYS["gradient_clip_val"].in_loops.get(self.loop)
        return default if self.gradient_clip_val is None else self.gradient_clip_val

    @property
    def is_padded(self) -> bool:
        """`padded` with its default applied."""
        return self.batch_size > 1 if self.padded is None else self.padded

    @property
    def label(self) -> str:
        """Name of the plan in reports."""
        return self.name or self.model_name

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON; `from_dict` reads it back."""
        values = {name: getattr(self, name) for name in PLAN_KEYS}
        values |= {name: dict(values[name]) for name in _MAPPINGS}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> TrainingPlan:
        """Make a plan from a lab config dictionary.

        Args:
            values: keys of `TrainingPlan`; those of a lab config that do not affect memory are
                ignored.
            overrides: values that win over `values`, except None.

        Raises:
            PlanError: a key does not exist, or a value is of the wrong kind.
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"a plan is a mapping of keys to values, not {shown(values)}",
                hint="write one `key: value` per line, `model_name` among them",
            )
        merged = {**values, **{k: v for k, v in overrides.items() if v is not None}}
        merged, assumed = read_other_names(merged, PLAN_KEYS)
        known = PLAN_KEYS.keys() | keys.IGNORED_KEYS
        if unknown := [shown(name) for name in merged if name not in known]:
            near = closest(unknown[0].strip("`"), other_names(PLAN_KEYS) | PLAN_KEYS.keys())
            listed = ", ".join(f"`{key}`" for key in near or sorted(PLAN_KEYS))
            hint = f"{'the closest keys' if near else 'keys'}: {listed}"
            raise PlanError(f"{unknown[0]} is not a key of a plan", hint=hint)
        given = {
            name: row.read(merged[name])
            for name, row in PLAN_KEYS.items()
            if merged.get(name) is not None
        }
        if isinstance(given.get("seq_len"), list | tuple):
            given["lengths"] = keys.read_lengths(given.pop("seq_len"))
        if given.get("lengths") and "steps" not in given:
            num_micro_batches = given.get("accumulate_grad_batches", 1)
            given["steps"] = keys.steps_of(given["lengths"], num_micro_batches)
        if "model_name" not in given:
            raise PlanError("the plan names no model", hint="give `model_name`, or `--model NAME`")
        return cls(**given, assumed=assumed)


PLAN_KEYS = keys.rows_of(TrainingPlan)  # Rows of the keys of a plan by name, in order

_MAPPINGS = tuple(name for name, row in PLAN_KEYS.items() if row.is_mapping)


def read_config(path: Path, overrides: Mapping[str, Any]) -> TrainingPlan:
    """Return the plan in a lab config; `overrides` win; `PlanError` if it holds no valid plan."""
    return TrainingPlan.from_dict({**_read_mapping(path), **overrides})


def read_suite(path: Path, overrides: Mapping[str, Any]) -> list[TrainingPlan]:
    """Return the plans of a suite, in its order.

    A suite is a mapping: optional `defaults`, then `experiments`, a list of plans with a `name`
    each.

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
    """Return the checked name of experiment `number`, and add it to `names`."""
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
    loaded = parse_yaml(read_limited(path), path)
    if not isinstance(loaded, dict):
        raise PlanError(f"`{path}` holds no mapping", hint="write `key: value` lines")
    return loaded
