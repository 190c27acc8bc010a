"""The command line: parse, one library call, render. torch is imported only when a prediction is
made.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest import __version__
from memest.errors import MemestError, PlanError
from memest.plan import TrainingPlan
from memest.plan_files import read_config, read_suite
from memest.plan_values import (
    ATTENTIONS,
    LORA_BIASES,
    OPTIMIZERS,
    PRECISIONS,
    QUANTISATIONS,
    SHARDINGS,
    STRATEGIES,
)
from memest.units import GIB, parse_bytes

if TYPE_CHECKING:
    from memest.validate.compare import Comparison

OOM_EXIT_CODE = 5
"""Of `--check` when a plan does not fit; without it a verdict is a result, and the exit code 0."""


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        return parse_bytes(value)


class _Group(click.Group):
    """Turns every expected error into two lines on stderr and its own exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        kwargs.setdefault("prog_name", "memest")
        try:
            code = super().main(*args, **kwargs)
        except MemestError as error:
            _fail(str(error), error.hint, error.exit_code)
        except click.UsageError as error:
            where = error.ctx.command_path if error.ctx else "memest"
            _fail(error.format_message(), f"`{where} --help` lists the options", error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), "", error.exit_code)
        except click.Abort:
            _fail("interrupted", "", 130)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, hint: str, code: int) -> None:
    _tell(message, hint)
    sys.exit(code)


def _tell(message: str, hint: str) -> None:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    if hint:
        click.echo(f"hint: {' '.join(hint.split())}", err=True)


_PLAN_OPTIONS = [
    click.option("--model", "model_name", help="Bundled name, folder, config.json or Hub id."),
    click.option("--bs", "batch_size", type=int, help="Samples per micro-batch."),
    click.option("--acc", "accumulate_grad_batches", type=int, help="Micro-batches per step."),
    click.option("--precision", help=f"{', '.join(PRECISIONS)}."),
    click.option("--optim", help=f"{', '.join(OPTIMIZERS)}."),
    click.option("--momentum", type=float, help="Of sgd and rmsprop."),
    click.option("--nesterov/--no-nesterov", default=None, help="Of sgd with momentum."),
    click.option("--act-ckpt/--no-act-ckpt", default=None, help="Activation checkpointing."),
    click.option("--lora/--no-lora", "use_lora", default=None, help="Train LoRA adapters only."),
    click.option("--qlora/--no-qlora", "use_qlora", default=None,
                 help="LoRA on a quantised base."),
    click.option("--quant", help=f"{', '.join(QUANTISATIONS)}."),
    click.option("--lora-r", type=int, help="Rank of the adapters."),
    click.option("--lora-alpha", type=float, help="Scale of the adapters."),
    click.option("--lora-dropout", type=float, help="Dropout before the adapters."),
    click.option("--lora-target", "lora_target_modules", multiple=True,
                 help="Module that gets an adapter, or all-linear."),
    click.option("--lora-save", "lora_modules_to_save", multiple=True,
                 help="Module trained whole beside the adapters."),
    click.option("--lora-bias", help=f"{', '.join(LORA_BIASES)}."),
    click.option("--rslora/--no-rslora", "use_rslora", default=None, help="Rank-stable scale."),
    click.option("--dora/--no-dora", "use_dora", default=None, help="Weight-decomposed LoRA."),
    click.option("--double-quant/--no-double-quant", default=None,
                 help="Quantise nf4's scales too."),
    click.option("--quant-skip", multiple=True, help="Module that stays unquantised."),
    click.option("--strategy", help=f"{', '.join(STRATEGIES)}."),
    click.option("--devices", type=int, help="Number of GPUs."),
    click.option("--sharding", "sharding_strategy", help=f"FSDP: {', '.join(SHARDINGS)}."),
    click.option("--shard-size", type=int, help="FSDP, HYBRID_SHARD: GPUs that share a copy."),
    click.option("--wrap", "wrap_classes", multiple=True, help="FSDP: layer class to wrap."),
    click.option("--ckpt-policy", "activation_checkpointing_policy", multiple=True,
                 help="FSDP: layer class to checkpoint."),
    click.option("--bucket-view/--no-bucket-view", "gradient_as_bucket_view", default=None,
                 help="DDP: gradients lie in the buckets."),
    click.option("--bucket-cap-mb", type=int, help="DDP: MiB of gradients in a bucket."),
    click.option("--reduce-bucket-size", type=int, help="DeepSpeed: elements summed at once."),
    click.option("--allgather-bucket-size", type=int, help="DeepSpeed: elements gathered at once."),
    click.option("--seq-len", type=int, help="Tokens per sample, padding included."),
    click.option("--padded/--no-padded", default=None, help="Whether some rows are shorter."),
    click.option("--image-size", type=int, help="Pixels per side."),
    click.option("--attn", "attn_implementation", help=f"{', '.join(ATTENTIONS)}."),
    click.option("--freeze", multiple=True, help="Glob of parameter names not to train."),
    click.option("--tie-embeddings/--untie-embeddings", "tie_word_embeddings", default=None,
                 help="Whether the output head shares the embeddings."),
    click.option("--gpu", multiple=True, help="GPU to judge; may be given again."),
    click.option("--gpu-memory", type=_Size(), help="Memory of a GPU not in the catalogue: 24GiB."),
    click.option("--memory-limit", type=_Size(), help="Cap on the allocator: 78.4GiB."),
    click.option("--host-memory", type=_Size(), help="Host memory of the node to judge: 256GiB."),
    click.option("--steps", type=int, help="Optimizer steps to simulate."),
]  # fmt: skip


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_PLAN_OPTIONS):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memest")
def main() -> None:
    """Predict the GPU memory of a fine-tune before a GPU is rented."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@main.command()
@_plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--suite", type=click.Path(path_type=Path), help="YAML or JSON of many plans.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per plan.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if a plan does not fit.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Processes for a suite; by default one per core."
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that a config brings along."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with charts as well.")
@click.option(
    "--snapshot", type=click.Path(path_type=Path), help="Write the run as PyTorch's snapshot."
)
@click.option(
    "--chrome-trace", type=click.Path(path_type=Path), help="Write the run for Perfetto, as JSON."
)
def predict(
    config: Path | None,
    suite: Path | None,
    as_json: bool,
    output: Path | None,
    check: bool,
    jobs: int | None,
    trust_remote_code: bool,
    html: Path | None,
    snapshot: Path | None,
    chrome_trace: Path | None,
    **flags: Any,
) -> int:
    """Predict one plan, or a suite of them.

    \b
    memest predict --model blip2-flan-t5-xxl --optim adam_8bit --bs 2
    memest predict --model llama-3.1-8b --lora --seq-len 2048 --gpu a100-80gb --gpu rtx-4090
    memest predict --config lab.yaml --bs 8
    memest predict --suite experiments.yaml --json
    memest predict --model gpt2 --bs 8 --html report.html --snapshot step.pickle
    """
    given = {k: v for k, v in flags.items() if v is not None and v != ()}
    plans = _plans(config, suite, given)
    for path in (output, html, snapshot, chrome_trace):
        if path is not None:
            _check_writable(path)
    if (snapshot or chrome_trace) and len(plans) > 1:
        raise PlanError("a recording is of one plan", hint="leave `--suite` out")
    from memest.cli_chart import write_files
    from memest.estimator.search.suite import apart, named, predict_each
    from memest.render import render_suite, render_text

    found = predict_each(plans, jobs=jobs, trust_remote_code=trust_remote_code)
    predicted, failed = apart(plans, found)
    if suite is None and failed:
        raise failed[0][1]
    reports = [report for _, report in predicted]
    write_files(
        [plan for plan, _ in predicted],
        reports,
        html=html,
        snapshot=snapshot,
        chrome_trace=chrome_trace,
    )
    if as_json:
        text = "\n".join(report.to_json() for report in reports)
    else:
        text = render_text(reports[0]) if suite is None else render_suite(reports)
    if output is None:
        click.echo(text)
    else:
        _write(output, text + "\n")
    for error in (named(*each) for each in failed):
        _tell(str(error), error.hint)
    if failed:
        return failed[0][1].exit_code
    return OOM_EXIT_CODE if check and any(r.verdict == "oom" for r in reports) else 0


@main.command()
def models() -> None:
    """List the bundled models."""
    from memest.models_meta.registry import list_models
    from memest.render import render_models

    click.echo(render_models(list_models()))


@main.command()
def gpus() -> None:
    """List the catalogue of GPUs."""
    from memest.estimator.hardware.gpus import list_gpus
    from memest.render import render_gpus

    click.echo(render_gpus(list_gpus()))


@main.command()
@_plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--suite", help="lab-a100, lab-h100, or a YAML or JSON of many plans.")
@click.option("--results", type=click.Path(path_type=Path), help="JSON Lines to append to.")
@click.option("--resume", is_flag=True, help="Pass over what the results hold already.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, help="Seconds for one experiment."
)
@click.option(
    "--weights", type=click.Choice(["random", "pretrained"]), default="random", help="Of the model."
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="`datasets` folder with image and text columns."
)
@click.option(
    "--snapshots", type=click.Path(path_type=Path), help="Folder for recordings of the allocator."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per experiment on stdout.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that a config brings along."
)
def validate(
    config: Path | None,
    suite: str | None,
    results: Path | None,
    resume: bool,
    timeout: float,
    weights: str,
    data: Path | None,
    snapshots: Path | None,
    as_json: bool,
    trust_remote_code: bool,
    **flags: Any,
) -> int:
    """Run plans for real on the GPU at hand, and write what they printed.

    Without a plan it takes the suite of the GPU. The table goes to stderr, `--json` to stdout.

    \b
    memest validate
    memest validate --suite lab-a100 --memory-limit 78.66GiB --resume
    memest validate --model blip2-opt-2.7b --bs 16 --precision 32-true
    """
    given = {k: v for k, v in flags.items() if v is not None and v != ()}
    for key in ("gpu", "gpu_memory"):
        if key in given:
            raise PlanError(
                f"`--{key.replace('_', '-')}` does not apply: the GPU at hand is measured",
                hint="cap it with `--memory-limit 78.66GiB`",
            )
    if suite is not None:
        from memest.validate.suite_files import find_suite

        find_suite(suite)
    from memest.validate.runner import detect_device

    device = detect_device()
    rows, label = _validation_rows(config, suite, given, device)
    limit = given.get("memory_limit")
    if results is None:
        capped = f"-capped-{limit / GIB:.2f}GiB" if limit else ""
        gpu = device.catalogue_name.replace(" ", "-")
        results = Path("results", f"{gpu}-{label}{capped}.jsonl")
    from memest.validate.experiment import RunOptions
    from memest.validate.runner import validate as run_all

    options = RunOptions(
        weights=weights, data=data, snapshots=snapshots, trust_remote_code=trust_remote_code
    )
    measured = run_all(
        rows,
        results=results,
        device=device,
        resume=resume,
        timeout_s=timeout,
        options=options,
        on_progress=_show_progress(),
    )
    click.echo(f"results: {results}", err=True)
    if as_json:
        click.echo("\n".join(m.to_json() for m in measured))
    return 0


def _validation_rows(
    config: Path | None, suite: str | None, given: dict[str, Any], device: Any
) -> tuple[Sequence[TrainingPlan], str]:
    """What is to be run, and a word for the name of the results file."""
    from memest.validate.snapshot import file_stem
    from memest.validate.suite_files import find_suite, suite_for_device

    if config is None and (suite is not None or "model_name" not in given):
        suite = suite or suite_for_device(device.name, device.memory_bytes)
        path = find_suite(suite)
        return read_suite(path, given), path.stem
    plan = _plans(config, None if suite is None else Path(suite), given)[0]
    return [plan], file_stem(plan.label)


def _show_progress() -> Callable[[Any], None]:
    """Prints the live table on stderr; the running line only where it can be overwritten."""
    from memest.validate.progress import finished_line, header, running_line

    click.echo(header(), err=True)
    is_terminal = sys.stderr.isatty()

    def show(progress: Any) -> None:
        clear = "\r\x1b[K" if is_terminal else ""
        if progress.measurement is not None:
            click.echo(clear + finished_line(progress), err=True)
        elif is_terminal:
            click.echo(clear + running_line(progress), nl=False, err=True)

    return show


@main.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--markdown", is_flag=True, help="A page for the documentation.")
@click.option("--charts", type=click.Path(path_type=Path), help="Folder for charts of every run.")
@click.option("--check", is_flag=True, help="Exit with 4 if a run is outside its tolerance.")
@click.option(
    "--tolerance", multiple=True, help="NAME=PERCENT of allocated, reserved, process, phase."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
def compare(
    results: tuple[Path, ...],
    as_json: bool,
    markdown: bool,
    charts: Path | None,
    check: bool,
    tolerance: tuple[str, ...],
    output: Path | None,
    jobs: int | None,
) -> int:
    """Predict what measured runs printed, and show both side by side.

    \b
    memest compare results/lab-h200.jsonl
    memest compare results/*.jsonl --check --tolerance allocated=0.2
    """
    from memest.report import read_measurements
    from memest.validate.compare import comparable, parse_tolerances, plan_of, summarise
    from memest.validate.compare import compare as compare_reports

    tolerances = parse_tolerances(tolerance)
    measured, left_out = comparable([m for path in results for m in read_measurements(path)])
    plans = [plan_of(m) for m in measured]
    if output is not None:
        _check_writable(output)
    from memest.estimator.search.suite import predict_all
    from memest.render_compare import (
        comparison_json,
        render_comparison,
        render_comparison_markdown,
    )

    comparisons = compare_reports(measured, predict_all(plans, jobs=jobs))
    summary = summarise(comparisons, tolerances)
    if as_json:
        text = json.dumps(comparison_json(comparisons, summary))
    else:
        text = (render_comparison_markdown if markdown else render_comparison)(comparisons, summary)
    for line in left_out:
        click.echo(f"not compared: {line}", err=True)
    if output is None:
        click.echo(text)
    else:
        _write(output, text + "\n")
    if charts is not None:
        _draw(comparisons, charts)
    if (check or tolerance) and summary.broken:
        _fail(f"{len(summary.broken)} outside tolerance: {summary.broken[0]}", "", 4)
    return 0


def _draw(comparisons: Sequence[Comparison], folder: Path) -> None:
    """The scatter of all runs, and the phases of each."""
    from memest.plots import plot_phases, plot_scatter, save

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"`{folder}` cannot be made: {error.strerror}", hint="name another folder"
        ) from error
    pairs = [(c.predicted, c.measured) for c in comparisons]
    save(plot_scatter(pairs), folder / "scatter")
    for comparison in comparisons:
        predicted, measured = comparison.predicted, comparison.measured
        limit = predicted.verdicts[predicted.gpu].limit_bytes
        name = re.sub(r"[^A-Za-z0-9.=+-]+", "-", comparison.name)
        save(plot_phases(predicted, measured, gpu_limit_bytes=limit), folder / f"phases-{name}")


def _plans(config: Path | None, suite: Path | None, given: dict[str, Any]) -> list[TrainingPlan]:
    if config is not None and suite is not None:
        raise PlanError("`--config` and `--suite` are given together", hint="choose one")
    if suite is not None:
        return read_suite(suite, given)
    if config is not None:
        return [read_config(config, given)]
    return [TrainingPlan.from_dict(given)]


def _check_writable(path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PlanError(f"`{path}` cannot be written", hint="name a file in a folder that exists")


def _write(path: Path, text: str) -> None:
    """Write beside and rename, so that nothing half-written is ever there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PlanError(
            f"`{path}` cannot be written: {error.strerror}", hint="name another file"
        ) from error


from memest import cli_advise, cli_chart, cli_scaling, cli_sweep  # noqa: E402, F401  own files

if __name__ == "__main__":
    main()
