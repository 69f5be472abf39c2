"""`shoal extract regions --draw`: the regions of one image, drawn into a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import typer

from shoal.cli.failures import InputError
from shoal.cli.inference import outputs
from shoal.cli.inference.files import TextRecord
from shoal.drawing import drawn
from shoal.extractions import Region
from shoal.results import ExtractResult


def check(output: Path | None, records: Sequence[TextRecord]) -> None:
    """Raise BadParameter or InputError, before any request is sent, for a drawing that cannot be
    made.
    """
    if output is None:
        return
    if str(output) == "-":
        raise typer.BadParameter("--draw must name a .png file")
    outputs.check(output, ".png", name="--draw")
    if len(records) != 1:
        raise typer.BadParameter(f"--draw draws into one image, not {len(records)}")
    if find_spec("PIL") is None:
        raise InputError("--draw needs Pillow: pip install pillow")


def drawing(
    output: Path | None, records: Sequence[TextRecord], ask: Callable[..., ExtractResult]
) -> Callable[..., ExtractResult]:
    """Return `ask`, which also draws the regions of the one image that it was asked about, if there
    is a file for them.
    """
    if output is None:
        return ask

    def ask_and_draw(items: Sequence[str | Path], **options: object) -> ExtractResult:
        result = ask(items, **options)
        _write(output, Path(records[0].text), result[0].regions)
        return result

    return ask_and_draw


def _write(output: Path, image: Path, regions: Sequence[Region]) -> None:
    """Write a PNG. Raises InputError for an image that this computer's Pillow does not read."""
    try:
        data = drawn(image.read_bytes(), regions)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{image} cannot be drawn into: {error}") from None
    outputs.replace_file(output, lambda file: file.write(data))
