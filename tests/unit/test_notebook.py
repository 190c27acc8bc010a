"""`%%memest` in IPython's shell if it is installed, and in a small shell like it."""

from __future__ import annotations

import linecache
import sys
import traceback
from types import FunctionType
from typing import Any

import pytest
import torch

import memest
from memest.notebook import CellReport

TRAIN = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    print("step", step)
"""


class Result:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class Shell:
    """What `%%memest` uses of IPython's shell."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"__builtins__": __builtins__}
        self.magics: dict[str, Any] = {}

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        self.magics[kind, name] = function

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        return self.magics["cell", name](line, cell)

    def transform_cell(self, cell: str) -> str:
        return cell

    def show_usage_error(self, error: object) -> None:
        sys.stderr.write(f"UsageError: {error}\n")

    def showtraceback(self) -> None:
        sys.stderr.write(traceback.format_exc())

    def run_cell(self, cell: str, store_history: bool = False) -> Result:
        name = "<ipython-input-1>"
        linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
        try:
            FunctionType(compile(cell, name, "exec"), self.user_ns)()
        except BaseException as error:
            self.showtraceback()
            return Result(error)
        return Result(None)


def ipython() -> Any:
    module = pytest.importorskip("IPython.core.interactiveshell")
    return module.InteractiveShell()


@pytest.fixture(params=["shell", "ipython"])
def shell(request: pytest.FixtureRequest) -> Any:
    found = Shell() if request.param == "shell" else ipython()
    memest.load_ipython_extension(found)
    return found


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


def test_a_cell_has_its_report(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = shell.run_cell_magic("memest", "a100-40gb", TRAIN)

    assert isinstance(found, CellReport)
    assert found.report.num_steps == 4
    assert found.report.gpu == "a100-40gb"
    assert repr(found).startswith("fits a100-40gb: needs 26.00 MiB")
    assert any("model(torch.ones(8, 512" in row.source for row in found.report.lines)
    html = found._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert html.count('"') == 4  # the page is escaped
    assert "step 3" in output(capsys)


def test_the_page_needs_no_charts_package(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    found = shell.run_cell_magic("memest", "", TRAIN)

    assert "Over the step of the peak" in found._repr_html_()


def test_the_steps_are_limited_without_a_traceback(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shell.run_cell_magic("memest", "t4 --max-steps 2 --memory-limit 1GiB", TRAIN)

    assert found.report.num_steps == 2
    assert found.report.ending == "stopped"
    assert found.report.limit_bytes == 1 << 30
    text = output(capsys)
    assert "step 0" in text
    assert "step 2" not in text
    assert "StepLimit" not in text


def test_an_error_of_the_cell_is_printed_and_its_peak_reported(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shell.run_cell_magic("memest", "t4", TRAIN + "raise KeyError('wrong')")

    assert found.report.ending == "crashed"
    assert "KeyError" in output(capsys)


def test_an_object_of_the_real_gpu_is_refused_by_name(
    shell: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4)
    shell.user_ns["model"] = model
    monkeypatch.setattr("memest.notebook.is_on_real_gpu", lambda tensor: tensor is model.weight)
    shell.run_cell("def train():\n    return [model for _ in range(2)]")

    assert shell.run_cell_magic("memest", "", "train()") is None
    assert "the cell uses `model`, which is on the real GPU\nhint: create it" in output(capsys)


def test_an_object_of_an_earlier_cell_is_refused_by_name(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell_magic("memest", "t4", TRAIN)

    assert shell.run_cell_magic("memest", "t4", "model(torch.ones(8, 512).cuda())") is None
    assert "uses `model` of an earlier cell, whose virtual GPU is gone" in output(capsys)
    assert shell.run_cell_magic("memest", "t4", TRAIN) is not None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("b9000", "`b9000` is not in the catalogue"),
        ("t4 --steps 3", "`--steps` is no option of `%%memest`"),
        ("t4 --max-steps", "`--max-steps` has no value"),
        ("--max-steps many", "`--max-steps` is `many`"),
        ("t4 --max-steps 0", "`max_steps` is 0"),
        ("t4 'x", "No closing quotation"),
        ("t4 --memory-limit 1MiB", "2 MiB\nhint: give more"),
    ],
)
def test_a_wrong_line_is_an_error_of_usage(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell()
    memest.load_ipython_extension(shell)

    assert shell.run_cell_magic("memest", line, "x = 1") is None
    assert says in output(capsys)


def test_await_outside_of_a_function_is_refused(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell_magic("memest", "t4", "import asyncio\nawait asyncio.sleep(0)") is None
    assert "the cell has `await` outside of a function" in output(capsys)


def test_the_gpu_is_named_as_for_the_command_and_a_comment_is_allowed(shell: Any) -> None:
    made = shell.run_cell_magic("memest", "--gpu t4  # my own", TRAIN)

    assert made.report.gpu == "t4"


def test_a_cell_without_the_gpu_has_no_report(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell_magic("memest", "t4", "x = 1") is None
    assert "the cell has not used the GPU" in output(capsys)
    assert shell.user_ns["x"] == 1


def test_a_tensor_of_the_real_gpu_is_refused_by_the_virtual_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.ones(2)
    monkeypatch.setattr("memest.estimator.tensors.placement.is_on_real_gpu", lambda t: t is real)

    with memest.virtual_gpu("t4"), pytest.raises(memest.MemestError, match="of the real GPU"):
        torch.ones(2, device="cuda") + real
