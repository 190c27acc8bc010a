"""Target (script or module) of `memest run`, and the Python that runs it, without torch."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import memest
from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.packages import is_in_packages
from memest.writing import cache_folder

SEVERAL_GPUS_HINT = "run it outside of the launcher: `memest run --nproc-per-node N train.py`"
UNREAD_LAUNCHERS = frozenset(("lightning", "fabric", "srun", "mpirun"))
SHELL_SUFFIXES = frozenset((".sh", ".bash", ".slurm", ".sbatch"))
_NAME_THE_SCRIPT = "name the Python script itself: `memest run train.py`"
LAUNCHER_MODULES = frozenset(("torch.distributed.elastic", "deepspeed.launcher.launch"))
"""Modules that start the script in processes of their own, which would not see the virtual GPU."""

IS_INSTALLED = "is it installed here?"
INSTALLED_BY = {
    "litgpt": "`pip install 'memest-gpu[litgpt]'`, then `pip install --no-deps litgpt==0.5.13`"
}
"""Install commands of packages with their own extra. LitGPT has two, since it requires a
huggingface_hub that is too old for transformers 5.
"""

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

_PROBE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Target:
    """Script or module that `memest run` runs, with its arguments."""

    name: str  # name as typed
    args: tuple[str, ...]
    is_module: bool
    path: Path  # absolute path of a script; of a module, the first folder of its import path
    roots: tuple[Path, ...] = ()  # folders of libraries whose code is the script's
    local_rank: str = ""  # argument to which each rank adds its number: `--local_rank=`

    def of_rank(self, local_rank: int) -> "Target":
        """Return the target of rank `local_rank`, with `--local_rank=N` if its launcher adds it."""
        if not self.local_rank:
            return self
        return replace(self, args=(f"{self.local_rank}{local_rank}", *self.args), local_rank="")

    @property
    def label(self) -> str:
        """The target and its arguments, for the header of a report."""
        name = f"-m {self.name}" if self.is_module else os.path.basename(self.name) or self.name
        return " ".join((name, *self.args))


def find_script(name: str, args: tuple[str, ...]) -> Target:
    """Return the script `name`: a file, a folder or archive with `__main__.py`, a console script.

    Raises:
        PlanError: there is no such script, or it cannot be read.
    """
    path = Path(os.path.abspath(name))
    if not path.exists() and (command := _console_script(name)) is not None:
        return replace(command, args=args)
    if not path.exists():
        scripts = [script.stem for script in path.parent.glob("*.py")]
        matches = closest(path.name.removesuffix(".py"), scripts)
        hint = f"did you mean `{matches[0]}.py`?" if matches else "a module is run with `-m`"
        if name in UNREAD_LAUNCHERS:
            hint = f"{_NAME_THE_SCRIPT}; `--nproc-per-node N` is for several GPUs"
        raise PlanError(f"no such script: {shown(name)}", hint=hint)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise PlanError(
            f"{shown(name)} is a folder without a `__main__.py`", hint="name the script in it"
        )
    if path.suffix == ".ipynb":
        raise PlanError(f"{shown(name)} is a notebook", hint="`%%memest` runs a cell of it")
    if path.suffix in SHELL_SUFFIXES:
        raise PlanError(f"{shown(name)} is a shell script", hint=_NAME_THE_SCRIPT)
    if not os.access(path, os.R_OK):
        raise PlanError(f"{shown(name)} cannot be read", hint="check its permissions")
    roots = (path.parent,) if is_in_packages(path) else ()
    return Target(name, args, is_module=False, path=path, roots=roots)


def _console_script(name: str) -> Target | None:
    from importlib.metadata import entry_points  # 20 ms, which no other script needs

    entry_point = next(iter(entry_points(group="console_scripts", name=name)), None)
    if entry_point is None:
        return None
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        return None
    package = find_module(entry_point.module.partition(".")[0], ())
    return Target(program, (), is_module=False, path=Path(program), roots=package.roots)


def find_module(name: str, args: tuple[str, ...]) -> Target:
    """Return module `name`, to be run like `python -m`; only its outermost package is looked up.

    Raises:
        PlanError: there is no such module.
        UnsupportedError: the module is a launcher, which starts scripts in other processes.
    """
    if name in LAUNCHER_MODULES:
        raise UnsupportedError(
            f"{shown(name)} starts the script in other processes, which have no virtual GPU",
            hint="give the script itself to `memest run`, with `--nproc-per-node N`",
        )
    if name.endswith(".py") and Path(name).is_file():
        raise PlanError(f"no such module: {shown(name)}", hint="a script is run without `-m`")
    cwd, root = Path.cwd(), name.partition(".")[0]
    try:
        spec = PathFinder.find_spec(root, [str(cwd), *sys.path]) or find_spec(root)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not all(part.isidentifier() for part in name.split(".")):
        raise PlanError(f"no such module: {shown(name)}", hint=INSTALLED_BY.get(root, IS_INSTALLED))
    locations = spec.submodule_search_locations or [""]
    # a namespace package has no origin
    folder = Path(spec.origin).parent if spec.origin else Path(next(iter(locations)))
    roots = (folder,) if is_in_packages(folder.parent) else ()
    return Target(name, args, is_module=True, path=cwd, roots=roots)


def check_single_process(environment: Mapping[str, str]) -> None:
    """Raise an `UnsupportedError` if a launcher has set `WORLD_SIZE` above 1 in `environment`."""
    size = environment.get("WORLD_SIZE", "1")
    if size.strip() not in ("", "1"):
        raise UnsupportedError(
            f"a launcher has started this as one of several: `WORLD_SIZE` is {shown(size)}",
            hint=SEVERAL_GPUS_HINT,
        )


class NoInput(io.TextIOBase):
    """Replacement of `sys.stdin` that raises an `UnsupportedError` when a script reads it."""

    def readable(self) -> bool:
        """Return True, as for a file that is open for reading."""
        return True

    def _refuse(self, *args: Any) -> NoReturn:
        raise UnsupportedError(
            "the script reads from stdin, which is empty here",
            hint="run it by `memest run` without `--no-input`, or give the answers as arguments",
        )

    read = readline = readlines = __next__ = _refuse


# The Python environment of the script, in which memest need not be installed.
#
# The script's interpreter runs memest from a folder of links at the front of `PYTHONPATH`: memest
# itself, and those of `PURE` that the environment lacks.


def active_environment() -> Path | None:
    """Return the interpreter of `VIRTUAL_ENV`; None if that is unset or is this environment."""
    folder = os.environ.get("VIRTUAL_ENV")
    if not folder or os.path.realpath(folder) == os.path.realpath(sys.prefix):
        return None
    return next((path for path in _interpreter_paths(Path(folder)) if path.is_file()), None)


def run_elsewhere(python: Path, arguments: Sequence[str]) -> int | None:
    """Run `memest run` with `arguments` under the interpreter `python`.

    Return None, without a run, if `python` is the interpreter of this environment. Otherwise, on
    POSIX, the other interpreter replaces this process, so that the call never returns. On Windows,
    the call returns the exit code of the run.

    Raises:
        PlanError: there is no such interpreter, it is too old, or it has no torch or no NumPy.
    """
    python, prefix, installed = _examine_python(python)
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


def _interpreter_paths(folder: Path) -> list[Path]:
    return [folder / "bin" / "python", folder / "Scripts" / "python.exe"]


def _examine_python(python: Path) -> tuple[Path, str, list[str]]:
    """Return facts on `python`, an interpreter or the folder of its environment. They are the path
    of the interpreter, its `sys.prefix`, and a list of installed packages. The list has torch,
    NumPy and the packages of `PURE` as far as they are installed."""
    if python.is_dir():
        python = next((p for p in _interpreter_paths(python) if p.is_file()), python)
    program = shutil.which(python)
    if program is None:
        raise PlanError(f"`{python}` is not a Python interpreter", hint="--python .venv/bin/python")
    command = [program, "-c", _PROBE, "torch", "numpy", *PURE]
    try:
        proc = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        version, prefix, installed, present = json.loads(proc.stdout)
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
            fault, install = f"no {name}", "install"
            if name in present:
                fault, install = f"only parts of {name}", "install --force-reinstall"
            raise PlanError(
                f"the environment of `{python}` has {fault}",
                hint=f"{python} -m pip {install} {name}",
            )
    return Path(os.path.abspath(program)), prefix, installed


def _folder_of_links(packages: Sequence[str]) -> Path:
    """Return a folder for the `PYTHONPATH` of another interpreter. The folder has links to memest
    and `packages` of this environment, and to nothing else of it."""
    import hashlib  # 5 ms, which a run in this environment does not need

    sources = {"memest": Path(memest.__file__).parent}
    for name in packages:
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
