"""Run memest in the Python environment of the script, without an installation there.

The script's interpreter runs memest from a folder of links at the front of `PYTHONPATH`: memest
itself, and those of `PURE` that the environment lacks.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import memest
from memest.errors import PlanError
from memest.writing import cache_folder

OLDEST_PYTHON = (3, 11)  # `requires-python` of pyproject.toml
PURE = ("click", "tqdm")
"""Pure Python dependencies of `memest run`; the script's environment has NumPy and torch."""

_PROBE = """
import json, sys
try:
    from importlib.util import find_spec
except ImportError:
    find_spec = lambda name: None
specs = [(name, find_spec(name)) for name in sys.argv[1:]]
whole = [name for name, spec in specs if spec and spec.origin]
print(json.dumps([sys.version_info[:2], sys.prefix, whole, [n for n, s in specs if s]]))
"""
"""Prints the version, the prefix, the packages that can be imported, and those with any file.
Python 2 can run the code too."""

_SECONDS = 60


def active_environment() -> Path | None:
    """Return the interpreter of `VIRTUAL_ENV` if this process runs in another environment."""
    folder = os.environ.get("VIRTUAL_ENV")
    if not folder or os.path.realpath(folder) == os.path.realpath(sys.prefix):
        return None
    return next((path for path in _interpreters(Path(folder)) if path.is_file()), None)


def run_elsewhere(python: Path, arguments: Sequence[str]) -> int | None:
    """Run `memest run` with `arguments` under another interpreter; return its exit code.

    Return None if `python` is the interpreter of this environment.

    Raises:
        PlanError: there is no such interpreter, it is too old, or it has no torch or no NumPy.
    """
    python, prefix, installed = _examine(python)
    if os.path.realpath(prefix) == os.path.realpath(sys.prefix):
        return None
    folder = _folder_of_links([name for name in PURE if name not in installed])
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [str(python), "-m", "memest", "run", *arguments]
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(command[0], command, environment)
    return subprocess.call(command, env=environment)


def _interpreters(folder: Path) -> list[Path]:
    return [folder / "bin" / "python", folder / "Scripts" / "python.exe"]


def _examine(python: Path) -> tuple[Path, str, list[str]]:
    """Return the interpreter, its prefix, and the dependencies of memest that it has."""
    if python.is_dir():
        python = next((p for p in _interpreters(python) if p.is_file()), python)
    found = shutil.which(python)
    if found is None:
        raise PlanError(f"`{python}` is not a Python interpreter", hint="--python .venv/bin/python")
    command = [found, "-c", _PROBE, "torch", "numpy", *PURE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        version, prefix, installed, begun = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PlanError(
            f"`{python}` does not run as a Python interpreter", hint="--python .venv/bin/python"
        ) from error
    if tuple(version) < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        raise PlanError(
            f"`{python}` is Python {'.'.join(map(str, version))}; memest needs {needed} or later",
            hint=f"make the script's environment with Python {needed} or later",
        )
    for name in ("torch", "numpy"):
        if name not in installed:
            fault = f"only parts of {name}" if name in begun else f"no {name}"
            raise PlanError(
                f"the environment of `{python}` has {fault}",
                hint=f"{python} -m pip install{' --force-reinstall' * (name in begun)} {name}",
            )
    return Path(os.path.abspath(found)), prefix, installed


def _folder_of_links(lacking: Sequence[str]) -> Path:
    """Return a folder with links to memest and the packages that the other environment lacks."""
    import hashlib  # 5 ms, which a run in this environment does not need

    sources = {"memest": Path(memest.__file__).parent}
    for name in lacking:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            sources[name] = Path(spec.origin).parent
    digest = hashlib.blake2b(repr(sorted(sources.items())).encode(), digest_size=8).hexdigest()
    folder = cache_folder() / f"python-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        link = folder / name
        if link.exists():
            continue
        try:
            link.symlink_to(source, target_is_directory=True)
        except FileExistsError:  # another process has made it
            continue
        except OSError:  # Windows allows links only to administrators
            shutil.copytree(source, link, dirs_exist_ok=True)
    return folder
