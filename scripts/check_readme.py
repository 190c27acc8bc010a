"""Runs every command of a page as a user would, in the environment that its install line makes.

    python scripts/check_readme.py                  # README.md: clone, install, run all commands
    python scripts/check_readme.py --venv .venv     # use an environment that is installed
    python scripts/check_readme.py advise sweep     # only commands that contain one of these words
    python scripts/check_readme.py --jobs 2         # commands of a block that need no other's files
    python scripts/check_readme.py --venv .venv --page docs/tutorials/job.md --new

`--new` leaves out commands of the README. The distribution `memest-gpu` is that of the clone.

Each command has to exit with 0. A block of output that follows the commands has to be in the output
of one of them, line by line; `...` there stands for what is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200
NUM_SHOWN = 3
"""Lines of each output that are printed."""

SKIPPED = {"scripts/check.py": "the development environment runs it"}
"""Reasons not to run a command, by a part of it."""

WITHOUT_GPU = {"memest validate": (3, "is built without CUDA")}
"""Exit code and error of commands that need a GPU, on a machine without one."""

PLAN = "model_name: gpt2\nbatch_size: 2\nprecision: bf16-mixed\n"
TRAIN = """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=4)
options = parser.parse_args()
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(options.bs, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 1000,
}  # fmt: skip
USER_FILES = {
    "lab.yaml": PLAN,
    "experiments.yaml": f"defaults:\n{indent(PLAN, '  ')}experiments:\n  - name: baseline\n",
    "my-model/config.json": json.dumps(CONFIG),
    "train.py": TRAIN,
    "package/train.py": TRAIN,
    "lengths.txt": "512\n96\n300\n420\n",
}
"""Files that the pages' commands name and that a user would have."""


SCRIPT = re.compile(r"^```python\n# (\S+\.py)\n(.*?)(?:^```$|\Z)", re.M | re.S)
"""A block of a page that is a file of the user."""


@dataclass
class Block:
    """A block of a page between two fences."""

    language: str
    text: str
    output: str = ""
    """Text of the block without a language that follows."""

    @property
    def commands(self) -> list[str]:
        """The lines without their comments."""
        lines = (re.sub(r"\s+#.*$", "", line).strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def main() -> int:
    """Run the commands; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run only commands that contain one of these")
    parser.add_argument("--venv", type=Path, help="installed environment")
    parser.add_argument(
        "--page", nargs="+", default=["README.md"], metavar="PAGE", help="pages with commands"
    )
    parser.add_argument("--new", action="store_true", help="leave out commands of the README")
    parser.add_argument("--jobs", type=int, default=1, help="commands of a block at a time")
    options = parser.parse_args()
    known = {c for block in blocks_of(text_of("README.md")) for c in block.commands}
    return max([check(page, options, known if options.new else set()) for page in options.page])


def check(page: str, options: argparse.Namespace, known: set[str]) -> int:
    """Run the commands of a page except the known ones; 1 if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        venv = options.venv and options.venv.absolute()
        user = User(Path(folder, "memest"), venv, page, options.jobs, known)
        is_right = [user.runs(block, options.words) for block in blocks_of(text_of(page))]
    print(f"{page}: {user.num_failed} of {user.num_run} commands failed", flush=True)
    return int(not all(is_right) or not user.num_run)


def text_of(page: str) -> str:
    """Return the text of a page of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of commands and of Python; those that install come first."""
    found: list[Block] = []
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S):
        if language in ("sh", "python") and not SCRIPT.match(f"```python\n{text}"):
            found.append(Block(language, text))
        elif not language and found:
            found[-1].output = text
    return sorted(found, key=lambda block: "pip install" not in block.text)


def missing_lines(sample: str, output: str) -> list[str]:
    """Return the lines of `sample` that are not in `output`.

    >>> missing_lines("a  1 MiB\\n...\\nb of c...\\nd", "a 1 MiB\\nb of cat")
    ['d']
    """
    said = [" ".join(line.split()) for line in output.splitlines()]
    missing = []
    for line in sample.splitlines():
        words = " ".join(line.split())
        start = words.removesuffix("...").rstrip()
        is_whole = start == words
        if not any(words == one if is_whole else one.startswith(start) for one in said):
            missing.append(line)
    return missing


class User:
    """A folder with a clone of the repository, and the shell of its user."""

    def __init__(
        self, folder: Path, venv: Path | None, page: str, jobs: int, known: set[str]
    ) -> None:
        self.folder, self.jobs, self.known = folder, jobs, known
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        own = scripts_of(page)
        for name, text in (USER_FILES | scripts_of("docs/run.md") | own).items():
            path = folder / name
            if not path.exists() or name in own:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        self.is_installed = venv is not None
        dropped = ("PYTHONPATH", "MEMEST_TORCH")
        self.env = {key: value for key, value in os.environ.items() if key not in dropped}
        self.env["PATH"] = f"{venv or folder / '.venv'}/bin:{self.env['PATH']}"
        self.num_run = self.num_failed = 0

    def runs(self, block: Block, words: list[str]) -> bool:
        """Run the commands of a block; returns whether each one did what the page says."""
        if block.language == "python":
            (self.folder / "readme.py").write_text(block.text, encoding="utf-8")
        commands = ["python readme.py"] if block.language == "python" else block.commands
        chosen = []
        before = self.num_failed
        for command in commands:
            is_install = "pip install" in command
            if is_install and self.is_installed:
                command = command.rpartition(" && ")[2].removeprefix(".venv/bin/")
                if "pip install" in command or command in self.known:
                    continue
            elif command in self.known:
                continue
            if words and not is_install and not any(word in command for word in words):
                continue
            reason = next((why for part, why in SKIPPED.items() if part in command), "")
            if reason:
                print(f"not run: {command}: {reason}", flush=True)
                continue
            chosen.append(command)
        with ThreadPoolExecutor(self.jobs) as pool:
            ran = list(pool.map(self._run, chosen))
        outputs = [output for output, _ in ran]
        self.num_run += len(ran)
        self.num_failed += sum(not is_right for _, is_right in ran)
        if block.output and outputs:
            missing = min((missing_lines(block.output, one) for one in outputs), key=len)
            for line in missing:
                print(f"not in the output: {line}", flush=True)
            self.num_failed += bool(missing)
        return self.num_failed == before

    def _run(self, command: str) -> tuple[str, bool]:
        """Run one command, print its time and first lines; return its output and if it is right."""
        started = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pip and processes of memest too
            stdout, stderr = process.communicate()
        code, text = WITHOUT_GPU.get(command, (0, ""))
        is_right = process.returncode == code and text in stderr
        said = [
            f"{'ok' if is_right else 'FAILED':<7}{time.monotonic() - started:6.1f} s  {command}"
        ]
        shown = [line for line in (stdout or stderr).splitlines() if line.strip()]
        said += [f"    {line}" for line in shown[:NUM_SHOWN]]
        if not is_right:
            said.append(f"exit code {process.returncode}\n{stderr[-3000:]}")
        print("\n".join(said), flush=True)
        return stdout, is_right


def scripts_of(page: str) -> dict[str, str]:
    """Return the scripts of a page whose first line is a comment with their name."""
    blocks = SCRIPT.findall(text_of(page))
    return {name: f"# {name}\n{text}" for name, text in blocks}


if __name__ == "__main__":
    sys.exit(main())
