"""torch's MemTracker: the training loop on fake CUDA tensors, its storages tracked by dispatch.

`torch.distributed._tools.mem_tracker.MemTracker` under `FakeTensorMode`, around two steps of the
module and batch that memest builds, in the order in which Lightning runs them: the gradients of a
step live until the next forward is done. Needs a CUDA build of torch and a GPU, since a CPU build
cannot run autograd on fake CUDA tensors. Its figure is the sum of live tensors, each rounded to
512 bytes, without what kernels take inside, the allocator's cache or the CUDA context.

What a user has to help it with, and is done here:

- `foreach` is named: torch takes the loop over single tensors for fake parameters, whose
  temporaries are smaller than those of the multi-tensor path that real ones take.
- Frozen weights become buffers: the tracker hooks every parameter, which a frozen one refuses.
- What reads a value: a GradScaler's check for infinities is passed over, Adafactor's norms are
  read as 1, and the number that layer dropout draws says that the layer stays.
- Masks are fake, so that transformers keeps them; a batch without padding gets none.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rivals.case import Case, Estimate, Refused

VERSION_OF = "torch"
SOURCE = "torch/distributed/_tools/mem_tracker.py"
PREDICTS = "peak allocated"

NUM_STEPS = 2

_EIGHT_BIT = {"adam_8bit": "Adam8bit", "adamw_8bit": "AdamW8bit", "lion_8bit": "Lion8bit"}
_BY_BITSANDBYTES = {**_EIGHT_BIT, "lion_32bit": "Lion32bit"}
_BY_TORCH = {
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adafactor": "Adafactor",
}


def where() -> str:
    """The GPU and the torch that answer here, told by a process of its own.

    A process that has used the driver cannot fork others that do.
    """
    code = "import torch; print(torch.cuda.get_device_name(0), 'with torch', torch.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit("a GPU and a CUDA build of torch are needed")
    return found.stdout.strip()


def estimate(case: Case) -> Estimate:
    """The peak of two steps."""
    if case.plan["strategy"] != "auto":
        raise Refused("a strategy that shards or offloads")
    if case.technique == "qlora":
        raise Refused("weights quantised by kernels, which fake tensors do not run")
    if case.plan["optim"].startswith("paged_"):
        raise Refused("paged optimizers, which take memory from the driver")
    try:
        parts = peak(json.dumps(case.plan_alone), "cuda")
    except Refused:
        raise
    except Exception as error:  # models read values, which fake tensors do not have
        raise Refused(f"stops with {type(error).__name__}") from error
    total = parts["Total"]
    return Estimate(
        allocated_bytes=total, process_bytes=None, fits=total <= case.limit_bytes, parts=parts
    )


@functools.lru_cache(maxsize=1)
def peak(plan_json: str, device: str) -> dict[str, int]:
    """Bytes of the tracked storages on `device` at the peak, by the tracker's categories."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memest.models_meta.assemble import assemble, sequence_length
    from memest.models_meta.batch import make_batch
    from memest.models_meta.registry import resolve_config
    from memest.plan import TrainingPlan

    plan = TrainingPlan.from_dict(json.loads(plan_json))
    config = resolve_config(plan.model_name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = assemble(plan, config, device="meta").module
    with mode:
        _move(model, device)
    batch = make_batch(
        model,
        batch_size=plan.batch_size,
        seq_len=sequence_length(plan, config),
        image_size=plan.image_size,
        padded=plan.is_padded,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _of_bitsandbytes(plan.optim, trained)
    with mode, _without_values():
        optimizer = optimizer or _of_torch(plan, trained)
        inputs = _inputs(plan, batch, mode, device)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *_tensors(inputs))
        with tracker:
            for _ in range(NUM_STEPS):
                _step(plan, model, inputs, batch.loss_output, optimizer, tracker)
        snapshot = tracker.get_tracker_snapshot("peak")
    sizes = next(sizes for where, sizes in snapshot.items() if where.type == device)
    return {str(getattr(kind, "value", kind)): int(size) for kind, size in sizes.items()}


def _step(
    plan: Any, model: Any, inputs: dict[str, Any], loss_output: str, optimizer: Any, tracker: Any
) -> None:
    """One step as Lightning's closure takes it: forward, `zero_grad`, backward, and the update."""
    import torch

    from memest.models_meta.assemble import half_dtype, loss_of

    is_mixed = plan.precision.endswith("-mixed")
    device = next(model.parameters()).device
    scale = None
    if plan.precision == "16-mixed":
        scale = torch.full((1,), 65536.0, device=device)
    for micro in range(plan.accumulate_grad_batches):
        with torch.autocast(device.type, dtype=half_dtype(plan), enabled=is_mixed):
            loss = loss_of(model, inputs, loss_output)
        loss = loss / plan.accumulate_grad_batches
        if micro == 0:
            optimizer.zero_grad()
        (loss if scale is None else loss * scale).backward()
        del loss
        tracker.reset_mod_stats()
    if scale is not None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found = torch.zeros((1,), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        del grads
    with _item_is_one(plan.optim):
        optimizer.step()


def _inputs(plan: Any, batch: Any, mode: Any, device: str) -> dict[str, Any]:
    """The batch as fake tensors on `device`; a mask of ones, which models drop, is left out."""
    import torch

    from memest.models_meta.assemble import input_dtype

    inputs = {}
    for name, value in batch.inputs.items():
        if name == "attention_mask" and not plan.is_padded:
            continue
        if torch.is_tensor(value):
            dtype = input_dtype(plan) if value.is_floating_point() else None
            value = mode.from_tensor(value).to(device, dtype=dtype)
        inputs[name] = value
    return inputs


def _tensors(inputs: Mapping[str, Any]) -> list[Any]:
    import torch

    return [value for value in inputs.values() if torch.is_tensor(value)]


def _move(model: Any, device: str) -> None:
    """Parameters and buffers of a model on the meta device become fake tensors; a tied one once."""
    import torch

    moved: dict[int, tuple[Any, Any]] = {}  # with the tensor that was, lest its id be used again
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if tensor.requires_grad:
                        made = torch.nn.Parameter(made)
                    moved[id(tensor)] = tensor, made
                _, found = moved[id(tensor)]
                if tensors is module._parameters and not tensor.requires_grad:
                    del tensors[name]
                    module.register_buffer(name, found, persistent=False)
                else:
                    tensors[name] = found


def _of_bitsandbytes(name: str, parameters: list[Any]) -> Any:
    """bitsandbytes' own optimizer; None where `name` is not one of its."""
    if name not in _BY_BITSANDBYTES:
        return None
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, _BY_BITSANDBYTES[name])(parameters)
    if name in _EIGHT_BIT:
        optimizer.fill_qmap()  # computed from values, so outside of the fake mode
    return optimizer


def _of_torch(plan: Any, parameters: list[Any]) -> Any:
    """torch's own optimizer, with the path that it takes for real parameters named."""
    import torch

    family, _, variant = plan.optim.partition("_")
    if family not in _BY_TORCH or variant not in ("", "single", "foreach", "fused"):
        raise Refused(f"optimizer {plan.optim}")
    is_foreach = variant == "foreach" or (variant == "" and family != "adafactor")
    options: dict[str, Any] = {"foreach": is_foreach}
    if variant == "fused":
        options["fused"] = True
    if family in ("sgd", "rmsprop"):
        options["momentum"] = plan.momentum
    if family == "sgd" and plan.nesterov:
        options["nesterov"] = True
    return getattr(torch.optim, _BY_TORCH[family])(parameters, **options)


@contextmanager
def _item_is_one(optim: str) -> Iterator[None]:
    """Adafactor's norms, of which it reads the values."""
    import torch

    if not optim.startswith("adafactor"):
        yield
        return
    fake = torch._subclasses.fake_tensor.FakeTensor
    with mock.patch.object(fake, "item", return_value=1.0):
        yield


@contextmanager
def _without_values() -> Iterator[None]:
    """Stands in for the number that layer dropout draws."""
    import torch

    original = torch.rand

    def rand(*size: Any, **options: Any) -> Any:
        return 1.0 if size == ([],) else original(*size, **options)

    with mock.patch.object(torch, "rand", rand):
        yield
