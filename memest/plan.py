"""`TrainingPlan`: the whole request. A lab config dictionary can be pasted into it, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.units import parse_bytes

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")

PRECISION_ALIASES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""As Lightning 2.6 reads its short forms (`fabric/connector.py`)."""

OPTIMIZERS = (
    "adamw", "adamw_fused", "adamw_single", "adam", "adam_fused", "adam_single",
    "sgd", "sgd_fused", "sgd_single", "rmsprop", "rmsprop_single", "adagrad", "adagrad_single",
    "adafactor", "adafactor_foreach",
    "adam_8bit", "adamw_8bit", "paged_adam_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
    "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit", "deepspeed_cpu",
)  # fmt: skip

STRATEGIES = (
    "auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", "fsdp2",
    "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
    "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
)  # fmt: skip
"""As Lightning 2.6 registers them; `fsdp` is its FSDPStrategy (FSDP1), `fsdp2` its
ModelParallelStrategy with `fully_shard`."""

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
"""Of FSDP1; FSDP2 knows all but `NO_SHARD`."""

ATTENTIONS = ("sdpa", "eager", "flash_attention_2")

QUANTISATIONS = ("nf4", "int8")

LORA_BIASES = ("none", "all", "lora_only")

ALL_LINEAR = "all-linear"
"""In place of names in `lora_target_modules`: every linear layer but the output head."""

_WITH_MOMENTUM = ("sgd", "sgd_fused", "sgd_single", "rmsprop", "rmsprop_single")

IGNORED_KEYS = frozenset(
    """
    lr learning_rate weight_decay betas eps num_workers max_epochs max_steps min_epochs num_epochs
    epochs limit_train_batches limit_val_batches log_every_n_steps val_check_interval seed shuffle
    pin_memory persistent_workers lr_scheduler scheduler warmup_steps warmup_ratio experiment_name
    project run_name output_dir save_dir logger log_dir enable_checkpointing enable_progress_bar
    dataset dataset_name data_dir train_size val_size accelerator note expected
    """.split()
)
"""Keys of lab configs that do not touch the memory of the training step."""

_LIMITS = {
    "batch_size": 1 << 16,
    "accumulate_grad_batches": 1 << 16,
    "seq_len": 1 << 22,
    "image_size": 1 << 14,
    "lora_r": 1 << 14,
    "steps": 1000,
    "devices": 1 << 14,
    "bucket_cap_mb": 1 << 20,
    "shard_size": 1 << 14,
    "reduce_bucket_size": 1 << 40,
    "allgather_bucket_size": 1 << 40,
}
"""The largest value that is taken for a request and not for a slip."""

_LARGEST_ALPHA = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """One fine-tune, as Lightning would be asked to run it.

    Raises:
        PlanError: a value does not exist, is out of range, or contradicts another.
        UnsupportedError: a combination that memest knows and does not model.
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

    optim: str = "adamw"
    """One of `OPTIMIZERS`."""

    momentum: float = 0.0
    """Of `sgd` and `rmsprop`; above 0 it adds a buffer of the size of the trainable parameters."""

    nesterov: bool = False
    """Of `sgd` with `momentum`; `sgd_single` needs a copy of one gradient more for it."""

    act_ckpt: bool = False
    """Activation checkpointing, as `gradient_checkpointing_enable()` of transformers does it."""

    strategy: str = "auto"
    """One of `STRATEGIES`; `auto` is Lightning's choice: DDP on several GPUs."""

    devices: int = 1
    """GPUs, over all nodes."""

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

    quant_skip: tuple[str, ...] = ("lm_head", "wo")
    """QLoRA: modules that stay unquantised besides the output head (`llm_int8_skip_modules`)."""

    seq_len: int | None = None
    """Tokens per sample, padding included; None is the modality's default, as the report states."""

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

    host_memory: int | None = None
    """Bytes of host memory of the node, for a verdict of its own."""

    steps: int = 2
    """Optimizer steps to simulate; from the third on only fragmentation can grow."""

    def __post_init__(self) -> None:
        _check_types(self)
        for key, allowed in (
            ("precision", PRECISIONS),
            ("optim", OPTIMIZERS),
            ("strategy", STRATEGIES),
            ("attn_implementation", ATTENTIONS),
            ("quant", QUANTISATIONS),
            ("lora_bias", LORA_BIASES),
            ("sharding_strategy", SHARDINGS),
        ):
            value = getattr(self, key)
            if value is not None and value not in allowed:
                raise PlanError(
                    f"`{key}` cannot be {shown(value)}", hint=_suggest(value, allowed, "allowed")
                )
        for key, largest in _LIMITS.items():
            value = getattr(self, key)
            if value is not None and not 1 <= value <= largest:
                raise PlanError(
                    f"`{key}` is {shown(value)}", hint=f"give a whole number from 1 to {largest}"
                )
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        if not self.model_name.strip():
            raise PlanError("`model_name` is empty", hint="`memest models` lists what is bundled")
        if not 0 <= self.lora_dropout < 1:
            raise PlanError(f"`lora_dropout` is {shown(self.lora_dropout)}", hint="give 0 <= p < 1")
        if not 0 <= self.momentum < 1:
            raise PlanError(f"`momentum` is {shown(self.momentum)}", hint="give 0 <= momentum < 1")
        if not 0 < self.lora_alpha <= _LARGEST_ALPHA:
            raise PlanError(
                f"`lora_alpha` is {shown(self.lora_alpha)}", hint="give a positive number"
            )
        for key in ("gpu_memory", "memory_limit", "host_memory"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise PlanError(f"`{key}` is {shown(value)}", hint="write it as `78.4GiB`")

    def _check_combinations(self) -> None:
        if self.momentum and self.optim not in _WITH_MOMENTUM:
            raise PlanError(
                f"`momentum` {self.momentum} does not go with `optim` `{self.optim}`",
                hint="use it with `sgd` or `rmsprop`",
            )
        if self.nesterov and not (self.momentum and self.optim.startswith("sgd")):
            raise PlanError(
                f"`nesterov` does not go with `optim` `{self.optim}`, momentum {self.momentum}",
                hint="use it with `sgd` and a `momentum` above 0",
            )
        if self.use_qlora and self.precision == "16-mixed":
            raise UnsupportedError(
                "QLoRA under `16-mixed` is not modelled",
                hint="use `bf16-mixed`, `bf16-true` or `32-true`",
            )
        if self.attn_implementation == "flash_attention_2":
            raise UnsupportedError(
                "`attn_implementation` `flash_attention_2` is not modelled: its kernels are those"
                " of the package `flash_attn`, with which no run was measured",
                hint="use `sdpa`, whose flash and cuDNN kernels keep no attention matrix either",
            )
        if self.freeze and (self.use_lora or self.use_qlora):
            raise PlanError(
                "`freeze` does not go with LoRA, which freezes the whole base",
                hint="leave `freeze` out, or narrow `lora_target_modules`",
            )
        self._check_adapters()
        if self.padded and self.batch_size == 1:
            raise PlanError(
                "`padded` is true for `batch_size` 1: its only row is the longest",
                hint="leave `padded` out or raise `batch_size`",
            )
        self._check_strategy()

    def _check_adapters(self) -> None:
        for key in (
            "lora_target_modules", "lora_modules_to_save", "lora_bias", "use_rslora", "use_dora",
        ):  # fmt: skip
            if getattr(self, key) not in ((), "none", False) and not self.uses_adapters:
                raise PlanError(
                    f"`{key}` is given for a full fine-tune",
                    hint="add `use_lora: true` (`--lora`) or leave it out",
                )
        if ALL_LINEAR in self.lora_target_modules and len(self.lora_target_modules) > 1:
            raise PlanError(
                f"`lora_target_modules` names `{ALL_LINEAR}` and other modules",
                hint=f"give `{ALL_LINEAR}` alone, or names alone",
            )
        for key, is_given in (("double_quant", self.double_quant), ("quant", self.quant != "nf4")):
            if is_given and not self.use_qlora:
                raise PlanError(
                    f"`{key}` is given without QLoRA", hint="add `use_qlora: true` (`--qlora`)"
                )
        if self.double_quant and self.quant != "nf4":
            raise PlanError(
                f"`double_quant` does not go with `quant` `{self.quant}`, whose scales are fp32",
                hint="leave one of them out",
            )

    def _check_strategy(self) -> None:
        strategy = self.strategy
        if self.optim == "deepspeed_cpu" and not self.offloads:
            raise PlanError(
                f"`deepspeed_cpu` needs an offload strategy, not `{strategy}`",
                hint="use `deepspeed_stage_2_offload` or `deepspeed_stage_3_offload`",
            )
        if self.offloads and self.optim != "deepspeed_cpu":
            raise PlanError(
                f"`{strategy}` updates on the CPU and refuses `optim` `{self.optim}`",
                hint="use `optim: deepspeed_cpu`",
            )
        if self.use_qlora and (self.is_fsdp or strategy.startswith("deepspeed_stage_3")):
            raise PlanError(
                f"`{strategy}` cannot divide a quantised base: its weights are packed bytes beside"
                " 16-bit ones",
                hint="use `ddp` or `deepspeed_stage_2`, or LoRA without quantisation",
            )
        self._check_keys_of_strategy()
        if self.shard_size is not None and self.devices % self.shard_size:
            raise PlanError(
                f"`shard_size` {self.shard_size} does not divide {self.devices} GPUs",
                hint="give a divisor of `devices`",
            )

    def _check_keys_of_strategy(self) -> None:
        """Keys that only one family of strategies reads."""
        is_hybrid = self.is_fsdp and self.sharding_strategy == "HYBRID_SHARD"
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for keys, applies, where in (
            (("gradient_as_bucket_view", "bucket_cap_mb"), self.is_ddp, "`strategy: ddp`"),
            (
                ("sharding_strategy", "wrap_classes", "activation_checkpointing_policy"),
                self.is_fsdp,
                "`strategy: fsdp`",
            ),
            (("shard_size",), is_hybrid, "`sharding_strategy: HYBRID_SHARD` of FSDP"),
            (
                ("reduce_bucket_size", "allgather_bucket_size"),
                self.is_deepspeed,
                "a DeepSpeed strategy",
            ),
        ):
            for key in keys:
                if not applies and getattr(self, key) != defaults[key]:
                    raise PlanError(
                        f"`{key}` does not go with `strategy` `{self.strategy}`",
                        hint=f"it is read by {where}",
                    )
        if self.strategy == "fsdp2" and self.sharding_strategy == "NO_SHARD":
            raise PlanError(
                "`fsdp2` has no `NO_SHARD`", hint="use `ddp`, which keeps all on every GPU"
            )
        if self.strategy == "fsdp2" and self.precision == "16-mixed":
            raise PlanError(
                "Lightning's `ModelParallelStrategy`, which is `fsdp2`, refuses `16-mixed`",
                hint="use `bf16-mixed`, or `strategy: fsdp`",
            )

    @property
    def is_ddp(self) -> bool:
        """Whether every GPU holds the whole model and gradients are summed in buckets."""
        return self.strategy.startswith("ddp") or (self.strategy == "auto" and self.devices > 1)

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
    def uses_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.use_lora or self.use_qlora

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
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
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
        known = {f.name for f in dataclasses.fields(cls)}
        for key in merged:
            if not isinstance(key, str) or (key not in known and key not in IGNORED_KEYS):
                raise PlanError(
                    f"{shown(key)} is not a key of a plan",
                    hint=_suggest(shown(key).strip("`"), known, "keys"),
                )
        given = {k: _normalise(k, v) for k, v in merged.items() if k in known and v is not None}
        if "model_name" not in given:
            raise PlanError("the plan names no model", hint="give `model_name`, or `--model NAME`")
        return cls(**given)


_TUPLES = frozenset(
    {
        "lora_target_modules", "lora_modules_to_save", "freeze", "gpu", "quant_skip",
        "wrap_classes", "activation_checkpointing_policy",
    }
)  # fmt: skip
_SIZES = frozenset({"gpu_memory", "memory_limit", "host_memory"})


def _normalise(key: str, value: Any) -> Any:
    if key in _SIZES:
        return parse_bytes(value)
    if key in _TUPLES:
        return _names(key, value)
    if key == "precision" and isinstance(value, int | str) and not isinstance(value, bool):
        text = value if isinstance(value, str) else shown(value).strip("`")
        return PRECISION_ALIASES.get(text, text)
    return value


def _names(key: str, value: Any) -> tuple[str, ...]:
    items: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) and i for i in items):
        raise PlanError(f"`{key}` is {shown(value)}", hint="give a list of names")
    parts = (part.strip() for item in items for part in item.split(","))
    return tuple(part for part in parts if part)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "int | None": (int,), "str": (str,), "str | None": (str,), "bool": (bool,),
    "bool | None": (bool,), "float": (float, int), "tuple[str, ...]": (tuple,),
}  # fmt: skip
_KIND_NAMES = {
    int: "a whole number", str: "text", bool: "true or false", float: "a number",
    tuple: "a list of names",
}  # fmt: skip


def _check_types(plan: TrainingPlan) -> None:
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        kinds = _KINDS[str(field.type)]
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is None and "None" in str(field.type):
            is_right = True
        if isinstance(value, tuple) and not all(isinstance(item, str) and item for item in value):
            is_right = False
        if not is_right:
            raise PlanError(
                f"`{field.name}` is {shown(value)}", hint=f"give {_KIND_NAMES[kinds[0]]}"
            )


def _suggest(value: str, allowed: Any, what: str) -> str:
    near = closest(value, allowed)
    listed = ", ".join(f"`{a}`" for a in (near if what == "keys" and near else sorted(allowed)))
    return f"the closest {what}: {listed}" if what == "keys" and near else f"{what}: {listed}"
