"""`shoal models convert`: writes a copy of a model's directory with safetensors instead of torch,
GGUF or ONNX files. Needs no mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from shoal.cli.console import SafeConsole, print_error, show, size

from libs.conversion import ConversionRecord
from libs.conversion.plan import GGUF_SETTINGS
from libs.errors import ShoalError
from libs.store import write_converted


def convert(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A model's directory with torch checkpoints, a GGUF or an ONNX file.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The directory to write; default: DIR-safetensors.",
        ),
    ] = None,
) -> None:
    """Write a copy of a model's directory with its weights as safetensors. Code in torch
    checkpoints is not run, and DIR is not changed.

    GGUF (llama, qwen2, gemma3; the extra `gguf`) is dequantised, and its tokenizer and chat
    template are written as files. ONNX initializers with parameter names are written; DIR then
    needs config.json and a tokenizer.

    Exit code 0: written, or nothing to convert; 1: a file is refused.
    """
    source = directory.resolve()
    target = output or source.with_name(f"{source.name}-safetensors")
    try:
        with SafeConsole(stderr=True).status(Text(str(source))) as status:
            done = write_converted(
                source,
                target,
                lambda file, written, total: status.update(
                    Text(f"{file}: {size(written)} of {size(total)}")
                ),
            )
    except ShoalError as error:
        print_error(error.message, [], "")
        raise typer.Exit(1) from None
    if not done:
        show(Text(f"{source}: weights are already safetensors; nothing to write"))
        return
    for one in done:
        for line in _lines(one):
            show(Text(line))
    show(Text(f"written: {target}", style="green"))


def _lines(one: ConversionRecord) -> list[str]:
    """Describe a conversion: the files, then tensors that the new file lacks."""
    if one.output == GGUF_SETTINGS:
        return [f"{one.source}: its settings, tokenizer and chat template, by {one.converter}"]
    tied = [
        f"  {name}: the same tensor as {equal}, written once" for name, equal in one.tied.items()
    ]
    left_out = [f"  {name}: skipped (not a tensor, or unnamed)" for name in one.left_out]
    return [
        f"{one.source} to {one.output}: {one.tensors:,} tensors, {size(one.output_bytes)}, "
        f"by {one.converter}",
        *tied,
        *left_out,
    ]
