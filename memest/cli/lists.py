"""`memest models`, `memest gpus` and `memest completion`: what is known."""

from __future__ import annotations

import dataclasses
import json

import click

from memest.cli.group import main


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model.")
def models(as_json: bool) -> None:
    """List the bundled models."""
    from memest.models_meta.registry import list_models
    from memest.render.text import render_models

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
    from memest.render.gpus import evidence, render_gpus

    cards = list_gpus()
    if as_json:
        for card in cards:
            row = dataclasses.asdict(card) | {"limit_bytes": card.limit_bytes}
            click.echo(json.dumps(row | {"evidence": evidence(card)}))
        return
    click.echo(render_gpus(cards, verbose=verbose))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete names and values.

    \b
    echo 'eval "$(memest completion bash)"' >> ~/.bashrc
    echo 'eval "$(memest completion zsh)"' >> ~/.zshrc
    memest completion fish > ~/.config/fish/completions/memest.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "memest", "_MEMEST_COMPLETE").source())
