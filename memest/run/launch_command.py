"""Commands of launchers, such as `torchrun`: the script and the ranks that a launcher starts."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from memest.child import submit
from memest.errors import MemestError, PlanError, UnsupportedError, shown
from memest.packages import require


@dataclass(frozen=True, slots=True)
class Launch:
    """Script or module that a launcher starts, with its arguments and the number of its ranks."""

    script: str  # path of the script, or name of the module
    args: tuple[str, ...]
    is_module: bool = False
    num_local: int | None = None  # ranks of a node; None if the launcher starts no ranks
    num_nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # variables besides `torchrun`'s
    local_rank: str = ""  # argument to which each rank appends its number: `--local_rank=`


def read_launch(module: str | None, words: Sequence[str]) -> Launch | None:
    """Return what a launcher's command would start; None if the command is of no launcher.

    `module` is the name after `python -m`, and `words` are its arguments. If `module` is None,
    `words` are the program, such as `torchrun`, and its arguments. The launcher is imported in a
    child process, since its libraries look for a GPU when they are imported.

    Raises:
        PlanError: the launcher refuses its arguments, or they lack the number of GPUs.
        UnsupportedError: the launcher would start something else than a Python script.
    """
    if module is not None:
        reader = _READER_BY_MODULE.get(module)
        words = [module, *words]
    else:
        program = Path(words[0])
        is_script = program.name == str(program) and program.is_file()
        reader = None if is_script else _READER_BY_COMMAND.get(program.name)
    if reader is None:
        return None
    launch: Launch = submit(partial(_read_checked, reader, list(words))).answer()
    return launch


def _read_checked(reader: Callable[[list[str]], Launch], command: list[str]) -> Launch:
    warnings.simplefilter("ignore")  # warnings of deprecated launchers
    launcher, *arguments = command
    try:
        return reader(arguments)
    except SystemExit as error:  # the parser has printed the reason
        raise PlanError(
            f"{shown(launcher)} starts no script", hint="correct its options"
        ) from error


def _read_python(all_arguments: list[str]) -> Launch:
    arguments = all_arguments[:]
    while arguments and arguments[0].startswith("-") and not arguments[0].startswith("-m"):
        if arguments[0] in ("-", "-c"):
            raise UnsupportedError("the code is not in a file", hint="write it to a script")
        option = arguments.pop(0)
        if option in ("-W", "-X"):
            del arguments[:1]  # the option's value
    is_module = bool(arguments) and arguments[0].startswith("-m")
    if is_module:
        option = arguments.pop(0)
        if option != "-m":  # `-mMODULE`
            arguments.insert(0, option.removeprefix("-m"))
    if not arguments:
        raise PlanError("no script is named", hint="`memest run train.py`, or `-m MODULE`")
    name, *rest = arguments
    if is_module and name in _READER_BY_MODULE:
        return _READER_BY_MODULE[name](rest)
    return Launch(name, tuple(rest), is_module)


def _read_torchrun(arguments: list[str], module: str = "torch.distributed.run") -> Launch:
    launcher = import_module(module)
    return _launch_from(*_until_started("torchrun", lambda: launcher.main(arguments)))


def _read_accelerate(arguments: list[str]) -> Launch:
    subcommand, *rest = arguments or [""]
    if subcommand != "launch":
        raise UnsupportedError(
            f"`accelerate {subcommand}` starts no script", hint="name the script itself"
        )
    return _read_accelerate_launch(rest)


def _read_accelerate_launch(arguments: list[str]) -> Launch:
    """Return what `accelerate launch` with `arguments` would start."""
    require("accelerate")
    launcher = import_module("accelerate.commands.launch")

    def start() -> None:
        launcher.launch_command(launcher.launch_command_parser().parse_args(arguments))

    return _with_accelerate("accelerate launch", start)


def _read_trl(arguments: list[str]) -> Launch:
    """Return what TRL's command with `arguments` would start by `accelerate launch`. TRL first
    checks the arguments of the training script. For most trainers, that check needs a GPU. So TRL
    runs on a virtual GPU, which exists only during this call."""
    require("trl")
    session = import_module("memest.run.session")

    def start() -> None:
        with session.virtual_gpu(), mock.patch.object(sys, "argv", ["trl", *arguments]):
            import_module("trl.cli").main()

    return _with_accelerate("trl", start)


def _with_accelerate(name: str, start: Callable[[], object]) -> Launch:
    """Return what `start`, a call of `accelerate launch`, would start; `name` is for errors."""
    launcher = import_module("accelerate.commands.launch")

    def start_one_process(args: Any) -> None:
        if not args.num_processes:  # defaults to this machine's GPUs, of which there are none
            raise _without_number("--num_processes")
        if args.num_processes > 1 and not args.cpu:  # accelerate's choice if there are GPUs
            launcher.multi_gpu_launcher(args)
        _, environment = launcher.prepare_simple_launcher_cmd_env(args)
        raise _Started(args, environment)

    def start_by_deepspeed(args: Any) -> NoReturn:
        _, environment = launcher.prepare_deepspeed_cmd_env(args)
        args.nnodes = args.num_machines  # as `torchrun` names them
        args.nproc_per_node = args.num_processes // args.num_machines
        raise _Started(args, environment)

    with (
        mock.patch.object(launcher, "simple_launcher", start_one_process),
        mock.patch.object(launcher, "deepspeed_launcher", start_by_deepspeed),
    ):
        args, environment = _until_started(name, start)
    return _launch_from(args, environment)


def _read_deepspeed(arguments: list[str]) -> Launch:
    require("deepspeed")
    runner = import_module("deepspeed.launcher.runner")
    args = runner.parse_args(arguments)
    if args.num_gpus < 1:
        raise _without_number("--num_gpus")
    if args.no_python:
        raise _not_python()
    local_rank = "" if args.no_local_rank else "--local_rank="  # deepspeed/launcher/launch.py
    return Launch(
        args.user_script, tuple(args.user_args), args.module, num_local=args.num_gpus,
        num_nodes=max(1, args.num_nodes), local_rank=local_rank,
    )  # fmt: skip


_READER_BY_COMMAND: dict[str, Callable[[list[str]], Launch]] = {
    "python": _read_python, "python3": _read_python, "torchrun": _read_torchrun,
    "accelerate": _read_accelerate, "accelerate-launch": _read_accelerate_launch,
    "deepspeed": _read_deepspeed, "trl": _read_trl,
}  # fmt: skip
_READER_BY_MODULE: dict[str, Callable[[list[str]], Launch]] = {
    "torch.distributed.run": _read_torchrun,
    "torch.distributed.launch": partial(_read_torchrun, module="torch.distributed.launch"),
    "accelerate.commands.launch": _read_accelerate_launch,
    "accelerate.commands.accelerate_cli": _read_accelerate,
    "deepspeed.launcher.runner": _read_deepspeed,
}  # fmt: skip


def _launch_from(args: Any, environment: Mapping[str, str]) -> Launch:
    if args.no_python or getattr(args, "run_path", False):
        raise _not_python()
    count = getattr(args, "nproc_per_node", None)  # accelerate starts one process without it
    if count is not None and not str(count).isdecimal():  # `gpu`, `auto`: those of this machine
        raise _without_number("--nproc-per-node")
    least, _, most = str(getattr(args, "nnodes", 1)).partition(":")  # `1:4` for an elastic run
    return Launch(
        args.training_script,
        tuple(args.training_script_args),
        bool(args.module),
        num_local=None if count is None else int(count),
        num_nodes=int(most or least),
        environment={k: v for k, v in environment.items() if os.environ.get(k) != v},
        # config_from_args of torch
        local_rank="" if getattr(args, "use_env", True) else "--local-rank=",
    )


def _without_number(option: str) -> MemestError:
    return PlanError("the launcher takes the GPUs of this machine", hint=f"give `{option} N`")


def _not_python() -> MemestError:
    return UnsupportedError("the launcher starts no Python script", hint="name a Python script")


class _Started(BaseException):
    def __init__(self, args: Any, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.args_of_launcher, self.environment = args, environment


def _start(args: Any) -> NoReturn:
    raise _Started(args, dict(os.environ))


def _until_started(name: str, start: Callable[[], object]) -> tuple[Any, Mapping[str, str]]:
    """Call `start`, which runs a launcher, and stop it before the launcher starts processes. Return
    (the launcher's parsed arguments, the environment variables of its processes). `name` is the
    launcher's name in error messages."""
    run, launch = map(import_module, ("torch.distributed.run", "torch.distributed.launch"))
    try:
        with mock.patch.object(run, "run", _start), mock.patch.object(launch, "run", _start):
            start()
    except _Started as started:
        return started.args_of_launcher, started.environment
    except MemestError:
        raise
    except Exception as error:
        raise PlanError(f"{shown(name)}: {error}", hint="correct its options") from error
    raise UnsupportedError(f"{shown(name)} starts no process here", hint="name the script itself")
