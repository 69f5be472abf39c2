"""The pages of --help, in which typer would cut and misname options in terminals of 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import typer
from rich.table import Table
from rich.text import Text
from typer import core, rich_utils

CONTEXT: Final[Mapping[str, Any]] = MappingProxyType({"help_option_names": ["--help", "-h"]})
"""Settings of the context of an application."""
_OPTION_CELLS: Final = (6, 7)
"""Cells of an option: four for names, its type and its help; also a mark if any is required."""
_display_type = core.TyperOption.display_type_rich


class _PanelTable(Table):
    """A table of options with one column for all names, which are never cut, where typer has four:
    so there is room for the descriptions.
    """

    def add_row(self, *cells: Any, **options: Any) -> None:
        if len(cells) in _OPTION_CELLS:
            *required, name, short, negative, short_negative, kind, description = cells
            names = (_joined(", ", name, short), _joined(", ", negative, short_negative))
            cells = (*required, _joined("\n", *names), kind, description)
        super().add_row(*cells, **options)
        for column in self.columns[:-2]:
            column.no_wrap = True


def _joined(separator: str, *texts: Text) -> Text:
    return Text(separator).join(text for text in texts if text)


def _option_type(option: core.TyperOption, ctx: Any) -> str | None:
    """Return the type of an option's value; empty for a flag, where typer shows `<bool>` as if a
    value followed it.
    """
    return "" if option.is_flag else _display_type(option, ctx)


def correct(app: typer.Typer) -> None:
    """Correct the help of an application and of its groups."""
    core.TyperOption.display_type_rich = _option_type  # type: ignore[assignment,method-assign]
    rich_utils.Table = _PanelTable  # type: ignore[attr-defined]
    _summarize(app)


def _summarize(app: typer.Typer) -> None:
    """Join the lines of each command's summary, which typer keeps apart in lists of commands."""
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) if command.help is None else None
        if text and command.short_help is None:
            command.short_help = " ".join(text.split("\n\n")[0].split())
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _summarize(group.typer_instance)
