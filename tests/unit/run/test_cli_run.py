"""`memest run` as it is typed: what is refused at once, what it writes, how it exits."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memest.cli import main
from memest.report import RunReport
from memest.report.text import error_hint
from tests import forked

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
import sys, torch
from torch import nn
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run", *args])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("tarin.py",), "no such script: `tarin.py`\nhint: did you mean `train.py`?"),
        (("nosuch.py",), "no such script: `nosuch.py`\nhint: a module is run with `-m`"),
        (("-m", "no_such_package"), "no such module: `no_such_package`"),
        (("-m", "train.py"), "no such module: `train.py`\nhint: a script is run without `-m`"),
        ((), "no script is named"),
        (("srun", "train.py"), "no such script: `srun`\nhint: name the Python script itself"),
        ((".",), "a folder without a `__main__.py`"),
        (("--gpu", "b9000", "train.py"), "`b9000` is not in the catalogue"),
        (("--gpu", "t4", "--gpu", "b9000", "train.py"), "`b9000` is not in the catalogue"),
        (("--bs", "8", "train.py"), "No such option"),
        (("--memory-limit", "much", "train.py"), "`much` is not a memory size"),
        (("--json", "no/such/folder.json", "train.py"), "cannot be written"),
        (("--json", "/proc/report.json", "train.py"), "`/proc/report.json` cannot be written"),
        (("--summary", "--emit", "sky", "train.py"), "`--summary` and `--emit` are given together"),
        (("--summary", "--price", "2", "train.py"), "hours and prices are not part of `--summary`"),
        (("--json", "-", "train.py"), "`-` is not a file\nhint: stdout is `/dev/stdout`"),
        (("--time-limit", "1e300", "train.py"), "'--time-limit': 1e+300 is not in the range"),
    ],
)
def test_what_is_wrong_is_told_before_torch_is_there(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    assert says in capsys.readouterr().err


def test_a_shell_script_and_a_cap_without_a_unit_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.sh").write_text("python train.py\n")

    assert run("run.sh") == 2
    assert "`run.sh` is a shell script\nhint: name the Python script" in capsys.readouterr().err
    (folder / "train.ipynb").write_text("{}")
    assert run("train.ipynb") == 2
    assert "`train.ipynb` is a notebook\nhint: `%%memest` runs a cell" in capsys.readouterr().err
    assert run("--memory-limit", "78", "train.py") == 2
    assert "2 MiB\nhint: give its unit: `78GiB`" in capsys.readouterr().err


def test_one_of_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert run("train.py", "2") == 3
    assert (
        "`WORLD_SIZE` is `4`\nhint: run it outside of the launcher: `memest run --nproc-per-node"
        in capsys.readouterr().err
    )


def test_a_launcher_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "deepspeed.launcher.launch", "train.py") == 3
    assert "`deepspeed.launcher.launch` starts the script in other" in capsys.readouterr().err


def test_ranks_of_a_launcher_and_of_the_command_are_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("--nproc-per-node", "2", "torchrun", "--nproc-per-node", "2", "train.py") == 2
    assert "a launcher and `memest run` both have a number of" in capfd.readouterr().err


def test_a_launchers_command_runs_its_ranks_with_their_arguments(folder: Path) -> None:
    (folder / "rank.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['RANK'])\n")
    words = ["run", "python", "-m", "torch.distributed.launch", "--nproc-per-node", "2", "rank.py"]
    done = forked.run(
        [sys.executable, "-m", "memest", *words, "a b"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.stdout == "['--local-rank=0', 'a b'] 0\n['--local-rank=1', 'a b'] 1\n"


def test_the_report_follows_the_output_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu=a100-40gb", "--max-steps", "2", "train.py", "5") == 0
    out = capsys.readouterr().out

    assert out.startswith("step 0\n\n-----")
    assert "stopped after the requested steps; 2 optimizer steps on a100-40gb: fits" in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("ranks", [(), ("--nproc-per-node", "2")])
def test_the_report_is_printed_if_its_file_cannot_be_written(ranks: tuple[str, ...]) -> None:
    words = ["run", "--summary", "--json", "/dev/full", *ranks, "train.py", "1"]
    done = forked.run(
        [sys.executable, "-m", "memest", *words],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 2
    assert "memest: 0.06 of" in done.stdout
    assert "`/dev/full` cannot be written: No space left on device" in done.stderr


def test_the_first_gpu_is_simulated_and_the_others_have_verdicts(folder: Path) -> None:
    gpus = ("--gpu", "t4", "--gpu", "rtx-4090,h100-80gb")
    assert run(*gpus, "--json", "report.json", "train.py", "1") == 0
    report = json.loads((folder / "report.json").read_text())

    assert report["gpu"] == "t4"
    assert list(report["verdicts"]) == ["t4", "rtx-4090", "h100-80gb"]


def test_files_are_written_where_the_command_was_typed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("import os\nos.chdir('/')\n" + TRAIN)
    names = ("report.json", "page.html", "run.pickle", "trace.json")
    flags = ("--json", "--html", "--snapshot", "--chrome-trace")

    args = [arg for pair in zip(flags, names, strict=True) for arg in pair]
    assert run(*args, "train.py", "3") == 0
    report = json.loads((folder / "report.json").read_text())
    page = (folder / "page.html").read_text()

    assert (report["kind"], report["num_steps"], report["verdict"]) == ("run", 3, "fits")
    assert "Over the step of the peak" in page
    assert "train.py:" in page
    assert page.count("<script>") == 1
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert (folder / "run.pickle").stat().st_size > 1000


def test_the_allocators_settings_are_those_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    files = ("--json", "report.json", "--html", "page.html", "--snapshot", "run.pickle")

    assert run(*files, "train.py", "3") == 0
    report = json.loads((folder / "report.json").read_text())
    out = capsys.readouterr().out
    assert report["allocator"] == "expandable_segments:True"
    assert report["peak_reserved_bytes"] % (20 << 20) == 2 << 20  # pieces of each pool
    assert report["verdicts"]["a100-40gb"]["reserved_bytes"] == report["peak_reserved_bytes"]
    assert "\nallocator: expandable_segments:True\n" in out
    assert "PyTorch's allocator with `expandable_segments:True`" in out
    assert "allocator: expandable_segments:True" in (folder / "page.html").read_text()
    snapshot = pickle.loads((folder / "run.pickle").read_bytes())
    assert len(snapshot["segments"]) == 2
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_settings_that_a_script_makes_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # undone after the test, whatever the script does
    line = "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:32'\n"
    (folder / "train.py").write_text(line + TRAIN)

    assert run("train.py", "1") == 0
    assert "\nallocator: max_split_size_mb:32\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("max_split_size_mb:8", 2, "CachingAllocator option max_split_size_mb too small, must be"),
        ("backend:cudaMallocAsync", 3, "`backend:cudaMallocAsync` is another allocator"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_runs(
    text: str,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)

    assert run("train.py", "1") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err


def test_check_exits_with_5_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--check", "train.py", "1") == 0
    assert run("--memory-limit", "4MiB", "train.py", "1") == 1
    assert run("--memory-limit", "4MiB", "--check", "train.py", "1") == 5
    captured = capsys.readouterr()

    assert "ran out of memory; 0 optimizer steps on h200: OOM" in captured.out
    assert "torch.OutOfMemoryError: CUDA out of memory." in captured.err


def test_a_script_without_the_gpu_is_told_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("print('nothing')")

    assert run("train.py") == 2
    captured = capsys.readouterr()
    assert captured.out == "nothing\n"
    assert "the script has not used the GPU" in captured.err


@pytest.mark.parametrize(
    ("text", "code", "last_words", "how", "hint"),
    [
        ("import torch\nraise ValueError('early')", 1, "ValueError: early", "", ""),
        ("import sys\nsys.exit('no data here')", 1, "no data here", "", ""),
        ("import sys\nsys.exit(7)", 7, "", " with exit code 7", ""),
        ("import sys\nsys.exit(2)", 2, "", " with exit code 2", "arguments of the script come"),
        ("import nowhere", 1, "ModuleNotFoundError: No module named 'nowhere'", "", "`--python"),
        (
            "raise EOFError('EOF when reading')",
            1,
            "EOFError: EOF when reading",
            "",
            "it reads stdin",
        ),
    ],
)
def test_a_script_that_dies_before_it_uses_the_gpu_ends_in_its_own_words_and_a_line(
    text: str,
    code: int,
    last_words: str,
    how: str,
    hint: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "train.py").write_text(text)

    assert run("train.py") == code
    before, line = capsys.readouterr().err.split("Error: the script ended")
    first, *hints = line.splitlines()
    assert first == f"{how} before it used the GPU: nothing to report"
    assert [each.startswith(f"hint: {hint}") for each in hints] == [True] * bool(hint)
    assert before.splitlines()[-1:] == ([last_words] if last_words else [])


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>", "download"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "download"),
        ("requests.exceptions.ConnectionError: Max retries exceeded", "a download failed"),
        (
            "CalledProcessError: Command '['curl', 'x']' returned non-zero exit status 6.",
            "download",
        ),
        ("ConnectionError: Couldn't reach 'imdb' on the Hub (OfflineModeIsEnabled)", "download"),
        ("RuntimeError: input(): lost sys.stdin", "it reads stdin"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", ""),
        ("ValueError: URLError", ""),
    ],
)
def test_an_error_of_a_script_has_a_hint(error: str, hint: str) -> None:
    found = "".join(error_hint(f"Traceback:\n  File 'train.py'\n{error}\n"))

    assert (hint in found, bool(found)) == (True, bool(hint))


def test_a_report_has_the_hint_below_the_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(
        "import torch\ntorch.ones(3, device='cuda')\nraise ConnectionError('no route')"
    )

    assert run("train.py") == 1
    assert "\nConnectionError: no route\nhint: a download failed: " in capsys.readouterr().out


def test_options_after_a_module_are_the_modules(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a_module_to_run.py").write_text("import sys\nprint(sys.argv[1:])")

    assert run("-m", "a_module_to_run", "--gpu", "x", "--check") == 2
    assert capsys.readouterr().out == "['--gpu', 'x', '--check']\n"


def test_from_the_shell(folder: Path) -> None:
    """Standard input is the script's, and an environment that names cards changes nothing."""
    script = folder / "ask.py"
    script.write_text(
        "import torch\nname = input()\nx = torch.ones(5, device='cuda')\n"
        "print(name, x.device, torch.cuda.get_device_name())\nraise SystemExit(4)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memest", "run", "--gpu", "t4", "ask.py"],
        input="me\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0"},
    )

    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("me cuda:0 Tesla T4\n\n---")


TRAIN_TOGETHER = """
import os, sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
local, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
if rank == int(sys.argv[1]):
    extra = torch.zeros(3 << 20, device=f"cuda:{local}")
torch.cuda.set_device(local)
model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).to(local), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters())
for step in range(2):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("rank", rank, "of", dist.get_world_size(), "on", model.device)
"""


def run_in_a_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, since ranks are forked before threads have run.

    SIGINT has its default there: a shell ignores it in what it runs in the background.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "memest", "run", *args]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return forked.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=False
        )
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_other_ranks_run_if_the_first_and_the_last_differ(folder: Path) -> None:
    (folder / "together.py").write_text(TRAIN_TOGETHER)

    ran = run_in_a_process("--nproc-per-node", "4", "--json", "report.json", "together.py", "3")
    report = json.loads((folder / "report.json").read_text())

    assert ran.returncode == 0, ran.stderr
    assert [line[:6] for line in ran.stdout.splitlines()[:4]] == [f"rank {n}" for n in (0, 3, 1, 2)]
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2, 3]
    assert report["notes"][0].startswith("the figures are those of rank 3 of 4; also run: rank 0, ")
    assert "--ranks" not in report["notes"][0]


def test_ranks_that_end_without_the_first_one_are_named_as_not_run(folder: Path) -> None:
    (folder / "together.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "if os.environ['RANK'] in '12':\n    Path('made').read_text()\n" + TRAIN_TOGETHER
    )

    ran = run_in_a_process("--nproc-per-node", "4", "--json", "report.json", "together.py", "3")
    report = json.loads((folder / "report.json").read_text())

    assert ran.returncode == 0, ran.stderr
    assert [row["rank"] for row in report["ranks"]] == [0, 3]
    assert "one that was not run may need more: `--ranks` names others" in report["notes"][0]


@pytest.mark.parametrize("numbers", ["4", "-1", "x", "0,", "1-2"])
def test_numbers_that_are_no_ranks_are_refused(
    numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--nproc-per-node", "4", "--ranks", numbers, "train.py") == 2
    assert f"`--ranks {numbers}` does not name ranks of 0 to 3" in capsys.readouterr().err


def test_the_named_ranks_are_run_and_the_worst_is_reported(folder: Path) -> None:
    """Two nodes of two: ranks 0 and 3, of which the last makes 12 MiB more."""
    (folder / "together.py").write_text(TRAIN_TOGETHER)
    files = ("--ranks", "0,3", "--json", "report.json", "--html", "page.html")

    ran = run_in_a_process("--nproc-per-node", "2", "--nnodes=2", *files, "together.py", "3")
    assert ran.returncode == 0, ran.stderr
    out = ran.stdout
    report = json.loads((folder / "report.json").read_text())

    assert out.startswith("rank 0 of 4 on cuda:0\nrank 3 of 4 on cuda:1\n")
    assert "by rank, MiB" in out
    first, last = report["ranks"]
    assert [first["rank"], last["rank"], report["rank"]] == [0, 3, 3]
    assert last["peak_allocated_bytes"] - first["peak_allocated_bytes"] == 12 << 20
    (low, high), (low_of_last, high_of_last) = (
        rank["intervals"]["allocated"].values() for rank in (first, last)
    )
    assert (high, high_of_last) == tuple(row["peak_allocated_bytes"] for row in (first, last))
    assert low <= high < low_of_last
    assert list(report["intervals"]["allocated"].values()) == [low, high_of_last]
    assert report["peak_allocated_bytes"] == last["peak_allocated_bytes"]
    assert report["process_bytes"] == report["peak_reserved_bytes"] + (846 + 760) * 2**20
    assert {p.name for p in folder.iterdir()} == {
        "page.html", "report.json", "together.py", "train.py",
    }  # fmt: skip
    by_rank = (folder / "page.html").read_text().partition("<h2>By rank</h2>")[2]
    assert [f"rank {n}</t" in by_rank for n in range(4)] == [True, False, False, True]


def test_a_rank_that_crashes_ends_the_run(folder: Path) -> None:
    (folder / "crash.py").write_text("import os\nraise ValueError(os.environ['RANK'])\n")

    ran = run_in_a_process("--nproc-per-node", "2", "crash.py")

    assert ran.returncode == 1
    assert ran.stderr.count("ValueError: ") == 1
    assert "ValueError: 0" in ran.stderr


def test_the_error_of_the_last_rank_is_that_of_the_run(folder: Path) -> None:
    (folder / "last.py").write_text(
        "import os, torch\ntorch.zeros(1, device='cuda')\nif os.environ['RANK'] == '1':\n"
        "    raise ValueError('odd')\n"
    )

    ran = run_in_a_process("--nproc-per-node", "2", "--json", "report.json", "last.py")
    report = RunReport.from_dict(json.loads((folder / "report.json").read_text()))

    assert ran.returncode == 1
    assert report.is_cut_short
    assert report.error == "ValueError: odd (rank 1)"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [("--nproc-per-node", "2"), ()])
def test_an_interrupted_run_reports_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[str, ...], sent: signal.Signals
) -> None:
    """The signal goes to the first process alone; it leaves no file of its own."""
    to = "os.getppid()" if ranks else "os.getpid()"
    (folder / "long.py").write_text(
        f"{TRAIN}\nimport os, time\nos.kill({to}, {int(sent)})\ntime.sleep(60)\nprint('slept')\n"
    )
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()

    ran = run_in_a_process(*ranks, "--json", "report.json", "long.py", "2")

    assert ran.returncode == 128 + sent, ran.stderr
    assert "slept" not in ran.stdout
    assert "was interrupted; 2 optimizer steps on h200: fits so far" in ran.stdout
    assert json.loads((folder / "report.json").read_text())["ending"] == "interrupted"
    assert not [path for path in (folder / "tmp").iterdir() if path.name.startswith("memest-")]


def test_more_ranks_than_make_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nproc-per-node", "99999", "train.py", "1") == 2
    assert "99999 ranks are too many" in capsys.readouterr().err


TRAIN_WIDE = """
import os
import torch
from torch import distributed as dist, nn

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
layers = [nn.Linear(2048, 2048) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(local), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters())
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(16384, 2048, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_buckets_that_may_live_on_leave_the_verdict_open(folder: Path) -> None:
    (folder / "wide.py").write_text(TRAIN_WIDE)

    free = run_in_a_process("--nproc-per-node", "2", "--json", "free.json", "wide.py")
    assert free.returncode == 0, free.stderr
    free_report = json.loads((folder / "free.json").read_text())
    found = free_report["intervals"]["allocated"]
    assert [rank["intervals"]["allocated"] for rank in free_report["ranks"]] == [found, found]
    assert found["high_bytes"] - found["low_bytes"] > 100 << 20
    limit = ("--memory-limit", str(found["high_bytes"]))
    tight = run_in_a_process("--nproc-per-node=2", *limit, "--json", "t.json", "--check", "wide.py")
    report = json.loads((folder / "t.json").read_text())

    assert tight.returncode == 5
    assert tight.stdout.splitlines()[2].startswith("may or may not fit h200")
    assert report["verdict"] == report["verdicts"]["h200"]["verdict"] == "may"
    assert "buckets may live on" in report["verdicts"]["h200"]["decides"]
    assert f"of {found['low_bytes']}" not in tight.stderr


def test_one_rank_is_launched_as_several_are(folder: Path) -> None:
    """Its buckets may live on, as on an H100 under `torchrun --nproc-per-node 1`; NCCL's memory was
    measured there.
    """
    (folder / "wide.py").write_text(TRAIN_WIDE)

    ran = run_in_a_process("--nproc-per-node", "1", "--json", "one.json", "wide.py")
    assert ran.returncode == 0, ran.stderr
    report = json.loads((folder / "one.json").read_text())

    found = report["intervals"]["allocated"]
    assert found["high_bytes"] - found["low_bytes"] > 100 << 20
    assert [rank["intervals"]["allocated"] for rank in report["ranks"]] == [found]
    assert report["process_bytes"] == report["peak_reserved_bytes"] + (564 + 760) * 2**20
    assert "CUDA context and NCCL 1.29 GiB" in ran.stdout


def test_a_script_that_waits_for_ever_is_ended_at_its_line(folder: Path) -> None:
    (folder / "waits.py").write_text(
        "import os, time, torch\ntorch.ones(8, device='cuda')\n"
        "while not os.path.exists('never'):\n    time.sleep(0.1)\n"
    )

    for options in ([], ["--nproc-per-node", "2"]):
        ran = run_in_a_process(*options, "--time-limit", "1", "waits.py")

        assert ran.returncode == 3
        assert "Error: the script has run for 1 s, and is at waits.py:" in ran.stderr
        assert "does it wait for another rank?" in ran.stderr


def test_one_line_replaces_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "a100-40gb", "--summary", "train.py", "1") == 0

    line = "memest: 0.02 of 39.0 GiB (fits) on a100-40gb, peak in step 1 backward at train.py:7"
    assert capsys.readouterr().out.splitlines() == ["step 0", line]


def test_resource_lines_are_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--emit", "sky", "--nnodes", "1", "train.py", "1") == 0

    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == ["resources:", "  accelerators: T4:1"]
    assert "step 0" in err


PROJECT = """
[tool.memest]
gpu = "t4"
limit = "10GiB"
command = "--max-steps 1 train.py 2"
"""


def test_a_project_names_gpu_limit_and_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)

    assert run("--summary") == 0

    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1  # the step ends the script before it prints
    assert " of 10.0 GiB (fits) on t4, " in out
    assert err == f"note: {folder / 'pyproject.toml'}: --gpu t4 --memory-limit 10GiB\n"


@pytest.mark.parametrize("script", [("train.py", "2"), ("-m", "train", "2"), ("-mtrain", "2")])
def test_options_of_the_command_line_replace_those_of_the_project(
    folder: Path, capsys: pytest.CaptureFixture[str], script: tuple[str, ...]
) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)

    assert run("--summary", "--gpu", "l4", *script) == 0

    out, err = capsys.readouterr()
    assert "step 1" in out
    assert " of 21.8 GiB (fits) on l4, " in out
    assert err == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.memest]\ngpus = 't4'", "has no key `gpus`\nhint: did you mean `gpu`?"),
        ("[tool.memest]\nlimit = 4", "is `4`\nhint: write text"),
        ("[tool]\nmemest = 4", "is no table"),
        ("[tool.memest", "cannot be read"),
        ("tool = 3", "`tool.memest` of"),
        ("[tool.memest]\ncommand = 'train.py \"a'", "cannot be split: No closing quotation"),
    ],
)
def test_wrong_settings_of_a_project_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (folder / "pyproject.toml").write_text(text)

    assert run("train.py") == 2
    assert says in capsys.readouterr().err


def memest(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    return forked.run(
        [sys.executable, "-m", "memest", "run", *words],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip


AT_EXIT = """
import atexit, torch
x = torch.zeros(1 << 20, device="cuda")
@atexit.register
def save():
    print("save", torch.zeros(1 << 20, device="cuda").device, torch.cuda.memory_allocated())
@atexit.register
def fail():
    raise ValueError("late")
"""


def test_functions_of_atexit_run_with_the_gpu_in_order(folder: Path) -> None:
    (folder / "at_exit.py").write_text(AT_EXIT)
    done = memest("--summary", "at_exit.py")

    assert done.stdout.startswith("save cuda:0 4194304\nmemest: 0.02 of")
    assert done.stderr.startswith("Exception ignored in atexit callback <function fail")
    assert "ValueError: late" in done.stderr
    assert "memest/" not in done.stderr
    assert done.returncode == 0


def test_a_process_that_may_use_a_gpu_is_noted(folder: Path) -> None:
    (folder / "own.py").write_text(
        "import multiprocessing, torch\n"
        "def work():\n    pass\n"
        "if __name__ == '__main__':\n"
        "    x = torch.zeros(1 << 20, device='cuda')\n"
        "    process = multiprocessing.get_context('fork').Process(target=work)\n"
        "    process.start()\n    process.join()\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        pool.map(abs, [1])\n"
    )
    notes = [line for line in memest("own.py").stdout.splitlines() if line.startswith("note: ")]

    assert notes == [
        "note: the script starts processes of its own (`work`): they have no GPU here, and what"
        " they would allocate is not in the report; ranks are simulated by `--nproc-per-node`"
    ]


def test_processes_that_a_script_starts_are_its_ranks(folder: Path) -> None:
    (folder / "own.py").write_text(
        "import os, torch\n"
        "from torch import distributed, multiprocessing\n"
        "def work(rank, size):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = str(rank)\n"
        "    distributed.init_process_group('nccl', rank=rank, world_size=size)\n"
        "    torch.cuda.set_device(0)\n"
        "    x = torch.zeros((rank + 1) << 20, device='cuda:0')\n"
        "    distributed.all_reduce(x)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    all = [multiprocessing.Process(target=work, args=(i, 3)) for i in range(3)]\n"
        "    for process in all:\n        process.start()\n"
        "    for process in all:\n        process.join()\n"
        "    assert [process.exitcode for process in all] == [0, 0, 0]\n"
    )
    done = memest("--nproc-per-node", "3", "--json", "own.json", "own.py")
    ranks = json.loads((folder / "own.json").read_text())["ranks"]

    assert done.returncode == 0
    assert "share GPU 0" not in done.stdout
    assert [row["peak_allocated_bytes"] for row in ranks] == [4 << 20, 8 << 20, 12 << 20]
    assert "this is rank 0 of 2" in memest("--nproc-per-node", "2", "own.py").stderr


def test_a_line_that_the_terminal_cannot_encode_is_printed_with_escapes(folder: Path) -> None:
    (folder / "accents.py").write_text(
        "import torch\nx = torch.zeros(1 << 20, device='cuda')  # é\n", encoding="utf-8"
    )
    done = memest("accents.py", PYTHONIOENCODING="ascii")

    assert "accents.py:2" in done.stdout
    assert "# \\xe9" in done.stdout
    assert done.returncode == 0
