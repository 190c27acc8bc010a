"""Inputs and weights of a run: synthetic batches, random weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memest.models_meta.assemble import input_dtype, sequence_length
from memest.models_meta.batch import Batch, make_batch
from memest.models_meta.build import BuiltModel
from memest.models_meta.quantized import quantization_config
from memest.models_meta.registry import ModelConfig, dtype_keyword, quiet_transformers
from memest.plan import TrainingPlan
from memest.units import ceil_div

INIT_STD = 0.02

_POOL_NUMEL = 1 << 20  # random numbers of the weights on the host; longer weights repeat them


Inputs = dict[str, Any]  # keyword arguments of a forward, on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Micro-batches of a run, in host memory, with their sizes."""

    batches: Sequence[Inputs]  # batches that are used in turn, repeatedly
    val_batches: Sequence[Inputs]
    loss_output: str  # output to differentiate
    seq_len: int
    padded: bool
    image_size: int | None
    notes: tuple[str, ...] = ()


def initialise(model: nn.Module) -> None:
    """Set random weights in place from one normal distribution, so that activations stay finite."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0.0, INIT_STD)


class RandomWeight:
    """Random weight in a state dict, generated when transformers reads it, like a file slice."""

    def __init__(self, pool: Tensor, weight: Tensor) -> None:
        self._pool, self.shape, self.dtype = pool, weight.shape, weight.dtype

    def __getitem__(self, index: Any) -> Tensor:
        numel = self.shape.numel()
        repeated = self._pool.repeat(ceil_div(numel, _POOL_NUMEL))[:numel]
        return repeated.view(self.shape).to(self.dtype)[index]

    def to(self, *args: Any) -> Tensor:
        """Make the weight and move it, as transformers before 5 requests."""
        return self[...].to(*args)


def random_state(module: nn.Module) -> dict[str, Any]:
    """Make a state dict for `module`, which is on meta: random weights, and buffers of ones."""
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
    """Make one micro-batch for all steps, or one of each of the plan's lengths in turn.

    The batch equals the prediction's, with random numbers for pixels.
    """

    def make(batch_size: int, length: int) -> Batch:
        is_padded = plan.is_padded and batch_size > 1
        return make_batch(
            model, batch_size=batch_size, seq_len=length, image_size=plan.image_size,
            padded=is_padded,
        )  # fmt: skip

    seq_len = sequence_length(plan, config)
    batch = make(plan.batch_size, seq_len)
    made = {seq_len: _inputs(batch, plan)}
    for length in plan.lengths:
        if length not in made:
            made[length] = _inputs(make(plan.batch_size, length), plan)
    val_batches = [made[seq_len]] if plan.validates else []
    if plan.validates and plan.val_batch_size not in (None, plan.batch_size):
        size = plan.val_batch_size or plan.batch_size
        val_batches = [_inputs(make(size, seq_len), plan)]
    notes = list(batch.notes)
    if plan.image_size is not None and batch.image_size is None:
        notes.append(f"`image_size` is passed over: `{config.name}` takes no images")
    return Feed(
        batches=[made[length] for length in plan.lengths or (seq_len,)], val_batches=val_batches,
        loss_output=batch.loss_output, seq_len=seq_len, padded=plan.is_padded,
        image_size=batch.image_size, notes=tuple(notes),
    )  # fmt: skip


def moved(inputs: Inputs, device: Any) -> Inputs:
    """Return the inputs with their tensors moved to `device`."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _inputs(batch: Batch, plan: TrainingPlan) -> Inputs:
    inputs = {
        name: torch.randn(value.shape) if isinstance(value, Tensor) and value.is_meta else value
        for name, value in batch.inputs.items()
    }
    return _cast(inputs, plan)


def _cast(inputs: Inputs, plan: TrainingPlan) -> Inputs:
    """Cast float inputs to 16 bits on the host, as Lightning's `HalfPrecision.convert_input`
    does."""
    dtype = input_dtype(plan)
    if dtype is None:
        return inputs
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def load_base(plan: TrainingPlan, built: BuiltModel, *, device: str) -> nn.Module:
    """Load `built`, which is on meta, to `device` by `from_pretrained`, with random weights.

    QLoRA quantises each weight while it is loaded.
    """
    cls: Any = type(built.module)
    index = torch.device(device).index  # accelerate 1.2 refuses `cuda:0`, since its own is `cuda`
    options: dict[str, Any] = {
        dtype_keyword(): built.module.dtype,
        "device_map": {"": device if index is None else index},
        "quantization_config": quantization_config(plan),
    }
    if plan.attn_implementation not in (None, "sdpa"):  # as `build_model` requests it
        options["attn_implementation"] = plan.attn_implementation
    with quiet_transformers():
        return cls.from_pretrained(
            None, config=built.module.config, state_dict=random_state(built.module), **options
        )
