"""`memest.virtual_gpu`: what code sees in the block, what is left after it, what is reported."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import multiprocessing as torch_multiprocessing
from torch.utils.data import DataLoader

import memest
from memest.errors import MemestError, PlanError
from memest.estimator import virtual_gpu
from memest.estimator.hardware.gpus import find_gpu
from memest.report import Ending, Outcome, RunReport
from memest.run.session import Session

MIB = 2**20
multiprocessing: Any = torch_multiprocessing


def train(num_steps: int = 3, *, frees_late: bool = False) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        inputs = torch.randn(64, 512).cuda()
        if not frees_late:
            optimizer.zero_grad()
        loss = model(inputs).pow(2).mean()
        if frees_late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(inputs.repeat(4, 1))


@pytest.fixture(scope="module")
def gpu() -> Session:
    with memest.virtual_gpu("a100-40gb") as session:
        train()
    return session


@pytest.fixture(scope="module")
def report(gpu: Session) -> RunReport:
    return gpu.report()


def test_terms_add_up_to_the_peak(report: RunReport) -> None:
    assert sum(term.num_bytes for term in report.terms) == report.peak_allocated_bytes > 0
    assert all(term.num_bytes >= 0 for term in report.terms)


def test_states_are_told_apart(report: RunReport) -> None:
    weights = 4 * (512 * 2048 + 2048 + 2048 * 512 + 512)
    sizes = {term.name: term.num_bytes for term in report.terms}

    assert sizes["params"] == sizes["grads"] == weights
    assert sizes["optimizer"] == 2 * weights


def test_modules_and_lines_hold_what_the_terms_hold(report: RunReport) -> None:
    held = sum(term.num_bytes for term in report.terms if term.name != "rounding")

    assert sum(row.num_bytes for row in report.modules) == held
    assert sum(row.num_bytes for row in report.lines) == held
    assert report.modules[0].name == "Sequential.*"


def test_states_of_an_optimizer_of_the_script_are_told_apart() -> None:
    """fastai has optimizers of its own, which are no optimizers of torch."""
    with memest.virtual_gpu("a100-40gb") as session:
        model = nn.Linear(512, 2048, bias=False).cuda()
        averages: dict[nn.Parameter, Tensor] = {}
        for _ in range(3):
            loss = model(torch.randn(64, 512, device="cuda")).pow(2).mean()
            loss.backward()
            for weight in model.parameters():
                assert weight.grad is not None
                average = averages.setdefault(weight, torch.zeros_like(weight.grad))
                weight.data.add_(average.mul_(0.9).add_(weight.grad), alpha=-0.1)
                weight.grad = None
    report = session.report()
    sizes = {term.name: term.num_bytes for term in report.terms}

    assert report.num_steps == 3
    assert sizes["params"] == sizes["optimizer"] == 4 * 512 * 2048


class Measured(nn.Module):
    """A model whose constructor calls its layers, as that of YOLO does for their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 512), nn.Linear(512, 64)
        self.stride = self.head(self.body(torch.zeros(1, 64))).shape[-1]

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(inputs))
        return found


def test_paths_begin_with_the_model_whose_constructor_calls_its_layers() -> None:
    with memest.virtual_gpu("a100-40gb") as session:
        for _ in range(3):  # a freed model's ids are used again
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))(torch.zeros(1, 64))
            model = Measured().cuda()
            model(torch.zeros(8, 64, device="cuda")).sum().backward()
            names = {row.name for row in session.report().modules}
            assert names <= {"Measured.body", "Measured.head", "Measured", "(outside of modules)"}
            assert "Measured.body" in names


def test_lines_are_shown_with_their_text(report: RunReport) -> None:
    sources = {row.source for row in report.lines}

    assert "optimizer.step()" in sources
    assert all(row.name.startswith("test_session.py:") for row in report.lines)


def test_an_operator_without_a_gradient_leaves_the_one_before_its_line() -> None:
    with memest.virtual_gpu("a100-40gb") as session:
        weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        powers = weight.exp()
        labels = torch.arange(10, device="cuda")
        powers.sum().backward()
    rows = [row.source for row in session.report().lines if ", backward of " in row.name]

    assert rows[0] == "powers = weight.exp()"
    assert len(labels) == 10


def test_what_backward_allocates_is_booked_on_its_call_and_names_the_forward() -> None:
    with memest.virtual_gpu("a100-40gb") as session:
        weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        loss = weight.exp().exp().sum()
        loss.backward()
    rows = {row.source: row for row in session.report().lines if ", backward of " in row.name}
    calls = [row.name for row in session.report().lines if row.source == "loss.backward()"]

    (row,) = rows.values()
    assert row.source == "loss = weight.exp().exp().sum()"
    assert row.num_bytes >= 4 << 20
    call, forward = (int(part.rpartition(":")[2]) for part in row.name.split(", backward of "))
    assert call == forward + 1
    assert calls == [row.name.partition(",")[0]]


def test_phases_have_peaks_of_their_own(report: RunReport) -> None:
    peaks = {phase.name: phase.peak_allocated_bytes for phase in report.phases}

    assert list(peaks) == ["setup", "forward", "backward", "optimizer", "evaluation"]
    assert max(peaks.values()) == report.peak_allocated_bytes
    assert peaks["setup"] < peaks["evaluation"] < peaks["optimizer"]


def test_steps_are_the_first_the_second_the_highest_and_the_last(report: RunReport) -> None:
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert report.num_steps == 3
    assert report.steps[0].peak_allocated_bytes == report.peak_allocated_bytes


def test_every_gpu_of_the_default_set_has_a_verdict(report: RunReport) -> None:
    assert set(report.verdicts) == {"a100-40gb", "a100-80gb", "h100-80gb", "h200"}
    assert {v.verdict for v in report.verdicts.values()} == {Outcome.FITS}


def test_the_report_is_json_text_and_a_fragment(report: RunReport) -> None:
    values = json.loads(report.to_json())

    assert (values["schema"], values["kind"]) == ("memest.report/1", "run")
    assert "held at the peak" in str(report)
    assert report._repr_html_().count("<table>") == 3


def test_gradients_that_outlive_their_step_are_told(report: RunReport) -> None:
    assert report.notes == ()
    with memest.virtual_gpu() as late:
        train(2, frees_late=True)

    assert "gradients live through the forward" in late.report().notes[0]


def test_the_gpu_answers_within_the_block_and_is_gone_after_it() -> None:
    names = ("is_available", "memory_allocated", "Stream", "device_count", "synchronize")
    before = {name: getattr(torch.cuda, name) for name in names}
    moves = torch.Tensor.to, torch.Tensor.device, multiprocessing.spawn
    with memest.virtual_gpu("h200") as gpu:
        assert torch.cuda.is_available()
        kept = torch.zeros(MIB, device="cuda")
        assert gpu.allocated_bytes == torch.cuda.memory_allocated() == 4 * MIB
        torch.cuda.reset_peak_memory_stats()
        del kept
    after = {name: getattr(torch.cuda, name) for name in names}

    assert after == before
    assert (torch.Tensor.to, torch.Tensor.device, multiprocessing.spawn) == moves
    assert gpu.peak_allocated_bytes == 4 * MIB
    assert gpu.report().ending == Ending.FINISHED
    assert torch.zeros(2).device.type == "cpu"


def test_one_block_at_a_time() -> None:
    with memest.virtual_gpu() as gpu:
        with pytest.raises(MemestError, match="active already"), memest.virtual_gpu():
            pass
        kept = torch.zeros(1, device="cuda")
        assert gpu.allocated_bytes == 512
        del kept
    with pytest.raises(MemestError, match="used before"), gpu:
        pass


def test_a_block_that_cannot_be_undone_whole_is_over() -> None:
    def fail() -> None:
        raise RuntimeError("of the compiler")

    with pytest.raises(RuntimeError, match="of the compiler"), memest.virtual_gpu() as gpu:
        gpu.virtual._patches.on_undo(fail)

    with memest.virtual_gpu():
        assert torch.cuda.is_available()


def test_out_of_memory_is_caught_and_leaves_the_allocator_whole() -> None:
    with memest.virtual_gpu("a100-40gb", memory_limit="64MiB") as gpu:
        kept = torch.zeros(8 * MIB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 40"):
            torch.zeros(10 * MIB, device="cuda")
        assert gpu.allocated_bytes == 32 * MIB
        more = torch.zeros(8 * MIB, device="cuda")
        del kept, more
        assert gpu.allocated_bytes == 0
    report = gpu.report()

    assert report.fits
    assert report.peak_allocated_bytes == 64 * MIB
    assert any("caught 1 out-of-memory" in note for note in report.notes)


def test_a_gpu_that_is_too_small_is_told_where(gpu: Session) -> None:
    with memest.virtual_gpu("h200") as large:
        kept = [torch.empty(5 << 30, dtype=torch.uint8, device="cuda") for _ in range(9)]
    verdict = large.report().verdicts["a100-40gb"]
    del kept

    assert verdict.verdict == Outcome.OOM
    assert verdict.margin_bytes == verdict.limit_bytes - 45 * 2**30
    assert "test_session.py" in verdict.at


def test_an_error_that_ends_the_block_is_in_the_report() -> None:
    gpu = memest.virtual_gpu(memory_limit=MIB * 8)
    with pytest.raises(torch.OutOfMemoryError), gpu:
        torch.zeros(8 * MIB, device="cuda")
    report = gpu.report()

    assert (report.ending, report.verdict) == (Ending.OOM, Outcome.OOM)
    assert report.verdicts["h200"].at


def test_a_step_limit_ends_the_block() -> None:
    gpu = memest.virtual_gpu(max_steps=2)
    with pytest.raises(SystemExit), gpu:
        train(5)

    assert (gpu.num_steps, gpu.report().ending) == (2, Ending.STOPPED)


def test_optimizers_in_hooks_of_the_weights_step_once_a_backward() -> None:
    with memest.virtual_gpu(max_steps=3) as gpu:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        optimizers = {p: torch.optim.SGD([p], momentum=0.9) for p in model.parameters()}

        def step(weight: nn.Parameter) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        for weight in optimizers:
            weight.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(torch.randn(8, 64, device="cuda")).sum().backward()

    assert gpu.num_steps == 2
    assert [step.step for step in gpu.report().steps] == [0, 1]


def test_optimizers_that_step_after_one_backward_take_one_step() -> None:
    """Muon for matrices and AdamW for the rest; Pyro has an optimizer for each parameter."""
    with memest.virtual_gpu("h100-80gb") as gpu:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        optimizers = [torch.optim.Adam(layer.parameters()) for layer in layers]
        for _ in range(3):
            layers(torch.randn(8, 64, device="cuda")).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert gpu.num_steps == 3
        for optimizer in optimizers * 2:  # with gradients of the script
            optimizer.step()
        assert gpu.num_steps == 3 + 2
        for optimizer in optimizers:  # as a GAN
            layers(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        assert gpu.num_steps == 5 + 2


def test_a_step_limit_stays_one_whatever_cleaning_up_after_it_raises() -> None:
    def train_and_clean_up() -> None:
        try:
            train()
        finally:
            raise ValueError("in vain")

    gpu = memest.virtual_gpu(max_steps=1)
    with pytest.raises(ValueError, match="in vain"), gpu:
        train_and_clean_up()

    assert gpu.report().ending is Ending.STOPPED


def test_dataloaders_take_a_part_of_each_batch() -> None:
    gpu = Session(find_gpu("h200"), batch_parts=4)
    loader = DataLoader(torch.arange(100), batch_size=8)
    with gpu:
        sizes = [len(batch) for batch in loader]
        whole = [len(batch) for batch in DataLoader(torch.arange(3))]

    assert sizes == [2] * 12 + [1]
    assert whole == [1, 1, 1]
    assert [len(batch) for batch in loader] == [8] * 12 + [4]
    assert "batches of DataLoaders are cut to 1/4, as asked" in gpu.virtual.notes


def test_values_are_not_guessed_where_that_is_refused() -> None:
    with (
        memest.virtual_gpu(strict=True),
        pytest.raises(MemestError, match=r"test_session\.py:\d+ reads a value"),
    ):
        nn.Linear(9, 9).cuda()(torch.ones(9, device="cuda")).sum().item()


def test_a_gpu_that_does_not_exist_is_refused_before_the_block() -> None:
    with pytest.raises(PlanError, match="not in the catalogue"):
        memest.virtual_gpu("b9000")
    assert memest.virtual_gpu(gpu_memory="24GiB").gpu.memory_bytes == 24 * 2**30


@pytest.mark.parametrize("num_processes", [2, 4])
def test_several_processes_are_refused_by_name(num_processes: int) -> None:
    with memest.virtual_gpu():
        with pytest.raises(MemestError, match="processes, and 1 is simulated") as caught:
            multiprocessing.spawn(print, nprocs=num_processes)
        assert f"`memest run --nproc-per-node {num_processes} ...`" in caught.value.hint
        with pytest.raises(MemestError, match=f"rank 0 of {num_processes}, and this is rank 0 of"):
            torch.distributed.init_process_group("nccl", world_size=num_processes, rank=0)


def test_one_process_that_is_not_joined_has_ended() -> None:
    ranks: list[int] = []
    with memest.virtual_gpu():
        context = multiprocessing.spawn(ranks.append, nprocs=1, join=False)
        assert context.join()
    assert ranks == [0]


def test_a_function_named_generate_is_a_phase_of_its_own() -> None:
    model = nn.Linear(64, 64)

    def generate() -> None:
        with torch.no_grad():
            model(torch.zeros(2, 64, device="cuda"))

    with memest.virtual_gpu() as gpu:
        model.cuda().eval()
        generate()

    assert "generation" in [phase.name for phase in gpu.report().phases]


def test_what_other_processes_hold_is_neither_free_nor_usable() -> None:
    with memest.virtual_gpu("a100-80gb", beside="60GiB") as gpu:
        free, total = torch.cuda.mem_get_info()
        with pytest.raises(torch.OutOfMemoryError, match=r"of which 18\.\d+ GiB is free"):
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

    assert total - free == gpu.gpu.context_bytes + (60 << 30)
    assert gpu.report().assumptions[0] == "other processes hold 60.00 GiB of each GPU"


def test_a_gpu_that_cannot_be_installed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*arguments: object) -> None:
        raise RuntimeError("a library that memest does not know")

    available = torch.cuda.is_available
    with monkeypatch.context() as patch:
        patch.setattr(virtual_gpu.integrations, "install", failing)
        with pytest.raises(RuntimeError, match="does not know"), memest.virtual_gpu():
            pass

    assert torch.cuda.is_available is available
    with memest.virtual_gpu("t4") as gpu:
        torch.empty(1 << 20, device="cuda")
    assert gpu.peak_allocated_bytes == 4 << 20


def test_one_rank_alone_may_keep_the_buckets_of_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's watchdog decides: of the first step's bucket nothing is left, or all of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with memest.virtual_gpu("h100-80gb") as session:
        torch.distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 2048).cuda(), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 2048, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.destroy_process_group()

    found = session.report().intervals["allocated"]

    assert found.high_bytes == session.peak_allocated_bytes
    assert found.high_bytes - found.low_bytes == 4 * (2048 * 2048 + 2048)


def by_hand(parameters: list[Tensor]) -> None:
    """Take a step as a loop without an optimizer does, under `no_grad`."""
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad


def of_data(parameters: list[Tensor]) -> None:
    """Take a step by `data`, outside of `no_grad`."""
    for parameter in parameters:
        parameter.data.add_(parameter.grad.data, alpha=-0.1)


@pytest.mark.parametrize("step", [by_hand, of_data])
@pytest.mark.parametrize(("max_steps", "ending"), [(None, Ending.FINISHED), (2, Ending.STOPPED)])
def test_a_step_without_an_optimizer_of_torch_is_counted(
    step: Callable[[list[Tensor]], None], max_steps: int | None, ending: Ending
) -> None:
    """Three steps of two micro-batches. A step ends before the next forward."""
    with contextlib.suppress(SystemExit), memest.virtual_gpu(max_steps=max_steps) as gpu:
        first = torch.ones(64, 64, device="cuda", requires_grad=True)
        second = nn.Linear(64, 64, device="cuda")
        parameters = [first, *second.parameters()]
        for _ in range(3):
            for _ in range(2):
                second(torch.ones(8, 64, device="cuda") @ first).sum().backward()
            step(parameters)
            for parameter in parameters:
                parameter.grad = None

    assert gpu.ending is ending
    assert gpu.num_steps == gpu.report().num_steps == (max_steps or 3)


def test_a_perturbed_input_is_no_step_where_the_script_has_an_optimizer() -> None:
    with memest.virtual_gpu() as gpu:
        model = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        delta = torch.zeros(8, 64, device="cuda", requires_grad=True)
        for _ in range(3):
            model(delta).sum().backward()
            delta.data.add_(delta.grad)
        optimizer.step()

    assert gpu.num_steps == 1


def test_an_optimizer_that_was_made_before_the_block_counts_alone() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with memest.virtual_gpu() as gpu:
        model.cuda()
        for _ in range(3):
            model(torch.ones(8, 8, device="cuda")).sum().backward()
            optimizer.step()

    assert gpu.num_steps == 3


def step_by_a_closure() -> None:
    model = nn.Linear(1024, 1024, bias=False, device="cuda")

    def closure() -> float:
        loss = model(torch.ones(8, 1024, device="cuda")).sum()
        loss.backward()
        return loss.item()

    torch.optim.SGD(model.parameters()).step(closure)


def test_gradients_that_a_closure_makes_are_gradients_of_a_freed_model() -> None:
    """skorch steps so, in a search over its parameters."""
    with memest.virtual_gpu() as gpu:
        step_by_a_closure()

    assert {row.name: row.num_bytes for row in gpu.report().terms}["grads"] == 4 * MIB


def test_memory_of_a_module_in_a_list_is_that_of_the_model_that_calls_it() -> None:
    """torchrl's losses have their networks so."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.networks = [nn.Linear(1024, 1024, device="cuda")]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.networks[0](inputs)  # type: ignore[no-any-return]

    with memest.virtual_gpu() as gpu:
        Loss()(torch.ones(1024, 1024, device="cuda"))

    assert {row.name: row.num_bytes for row in gpu.report().modules}["Loss"] >= 4 * MIB


def test_a_loss_that_lists_the_parameters_of_a_model_is_not_their_owner() -> None:
    """torchrl's losses list them so."""
    with memest.virtual_gpu() as gpu:
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        outputs = model(torch.ones(8, 1024, device="cuda"))
        loss = nn.MSELoss()
        loss.weight = model.weight
        loss(outputs, torch.ones_like(outputs)).backward()
        torch.optim.SGD(loss.parameters(), momentum=0.9).step()

    modules = {row.name: row.kinds for row in gpu.report().modules}
    assert modules["Linear"]["params"] == modules["Linear"]["optimizer"] == 4 * MIB


def test_a_note_tells_that_the_script_resets_the_peak() -> None:
    with memest.virtual_gpu("t4") as gpu:
        torch.zeros(64 << 20, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        torch.zeros(1 << 20, device="cuda")
        assert torch.cuda.max_memory_allocated() == 4 << 20
    report = gpu.report()

    assert report.peak_allocated_bytes == 256 << 20
    assert any("is 4.00 MiB at its end" in note for note in report.notes)
