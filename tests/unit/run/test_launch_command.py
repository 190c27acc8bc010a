"""Commands of launchers are read as the launchers themselves read them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memest.errors import PlanError, UnsupportedError
from memest.run.launch_command import Launch, read_launch
from memest.run.target import find_script

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
mixed_precision: bf16
num_machines: 2
num_processes: 8
main_process_ip: localhost
main_process_port: 29517
machine_rank: 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # without the user's configuration
    return tmp_path


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("python -u -W ignore train.py --bs 8", Launch("train.py", ("--bs", "8"))),
        ("python -m package.train --bs 8", Launch("package.train", ("--bs", "8"), True)),
        ("torchrun train.py", Launch("train.py", (), num_local=1)),
        (
            "torchrun --nproc-per-node 4 --nnodes 1:3 --max-restarts 2 -m package.train -m x",
            Launch("package.train", ("-m", "x"), True, 4, 3),
        ),
        ("bin/torchrun --standalone --nproc_per_node=2 a.py", Launch("a.py", (), num_local=2)),
        (
            "python -m torch.distributed.launch --nproc-per-node 2 train.py",
            Launch("train.py", (), num_local=2, local_rank="--local-rank="),
        ),
    ],
)
def test_a_command_is_read_as_its_launcher_reads_it(command: str, launch: Launch) -> None:
    assert read_launch(None, command.split()) == launch


def test_a_module_is_a_launcher_and_a_script_of_that_name_is_none(folder: Path) -> None:
    words = ["--nproc-per-node", "2", "train.py"]
    assert read_launch("torch.distributed.run", words) == Launch("train.py", (), num_local=2)
    assert read_launch("package.train", words) is None

    (folder / "torchrun").write_text("")
    assert read_launch(None, ["torchrun", *words]) is None
    assert read_launch(None, ["train.py"]) is None


def test_deepspeed_adds_the_local_rank() -> None:
    pytest.importorskip("deepspeed")
    words = ["deepspeed", "--num_gpus", "2", "train.py", "--zero", "3"]

    assert read_launch(None, words) == Launch(
        "train.py", ("--zero", "3"), num_local=2, local_rank="--local_rank="
    )


def test_the_configuration_of_accelerate_becomes_the_environment(folder: Path) -> None:
    (folder / "fsdp.yaml").write_text(CONFIG)
    words = ["accelerate", "launch", "--config_file", "fsdp.yaml", "train.py", "--bs", "8"]
    launch = read_launch(None, words)

    assert launch is not None
    assert (launch.script, launch.args) == ("train.py", ("--bs", "8"))
    assert (launch.num_local, launch.num_nodes) == (4, 2)
    assert launch.environment["ACCELERATE_USE_FSDP"] == "true"
    assert launch.environment["FSDP_VERSION"] == "2"
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_accelerate_starts_one_process_without_ranks() -> None:
    words = ["accelerate", "launch", "--num_processes", "1", "train.py"]
    launch = read_launch(None, words)

    assert launch is not None
    assert launch.num_local is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --nproc-per-node gpu train.py", "takes the GPUs of this machine"),
        ("accelerate launch train.py", "takes the GPUs of this machine"),
        ("torchrun --wrong train.py", "`torchrun` starts no script"),
        ("accelerate launch --num_processes 2 --mixed_precision bf17 a.py", "starts no script"),
        ("python", "no script is named"),
    ],
)
def test_a_command_without_a_number_of_gpus_or_script_is_refused(
    command: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        read_launch(None, command.split())


@pytest.mark.parametrize("command", ["python -c pass", "torchrun --no-python a.sh", "accelerate"])
def test_what_is_no_script_is_refused(command: str) -> None:
    with pytest.raises(UnsupportedError):
        read_launch(None, command.split())


TRL = """
import sys
import torch
from accelerate.commands.launch import launch_command, launch_command_parser

def main():
    assert torch.cuda.is_available()  # most of TRL's arguments need a GPU
    _, script, *rest = sys.argv
    launch_command(launch_command_parser().parse_args(["--num_processes", "2", script, *rest]))
"""


def test_a_command_of_trl_is_read_with_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "trl").mkdir()
    (folder / "trl" / "__init__.py").write_text("")
    (folder / "trl" / "cli.py").write_text(TRL)
    monkeypatch.syspath_prepend(folder)
    launch = read_launch(None, ["trl", "sft.py", "--use_peft"])

    assert launch is not None
    assert (launch.script, launch.args, launch.num_local) == ("sft.py", ("--use_peft",), 2)


def test_an_installed_command_is_a_script() -> None:
    target = find_script("pytest", ("-q",))

    assert target.path.parent == Path(sys.executable).parent
    assert target.args == ("-q",)
    assert target.roots[0].name.endswith("pytest")
    assert target.label == "pytest -q"
