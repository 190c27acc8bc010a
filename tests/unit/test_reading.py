"""Files that are no files of plans: a clear error, at once, with little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memest.errors import PlanError
from memest.plan.reading import MAX_NODES, parse_yaml, read_limited
from memest.plan.training_plan import read_config, read_suite


def bomb(levels: int) -> str:
    """A list of lists that are ten times the one before, each an alias."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join([*lines, f"experiments: [*a{levels - 1}]"])


def test_aliases_that_multiply_are_refused_and_some_are_not(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(bomb(9))
    with pytest.raises(PlanError, match=f"has more than {MAX_NODES} values"):
        read_suite(tmp_path / "bomb.yaml", {})

    (tmp_path / "few.yaml").write_text(
        "defaults: &d {model_name: gpt2}\nexperiments: [{<<: *d, name: a}, {<<: *d, name: b}]\n"
    )
    assert [plan.label for plan in read_suite(tmp_path / "few.yaml", {})] == ["a", "b"]


def test_a_list_that_holds_itself_is_refused() -> None:
    with pytest.raises(PlanError, match="has more than"):
        parse_yaml("a: &a [*a]", Path("cyclic.yaml"))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/dev/full"])
def test_a_device_is_no_suite(path: str) -> None:
    with pytest.raises(PlanError, match="is no regular file"):
        read_suite(Path(path), {})


def test_a_folder_and_what_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a folder"):
        read_config(tmp_path, {})
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.yaml", {})


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(20 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(PlanError, match="is larger than 512 KiB"):
        read_suite(huge, {})

    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_pipe_is_read_up_to_the_limit() -> None:
    """As in `--suite <(generate)`; one without end is refused."""
    reader, writer = os.pipe()
    os.write(writer, b"model_name: gpt2")
    os.close(writer)
    assert read_limited(Path(f"/dev/fd/{reader}")) == "model_name: gpt2"
    os.close(reader)

    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        with pytest.raises(PlanError, match="is larger than"):
            read_limited(Path(f"/dev/fd/{endless.stdout.fileno()}"))
        endless.kill()


def test_a_full_disk_is_one_clear_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memest", "models"], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: the output cannot be written: No space left on device",
        "hint: write where there is room",
    ]
