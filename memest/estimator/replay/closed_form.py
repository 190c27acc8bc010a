"""The textbook's activations per layer: a comparison with the trace, for teaching.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4:
a transformer layer in 16 bit saves

    s * b * h * 34 + 5 * a * s**2 * b   bytes

Of the 34, 11 are in attention (input 2, Q 2, K 2, V 2, input of the projection 2, dropout mask 1),
19 in an MLP of width 4h (input 2, input of GELU 8, its output 8, mask 1), and 4 are inputs of two
layer norms. The attention matrix is softmax output 2, dropout mask 1 and dropout output 2. With
recomputation of whole layers it saves their inputs, 2 * s * b * h.

Rows list the differences that follow from the model's config; the last row is the rest.
Shapes: s tokens, b samples, h model width, a heads, k key heads, f MLP width.
"""

import re
from collections import defaultdict

from memest.estimator.replay.program import Program
from memest.models_meta.geometry import LayerGeometry
from memest.plan import TrainingPlan
from memest.report import ClosedForm, Term

LAYER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")
_FUSED_ATTENTION = re.compile("_scaled_dot_product_(flash|efficient|cudnn)_attention")


def closed_form(
    plan: TrainingPlan, program: Program, geometry: LayerGeometry | None, seq_len: int
) -> ClosedForm | None:
    """Compare the textbook with the trace of `program`; None if the textbook does not apply.

    It applies to whole dense models trained in 16 bit on one GPU.
    """
    is_other = plan.uses_adapters or plan.freeze or plan.is_distributed or plan.lengths
    if geometry is None or is_other or plan.precision == "32-true":
        return None
    storages = program.storages
    layers: dict[int, int] = defaultdict(int)  # bytes after the first forward, by layer
    *_, first_forward = program.until_forward()
    for index in program.alive_after([first_forward]):
        found = LAYER.match(storages.sites[index].module)
        if found and storages.kinds[index] == "activations":
            layers[int(found[2])] += storages.num_bytes[index]
    if not layers:
        return None
    per_layer = sum(layers.values()) // len(layers)
    g, tokens = geometry, seq_len * plan.batch_size
    if plan.act_ckpt:
        formula, textbook = "2 s b h", 2 * tokens * g.h
        differences: list[Term] = []
    else:
        formula = "34 s b h + 5 a s^2 b"
        textbook = 34 * tokens * g.h + 5 * g.a * seq_len * tokens
        is_fused = any(_FUSED_ATTENTION.search(site.op) for site in storages.sites)
        differences = _differences(plan, g, seq_len, is_fused=is_fused)
    rest = per_layer - textbook - sum(t.num_bytes for t in differences)
    other = Term(
        kind="this model's code",
        num_bytes=rest,
        arithmetic="the rest",
        why="what its modules and kernels save in addition, or do not save: copies in fp32, parts"
        " of decomposed functions, sums of a softmax",
    )
    return ClosedForm(
        formula=formula,
        letters={"s": seq_len, "b": plan.batch_size, "h": g.h, "a": g.a},
        num_layers=len(layers),
        textbook_bytes=textbook,
        traced_bytes=per_layer,
        differences=(*differences, other),
    )


def _differences(
    plan: TrainingPlan, g: LayerGeometry, seq_len: int, *, is_fused: bool
) -> list[Term]:
    """Return the differences of a layer of this shape to the textbook's."""
    tokens = seq_len * plan.batch_size
    matrix = g.a * seq_len * tokens
    rows: list[tuple[str, int, str, str]] = []
    if is_fused:
        rows.append(
            ("fused attention", -5 * matrix, "-5 a s^2 b", "recomputes the matrix in tiles")
        )
    elif not g.attention_dropout:
        rows.append(
            ("no attention dropout", -3 * matrix, "-3 a s^2 b", "neither a mask nor a second copy")
        )
    if not g.hidden_dropout:
        rows.append(("no dropout", -2 * tokens * g.h, "-2 s b h", "two masks of a byte"))
    inner = g.a * g.head_dim
    if inner != g.h:
        rows.append(
            ("width of heads", 8 * tokens * (inner - g.h), "8 s b (a d - h)",
             f"heads of d = {g.head_dim}: Q, K, V and the input of the projection")
        )  # fmt: skip
    if g.k != g.a and not plan.is_padded:
        saved = 4 * tokens * g.head_dim * (g.a - g.k)
        rows.append(("grouped heads", -saved, "-4 s b d (a - k)", f"K and V have k = {g.k} heads"))
    rows += _mlp_differences(g, tokens)
    if g.num_written_norms:
        extra = (6 * g.num_written_norms - 4) * tokens * g.h
        rows.append(
            ("RMS norms", extra, f"{g.num_written_norms} x 6 s b h - 4 s b h",
             "written out: the input in fp32 and the scaled one, not the input alone")
        )  # fmt: skip
    if plan.precision.endswith("-mixed"):
        rows.append(
            ("autocast", 2 * g.num_weights, "2 x weights of the layer",
             "a 16-bit copy of each matrix, for the gradient of its input")
        )  # fmt: skip
    return [Term(kind=k, num_bytes=n, arithmetic=a, why=w) for k, n, a, w in rows]


def _mlp_differences(g: LayerGeometry, tokens: int) -> list[tuple[str, int, str, str]]:
    kept, what = 4, "input and output of the activation"
    if g.is_gated:
        kept, what = 8, "gate, its activation, the other product, and what both make"
    elif g.activation == "relu":
        kept, what = 2, "ReLU needs its output alone"
    difference = tokens * (kept * g.f - 16 * g.h)
    if not difference:
        return []
    name = "gated MLP" if g.is_gated else "ReLU" if kept == 2 else "width of the MLP"
    return [(name, difference, f"s b ({kept} f - 16 h)", f"f = {g.f}: {what}")]
