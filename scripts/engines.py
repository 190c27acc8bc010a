"""Times one worker against several on the same plans, and compares the files byte by byte.

    python scripts/engines.py                    # 640 plans on 1 and on 4 workers of a Ray cluster
    python scripts/engines.py --plans 160        # fewer: a multiple of 160
    python scripts/engines.py --engine local     # processes instead of Ray
    python scripts/engines.py --kill             # one of the 4 is killed when half is done

Sixteen batch sizes with five optimizers share traces, so they are one task. Exit code 1 if the
files differ, or if the share of one worker's time is above `--most`: 0.6 on two cores, 0.35 on
four.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "rmsprop", "adagrad")
NUM_BATCHES = 16
MARK = "MEMEST_ENGINES_RUN"
"""Variable by which the processes of a run are found."""


def main() -> int:
    """Run both, print times and files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=640)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--engine", default="ray", choices=("local", "ray", "slurm"))
    parser.add_argument("--kill", action="store_true", help="kill a worker in the middle")
    parser.add_argument("--most", type=float, help="[0.35 where 4 cores are there, else 0.6]")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    most = options.most or (0.35 if cores >= 4 else 0.6)
    seconds, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, options.workers):
            path = Path(folder, f"{workers}.csv")
            command = [*sweep(options.plans), "--engine", options.engine]
            command += ["--workers", str(workers), "-o", str(path)]
            started = time.perf_counter()
            run(command, Path(folder), path, killed=options.kill and workers > 1)
            seconds.append(time.perf_counter() - started)
            files.append(path.read_bytes())
            digest = hashlib.sha256(files[-1]).hexdigest()[:16]
            rows = files[-1].count(b"\n") - 1
            print(
                f"{options.engine}, {workers} worker{'s' * (workers > 1)}: {seconds[-1]:.1f} s,"
                f" {rows} rows, {len(files[-1])} bytes, sha256 {digest}",
                flush=True,
            )
    share = seconds[1] / seconds[0]
    is_same = files[0] == files[1]
    print(f"{'the same' if is_same else 'OTHER'} bytes; {share:.2f} of one worker's time on"
          f" {cores} cores (at most {most})")  # fmt: skip
    return int(not is_same or share > most)


def sweep(plans: int) -> list[str]:
    """Return the command of this many plans."""
    num_precisions, rest = divmod(plans, 2 * len(OPTIMIZERS) * NUM_BATCHES)
    if rest or not 1 <= num_precisions <= len(PRECISIONS):
        raise SystemExit("--plans is 160, 320, 480 or 640")
    return [
        sys.executable, "-m", "memest", "sweep", "--model", "gpt2-medium", "--seq-len", "128",
        "--gpu", "a100-40gb", "--bs", f"1:{NUM_BATCHES}",
        "--precision", ",".join(PRECISIONS[:num_precisions]),
        "--optim", ",".join(OPTIMIZERS), "--act-ckpt", "false,true",
    ]  # fmt: skip


def run(command: list[str], folder: Path, output: Path, *, killed: bool) -> None:
    """Run a command to its end; with `killed`, kill a worker when half of its results are there."""
    mark = f"{os.getpid()}-{output.stem}"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["RAY_worker_niceness"] = "0"  # by default 15: slower where other work runs
    process = subprocess.Popen(command, cwd=folder, env=environment)
    stored = output.with_name(f".{output.name}.partial.jsonl")
    num_plans = 0
    for name in ("--bs", "--precision", "--optim", "--act-ckpt"):
        values = command[command.index(name) + 1]
        count = NUM_BATCHES if ":" in values else values.count(",") + 1
        num_plans = count * (num_plans or 1)
    while killed and process.poll() is None:
        if stored.is_file() and stored.read_bytes().count(b"\n") * 2 >= num_plans:
            pid = next(workers_of(mark))
            os.kill(pid, signal.SIGKILL)
            print(f"killed worker {pid}", flush=True)
            break
        time.sleep(0.1)
    if process.wait():
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")


def workers_of(mark: str) -> Iterator[int]:
    """Yield the processes of a run that do a task."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            is_ours = f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if is_ours and (words.startswith(b"ray::_do") or b"spawn_main(" in words):
            yield int(folder.name)


if __name__ == "__main__":
    sys.exit(main())
