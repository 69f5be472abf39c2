"""Where words, tables and bars go: answers to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# A bar for less than this would only flicker.
BAR_ITEMS = 1000
# Of lines that are printed for no terminal.
WIDTH = 200


def show(renderable: RenderableType) -> None:
    """Prints for people, brackets in names as they are. Without a terminal no width is given: lines are long, not cut."""
    Console(width=None if sys.stdout.isatty() else WIDTH, markup=False).print(renderable)


def emit(value: object) -> None:
    """Prints for programs: one JSON document."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


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


def preview(text: str, most: int = 60) -> Text:
    """The beginning of a text on one line; as Text, so that brackets in it are not taken for markup."""
    line = " ".join(text[: 2 * most].split())
    return Text(line if len(line) <= most else line[: most - 1] + "…")


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
