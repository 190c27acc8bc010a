"""Writing of figures: atomic, with the same bytes for the same figure."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from memest.errors import PlanError, shown
from memest.plots.style import FONT, PNG_DPI, plain_matplotlib
from memest.writing import writing

FORMATS = ("png", "svg", "pdf")
_OTHERS = frozenset("bmp eps gif jpeg jpg pgf ps tif tiff webp".split())  # formats a path may name

_METADATA: dict[str, dict[str, Any]] = {  # None omits what matplotlib would write: dates, versions
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SETTINGS = {
    "svg.hashsalt": "memest",  # ids derive from the drawing, not from a random number
    "svg.fonttype": "none",  # keep text as text, which can be searched, copied and edited
    "pdf.fonttype": 42,  # TrueType, so that the text can be searched and edited
}


def save(
    figure: Figure, path: str | os.PathLike[str], formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write `figure` in each of `formats` and return the files; a failure writes none.

    `path` has no suffix, or that of the only format to write.

    Raises:
        PlanError: a format does not exist, or the folder cannot be written.
    """
    stem, names = _stem_and_formats(Path(path), formats)
    targets = [stem.with_name(f"{stem.name}.{name}") for name in names]
    written: dict[Path, Path] = {}
    try:
        with writing(targets[0], "name a folder that you may write to"):
            stem.parent.mkdir(parents=True, exist_ok=True)
            for name, target in zip(names, targets, strict=True):
                temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
                written[temporary] = target
                temporary.write_bytes(_rendered(figure, name))
            for temporary, target in written.items():
                temporary.replace(target)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)
    return targets


def parse_formats(text: str) -> list[str]:
    """Return the formats in `png,svg`, each once; `PlanError` for unknown ones."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return _stem_and_formats(Path("chart"), names)[1]


def svg_text(figure: Figure) -> str:
    """Return `figure` as the text of an SVG file, for a page."""
    text = _rendered(figure, "svg").decode()
    return text[text.index("<svg") :]


def _rendered(figure: Figure, name: str) -> bytes:
    """Return the file of a format; an SVG's fonts are as wide as DejaVu Sans if that is missing."""
    buffer, color = io.BytesIO(), figure.get_facecolor()
    with plain_matplotlib(_SETTINGS):
        figure.savefig(buffer, format=name, dpi=PNG_DPI, metadata=_METADATA[name], facecolor=color)
    content = buffer.getvalue()
    if name == "svg":
        content = content.replace(f"'{FONT}'".encode(), f"'{FONT}', Verdana, sans-serif".encode())
    return content


class Picture:
    """A figure as a notebook shows it: at the end of a cell, with no plotting library set up."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_svg_(self) -> str:
        return svg_text(self.figure)


def _stem_and_formats(path: Path, formats: Sequence[str]) -> tuple[Path, list[str]]:
    """The path without suffix, and the formats, each once."""
    if path.name in ("", ".."):
        raise PlanError(f"`{path}` names no file", hint="write it as `charts/phases`")
    suffix = path.suffix.removeprefix(".").lower()
    if suffix in FORMATS:
        return path.with_suffix(""), [suffix]
    names = list(dict.fromkeys(name.lower().removeprefix(".") for name in formats))
    if suffix in _OTHERS:
        names.insert(0, suffix)
    unknown = next((name for name in names if name not in FORMATS), None)
    if unknown is not None or not names:
        problem = f"format {shown(unknown)} does not exist" if unknown is not None else "no format"
        raise PlanError(problem, hint=f"choose from {', '.join(f'`{f}`' for f in FORMATS)}")
    return path, names
