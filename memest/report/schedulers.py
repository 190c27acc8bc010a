"""Resource lines of schedulers for the smallest GPU on which a run fits."""

from __future__ import annotations

from memest.errors import MemestError
from memest.estimator.hardware.gpus import find_gpu
from memest.report import Outcome, SimulatedReport
from memest.report.answer import summary_line
from memest.units import gib_or_mib

SCHEDULERS = ("sky", "slurm", "dstack")

NAMES = {
    "t4": ("T4", "T4:16GB"), "v100-16gb": ("V100", "V100:16GB"),
    "v100-32gb": ("V100-32GB", "V100:32GB"), "a10g": ("A10G", "A10G:24GB"), "l4": ("L4", "L4:24GB"),
    "rtx-3090": ("RTX3090", "RTX3090:24GB"), "rtx-4090": ("RTX4090", "RTX4090:24GB"),
    "rtx-5090": ("RTX5090", "RTX5090:32GB"), "a100-40gb": ("A100", "A100:40GB"),
    "l40s": ("L40S", "L40S:48GB"), "a6000": ("A6000", "A6000:48GB"),
    "a100-80gb": ("A100-80GB", "A100:80GB"), "h100-80gb": ("H100", "H100:80GB"),
    "gh200-96gb": ("GH200", "GH200:96GB"), "h200": ("H200", "H200:141GB"),
    "b200": ("B200", "B200:180GB"),
}  # fmt: skip
"""GPU of the catalogue -> name for SkyPilot (`sky show-gpus -a`), name and memory for dstack
(https://dstack.ai/docs/concepts/tasks, resources). GPUs without a name in both are left out.
"""


class DoesNotFitError(MemestError):
    """The run fits no GPU of the report."""

    exit_code = 5


def resource_lines(
    report: SimulatedReport, scheduler: str, *, num_gpus: int = 1, num_nodes: int = 1
) -> str:
    """Return the resource lines of `scheduler` for the smallest GPU of the report that fits.

    A tight verdict does not count as fitting.

    Raises:
        DoesNotFitError: the run fits none of them.
    """
    fitting = [
        (verdict.limit_bytes, name)
        for name, verdict in report.verdicts.items()
        if verdict.verdict is Outcome.FITS and not verdict.is_tight and name in NAMES
    ]
    if not fitting:
        needs = max(verdict.needs_bytes for verdict in report.verdicts.values())
        raise DoesNotFitError(
            f"needs {gib_or_mib(needs)}, which fits none of {', '.join(report.verdicts)}",
            hint="`memest advise` finds changes with which a plan fits",
        )
    name = min(fitting)[1]
    sky, dstack = NAMES[name]
    lines = [f"# {summary_line(report, name)}"]
    if scheduler == "slurm":
        kind = find_gpu(name).label.lower().replace(" ", "_")
        lines += [
            "# the type is NVML's name; the cluster's gres.conf may have a shorter one",
            f"#SBATCH --nodes={num_nodes}",
            f"#SBATCH --gpus-per-node={kind}:{num_gpus}",
        ]
    elif scheduler == "sky":
        lines += [f"num_nodes: {num_nodes}"] if num_nodes > 1 else []
        lines += ["resources:", f"  accelerators: {sky}:{num_gpus}"]
    else:
        lines += [f"nodes: {num_nodes}"] if num_nodes > 1 else []
        lines += ["resources:", f"  gpu: {dstack}:{num_gpus}"]
    return "\n".join(lines)
