"""`memest mcp`: its tools, and the server with the official client if the SDK is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from memest.cli import mcp
from memest.errors import MemestError

ROOT = Path(__file__).resolve().parents[2]
needs_sdk = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="the MCP SDK is not installed"
)
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

TRAIN = """
import torch
x = torch.ones(1 << 20, device="cuda")
print("made")
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_run_returns_summary_and_report(script: Path) -> None:
    found = asyncio.run(mcp.run("train.py", gpu="t4", folder=str(script.parent)))

    assert found["summary"].startswith("memest: 0.02 of 14.6 GiB (fits) on t4, peak in setup at ")
    assert found["report"]["peak_allocated_bytes"] == 4 << 20
    assert found["output"].startswith("made\n")
    assert found["exit_code"] == 0


def test_a_command_that_fails_is_an_error_with_its_hint(script: Path) -> None:
    with pytest.raises(MemestError, match="no such script: `tarin") as raised:
        asyncio.run(mcp.run("tarin.py", folder=str(script.parent)))

    assert raised.value.hint == "did you mean `train.py`?"


def test_a_run_without_an_end_is_given_up_with_its_processes(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(
        "import subprocess, time\nprocess = subprocess.Popen(['sleep', '600'])\n"
        "open('pid', 'w').write(str(process.pid))\ntime.sleep(600)\n"
    )
    pid = script.parent / "pid"
    # The time passes once the script has started its process, however long that takes.
    clock = SimpleNamespace(monotonic=lambda: 9.0 if has_text(pid) else 0.0, sleep=time.sleep)
    monkeypatch.setattr("memest.child.time", clock)

    with pytest.raises(MemestError, match="did not end within 8 s"):
        asyncio.run(mcp.run("train.py", folder=str(script.parent), time_limit_s=8))

    assert is_gone(int(pid.read_text()))


def has_text(path: Path) -> bool:
    """Return whether a file exists and is not empty."""
    return path.is_file() and path.stat().st_size > 0


def is_gone(pid: int) -> bool:
    """Whether a process ends within a few seconds; a zombie has ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_plan_is_predicted(shallow: Callable[..., str]) -> None:
    plan = {"model_name": shallow("gpt2"), "batch_size": 1, "seq_len": 16, "gpu": ["t4"]}

    found = asyncio.run(mcp.predict(plan))

    assert found["verdicts"]["t4"]["verdict"] == "fits"


def test_advice_has_options_and_gpus_have_memory(shallow: Callable[..., str]) -> None:
    plan = {"model_name": shallow("gpt2"), "batch_size": 1, "seq_len": 16, "gpu": ["t4"]}

    assert asyncio.run(mcp.advise(plan))["fits"]
    assert {"name": "t4", "label": "Tesla T4"}.items() <= asyncio.run(mcp.gpus())[0].items()
    with pytest.raises(MemestError, match="`model`"):
        asyncio.run(mcp.predict({"model": 4}))


def test_without_the_sdk_the_command_names_its_extra() -> None:
    code = "import sys; sys.modules['mcp'] = None; import memest.packages as p;"
    code += "p.is_installed = lambda name: False; from memest.cli import main; main(['mcp'])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 3
    assert "pip install 'memest-gpu[mcp]'" in done.stderr


@needs_sdk
def test_a_client_calls_the_tools(script: Path) -> None:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "memest", "mcp"], env=dict(os.environ)
    )

    async def session() -> None:
        async with Client(stdio_client(server)) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == ["run", "predict", "advise", "gpus"]
            assert tools[0].input_schema["required"] == ["script"]
            arguments = {"script": "train.py", "gpu": "t4", "folder": str(script.parent)}
            found = await client.call_tool("run", arguments)
            assert json.loads(found.content[0].text)["summary"].startswith("memest: 0.02 of 14.6")
            wrong = await client.call_tool("predict", {"plan": {"model_name": "gpt5"}})
            assert wrong.is_error
            assert "hint: " in wrong.content[0].text

    asyncio.run(session())


REQUESTS = [
    {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"}}},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
]  # fmt: skip


@needs_sdk
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_client_that_hangs_up_ends_the_server(script: Path, is_busy: bool) -> None:
    script.write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    run = {"name": "run", "arguments": {"script": "train.py", "folder": str(script.parent)}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": run}
    command = [sys.executable, "-m", "memest", "mcp"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:  # type: ignore[call-overload]
        for request in [*REQUESTS, *([call] if is_busy else [])]:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
        assert '"id":0' in server.stdout.readline().replace(" ", "")
        pid = script.parent / "pid"
        while is_busy and not has_text(pid):
            time.sleep(0.1)

        server.stdin.close()
        server.stdout.close()

        try:
            assert server.wait(120) == 0, server.stderr.read()
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
    assert not is_busy or is_gone(int(pid.read_text()))
