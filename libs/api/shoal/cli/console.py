"""Print results to stdout, and notes, errors and progress bars to stderr.

Names, labels and errors originate in checkpoints, workers and callers. All output goes through
`SafeConsole`, which replaces their control characters; JSON goes through `shoal.cli.text.document`,
which escapes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import console as rich
from rich.console import RenderableType
from rich.measure import measure_renderables
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text, TextType

from shoal.cli.text import document, printable

# Fewer items have no progress bar.
BAR_ITEMS = 1000
# Columns of output that does not go to a terminal.
WIDTH = 200
# Columns of a table that a longer word is divided for, such as a text without spaces.
MAX_WORD = 48


class SafeConsole(rich.Console):
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
    console = SafeConsole(width=None if sys.stdout.isatty() else WIDTH, markup=False)
    console.print(fitted(renderable, console) if isinstance(renderable, Table) else renderable)


def fitted(made: Table, console: rich.Console) -> Table:
    """Return a table for the console's width. Rich would divide names where columns are narrow.

    Columns are narrowed to their longest words, the widest first. If that is not enough, each row
    becomes a block of lines.
    """
    room = console.width - 3 * len(made.columns) - 1  # borders and padding
    spans = [
        measure_renderables(console, console.options, [column.header, *column.cells])
        for column in made.columns
    ]
    least = [min(span.minimum, MAX_WORD) for span in spans]
    widths = [max(span.maximum, 1) for span in spans]
    if made.box is None or sum(widths) <= room:
        return made
    if sum(least) > room:
        return _blocks(made)
    while sum(widths) > room:
        widest = max((width, index) for index, width in enumerate(widths) if width > least[index])[
            1
        ]
        widths[widest] -= 1
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
    return made


def _blocks(made: Table) -> Table:
    """Return a line for each cell that is not empty, with the name of its column, and an empty line
    between rows.
    """
    cells = zip(*(column.cells for column in made.columns), strict=True)
    names = [column.header for column in made.columns]
    found = facts(made.title)
    for number, row in enumerate(cells):
        if number:
            found.add_row("", "")
        for name, cell in zip(names, row, strict=True):
            if cell:
                found.add_row(name, cell)
    return found


def emit(value: object) -> None:
    """Print one JSON document to stdout, for programs."""
    sys.stdout.write(document(value) + "\n")


def note(message: str) -> None:
    """Print a note about finished work to stderr."""
    SafeConsole(stderr=True).print(Text(message), soft_wrap=True)


def print_error(problem: str, details: Sequence[str], advice: str) -> None:
    """Print an error to stderr: the problem, its place, and advice."""
    console = SafeConsole(stderr=True)
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


def facts(title: TextType | None) -> Table:
    """Return a table of two columns, names and values, without a header."""
    made = Table(show_header=False, box=None, title=title, title_justify="left", title_style="bold")
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
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
    description: str, total: int, min_items: int = BAR_ITEMS
) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar and give its `on_progress`; None for fewer than `least` or without a
    terminal.
    """
    if total < min_items or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done, _: progress.update(task, completed=done)
