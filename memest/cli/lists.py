"""`memest models`, `gpus`, `schema` and `completion`: lists of known names."""

from __future__ import annotations

import dataclasses
import json

import click

from memest.cli.group import main
from memest.errors import PlanError, shown


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model.")
def models(as_json: bool) -> None:
    """List the bundled models."""
    from memest.models_meta.registry import list_models
    from memest.report.text import render_models

    entries = list_models()
    if as_json:
        keys = ("name", "hub_id", "aliases", "family", "modality", "num_params")
        for entry in entries:
            click.echo(json.dumps({key: getattr(entry, key) for key in keys}))
        return
    click.echo(render_models(entries))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per GPU.")
@click.option("-v", "--verbose", is_flag=True, help="With the source of every figure.")
def gpus(as_json: bool, verbose: bool) -> None:
    """List the GPUs, and which figures are measured."""
    from memest.estimator.hardware.gpus import list_gpus
    from memest.report.text import evidence, render_gpus

    gpus = list_gpus()
    if as_json:
        for gpu in gpus:
            row = dataclasses.asdict(gpu) | {"limit_bytes": gpu.limit_bytes}
            click.echo(json.dumps(row | {"evidence": evidence(gpu)}))
        return
    click.echo(render_gpus(gpus, verbose=verbose))


@main.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON schema of a report: run, predicted, measured, plan, or peak.

    Without a name, an object of all of them.
    """
    from memest.report.schema import REPORTS, schema_of

    if name is None:
        click.echo(json.dumps({each: schema_of(each) for each in REPORTS}, indent=1))
        return
    if name not in REPORTS:
        hint = f"known: {', '.join(REPORTS)}"
        raise PlanError(f"no report is called {shown(name)}", hint=hint)
    click.echo(json.dumps(schema_of(name), indent=1))


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

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "memest", "_MEMEST_COMPLETE").source())
