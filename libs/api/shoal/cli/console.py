"""Print results to stdout, and notes, errors and progress bars to stderr.

Names, labels and errors originate in checkpoints, workers and callers. All output goes through
`Console`, which replaces their control characters; JSON goes through `shoal.cli.text.document`,
which escapes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import console as rich
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.cli.text import document, printable

# Fewer items have no progress bar.
BAR_ITEMS = 1000
# Columns of output that does not go to a terminal.
WIDTH = 200


class Console(rich.Console):
    """Rich's console, with U+FFFD for each control character in texts; its own colours and cursor
    movements stay.
    """

    def render(
        self, renderable: RenderableType, options: rich.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Replace control characters in all output: cells of tables, bars, live screens."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        """Replace them before texts are measured, too, so that columns stay aligned; `:cat:` in a
        name is not made an emoji.
        """
        return super().render_str(printable(text), **options | {"emoji": False})


def show(renderable: RenderableType) -> None:
    """Print a text or table to stdout, without markup. Without a terminal, lines are WIDTH columns
    long.
    """
    Console(width=None if sys.stdout.isatty() else WIDTH, markup=False).print(renderable)


def emit(value: object) -> None:
    """Print one JSON document to stdout, for programs."""
    sys.stdout.write(document(value) + "\n")


def note(message: str) -> None:
    """Print a note about finished work to stderr."""
    Console(stderr=True).print(Text(message), soft_wrap=True)


def print_error(problem: str, details: Sequence[str], advice: str) -> None:
    """Print an error to stderr: the problem, its place, and advice."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), problem), soft_wrap=True)
    for detail in details:
        console.print(Text(f"  {detail}", style="dim"), soft_wrap=True)
    if advice:
        console.print(Text(f"  {advice}"), soft_wrap=True)


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def preview(text: str, max_length: int = 60) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 2 * max_length].split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 text` or `1,200 texts`."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def size(count: float) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextmanager
def bar(
    description: str, total: int, least: int = BAR_ITEMS
) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar and give its `on_progress`; None for fewer than `least` or without a
    terminal.
    """
    if total < least or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done, _: progress.update(task, completed=done)
