"""`nvidia-smi`, for processes that the script starts: a program that prints what NVML returns.

It runs without memest, so this module imports Python's library alone at its top.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

NAME = "nvidia-smi"
UNITS = {"memory": "MiB", "utilization": "%", "power": "W", "clocks": "MHz", "temperature": ""}
NOT_AVAILABLE = "[N/A]"  # printed for a field that a GPU lacks


def answer(gpus: Sequence[Mapping[str, Any]], words: Sequence[str]) -> str:
    """Return what `nvidia-smi` prints for its arguments `words`: a list (`-L`), CSV for a query, or
    a table. `gpus` has each GPU's values by field name, such as `memory.used` in MiB."""
    options, name = dict[str, str](), ""
    for word in words:
        if word.startswith("-"):
            name, _, options[name] = word.lstrip("-").partition("=")
        else:
            options[name] = word  # the value of the option before it
    if "L" in options or "list-gpus" in options:
        return "\n".join(f"GPU {g['index']}: {g['name']} (UUID: {g['uuid']})" for g in gpus)
    if ids := options.get("id") or options.get("i"):
        gpus = [g for g in gpus if {str(g["index"]), g["uuid"]} & {*ids.split(",")}]
        if not gpus:
            return "No devices were found"
    query = options.get("query-gpu") or options.get("query-compute-apps")
    if not query:
        rows = []
        for gpu in gpus:
            used = f"{gpu['memory.used']}MiB / {gpu['memory.total']}MiB"
            rows.append(f"| {gpu['index']}  {gpu['name']:<32} {used:>24} |")
        head = f"| NVIDIA-SMI {gpus[0]['driver_version']}, of a simulated GPU"
        rule = f"+{'-' * 62}+"
        return "\n".join([rule, f"{head:<63}|", rule, *rows, rule])
    formats = options.get("format", "csv").split(",")
    fields = [field.strip() for field in query.split(",")]
    columns = [(field, UNITS.get(field.partition(".")[0], "")) for field in fields]
    titles = [f"{field} [{unit}]" if unit else field for field, unit in columns]
    lines = [] if "noheader" in formats else [", ".join(titles)]
    if "nounits" in formats:
        columns = [(field, "") for field in fields]
    for gpu in gpus:
        values = [f"{gpu[name]} {unit}" if name in gpu else NOT_AVAILABLE for name, unit in columns]
        lines.append(", ".join(map(str.strip, values)))
    return "\n".join(lines)


def install(patches: Any, module: Any) -> None:
    """Put memest's `nvidia-smi` first on `PATH` of child processes whose command names it. `module`
    is the `pynvml` of the virtual GPU, from which the program's values are read."""

    @cache
    def folder() -> str:
        directory = tempfile.TemporaryDirectory(prefix="memest-smi-", ignore_cleanup_errors=True)
        patches.on_undo(directory.cleanup)
        return directory.name

    start, system = subprocess.Popen.__init__, os.system

    def start_with_program(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        arguments = args if isinstance(args, list | tuple) else [args]
        has_env = len(rest) >= 10  # `env` is the tenth parameter after `args`
        if not has_env and any(NAME in os.fsdecode(word) for word in arguments):
            options["env"] = _environment(folder(), options.get("env"), module)
        start(self, args, *rest, **options)

    def run(command: str | bytes) -> int:
        if NAME not in os.fsdecode(command):
            return system(command)
        code = subprocess.Popen(command, shell=True).wait()  # below 0: the number of a signal
        return -code if code < 0 else code << 8  # a wait status, as from `os.wait`

    patches.set(subprocess.Popen, "__init__", start_with_program)
    patches.set(os, "system", run)


def _environment(folder: str, base: Mapping[str, str] | None, nvml: Any) -> dict[str, str]:
    """Write the program, and the GPU's values as read from `nvml` (`pynvml`), to `folder`. Return
    the environment of the child process, with `folder` first on `PATH`. `base` is its environment
    before; None is this process's."""
    program, values = Path(folder, NAME), Path(folder, "values.json")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    fields = {
        "name": nvml.nvmlDeviceGetName(handle), "gpu_name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle), "gpu_uuid": nvml.nvmlDeviceGetUUID(handle),
        "driver_version": nvml.nvmlSystemGetDriverVersion(), "utilization.gpu": 0,
        "utilization.memory": 0, "temperature.gpu": 0, "power.draw": 0, "pid": os.getpid(),
        "compute_cap": "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory.total": memory.total >> 20, "memory.used": memory.used >> 20,
        "memory.free": memory.free >> 20, "used_memory": memory.used >> 20,
        "used_gpu_memory": memory.used >> 20, "count": nvml.nvmlDeviceGetCount(),
    }  # fmt: skip
    gpus = [{**fields, "index": index} for index in range(nvml.nvmlDeviceGetCount())]
    values.write_text(json.dumps(gpus), encoding="utf-8")
    command = [sys.executable, "-S", os.path.abspath(__file__), str(values)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = dict(os.environ if base is None else base)
    return environment | {"PATH": os.pathsep.join([folder, environment.get("PATH", os.defpath)])}


if __name__ == "__main__":
    gpus = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(f"{answer(gpus, sys.argv[2:])}\n")
