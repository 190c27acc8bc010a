"""torch's MemTracker: the model on fake CUDA tensors, its storages tracked by dispatch.

`torch.distributed._tools.mem_tracker.MemTracker` around two training steps of the same module and
batch that memest builds, under `FakeTensorMode`. Needs a CUDA build of torch and a GPU: a CPU build
cannot run autograd on fake CUDA tensors. Its figure is the sum of live tensors, without the
allocator's rounding, cache or the CUDA context. Fake tensors have no values, and 8-bit optimizers
and quantised layers no fake kernels, so that these are refused and padding masks left out.
"""

from __future__ import annotations

from typing import Any

from rivals.case import Case, Estimate, Refused, refuse_parts

VERSION_OF = "torch"
SOURCE = "torch/distributed/_tools/mem_tracker.py"
PREDICTS = "peak allocated"

NUM_STEPS = 2


def can_run() -> bool:
    """Whether this torch has a GPU."""
    import torch

    return torch.cuda.is_available()


def estimate(case: Case) -> Estimate:
    """The peak of two steps."""
    refuse_parts(case)
    if case.technique == "qlora" or "8bit" in case.plan["optim"]:
        raise Refused("bitsandbytes has no fake kernels")
    if case.plan["precision"] == "16-mixed":
        raise Refused("a GradScaler reads values")
    try:
        allocated = peak_bytes(case.plan, "cuda")
    except Exception as error:  # models read values, which fake tensors do not have
        raise Refused(f"stops with {type(error).__name__}") from error
    return Estimate(
        allocated_bytes=allocated,
        process_bytes=None,
        fits=allocated <= case.limit_bytes,
        stretch="padding: models read the values of a mask" if case.plan["padded"] else "",
    )


def peak_bytes(fields: Any, device: str) -> int:
    """Peak of the tracked storages on `device`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memest.models_meta.assemble import assemble, input_dtype, loss_of, sequence_length
    from memest.models_meta.batch import make_batch
    from memest.models_meta.registry import resolve_config
    from memest.plan import TrainingPlan

    plan = TrainingPlan.from_dict(dict(fields))
    config = resolve_config(plan.model_name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = assemble(plan, config, quantize=lambda _: None).module
    with mode:
        _move(model, device)
    seq_len = sequence_length(plan, config)
    batch = make_batch(
        model,
        batch_size=plan.batch_size,
        seq_len=seq_len,
        image_size=plan.image_size,
        device="cpu",
    )
    with mode:
        inputs = {
            name: mode.from_tensor(value).to(device, dtype=input_dtype(plan))
            if torch.is_tensor(value) and value.is_floating_point()
            else mode.from_tensor(value).to(device)
            if torch.is_tensor(value)
            else value
            for name, value in batch.kwargs.items()
            if name != "attention_mask"
        }
        optimizer = _optimizer(plan, [p for p in model.parameters() if p.requires_grad])
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(NUM_STEPS):
                for _ in range(plan.accumulate_grad_batches):
                    is_mixed = plan.precision == "bf16-mixed"
                    with torch.autocast(device, dtype=torch.bfloat16, enabled=is_mixed):
                        loss = loss_of(model, inputs, batch.loss_output)
                    loss.backward()  # type: ignore[no-untyped-call]
                    del loss
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")
    return next(int(sizes["Total"]) for where, sizes in peak.items() if where.type == device)


def _move(model: Any, device: str) -> None:
    """Parameters and buffers of a model on the meta device become fake tensors; a tied one once."""
    import torch

    moved: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = made
                tensors[name] = moved[id(tensor)]


def _optimizer(plan: Any, parameters: Any) -> Any:
    import torch

    if plan.optim.startswith("adam"):
        return torch.optim.AdamW(parameters)
    if plan.optim == "sgd":
        return torch.optim.SGD(parameters, momentum=plan.momentum)
    raise Refused(f"optimizer {plan.optim}")
