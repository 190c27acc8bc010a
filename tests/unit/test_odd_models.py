"""Models that do what a meta device cannot follow: predicted, or an error with module and reason.

Each is a folder with a config and code of its own, read with `trust_remote_code`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest

from memest.errors import TraceError
from memest.estimator.predict import predict
from memest.plan import TrainingPlan
from memest.report import Prediction

VOCABULARY, WIDTH, BATCH, TOKENS = 1000, 64, 3, 40
ROWS = BATCH * TOKENS

CONFIGURATION = """
from transformers import PreTrainedConfig

class OddConfig(PreTrainedConfig):
    model_type = "odd_{name}"

    def __init__(self, vocab_size=1000, hidden_size=64, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
"""

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_odd import OddConfig

{code}

class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.block = Block(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def _init_weights(self, module):
        pass

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = self.head(self.block(self.embed(input_ids), attention_mask))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""

PLAIN = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, mask):
        return self.linear(x)
"""

Predict = Callable[[str], Prediction]


numbers = itertools.count()


@pytest.fixture(scope="module")
def modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all, since Python remembers where it found the package `transformers_modules`."""
    path, before = sys.path, set(sys.modules)
    sys.path = [*path]
    for name in [n for n in before if n.startswith("transformers_modules")]:
        del sys.modules[name]
    yield tmp_path_factory.mktemp("modules")
    sys.path = path
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def predicted(tmp_path: Path, modules_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """`predicted(code)` predicts a model whose `Block` is in `code`."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules_folder))

    def run(code: str) -> Prediction:
        name = f"number_{next(numbers)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "configuration_odd.py").write_text(CONFIGURATION.format(name=name))
        (folder / "modeling_odd.py").write_text(MODELING.format(code=dedent(code)))
        auto_map = {
            "AutoConfig": "configuration_odd.OddConfig",
            "AutoModelForCausalLM": "modeling_odd.OddForCausalLM",
        }
        values = {"model_type": f"odd_{name}", "auto_map": auto_map}
        (folder / "config.json").write_text(json.dumps(values))
        plan = TrainingPlan(
            model_name=str(folder), batch_size=BATCH, seq_len=TOKENS, precision="32-true"
        )
        return predict(plan, trust_remote_code=True)

    return run


def block(forward: str, init: str = "pass", before: str = "") -> str:
    """Code of a `Block` with a linear layer and the lines given."""
    return "\n".join(
        [
            dedent(before),
            "class Block(nn.Module):",
            "    def __init__(self, width):",
            "        super().__init__()",
            "        self.linear = nn.Linear(width, width)",
            indent(dedent(init), " " * 8),
            "",
            "    def forward(self, x, mask):",
            indent(dedent(forward), " " * 8),
        ]
    )


def test_a_plain_block_is_predicted(predicted: Predict) -> None:
    prediction = predicted(PLAIN)

    assert prediction.model["num_params"] == 2 * VOCABULARY * WIDTH + WIDTH * WIDTH + WIDTH


def test_a_branch_on_an_activation_is_guessed_and_said(predicted: Predict) -> None:
    reads = """
    y = self.linear(x)
    return y * 2 if y.mean() > 0 else y
    """
    assert any("guessed" in line for line in predicted(block(reads)).assumptions)


@pytest.mark.parametrize("reading", ["item()", "tolist()"])
def test_reading_an_activation_by_name_is_too(predicted: Predict, reading: str) -> None:
    report = predicted(block(f"x = self.linear(x)\nx.sum().{reading}\nreturn x"))

    assert any("guessed" in line for line in report.assumptions)


def test_a_copy_of_an_activation_to_numpy_is_one_number_everywhere(predicted: Predict) -> None:
    report = predicted(block("x = self.linear(x)\nx.detach().cpu().numpy()\nreturn x"))

    assert any("guessed" in line for line in report.assumptions)


def test_a_branch_on_the_mask_is_followed(predicted: Predict) -> None:
    """Masks have values: with padding in it the mask is not all ones."""
    reads = """
    if mask is not None and not mask.bool().all():
        return self.linear(x)
    return x
    """
    assert predicted(block(reads)).peak_allocated_bytes == predicted(PLAIN).peak_allocated_bytes


def test_a_custom_autograd_function_keeps_what_it_saves(predicted: Predict) -> None:
    """It saves a copy of the activations, 4 bytes each, which live to the end of the forward."""
    function = """
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saves):
            if saves:
                ctx.save_for_backward(x * 3)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None
    """
    lean = predicted(block("return Scale.apply(self.linear(x), False)", before=function))
    keeping = predicted(block("return Scale.apply(self.linear(x), True)", before=function))

    held = [p.phases[1].activations_bytes for p in (lean, keeping)]
    assert held[1] - held[0] == ROWS * WIDTH * 4


def test_a_custom_function_that_fails_names_the_module(predicted: Predict) -> None:
    """Tensors have addresses here, as those of the card."""
    function = """
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if x.data_ptr() != 0:
                raise RuntimeError("no kernel for this device")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2
    """
    with pytest.raises(TraceError, match="`block` fails: no kernel for this"):
        predicted(block("return Kernel.apply(self.linear(x))", before=function))


@pytest.mark.parametrize(
    "how", ["torch.compile(nn.Linear(width, width))", "nn.Linear(width, width)"]
)
def test_a_compiled_part_has_the_parameters_of_its_module(predicted: Predict, how: str) -> None:
    init = f"self.part = {how}"

    prediction = predicted(block("return self.part(self.linear(x))", init=init))

    assert prediction.model["num_params"] == 2 * VOCABULARY * WIDTH + 2 * (WIDTH * WIDTH + WIDTH)


def test_a_buffer_on_the_cpu_takes_no_memory_of_the_gpu(predicted: Predict) -> None:
    init = 'self.steps = torch.ones(1 << 20, device="cpu")'

    prediction = predicted(block("return self.linear(x)", init=init))

    assert prediction.peak_allocated_bytes == predicted(PLAIN).peak_allocated_bytes


def test_a_product_with_a_buffer_on_the_cpu_names_the_module(predicted: Predict) -> None:
    """CUDA refuses it as well: tensors of two devices."""
    init = 'self.scales = torch.ones(64, device="cpu")'

    with pytest.raises(TraceError, match="`block` "):
        predicted(block("return self.linear(x) * self.scales", init=init))


def test_rows_chosen_by_the_mask_have_the_shape_that_the_mask_gives(predicted: Predict) -> None:
    chosen = """
    rows = x[mask.bool()]
    return self.linear(x) + self.linear(rows).mean()
    """
    assert predicted(block(chosen)).peak_allocated_bytes > 0


def test_rows_chosen_by_an_activation_are_all_rows_and_the_report_says_so(
    predicted: Predict,
) -> None:
    chosen = """
    y = self.linear(x)
    return y + y[y[..., 0] > 0].mean()
    """
    told = predicted(block(chosen)).assumptions
    assert any(f"nonzero as {ROWS} of {ROWS} elements" in line for line in told)
    assert (
        predicted(block(chosen)).peak_allocated_bytes
        == (
            predicted(
                block(chosen.replace("y[y[..., 0] > 0]", "y[torch.ones_like(y[..., 0]) > 0]"))
            )
        ).peak_allocated_bytes
    )
