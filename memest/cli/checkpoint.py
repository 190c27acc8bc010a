"""`memest checkpoint`: a folder that scripts accept as a model, without its weights."""

from __future__ import annotations

from pathlib import Path

import click

from memest.cli.group import main
from memest.units import format_bytes

_FOLDER = click.Path(path_type=Path)


@main.command()
@click.argument("model")
@click.argument("folder", type=_FOLDER)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["litgpt", "hf"]),
    required=True,
    help="Layout: of `litgpt download`, or of transformers' `save_pretrained`.",
)
@click.option("--tokenizer", type=_FOLDER, help="Copy the tokenizer of this folder.")
def checkpoint(model: str, folder: Path, layout: str, tokenizer: Path | None) -> None:
    """Write a dummy checkpoint of MODEL to FOLDER.

    It has names, shapes and dtypes, but no values: a few hundred kilobytes for any model.
    Scripts load it under `memest run`. Only another dummy checkpoint is overwritten.

    \b
    memest checkpoint open-llama-7b --format litgpt checkpoints/openlm-research/open_llama_7b
    memest checkpoint blip2-opt-2.7b --format hf Salesforce/blip2-opt-2.7b
    """
    from memest.run.dummy_checkpoints import write_checkpoint

    made = write_checkpoint(model, folder, layout=layout, tokenizer=tokenizer)
    click.echo(
        f"{made.folder}: a dummy checkpoint of {made.model}, {made.num_tensors} tensors, "
        f"{format_bytes(made.num_bytes)} for {format_bytes(made.stands_for_bytes)} of weights"
    )
