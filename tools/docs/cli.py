"""The page of the command line: the help of every command."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import Any, Final

import typer
from shoal.cli.main import build
from shoal.cli.plugins import GROUP
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
    _expand(command)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="shoal"), name="shoal"
    )
    # Lists of commands have cut descriptions, and each command has a heading anyway.
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)*\n", "", text, flags=re.MULTILINE)
    # Every heading moves down one level, below the page's own.
    return HEAD + escape(re.sub(r"^#", "##", text, flags=re.MULTILINE)).rstrip() + "\n"


def _expand(command: Any) -> None:
    """Replace the commands of other distributions, such as `shoal up`, which `shoal` loads when
    they run, by their implementations, so that the page lists their options.
    """
    for entry in entry_points(group=GROUP):
        *path, name = entry.name.split(".")
        group = command
        for part in path:
            group = group.commands[part]
        loaded = entry.load()
        if not isinstance(loaded, typer.Typer):
            function, loaded = loaded, typer.Typer(add_completion=False)
            loaded.command()(function)
        made = typer.main.get_command(loaded)
        made.name = name
        group.commands[name] = made
