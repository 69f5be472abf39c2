"""The page of the command line: the help of every command."""

from __future__ import annotations

import re
from typing import Final

import typer
from shoal.cli.main import build
from typer.cli import get_docs_for_click

from tools.docs.markdown import escape

ALIASES: Final = {"embed": "encode", "rerank": "score"}
HEAD: Final = """# Command line

Generated from the help of `shoal` by `python -m tools.docs`.
`shoal embed` is the same as `shoal encode`, and `shoal rerank` the same as `shoal score`.

"""


def page() -> str:
    command = typer.main.get_group(build())
    for alias in ALIASES:
        command.commands.pop(alias)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="shoal"), name="shoal"
    )
    # Lists of commands have cut descriptions, and each command has a heading anyway.
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)*\n", "", text, flags=re.MULTILINE)
    # Every heading moves down one level, below the page's own.
    return HEAD + escape(re.sub(r"^#", "##", text, flags=re.MULTILINE)).rstrip() + "\n"
