"""The command `memest` itself: every expected error is two lines and an exit code."""

import errno
import os
import platform
import sys
from collections import ChainMap
from importlib import import_module
from typing import Any

import click

from memest.errors import MemestError, closest
from memest.packages import broken_package

SECTIONS = {
    "Predict": {"run": "run", "checkpoint": "run", "predict": "predict", "explore": "explore"},
    "Search": {
        "advise": "predict", "cheapest": "sweep", "max-batch": "sweep", "sweep": "sweep",
    },
    "Draw": {"chart": "chart", "lecture": "explore"},
    "Measure": {"validate": "validate", "compare": "diff"},
    "Integrate": {"diff": "diff", "ci": "diff", "mcp": "mcp"},
    "Look up": dict.fromkeys(("models", "gpus", "schema", "completion", "doctor"), "doctor"),
}  # fmt: skip
"""Sections of `memest --help`, with every command and its module of `cli`."""

OPTION_SECTIONS: dict[str, str] = {}  # section of a command's help by parameter; see `options.py`
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errno of a full disk or a failed write


class _Command(click.Command):
    """Command whose `--help` lists the options in sections, such as `GPUs`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                section = OPTION_SECTIONS.get(str(param.name), "Options")
                sections.setdefault(section, []).append(record)
        options = sections.pop("Options", [])
        for name, records in {"Options": options, **sections}.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class _Group(click.Group):
    """Command group that prints an expected error as two lines, and exits with the error's code."""

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(ChainMap(*SECTIONS.values()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of command `cmd_name`; return the command, or None if there is none."""
        if module := ChainMap(*SECTIONS.values()).get(cmd_name):
            import_module(f"memest.cli.{module}")
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands to the help page `formatter`, in sections."""
        for section, names in SECTIONS.items():
            commands = [(n, c) for n in names if (c := self.get_command(ctx, n)) is not None]
            rows = [(name, command.get_short_help_str(70)) for name, command in commands]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (args[0], command of this name, args[1:]); raise `UsageError` if there is none."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            suggestion = "".join(f" Did you mean {n!r}?" for n in closest(args[0], names, 1))
            raise click.UsageError(f"No such command {args[0]!r}.{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        kwargs.setdefault("prog_name", "memest")
        try:
            code = super().main(*args, **kwargs)
        except MemestError as error:
            fail(str(error), error.hint, error.exit_code)
        except click.UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # of click 8.2 and newer: the help
                error.show()
                sys.exit(error.exit_code)
            program = error.ctx.command_path if error.ctx else "memest"
            message = error.format_message()
            hint = f"`{program} --help` lists the options"
            if "extra argument" in message and ".py" in message:
                hint = "`memest run SCRIPT` simulates a script; this command takes a model"
            fail(message, hint, error.exit_code)
        except click.ClickException as error:
            fail(error.format_message(), "", error.exit_code)
        except click.Abort:
            fail("interrupted", "", 130)  # 128 + SIGINT, as in shells
        except BrokenPipeError:  # the reader of a pipe has seen enough
            _discard_output()
            sys.exit(0)
        except (ImportError, OSError) as error:
            if broken := broken_package(error):
                fail(*broken, 3)
            if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
                raise
            _fail_to_write(error)
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
        except OSError as error:
            _fail_to_write(error)
        sys.exit(code if isinstance(code, int) else 0)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_to_write(error: OSError) -> None:
    """Report that stdout cannot be written, discard the rest of the output, and exit."""
    _discard_output()
    fail(f"the output cannot be written: {error.strerror}", "write where there is room", 1)


def fail(message: str, hint: str, code: int) -> None:
    """Print `message` and `hint` on stderr, and exit with `code`: the call never returns."""
    print_error(message, hint)
    sys.exit(code)


def print_error(message: str, hint: str) -> None:
    """Print `message` and `hint`, a line each, on stderr; an empty hint has no line."""
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    if hint:
        click.echo(f"hint: {' '.join(hint.split())}", err=True)


def _print_versions(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from memest.estimator.versions import STACK, library_versions

    python = f"{platform.python_version()} on {platform.platform()}"
    for name, number in {**library_versions(*STACK), "Python": python}.items():
        click.echo(f"{name} {number}")
    ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions,
    help="Show the installed versions and exit.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context) -> None:
    """Predict the GPU memory of a fine-tune before a GPU is rented."""
    if ctx.invoked_subcommand == "run":  # the script's output stays unchanged
        return
    from memest.cli.terminal import print_any_text

    print_any_text(sys.stdout)
    if ctx.invoked_subcommand != "validate":  # `memest validate` trains on a real GPU
        from memest.engines import collect_seldom

        ctx.call_on_close(collect_seldom())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
