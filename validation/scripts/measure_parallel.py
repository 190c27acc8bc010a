"""Runs cases of parallel_cases.json on all GPUs of a host; prints one JSON object per rank.

measure_parallel.py --root FOLDER --out FILE [--seconds N] [CASES...]

FOLDER has the folders of the cases, as `compare_parallel.py --prepare FOLDER` makes them. Each rank
is forked from this process, which has imported the libraries, with the environment of `torchrun`.
It runs under watch.py. Where a forked process cannot use the GPU, each rank is a new process.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPORTS = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo",
    "transformers", "transformers.models.llama.modeling_llama", "transformers.trainer",
    "accelerate", "peft", "lightning", "lightning.pytorch.strategies",
)  # fmt: skip
FIRST_PORT = 29600
THREADS = 8


def main():
    options = _options()
    if options.rank is not None:
        _be_rank(options)
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a check that leaves CUDA uninitialized
    started = time.time()
    for name in IMPORTS:
        __import__(name)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK")
    can_fork = _can_fork()
    print(f"imported in {time.time() - started:.1f} s, forks: {can_fork}", flush=True)
    cases = json.loads((HERE / "parallel_cases.json").read_text(encoding="utf-8"))["cases"]
    names = options.cases or list(cases)
    with open(options.out, "a", encoding="utf-8") as out:
        for number, name in enumerate(names):
            left_s = options.seconds - (time.time() - started)
            if left_s < cases[name].get("least_seconds", 15):
                print(f"{name}: not run, {left_s:.0f} s left", flush=True)
                continue
            began = time.time()
            for row in _run(name, cases[name], FIRST_PORT + number, left_s, can_fork, options):
                out.write(json.dumps(row) + "\n")
                out.flush()
            print(f"{name}: {time.time() - began:.1f} s", flush=True)


def _options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", default="/tmp/parallel-logs")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rank", type=int, help="be this rank of the only case")
    parser.add_argument("--port", type=int, default=FIRST_PORT)
    parser.add_argument("cases", nargs="*")
    return parser.parse_args()


def _can_fork():
    child = os.fork()
    if child == 0:
        try:
            _import_torch().ones(1, device="cuda")
            import torch

            torch.cuda.synchronize()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _import_torch():
    """Return torch; a process that only counted GPUs before the fork may use them after it.

    Its own children may not.
    """
    import torch

    pid = os.getpid()
    torch.cuda._is_in_bad_fork = lambda: os.getpid() != pid
    return torch


def _run(name, case, port, left_s, can_fork, options):
    """Run the ranks of a case and return the row of each; kill those that take too long."""
    logs = Path(options.logs, name)
    logs.mkdir(parents=True, exist_ok=True)
    world = case.get("world", 4)
    gc.collect()
    children = {}
    for rank in range(world):
        if can_fork:
            child = os.fork()
            if child == 0:
                _rank(name, case, rank, port, options)
        else:
            command = [sys.executable, __file__, "--root", options.root, "--out", options.out]
            command += ["--logs", options.logs, "--rank", str(rank), "--port", str(port), name]
            child = subprocess.Popen(command).pid
        children[child] = rank
    deadline = time.time() + min(left_s, case.get("seconds", 90))
    alive = set(children)
    while alive and time.time() < deadline:
        alive = {child for child in alive if os.waitpid(child, os.WNOHANG)[0] == 0}
        time.sleep(0.05)
    for child in alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    rows = []
    for rank in range(world):
        path = logs / f"figures.{rank}.json"
        figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        rows.append({"case": name, "rank": rank, "is_killed": bool(alive), **figures})
        if figures.get("status") != "fits":
            print((logs / f"{rank}.log").read_text(errors="replace")[-700:], flush=True)
    return rows


def _be_rank(options):
    cases = json.loads((HERE / "parallel_cases.json").read_text(encoding="utf-8"))["cases"]
    _rank(options.cases[0], cases[options.cases[0]], options.rank, options.port, options)


def _rank(name, case, rank, port, options):
    """Be a rank until its end."""
    try:
        logs, root = Path(options.logs, name).resolve(), Path(options.root).resolve()
        log = os.open(logs / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(rank, case.get("world", 4), port), **case.get("env", {}))
        os.chdir(root / case["folder"])
        sys.path[:0] = [str(HERE), *(str(root / each) for each in case.get("packages", ()))]
        torch = _import_torch()
        torch.set_num_threads(THREADS)
        if case.get("is_checkpoint_read"):
            _skip_init(torch)
        import watch

        given = ["--out", str(logs / "figures.json"), "--max-steps", str(case.get("steps", 8))]
        if rank in (0, case.get("world", 4) - 1):
            given += ["--history", str(logs / "events.json.gz")]
        if "limit_gib" in case:
            given += ["--limit", str(case["limit_gib"])]
        sys.argv = ["watch.py", *given, *case["command"]]
        watch.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _environment(rank, world, port):
    values = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": False,
        "HF_HUB_OFFLINE": 1, "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()}


def _skip_init(torch):
    """Draw no weights on the host where a checkpoint replaces them."""
    for name in ("kaiming_uniform_", "uniform_", "normal_"):
        draw = getattr(torch.nn.init, name)
        setattr(
            torch.nn.init, name,
            lambda tensor, *args, draw=draw, **more: (
                tensor if tensor.device.type == "cpu" else draw(tensor, *args, **more)
            ),
        )  # fmt: skip


if __name__ == "__main__":
    main()
