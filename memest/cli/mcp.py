"""`memest mcp`: a server of the Model Context Protocol over stdio, for agents."""

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from memest import __version__
from memest.child import spawn
from memest.cli.group import main
from memest.errors import MemestError, shown
from memest.estimator.hardware.gpus import list_gpus
from memest.packages import require
from memest.report import RunReport

MAX_OUTPUT = 4000  # characters of a script's output in an answer, from its end
MAX_LINES = 5  # lines of a command's output in an error, from its end


@main.command()
def mcp() -> None:
    """Serve the tools run, predict, advise and gpus to an agent (MCP over stdio).

    \b
    pip install 'memest-gpu[mcp]'
    claude mcp add memest -- memest mcp
    """
    require("mcp")
    from mcp.server import MCPServer

    server = MCPServer("memest", version=__version__, log_level="WARNING")
    for tool in (run, predict, advise, gpus):
        server.add_tool(_with_hints(tool))
    try:
        server.run("stdio")
    except* (BrokenPipeError, KeyboardInterrupt):  # the client is gone, or ends the server
        pass


def _with_hints(tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap the server's `tool`: a `MemestError` reaches the agent as text, with its hint."""

    @wraps(tool)
    async def wrapper(**arguments: Any) -> Any:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            return await tool(**arguments)
        except MemestError as error:
            raise ToolError(f"{error}\nhint: {error.hint}" if error.hint else str(error)) from error

    return wrapper


async def run(
    script: str, arguments: list[str] | None = None, gpu: str = "", max_steps: int = 3,
    folder: str = ".", time_limit_s: float = 600.0,
) -> dict[str, Any]:  # fmt: skip
    """Run a training script on a virtual GPU and return its memory by kind, module and line.

    The script really runs, without a GPU: its other effects, such as written files, happen.

    Args:
        script: path of the script, relative to `folder`; or `-m` and a module.
        arguments: arguments of the script.
        gpu: name from the tool `gpus`; by default that of the project's pyproject.toml, or h200.
        max_steps: optimizer steps after which the script is ended.
        folder: working folder of the script.
        time_limit_s: seconds after which the run is given up.
    """
    options = ["--no-input", "--max-steps", str(max_steps)]
    if gpu:
        options += ["--gpu", gpu]
    args = [*options, *script.split(" ", 1), *(arguments or [])]  # `-m MODULE` is two words
    code, text, output = await _command("run", "--json", args, folder=folder, seconds=time_limit_s)
    if not text:
        raise _printed_error(output)
    values = json.loads(text)
    summary = RunReport.from_dict(values).summary()
    return {"summary": summary, "exit_code": code, "report": values, "output": output[-MAX_OUTPUT:]}


async def predict(plan: dict[str, Any]) -> dict[str, Any]:
    """Predict the GPU memory of a training plan, without a script.

    The result is the JSON object of `memest predict --json`. `peak_reserved_bytes` is the peak, and
    `verdicts` has for each GPU whether the plan fits.

    Args:
        plan: keys of `memest schema plan`, such as model_name, batch_size, precision, optim,
            seq_len, use_lora, and gpu as a list of names.
    """
    return await _run_on_plan("predict", plan)


async def advise(plan: dict[str, Any]) -> dict[str, Any]:
    """Find changes with which a training plan fits one GPU, cheapest first.

    The result is the JSON object of `memest advise --json`. Its list `options` has changed plans
    that fit, each with `changes`, `cost` and `needs_bytes`. `cost` is not money, but a
    disadvantage for the training, such as more time per step or numbers of fewer bits.

    Args:
        plan: keys as for `predict`; `gpu` has one name.
    """
    return await _run_on_plan("advise", plan)


async def gpus() -> list[dict[str, Any]]:
    """List the GPUs that can be simulated, with usable memory in bytes."""
    return [{"name": g.name, "label": g.label, "limit_bytes": g.limit_bytes} for g in list_gpus()]


async def _run_on_plan(command: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the memest command `command`, such as `predict`, on the plan {key: value}; return its
    JSON output. Raise `MemestError` if the command fails."""
    with tempfile.TemporaryDirectory(prefix="memest-") as folder:
        path = Path(folder, "plan.json")
        path.write_text(json.dumps(plan), encoding="utf-8")
        args = ["--config", str(path), "--json"]
        code, text, output = await _command(command, "--output", args)
    if code:
        raise _printed_error(output)
    return dict(json.loads(text))


async def _command(
    command: str, option: str, args: list[str], *, folder: str = ".", seconds: float = math.inf
) -> tuple[int, str, str]:
    """Run `memest COMMAND OPTION FILE ARGS`; return (exit code, text of FILE, stdout and stderr).
    `option` is the command's option for an output file, such as `--json`. FILE is temporary; its
    text is "" if the command writes none. The working folder is `folder`. Raise `MemestError` if
    the command does not end within `seconds`, or if there is no `folder`."""
    if not Path(folder).is_dir():
        raise MemestError(f"no such folder: {shown(folder)}")
    with tempfile.TemporaryDirectory(prefix="memest-") as temporary:
        file, log = Path(temporary, "answer"), Path(temporary, "output")
        memest = [sys.executable, "-P", "-m", "memest", command, option, str(file)]
        child = spawn([*memest, *args], log, cwd=folder)
        try:
            code = await asyncio.to_thread(child.wait, seconds)
        finally:
            child.kill()  # also processes that the script has started
        if code is None:
            raise MemestError(f"the run did not end within {seconds:g} s")
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        return code, text, log.read_text(encoding="utf-8", errors="replace")


def _printed_error(text: str) -> MemestError:
    """Return the error that a memest command printed in `text`, its stdout and stderr."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    hint = next((line for line in reversed(lines) if line.startswith("hint: ")), "")
    message = errors[-1] if errors else "\n".join(lines[-MAX_LINES:])
    return MemestError(message.removeprefix("Error: "), hint=hint.removeprefix("hint: "))
