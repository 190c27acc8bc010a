"""Inputs and weights of a run: synthetic or real batches, random or published weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memest.errors import MemestError, PlanError
from memest.models_meta.assemble import input_dtype, sequence_length
from memest.models_meta.batch import Batch, make_batch
from memest.models_meta.build import BuiltModel
from memest.models_meta.quantized import quantization_config
from memest.models_meta.registry import ModelConfig, dtype_keyword, error_text, quiet_transformers
from memest.packages import require
from memest.plan import TrainingPlan
from memest.units import ceil_div

MAX_CAPTION_TOKENS = 50  # caption length of the lab's processor (`max_length=50`, padded)
INIT_STD = 0.02
_POOL_NUMEL = 1 << 20  # random numbers of the weights on the host; longer weights repeat them
Inputs = dict[str, Any]  # keyword arguments of a forward, on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Training and validation micro-batches of a run, in host memory. Further fields have the
    length of their rows in tokens and the size of their images in pixels."""

    batches: Sequence[Inputs]  # batches that are used in turn, repeatedly
    val_batches: Sequence[Inputs]  # batches of validation
    loss_output: str  # output to differentiate
    seq_len: int  # tokens of the longest row
    padded: bool  # True if rows have padding
    image_size: int | None  # pixels a side; None without images
    notes: tuple[str, ...] = ()  # assumptions for the report


def initialise(model: nn.Module) -> None:
    """Set float parameters in place to normal random numbers, so that activations stay finite."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0.0, INIT_STD)


class RandomWeight:
    """Random weight in a state dict, with the shape and dtype of `weight`. transformers reads an
    entry of a state dict by indexing. Indexing makes the numbers from `pool`, a flat tensor of
    random numbers, which a longer weight repeats."""

    def __init__(self, pool: Tensor, weight: Tensor) -> None:
        self._pool, self.shape, self.dtype = pool, weight.shape, weight.dtype

    def __getitem__(self, index: Any) -> Tensor:
        numel = self.shape.numel()
        values = self._pool.repeat(ceil_div(numel, _POOL_NUMEL))[:numel]
        return values.view(self.shape).to(self.dtype)[index]

    def to(self, *args: Any) -> Tensor:
        """Return the whole weight after `Tensor.to(*args)`, which transformers before 5 calls."""
        return self[...].to(*args)


def random_state(module: nn.Module) -> dict[str, Any]:
    """Return a state dict of random weights for `module`, which is on the meta device. A parameter
    has a `RandomWeight`, a buffer a tensor of ones. A tied weight has one entry."""
    # A parameter: the host of a virtual GPU stores no values of tensors computed from parameters.
    pool = nn.Parameter(torch.randn(_POOL_NUMEL) * INIT_STD).detach()
    tied = getattr(module, "all_tied_weights_keys", {})
    weights = {name for name, _ in module.named_parameters()}
    return {
        name: RandomWeight(pool, tensor)
        if name in weights
        else torch.ones(tensor.shape, dtype=tensor.dtype)
        for name, tensor in module.state_dict().items()
        if name not in tied
    }


def synthetic_feed(plan: TrainingPlan, model: nn.Module, config: ModelConfig) -> Feed:
    """Make synthetic micro-batches for `model`: one for all steps, or one for each of
    `plan.lengths`. Meta tensors of `make_batch`, such as pixels, become random numbers."""
    make = partial(make_batch, model, image_size=plan.image_size, padded=plan.is_padded)
    seq_len = sequence_length(plan, config)
    batch = make(batch_size=plan.batch_size, seq_len=seq_len)
    batches = {seq_len: _real_inputs(batch, plan)}
    for length in plan.lengths:
        if length not in batches:
            batches[length] = _real_inputs(make(batch_size=plan.batch_size, seq_len=length), plan)
    val_batches = [batches[seq_len]] if plan.validates else []
    if plan.validates and plan.val_batch_size not in (None, plan.batch_size):
        size = plan.val_batch_size or plan.batch_size
        val_batches = [_real_inputs(make(batch_size=size, seq_len=seq_len), plan)]
    notes = list(batch.notes)
    if plan.image_size is not None and batch.image_size is None:
        notes.append(f"`image_size` is passed over: `{config.name}` takes no images")
    return Feed(
        batches=[batches[length] for length in plan.lengths or (seq_len,)], val_batches=val_batches,
        loss_output=batch.loss_output, seq_len=seq_len, padded=plan.is_padded,
        image_size=batch.image_size, notes=tuple(notes),
    )  # fmt: skip


def moved(inputs: Inputs, device: Any) -> Inputs:
    """Return `inputs` with tensors moved to `device` and other values unchanged."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _real_inputs(batch: Batch, plan: TrainingPlan) -> Inputs:
    inputs = {
        name: torch.randn(value.shape) if isinstance(value, Tensor) and value.is_meta else value
        for name, value in batch.inputs.items()
    }
    return _cast(inputs, plan)


def dataset_feed(plan: TrainingPlan, config: ModelConfig, folder: Path) -> Feed:
    """Make micro-batches of captioned images from a `datasets` folder, by the model's processor.

    Raises:
        PlanError: the folder is no data set, is empty, or lacks the columns `image` and `text`.
        UnsupportedError: `datasets` is not installed.
    """
    require("datasets")
    import datasets

    try:
        rows: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds of errors for an invalid folder
        raise PlanError(
            f"`{folder}` is no data set: {error_text(error)}",
            hint="name a folder that `datasets` wrote with `save_to_disk`",
        ) from error
    if isinstance(rows, dict):  # splits by name
        rows = rows["train"] if "train" in rows else next(iter(rows.values()))
    missing = [name for name in ("image", "text") if name not in rows.column_names]
    if missing or not len(rows):
        columns = ", ".join(f"`{name}`" for name in rows.column_names) or "none"
        fault = f"has no column `{missing[0]}`" if missing else "has no rows"
        raise PlanError(f"`{folder}` {fault}", hint=f"its columns are {columns}")
    return _feed_of_captions(rows, plan, _load_processor(config))


def _captioned_images(samples: Sequence[Any], processor: Any) -> Inputs:
    pixels = processor.image_processor(
        [sample["image"].convert("RGB") for sample in samples], return_tensors="pt"
    )
    text = processor.tokenizer(
        [sample["text"] for sample in samples], padding="longest", max_length=MAX_CAPTION_TOKENS,
        truncation=True, return_tensors="pt",
    )  # fmt: skip
    return {
        "pixel_values": pixels["pixel_values"],
        "input_ids": text["input_ids"],
        "attention_mask": text["attention_mask"],
        "labels": text["input_ids"].clone(),
    }


def _feed_of_captions(rows: Any, plan: TrainingPlan, processor: Any) -> Feed:
    num_samples = plan.steps * plan.accumulate_grad_batches * plan.batch_size
    batches = []
    for start in range(0, num_samples, plan.batch_size):
        numbers = range(start, start + plan.batch_size)
        samples = [rows[number % len(rows)] for number in numbers]  # a short data set repeats
        batches.append(_cast(_captioned_images(samples, processor), plan))
    lengths = {batch["input_ids"].shape[1] for batch in batches}
    note = f"micro-batches of {min(lengths)} to {max(lengths)} tokens"
    return Feed(
        batches=batches,
        val_batches=batches,
        loss_output="loss",
        seq_len=max(lengths),
        padded=any(not bool(batch["attention_mask"].all()) for batch in batches),
        image_size=int(batches[0]["pixel_values"].shape[-1]),
        notes=(note,) if len(lengths) > 1 else (),
    )


def _cast(inputs: Inputs, plan: TrainingPlan) -> Inputs:
    """Return `inputs` with float tensors cast to 16 bits if the plan's precision is `bf16-true` or
    `16-true`, as Lightning does (`HalfPrecision.convert_input`)."""
    dtype = input_dtype(plan)
    if dtype is None:
        return inputs
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def checkpoint_source(config: ModelConfig) -> str:
    """Return a Hub id, or a folder with weights, for `config`; `PlanError` if it has none."""
    if config.entry is not None:
        return config.entry.hub_id
    if config.source.startswith("hub:"):
        return config.source.removeprefix("hub:")
    folder = Path(config.source).parent
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise PlanError(f"`{folder}` has no weights", hint="leave `--weights` out for random ones")
    return str(folder)


def load_base(
    plan: TrainingPlan, config: ModelConfig, built: BuiltModel, *, is_random: bool, device: str
) -> nn.Module:
    """Return the model `built` (on meta) with weights on `device`, by `from_pretrained`.

    Weights are random if `is_random`, else from the checkpoint of `config`. QLoRA quantises each
    weight while it is loaded, unless the plan quantises in place.

    Raises:
        MemestError: the weights are not found or do not load.
    """
    cls: Any = type(built.module)
    index = torch.device(device).index  # accelerate 1.2 refuses `cuda:0`, since its own is `cuda`
    options: dict[str, Any] = {
        dtype_keyword(): built.module.dtype,
        "device_map": {"": device if index is None else index},
    }
    if plan.loads_quantized:
        options["quantization_config"] = quantization_config(plan)
    if plan.attn_implementation not in (None, "sdpa"):  # as `build_model` requests it
        options["attn_implementation"] = plan.attn_implementation
    with quiet_transformers():
        if is_random:
            state = random_state(built.module)
            return cls.from_pretrained(
                None, config=built.module.config, state_dict=state, **options
            )
        source = checkpoint_source(config)
        try:
            model: nn.Module = cls.from_pretrained(source, **options)
        except Exception as error:  # Hub, disk and model class raise different errors
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise MemestError(
                f"the weights of `{source}` cannot be loaded: {error_text(error)}",
                hint="check the name and the network, or leave `--weights` out for random ones",
            ) from error
    return model


def _load_processor(config: ModelConfig) -> Any:
    from transformers import AutoProcessor

    source = checkpoint_source(config)
    try:
        return AutoProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
    except Exception as error:  # Hub, disk and processor class raise different errors
        raise MemestError(
            f"the processor of `{source}` cannot be loaded: {error_text(error)}",
            hint="`--data` needs the model's own processor: a Hub id, or a folder that holds it",
        ) from error
