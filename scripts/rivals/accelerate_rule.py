"""accelerate's `accelerate estimate-memory`: the column "Training using Adam".

Its rule (`estimate_training_usage` in `accelerate/commands/estimate.py`), of the bytes S of the
model in fp32, "for a batch size of 1", is the largest of

    float32:            model S, gradients S,     optimizer 2 S, step 4 S
    float16, bfloat16:  model S, gradients 1.5 S, optimizer 2 S, step 2 S

It knows neither batch, sequence, activations nor the CUDA context. S is counted on `AutoModel`, the
model without its head, on the meta device. Both functions are called, not copied; the command
itself would ask the Hub for the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rivals.case import ADAMS, Case, Estimate, Refused, refuse_parts
from rivals.variants import optimizer_family

VERSION_OF = "accelerate"
SOURCE = "accelerate/commands/estimate.py"
PREDICTS = "peak allocated, of the states alone"

_DTYPES = {"32": "float32", "bf16": "bfloat16", "16": "float16"}
_model_bytes: dict[str, int] = {}


def estimate(case: Case) -> Estimate:
    """The figure of the run's dtype."""
    refuse_parts(case)
    if case.technique != "full":
        raise Refused("not all parameters are trained")
    if optimizer_family(case.plan["optim"]) not in ADAMS:
        raise Refused("another optimizer than Adam")
    if case.hub_id not in _model_bytes:
        _model_bytes[case.hub_id] = model_bytes(case.config)
    allocated = training_bytes(_model_bytes[case.hub_id], case.plan["precision"])
    return Estimate(
        allocated_bytes=allocated, process_bytes=None, fits=allocated <= case.limit_bytes
    )


def model_bytes(config: Mapping[str, Any]) -> int:
    """Bytes in fp32 of the model that `AutoModel` makes of a config."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import CONFIG_MAPPING, AutoModel

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    try:
        with init_empty_weights():
            model = AutoModel.from_config(parsed, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise Refused("AutoModel does not know the model") from error
    return int(calculate_maximum_sizes(model)[0])


def training_bytes(num_bytes: int, precision: str) -> int:
    """The rule for a model of `num_bytes` in fp32; `precision` as Lightning names it."""
    from accelerate.commands.estimate import estimate_training_usage

    dtype = _DTYPES[precision.partition("-")[0]]
    return int(max(estimate_training_usage(num_bytes, dtype).values()))
