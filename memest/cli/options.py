"""Command-line options of a plan, generated from its fields."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from memest.cli.group import OPTION_SECTIONS
from memest.engines import ENGINES, find_engine
from memest.errors import PlanError
from memest.estimator.hardware.gpus import list_gpus
from memest.estimator.versions import RELEASES, simulating
from memest.plan.keys import Key
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.training_plan import PLAN_KEYS
from memest.report.answer import SCHEDULERS
from memest.report.times import Training, read_prices, steps_of_plan
from memest.units import parse_bytes
from memest.writing import why_not_writable

Option = Callable[[Callable[..., Any]], Callable[..., Any]]  # adds options to a command


def combined(*options: Option) -> Option:
    """Return one decorator that adds all `options` to a command, in the order of `--help`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class Size(click.ParamType):  # type: ignore[type-arg]
    """Type of options whose value is a size in bytes, such as 24GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value`, a text such as 24GiB, as a number of bytes."""
        return parse_bytes(value)


class OutputPath(click.Path):
    """Option type of output files; an unwritable path is an error before the command runs."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return `value` as a path; raise `PlanError` if no file can be written there."""
        path = Path(str(super().convert(value, param, ctx)))
        if str(path) == "-":
            raise PlanError("`-` is not a file", hint="stdout is `/dev/stdout`")
        if reason := why_not_writable(path):
            raise PlanError(
                f"`{path}` cannot be written: {reason}", hint="name a file in a folder that exists"
            )
        return path


def completes(values: Callable[[], Iterable[str]], *, is_list: bool = False) -> Any:
    """Return a function for click's `shell_complete`. It proposes those strings of `values()` that
    begin with the typed text. If `is_list`, the typed text is a list such as `gpt2,opt`. Then only
    the part after the last comma is completed; proposals keep the part before it."""

    def complete(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        head, comma, tail = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        return [CompletionItem(f"{head}{comma}{v}") for v in values() if v.startswith(tail)]

    return complete


def model_names() -> list[str]:
    """Return names of the bundled models, from file names only, so that completion is fast."""
    from memest.models_meta.registry import CONFIG_DIR

    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def gpu_names() -> list[str]:
    """Return names of the catalogue's GPUs."""
    return [gpu.name for gpu in list_gpus()]


VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "model_name": model_names, "models": model_names, "gpu": gpu_names, "gpu_names": gpu_names,
    "optim": lambda: OPTIMIZERS,
    **{name: partial(list, row.choices) for name, row in PLAN_KEYS.items() if row.choices},
}  # fmt: skip
"""Values that a shell completes, by key."""

_TYPES = {"int": int, "float": float, "str": str}


def _option(row: Key) -> Option:
    """Return the command-line option of the plan key `row`. Also store the key's section of
    `--help`, such as `GPUs`, in the global table `OPTION_SECTIONS`."""
    OPTION_SECTIONS[row.name] = row.section
    if row.is_switch:
        return click.option("/".join(row.flags), row.name, default=None, help=row.help_text)
    kind = Size() if row.is_size else _TYPES.get(row.type.partition(" ")[0])
    complete = completes(VALUES[row.name]) if row.name in VALUES else None
    return click.option(
        row.flag, row.name, type=kind, multiple=row.is_repeated, help=row.help_text,
        shell_complete=complete,
    )  # fmt: skip


PATH = click.Path(path_type=Path)
OUT = OutputPath(path_type=Path)
config = click.option(
    "--config", type=PATH, help="YAML, JSON or TOML of one plan; flags override it."
)
jobs = click.option(
    "--workers", "--jobs", "jobs", type=click.IntRange(1),
    help="Workers at a time; by default a process per core.",
)  # fmt: skip
remote_code = click.option(
    "--trust-remote-code", is_flag=True, help="Run model code from the config's folder."
)


def models(text: str, **settings: Any) -> Option:
    """Return the repeatable option `--model`; `text` is its help, `settings` are click's."""
    complete = completes(VALUES["models"])
    return click.option(
        "--model", "models", multiple=True, help=text, shell_complete=complete, **settings
    )


def gpus(text: str) -> Option:
    """Return the repeatable option `--gpu`, with help `text`."""
    return click.option("--gpu", multiple=True, help=text, shell_complete=completes(VALUES["gpu"]))


def _check_engine(ctx: click.Context, param: Any, value: str) -> str:
    """Return `value`, the name of an engine; raise `UnsupportedError` if it cannot run here."""
    find_engine(value)
    return value


engine = click.option(
    "--engine", type=click.Choice(list(ENGINES)), default="local", show_default=True,
    callback=_check_engine, help="Where workers run: this machine, a Ray cluster, Slurm.",
)  # fmt: skip


def _simulate_release(ctx: click.Context, param: Any, value: str | None) -> None:
    ctx.with_resource(simulating(value))  # until the command ends


torch = click.option(
    "--torch", "torch_release", expose_value=False, callback=_simulate_release,
    help=f"Release whose kernels are simulated: {', '.join(r.name for r in RELEASES)}. [installed]",
    shell_complete=completes(lambda: [r.name for r in RELEASES]),
)  # fmt: skip
OPTION_SECTIONS["torch_release"] = "GPUs"
emit = click.option(
    "--emit", type=click.Choice(SCHEDULERS),
    help="Print the resource lines of the smallest GPU on which it fits.",
)  # fmt: skip
_train_steps = click.option(
    "--train-steps", type=click.IntRange(1), help="Optimizer steps of the whole training."
)
_price = click.option(
    "--price",
    help="Price of a GPU for an hour, a YAML file (h100-80gb: 2.10) or a folder of gpuhunt.",
)
_epochs = click.option(
    "--epochs", type=click.FloatRange(0, min_open=True),
    help="Epochs of the training, with --samples.",
)  # fmt: skip
_samples = click.option("--samples", type=click.IntRange(1), help="Samples of an epoch.")
OPTION_SECTIONS |= dict.fromkeys(("train_steps", "price", "epochs", "samples"), "Time and price")

STEPS_WITHOUT_NUMBER = 1000  # number of steps that is priced if none is given


@dataclass(frozen=True, slots=True)
class WholeTraining:
    """Length and prices of a whole training, as given on the command line, to estimate its cost."""

    num_steps: int | None  # optimizer steps; None if not given
    prices: Mapping[str, float]  # price of one GPU for an hour, by name; `""` is any other GPU
    epochs: float | None  # None if not given: 1
    samples: int | None  # samples of an epoch; None if not given

    @property
    def is_given(self) -> bool:
        """True if the command line has a number of steps or samples, or a price."""
        return bool(self.num_steps or self.samples or self.prices)

    def of(self, plan: Mapping[str, Any]) -> Training:
        """Return the `Training` (steps, prices, GPUs) of `plan`: {plan key: value}. The
        `Training` has `STEPS_WITHOUT_NUMBER` steps if the command line has no steps or samples."""
        num_steps = self.num_steps or STEPS_WITHOUT_NUMBER
        if self.samples is not None:
            num_steps = steps_of_plan(plan, self.epochs or 1.0, self.samples)
        num_gpus = plan.get("devices", 1) * plan.get("num_nodes", 1)
        return Training(num_steps, self.prices, num_gpus)


def training(*, has_epochs: bool) -> Option:
    """Return a decorator that adds `--train-steps` and `--price` to a command. The command gets
    them as one argument, `whole: WholeTraining`. `has_epochs` adds `--epochs` and `--samples`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(
            *args: Any, train_steps: int | None, price: str | None, epochs: float | None = None,
            samples: int | None = None, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if epochs is not None and samples is None:
                raise PlanError("`--epochs` needs `--samples`", hint="give the samples of an epoch")
            if samples is not None and train_steps is not None:
                problem = "`--samples` and `--train-steps` exclude each other"
                raise PlanError(problem, hint="give one")
            whole = WholeTraining(train_steps, read_prices(price), epochs, samples)
            return command(*args, whole=whole, **kwargs)

        length_options = (_epochs, _samples) if has_epochs else ()
        return combined(_train_steps, _price, *length_options)(run)

    return add


def plan_without(*names: str) -> Option:
    """Return a decorator that adds `--torch` and the options of all plan keys except `names`."""
    rows = (row for name, row in PLAN_KEYS.items() if row.flag and name not in names)
    return combined(*map(_option, rows), torch)


plan = plan_without()
