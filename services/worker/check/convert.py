"""`shoal models convert`: writes a model's directory with safetensors instead of torch checkpoints. No mesh is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from shoal.cli.console import Console, print_error, show, size

from libs.conversion import Converted
from libs.errors import ShoalError
from libs.store import write_converted


def convert(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A model's directory with torch checkpoints.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The directory to write; default: DIR-safetensors.")
    ] = None,
) -> None:
    """Write a copy of a model's directory whose torch checkpoints are safetensors. Their code is not run; DIR is left as it is.

    Exit code 0: it is written, or there was nothing to convert; 1: a file is refused.
    """
    source = directory.resolve()
    target = output or source.with_name(f"{source.name}-safetensors")
    try:
        with Console(stderr=True).status(Text(str(source))) as status:
            done = write_converted(
                source, target, lambda file, written, total: status.update(Text(f"{file}: {size(written)} of {size(total)}"))
            )
    except ShoalError as error:
        print_error(error.message, [], "")
        raise typer.Exit(1) from None
    if not done:
        show(Text(f"{source}: its weights are safetensors already; nothing is written"))
        return
    for one in done:
        for line in _lines(one):
            show(Text(line))
    show(Text(f"written: {target}", style="green"))


def _lines(one: Converted) -> list[str]:
    """A conversion as text: the files, then what the new one does not have."""
    tied = [f"  {name}: the same tensor as {equal}, written once" for name, equal in one.tied.items()]
    left_out = [f"  {name}: left out, as it is not a tensor" for name in one.left_out]
    return [f"{one.source} to {one.output}: {one.tensors:,} tensors, {size(one.output_bytes)}", *tied, *left_out]
