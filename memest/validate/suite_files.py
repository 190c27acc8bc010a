"""The suites that come with memest, and which of them a GPU gets."""

from __future__ import annotations

from pathlib import Path

from memest.errors import PlanError

SUITE_DIR = Path(__file__).with_name("suites")


def list_suites() -> list[str]:
    """Names of the shipped suites."""
    return sorted(path.stem for path in SUITE_DIR.glob("*.yaml"))


def find_suite(name: str) -> Path:
    """The file of a shipped suite, or the file that `name` is.

    Raises:
        PlanError: neither exists.
    """
    if name in list_suites():
        return SUITE_DIR / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    raise PlanError(
        f"there is no suite and no file `{name[:200]}`",
        hint=f"shipped: {', '.join(f'`{n}`' for n in list_suites())}; or give a YAML file of plans",
    )


def suite_for_device(name: str, total_bytes: int) -> str:
    """The suite for a GPU by its CUDA name and memory: `lab-h100` for H100 and H200 alike.

    >>> suite_for_device("NVIDIA H200", 143155 << 20), suite_for_device("NVIDIA A40", 48 << 30)
    ('lab-h100', 'lab-a100')
    """
    from memest.estimator.hardware.gpus import match_device

    gpu = match_device(name, total_bytes)
    known = (gpu.name if gpu is not None else name).casefold()
    return "lab-h100" if any(kind in known for kind in ("h100", "h200")) else "lab-a100"
