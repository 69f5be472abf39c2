"""Where words, tables and bars go: answers to stdout, everything else to stderr.

Names, labels and errors come from checkpoints, workers and callers. `Console` is the one way to a terminal, so that none of them
can steer it; JSON goes through `shoal.text.document`, which loses nothing.
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

from shoal.text import document, shown

# A bar for less than this would only flicker.
BAR_ITEMS = 1000
# Of lines that are printed for no terminal.
WIDTH = 200


class Console(rich.Console):
    """Rich's, with U+FFFD for each control character of what it is given; its own colours and movements of the cursor stay."""

    def render(self, renderable: RenderableType, options: rich.ConsoleOptions | None = None) -> Iterator[Segment]:
        """All that is drawn passes here, whatever it is made of: cells of tables, bars, live screens."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        """Replaced before it is measured, too, so that tables keep their widths; `:cat:` in a name is no picture of one."""
        return super().render_str(shown(text), **options | {"emoji": False})


def show(renderable: RenderableType) -> None:
    """Prints for people, brackets in names as they are. Without a terminal no width is given: lines are long, not cut."""
    Console(width=None if sys.stdout.isatty() else WIDTH, markup=False).print(renderable)


def emit(value: object) -> None:
    """Prints for programs: one JSON document."""
    sys.stdout.write(document(value) + "\n")


def note(words: str) -> None:
    """Says what was done, on stderr."""
    Console(stderr=True).print(Text(words), soft_wrap=True)


def complain(problem: str, details: Sequence[str], advice: str) -> None:
    """Says on stderr what is wrong, where, and what to do."""
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


def preview(text: str, most: int = 60) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most else line[: most - 1] + "…"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar's `on_progress` for long work with somebody watching, else None."""
    if total < BAR_ITEMS or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, _: progress.update(task, completed=done)
