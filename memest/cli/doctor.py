"""`memest doctor`, `models`, `gpus`, `schema`, `completion`: what is installed and known."""

import dataclasses
import json
import os
import platform
from importlib import import_module
from pathlib import Path

import click

from memest import __version__, packages
from memest.cli.group import main
from memest.cli.terminal import folded
from memest.errors import PlanError, shown
from memest.estimator import versions
from memest.estimator.hardware.gpus import list_gpus
from memest.models_meta.registry import list_models
from memest.report.text import evidence, render_gpus, render_models

EXTRAS = ("plans", "plots", "validate", "cudnn", "litgpt")  # of pyproject.toml, for users
SETTINGS = ("MEMEST_TORCH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@main.command()
def doctor() -> int:
    """Show what is installed and what is missing.

    Exits with 1 if torch cannot be imported.
    """
    build, is_broken = _describe_torch()
    installed = versions.library_versions(*versions.STACK)
    libraries = [f"{name} {number}" for name, number in installed.items() if name in versions.STACK]
    missing = [name for name in versions.STACK if name not in installed]
    rows = {
        "memest": f"{__version__} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": build,
        "simulated": _describe_release() if "torch" in installed else "",
        "installed": ", ".join(libraries),
        "missing": ", ".join(missing),
        "extras": ", ".join(map(_describe_extra, EXTRAS)),
        "settings": ", ".join(f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ),
    }
    for name, text in rows.items():
        if text:
            click.echo(folded(f"{name:<10} {text}"))
    return int(is_broken)


def _describe_torch() -> tuple[str, bool]:
    """Return (description of the installed torch and its GPU, True if torch cannot be imported)."""
    try:
        torch = import_module("torch")
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {error}", True
    cuda, backend = torch.version.cuda, versions.other_kernels(torch)
    if backend:
        return f"{torch.__version__}, built for {backend}; CUDA kernels are simulated", False
    build = f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'a CPU build'}"
    build += ", a nightly" if versions.is_nightly(torch.__version__) else ""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, none is needed"
    return f"{build}; {gpu}", False


def _describe_release() -> str:
    """Return text on the simulated release of torch, such as `kernels of torch 2.11, measured`.
    `measured` means that GPU memory was measured in runs with this release. The rules of other
    releases come from torch's sources; their text has `read from its sources`."""
    release = versions.simulated()
    sources = f"read from its sources; measured is {versions.MEASURED}"
    origin = "measured" if release.is_measured else sources
    return f"{versions.KERNELS} {release.name}, {origin}"


def _describe_extra(name: str) -> str:
    """Return text: the extra `name` of pyproject.toml is installed, or how to install it."""
    package = next(package for package, extra in packages.EXTRAS.items() if extra == name)
    if packages.is_installed(package):
        return f"{name} installed"
    return f"{name} missing: {packages.how_to_install(package)}"


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model.")
def models(as_json: bool) -> None:
    """List the bundled models."""
    entries = list_models()
    if not as_json:
        click.echo(folded(render_models(entries)))
        return
    for entry in entries:
        keys = ("name", "hub_id", "aliases", "family", "modality", "num_params")
        click.echo(json.dumps({key: getattr(entry, key) for key in keys}))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per GPU.")
@click.option("-v", "--verbose", is_flag=True, help="With the source of every figure.")
def gpus(as_json: bool, verbose: bool) -> None:
    """List the GPUs, and which of their figures are measured."""
    gpus = list_gpus()
    if as_json:
        for gpu in gpus:
            row = dataclasses.asdict(gpu) | {"limit_bytes": gpu.limit_bytes}
            click.echo(json.dumps(row | {"evidence": evidence(gpu)}))
        return
    click.echo(folded(render_gpus(gpus, verbose=verbose)))


@main.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON schema of a report: run, predicted, measured, plan, or peak.

    Without a name, an object of all of them.
    """
    from memest.report.schema import REPORTS, schema_of

    if name is not None and name not in REPORTS:
        hint = f"known: {', '.join(REPORTS)}"
        raise PlanError(f"no report is called {shown(name)}", hint=hint)
    document = schema_of(name) if name else {report: schema_of(report) for report in REPORTS}
    click.echo(json.dumps(document, indent=1))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for the shell that completes names and values.

    \b
    echo 'eval "$(memest completion bash)"' >> ~/.bashrc
    echo 'eval "$(memest completion zsh)"' >> ~/.zshrc
    memest completion fish > ~/.config/fish/completions/memest.fish
    """
    from click.shell_completion import get_completion_class

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    click.echo(shell_class(main, {}, "memest", "_MEMEST_COMPLETE").source())
