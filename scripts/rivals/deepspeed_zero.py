"""DeepSpeed's `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`, for its stages.

Model states alone, in mixed precision, by its functions in `stage_1_and_2.py` and `stage3.py` of
`deepspeed/runtime/zero`. Stage 1 has none. The largest layer that stage 3 asks for is that of the
input embeddings.
"""

from __future__ import annotations

from rivals.case import Case, Estimate, Refused

VERSION_OF = "deepspeed"
SOURCE = "deepspeed/runtime/zero/stage_1_and_2.py, stage3.py"
PREDICTS = "peak allocated, of the states alone"


def estimate(case: Case) -> Estimate:
    """The GPU figure of the run's stage, on one GPU."""
    strategy = case.plan["strategy"]
    if not strategy.startswith(("deepspeed_stage_2", "deepspeed_stage_3")):
        raise Refused("no ZeRO stage 2 or 3")
    is_offloaded = strategy.endswith("_offload")
    if "stage_2" in strategy:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        _, num_bytes = estimate_zero2_model_states_mem_needs(
            case.num_params, cpu_offload=is_offloaded
        )
    else:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        width = case.config.get("hidden_size") or case.config.get("d_model")
        if not width or not case.config.get("vocab_size"):
            raise Refused("the largest layer is not in config.json")
        _, num_bytes, _ = estimate_zero3_model_states_mem_needs(
            case.num_params,
            width * case.config["vocab_size"],
            cpu_offload=is_offloaded,
            cpu_offload_params=is_offloaded,
        )
    return Estimate(
        allocated_bytes=num_bytes, process_bytes=None, fits=num_bytes <= case.limit_bytes
    )
