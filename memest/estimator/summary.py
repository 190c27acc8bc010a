"""Report of a replayed run: the memory allocated at the peak by purpose, and what was assumed.

A plan's report also compares activations of a layer with the textbook's.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memest.estimator.allocator.settings import AllocatorSettings, describe, parse_settings
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.convolution import describe_source
from memest.estimator.replay.recording import kind_of
from memest.estimator.replay.replay import Program, Replayed, TracedPlan, live_at
from memest.estimator.replay.scenarios import Scenario, intervals, phase_intervals
from memest.estimator.tensors.storages import Coverage
from memest.estimator.versions import library_versions, simulated
from memest.models_meta.geometry import LayerGeometry
from memest.plan import TrainingPlan
from memest.plan.reading import read_table
from memest.report import KINDS, WHY, ClosedForm, Outcome, Peak, Prediction, StepTime, Term, Verdict
from memest.units import MIB, counted, format_bytes, format_count, gib_or_mib

LAYER = re.compile(r"^(?P<stack>.*?)\.(?P<number>\d+)(?:\.|$)")
_FUSED_ATTENTION = re.compile("_scaled_dot_product_(flash|efficient|cudnn)_attention")


def closed_form(
    plan: TrainingPlan, program: Program, geometry: LayerGeometry | None, seq_len: int
) -> ClosedForm | None:
    """Compare the textbook's activations per layer with those that `program` allocates.

    Return None unless a whole dense model is trained in 16 bit on one GPU, as the formula assumes.
    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
    section 4: a transformer layer saves

        s * b * h * 34 + 5 * a * s**2 * b   bytes

    Of the 34, 11 are in attention (input 2, Q 2, K 2, V 2, input of the projection 2, dropout mask
    1), 19 in an MLP of width 4h (input 2, input of GELU 8, its output 8, mask 1), and 4 are inputs
    of two layer norms. The attention matrix is softmax output 2, dropout mask 1 and dropout output
    2. With recomputation of whole layers it saves their inputs, 2 * s * b * h.

    Letters: s tokens, b samples, h model width, a heads, k key heads, f MLP width. `geometry` has
    the sizes of a layer; it is None if the model is no stack of equal dense layers. `differences`
    of the result add up to the bytes of `program` less those of the textbook. A difference has a
    cause in the model's config, such as a gated MLP. The last difference is the rest, which no
    other difference explains.
    """
    if plan.uses_adapters or plan.freeze or plan.is_distributed or plan.lengths:
        return None
    if geometry is None or plan.precision == "32-true":
        return None
    storages = program.storages
    bytes_by_layer: dict[int, int] = defaultdict(int)
    first_forward = list(program.until_forward())[-1]
    for index in program.alive_after([first_forward]):
        layer = LAYER.match(storages.sites[index].module)
        if layer and storages.kinds[index] == "activations":
            bytes_by_layer[int(layer["number"])] += storages.num_bytes[index]
    if not bytes_by_layer:
        return None
    traced_bytes = sum(bytes_by_layer.values()) // len(bytes_by_layer)
    g, tokens = geometry, seq_len * plan.batch_size
    differences: list[tuple[str, int]] = []
    if plan.act_ckpt:
        formula, textbook_bytes = "2 s b h", 2 * tokens * g.h
    else:
        formula = "34 s b h + 5 a s^2 b"
        textbook_bytes = 34 * tokens * g.h + 5 * g.a * seq_len * tokens
        is_fused = any(_FUSED_ATTENTION.search(site.op) for site in storages.sites)
        differences += _differences(plan, g, seq_len, is_fused=is_fused)
    remainder = traced_bytes - textbook_bytes - sum(num_bytes for _, num_bytes in differences)
    terms = []
    for kind, num_bytes in (*differences, ("this model's code", remainder)):
        arithmetic, why = (text.format(g=g) for text in TEXTBOOK[kind])
        terms.append(Term(kind=kind, num_bytes=num_bytes, arithmetic=arithmetic, why=why))
    return ClosedForm(
        formula=formula, letters={"s": seq_len, "b": plan.batch_size, "h": g.h, "a": g.a},
        num_layers=len(bytes_by_layer), textbook_bytes=textbook_bytes, traced_bytes=traced_bytes,
        differences=tuple(terms),
    )  # fmt: skip


TEXTBOOK: dict[str, tuple[str, str]] = read_table(__file__, "textbook.json")
"""Difference to the textbook -> arithmetic and reason; braces stand for values of the geometry."""


def _differences(
    plan: TrainingPlan, g: LayerGeometry, seq_len: int, *, is_fused: bool
) -> Iterator[tuple[str, int]]:
    """Yield (key of `TEXTBOOK`, bytes) of each difference between a layer with the geometry `g` and
    the textbook's. `is_fused` is True if one kernel computes attention. A 16-bit value has 2 bytes,
    one in fp32 has 4, and one of a dropout mask has 1."""
    tokens = seq_len * plan.batch_size
    matrix = g.a * seq_len * tokens  # elements of the attention matrix
    if is_fused:
        yield "fused attention", -5 * matrix  # softmax output, dropout mask, dropout output
    elif not g.attention_dropout:
        yield "no attention dropout", -3 * matrix  # dropout mask, dropout output
    if not g.hidden_dropout:
        yield "no dropout", -2 * tokens * g.h  # masks after attention and after the MLP
    extra_width = g.a * g.head_dim - g.h
    if extra_width:
        yield "width of heads", 8 * tokens * extra_width  # Q, K, V and the projection's input
    if g.k != g.a and not plan.is_padded:  # with a mask, transformers repeats K and V for all heads
        yield "grouped heads", -4 * tokens * g.head_dim * (g.a - g.k)  # K and V
    mlp, bytes_per_width = "width of the MLP", 4  # input and output of the activation
    if g.is_gated:
        mlp, bytes_per_width = "gated MLP", 8  # gate, its activation, up projection, their product
    elif g.activation == "relu":
        mlp, bytes_per_width = "ReLU", 2  # its output
    # the textbook's input and output of GELU have a width of 4 h
    if difference := tokens * (bytes_per_width * g.f - 4 * 4 * g.h):
        yield mlp, difference
    if g.num_written_norms:  # input in fp32 and scaled input of each, not the textbook's two inputs
        yield "RMS norms", (6 * g.num_written_norms - 4) * tokens * g.h
    if plan.precision.endswith("-mixed"):
        yield "autocast", 2 * g.num_weights  # a 16-bit copy of each matrix


def summarise(
    *, plan: TrainingPlan, primary: Gpu, scenarios: Sequence[Scenario], results: Sequence[Replayed],
    verdicts: Mapping[str, Verdict], times: Mapping[str, StepTime], warnings: Sequence[str],
    elapsed_s: float,
) -> Prediction:  # fmt: skip
    """Return the prediction for the GPU `primary`, with the verdicts on all GPUs. `scenarios` begin
    with the one that reserves most; `results` are their replays on `primary`. `verdicts` and
    `times` (of a step) are by name of the GPU. `elapsed_s` is the time in seconds that the
    prediction took."""
    worst_scenario, result = scenarios[0], results[0]
    traced, unlimited = worst_scenario.traced, worst_scenario.unlimited
    outside_bytes = primary.context_bytes + traced.libraries_bytes
    program = traced.program
    terms = peak_terms(traced, plan.accumulate_grad_batches, result)
    site = program.storages.sites[result.peak.storage]
    return Prediction(
        name=plan.label,
        plan=plan.to_dict()
        | {
            "seq_len": None if plan.lengths else traced.seq_len,
            "image_size": traced.image_size,
            "padded": plan.is_padded,
        },
        model=traced.model,
        gpu=primary.name,
        peak_allocated_bytes=result.peak_allocated_bytes,
        peak_reserved_bytes=result.peak_reserved_bytes,
        process_bytes=result.peak_reserved_bytes + outside_bytes,
        intervals=intervals(results, outside_bytes=outside_bytes),
        phase_intervals=phase_intervals(results) if len(results) > 1 else (),
        host_bytes=traced.host_bytes,
        host_terms=traced.host_terms,
        host_verdict=host_verdict_of(traced.host_bytes, plan.host_memory),
        unlimited_reserved_bytes=unlimited.peak_reserved_bytes,
        peak=Peak(step=result.peak.step, phase=site.phase, module=site.module, op=site.op),
        phases=tuple(result.rows),
        verdict=verdicts[primary.name].verdict,
        verdicts=verdicts,
        times=times,
        warnings=tuple(warnings),
        terms=terms,
        coverage=coverage_of(program.coverage),
        assumptions=(
            *_assumptions(plan, traced, primary, unlimited),
            *([describe_source(primary)] if program.coverage.has_convolutions else []),
            _loop_line(plan, result, terms, site.phase),
            *plan.assumed,
        ),
        closed_form=closed_form(plan, program, traced.geometry, traced.seq_len),
        versions=library_versions("transformers", "peft", "accelerate"),
        elapsed_s=elapsed_s,
    )


def coverage_of(coverage: Coverage) -> dict[str, Any]:
    """Return the report's counts of operator calls: `num_ops`, `num_modelled`, and `unmodelled`, a
    dict of counts by operator."""
    return {
        "num_ops": coverage.num_ops,
        "num_modelled": coverage.num_ops - sum(coverage.unmodelled.values()),
        "unmodelled": dict(sorted(coverage.unmodelled.items())),
    }


def host_verdict_of(needed_bytes: int, limit_bytes: int | None) -> Verdict | None:
    """Return the verdict on `needed_bytes` under the host's `limit_bytes`; None without a limit."""
    if limit_bytes is None:
        return None
    margin = limit_bytes - needed_bytes
    return Verdict(
        verdict=Outcome.FITS if margin >= 0 else Outcome.OOM, margin_bytes=margin,
        limit_bytes=limit_bytes, reserved_bytes=needed_bytes,
        at="" if margin >= 0 else "host memory",
    )  # fmt: skip


_LOOPS = {
    "lightning": "Lightning's loop, which frees gradients after the forward of the next step",
    "transformers": "the loop of transformers' Trainer, which frees gradients after each step and"
    " clips them to a norm of {clip}",
    "plain": "a plain loop, with `zero_grad` after each step",
}


def _loop_line(plan: TrainingPlan, result: Replayed, terms: Sequence[Term], phase: str) -> str:
    """Return the report's sentence on the training loop and the gradients that it leaves in the
    peak. `terms` are the report rows of the peak, `phase` is the phase of the peak."""
    line = _LOOPS[plan.loop].format(clip=f"{plan.clip_norm or 0:g}")
    if plan.loop != "lightning" or plan.is_distributed:
        return line
    size = sum(term.num_bytes for term in terms if term.kind == "grads")
    if size and phase == "forward" and result.peak.step > 0:  # step 0 begins without gradients
        return f"{line}: {gib_or_mib(size)} of them are part of the peak (`loop: plain` has none)"
    return f"{line}: none of the peak is due to that"


def peak_terms(traced: TracedPlan, num_micro_batches: int, result: Replayed) -> tuple[Term, ...]:
    """Return report rows with the bytes of the peak by purpose, which add up to the peak of
    `result`. `num_micro_batches` is their number per step."""
    program = traced.program
    storages = program.storages
    ids_by_group: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in live_at(program, num_micro_batches, result.peak, result.timing):
        ids_by_group[_kind_and_owner(program, index)].append(index)
    terms = []
    for (kind, owner), ids in ids_by_group.items():
        num_bytes = sum(storages.num_bytes[index] for index in ids)
        arithmetic, why = _arithmetic_and_reason(traced, kind, owner, ids, num_bytes)
        terms.append(Term(kind=kind, num_bytes=num_bytes, arithmetic=arithmetic, why=why))
    terms = _with_small_merged(terms, result.peak_allocated_bytes)
    terms.sort(key=lambda t: (KINDS.index(t.kind), -t.num_bytes))
    rounding_bytes = result.peak_allocated_bytes - sum(t.num_bytes for t in terms)
    rounding = Term(
        kind="rounding", num_bytes=rounding_bytes, arithmetic="blocks minus requests in bytes",
        why=WHY["rounding"],
    )  # fmt: skip
    return (*terms, rounding)


def _with_small_merged(terms: list[Term], peak_bytes: int) -> list[Term]:
    """Return `terms`, with activations that are each below 0.2 % of `peak_bytes` in one term."""
    limit_bytes = peak_bytes / 500
    small = [t for t in terms if t.kind == "activations" and t.num_bytes < limit_bytes]
    if len(small) < 2:
        return terms
    merged = Term(
        kind="activations", num_bytes=sum(t.num_bytes for t in small),
        arithmetic=f"{len(small)} other groups of modules", why="saved for the backward",
    )  # fmt: skip
    return [t for t in terms if t not in small] + [merged]


def _kind_and_owner(program: Program, index: int) -> tuple[str, str]:
    """Return (purpose, owner) of the storage with id `index`. For activations, the owner is a stack
    of layers; for temporaries, it is the phase; else it is ""."""
    kind, site = kind_of(program.storages, index), program.storages.sites[index]
    if kind == "temporaries":
        return kind, f"{site.phase}: {site.op}" if site.phase == "optimizer" else site.phase
    if kind != "activations":
        return kind, ""
    layer = LAYER.match(site.module)
    if layer:
        return kind, f"{layer['stack']}.*"
    return kind, site.module.partition(".")[0] or "loss"


def _arithmetic_and_reason(
    traced: TracedPlan, kind: str, owner: str, ids: list[int], num_bytes: int
) -> tuple[str, str]:
    """Return (arithmetic, reason) of the report row for the storages `ids`, of `num_bytes` in all.
    `kind` and `owner` are those of `_kind_and_owner`."""
    tensors = counted(len(ids), "tensor")
    if kind in ("params", "grads", "optimizer"):
        counts = traced.param_groups[kind]
        total_bytes = sum(n * getattr(torch, dtype).itemsize for dtype, n in counts.items())
        if total_bytes == num_bytes or kind == "params":
            return _sizes_by_dtype(counts, kind), WHY[kind]
        return f"{tensors}, {format_bytes(total_bytes)} when all exist", WHY[kind]
    if kind == "activations":
        modules = [traced.program.storages.sites[index].module for index in ids]
        layer_numbers = {layer["number"] for layer in map(LAYER.match, modules) if layer}
        arithmetic = tensors
        if layer_numbers:
            mib_per_layer = num_bytes / len(layer_numbers) / MIB
            arithmetic = f"{counted(len(layer_numbers), 'layer')} x {mib_per_layer:.2f} MiB"
        return arithmetic, f"{owner}: saved for the backward"
    if kind == "temporaries":
        return tensors, f"of the {owner}"
    return tensors, WHY[kind]


def _sizes_by_dtype(counts: Mapping[str, int], kind: str) -> str:
    """Return `counts`, elements by name of a dtype, as the arithmetic of their bytes."""
    noun = "elements" if kind == "optimizer" else "params"
    return " + ".join(
        f"{format_count(n)} {noun} x {getattr(torch, dtype).itemsize} B ({dtype})"
        for dtype, n in sorted(counts.items(), key=lambda item: -item[1])
    )


def _assumptions(
    plan: TrainingPlan, traced: TracedPlan, primary: Gpu, unlimited: Replayed
) -> tuple[str, ...]:
    tokens = f"{traced.seq_len} tokens per sample, padding included"
    lines = other_processes_assumed(primary)
    if plan.lengths:
        count = plan.steps * plan.accumulate_grad_batches
        lines.append(f"{count} micro-batches of {min(plan.lengths)} to {max(plan.lengths)} tokens")
    else:
        lines.append(tokens if plan.seq_len else f"{tokens}; the default, set it with `seq_len`")
    if traced.image_size is not None:
        lines.append(f"images of {traced.image_size} x {traced.image_size} pixels")
    if plan.is_padded:
        lines.append("at least one row is shorter than the longest, so masks are materialised")
    else:
        lines.append("no row is padded, so masks of ones are dropped where the model does so")
    lines.append("the model is built on the GPU, and the cache is empty before the first step")
    if unlimited.setup_reserved_bytes > unlimited.peak_reserved_bytes:
        lines.append(
            f"building it there takes {gib_or_mib(unlimited.setup_reserved_bytes)}, more than the"
            " training: load it quantised, or through the CPU"
        )
    lines.append(
        kernels_assumed("compute capability", primary.capability, parse_settings(plan.alloc_conf))
    )
    if plan.precision.startswith("bf16") and primary.capability < (8, 0):
        lines.append(
            f"bfloat16 is emulated on {primary.name}: its own 16-bit precision is `16-mixed`"
        )
    lines.append(context_assumed(primary))
    return (*lines, *traced.notes)


def kernels_assumed(prefix: str, capability: tuple[int, int], settings: AllocatorSettings) -> str:
    """Return the report's sentence on kernels and allocator `settings`. An example is "CUDA kernels
    as torch 2.11 runs them on compute capability 9.0; PyTorch's default allocator". `prefix` is the
    text in front of the number of `capability`, such as "compute capability"."""
    return (
        f"CUDA kernels as torch {simulated().name} runs them on {prefix}"
        f" {capability[0]}.{capability[1]}; {describe(settings)}"
    )


def context_assumed(gpu: Gpu) -> str:
    """Return the report's sentence on the CUDA context, which is outside of the allocator."""
    as_on = f", as on the whole {gpu.whole}" if gpu.whole else ""
    return f"a CUDA context of {format_bytes(gpu.context_bytes)} outside the allocator{as_on}"


def other_processes_assumed(gpu: Gpu) -> list[str]:
    """Return [the report's sentence on GPU memory of other processes], or [] if they hold none."""
    size = format_bytes(gpu.beside_bytes)
    return [f"other processes hold {size} of each GPU"] if gpu.beside_bytes else []
