"""Changes for a script that does not fit: estimates from its peak on an unlimited GPU.

`memest run` can apply some of them without touching the script; the preflight tries those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memest.estimator.allocator.settings import EXPANDABLE
from memest.report import RunReport
from memest.units import gib_or_mib

EIGHT_BIT_SHARE = 0.74
"""Share of two float32 moments that bitsandbytes' blockwise 8-bit ones save: 8 B to 2 B and 8 B per
256 elements (`bitsandbytes/optim/optimizer.py`: blocks of 256, one float32 `absmax` each).
"""

PARTS = (2, 4, 8, 16, 32, 64)  # numbers of parts into which a micro-batch is cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change, and its saving at the peak."""

    title: str
    price: str  # cost in plain words
    saved_bytes: int  # estimated saving
    options: tuple[str, ...] = ()  # options of `memest run` that simulate it
    alloc_conf: str = ""  # addition to `PYTORCH_ALLOC_CONF` that simulates it

    @property
    def can_be_simulated(self) -> bool:
        """True if `memest run` can apply it; otherwise the script has to be changed."""
        return bool(self.options or self.alloc_conf)


def suggestions(report: RunReport, limit_bytes: int) -> tuple[Suggestion, ...]:
    """Return changes each of which is enough alone by this estimate, cheapest first.

    `report` is of the script on a GPU with enough memory; `limit_bytes` is the real allocator's.
    """
    over = report.verdicts[report.gpu].needs_bytes - limit_bytes
    return tuple(s for s in _all(report, over) if s.saved_bytes >= over) if over > 0 else ()


def _all(report: RunReport, over: int) -> Iterator[Suggestion]:
    held = {term.name: term.num_bytes for term in report.terms}
    in_step = report.peak.phase == "optimizer"
    temporaries = held.get("temporaries", 0)
    cached = report.verdicts[report.gpu].needs_bytes - report.peak_allocated_bytes
    if in_step and temporaries:
        yield Suggestion(
            title="`fused=True` in the optimizer",
            price="nothing: the same update in one kernel, without temporaries",
            saved_bytes=temporaries,
        )
    if cached and EXPANDABLE not in report.allocator:
        yield Suggestion(
            title=f"`PYTORCH_ALLOC_CONF={EXPANDABLE}` in the environment",
            price="nothing: the allocator keeps less in pieces that nothing fits into",
            saved_bytes=cached,
            alloc_conf=EXPANDABLE,
        )
    grows = held.get("activations", 0) + held.get("batch", 0) + (0 if in_step else temporaries)
    parts = next((n for n in PARTS if grows - grows // n >= over), 0)
    if parts:
        yield Suggestion(
            title=f"1/{parts} of the micro-batch, and {parts} times the accumulation",
            price="same mathematics, at most a little more time",
            saved_bytes=grows - grows // parts,
            options=("--batch-parts", str(parts)),
        )
    yield Suggestion(
        title="activation checkpointing, if it is not on",
        price="same mathematics, about a third more time",
        saved_bytes=held.get("activations", 0) // 2,
    )
    yield Suggestion(
        title="an 8-bit optimizer, if its state is of 32 bits",
        price="another optimizer",
        saved_bytes=int(held.get("optimizer", 0) * EIGHT_BIT_SHARE),
    )
    trained = held.get("grads", 0) + held.get("optimizer", 0)
    yield Suggestion(
        title="LoRA adapters instead of all parameters",
        price="fewer parameters trained",
        saved_bytes=trained,
    )


def render_suggestions(found: Sequence[Suggestion]) -> list[str]:
    """Return lines for the best change and the next of another kind, if any is enough."""
    if not found:
        return [
            "best change: none alone is enough; a smaller model, several GPUs or offload may be"
        ]
    lines = [
        f"{name}: {each.title} (about {gib_or_mib(each.saved_bytes)} less; {each.price})"
        for name, each in zip(("best change", "or"), found, strict=False)
    ]
    return [
        *lines,
        "estimated from the contents of the peak; check the changed script by `memest run`",
    ]
