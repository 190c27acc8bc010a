"""`memest models` and `memest gpus`: what is known."""

from __future__ import annotations

import click

from memest.cli.group import main


@main.command()
def models() -> None:
    """List the bundled models."""
    from memest.models_meta.registry import list_models
    from memest.render.text import render_models

    click.echo(render_models(list_models()))


@main.command()
def gpus() -> None:
    """List the catalogue of GPUs."""
    from memest.estimator.hardware.gpus import list_gpus
    from memest.render.text import render_gpus

    click.echo(render_gpus(list_gpus()))
