"""Helpers of all examples: options, a client of a mesh, progress bars, tables and error advice."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import shoal
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from libs.errors import ShoalError
from services.local.devices import accelerators, layout
from services.local.mesh import running
from services.local.settings import MINILM as BUNDLED
from services.local.settings import Settings, known_models, known_stores

MINILM = BUNDLED
DATA = Path(__file__).parent / "data"
TIMEOUT = 600.0
"""Deadline of a call in seconds. It is long because admission refuses requests that would miss
their deadline, and the examples are batch jobs.
"""
IN_FLIGHT = 8
"""Concurrent calls. One at a time would leave the workers idle between calls; the mesh batches
concurrent ones.
"""
T = TypeVar("T")
Floats = NDArray[np.float32]
console = Console(stderr=True)
"""Progress and messages. Results go to stdout."""


class Advice(Exception):
    """A user's mistake; the message says how to correct it."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's line breaks and shows defaults."""


def options(description: str, *, embedder: bool = True) -> argparse.ArgumentParser:
    """Build a parser with the options of all examples.

    Args:
        embedder: Add --embedder, for examples that encode texts.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="address of a running mesh; default: start one on this machine for this run",
    )
    if embedder:
        parser.add_argument(
            "--embedder", default=MINILM, metavar="MODEL", help="the model that encodes"
        )
    parser.add_argument(
        "--json", action="store_true", help="print the numbers as JSON instead of tables"
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run an example and return its exit status. Errors are printed with advice."""
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        return 130
    except (Advice, ShoalError, shoal.ShoalError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        advice = _advice(error)
        if advice:
            console.print(advice, highlight=False, soft_wrap=True)
        return 1
    return 0


def _advice(error: Exception) -> str:
    match error:
        case shoal.errors.CannotConnect():
            return (
                "Is a mesh running at --endpoint? `shoal up` starts one; without --endpoint the "
                "example starts its own."
            )
        case shoal.errors.ModelNotFound():
            return (
                "Models are read from the Hugging Face hub, or from folders: "
                "SHOAL_MODELS=org/name=/path for a mesh that the example "
                "starts, `shoal up --model org/name=/path` for a mesh that you start "
                "(docs/quickstart.md)."
            )
        case shoal.errors.TaskNotSupported():
            return (
                "docs/models.md lists which models encode, score and extract; `shoal models` "
                "lists the tasks of a running mesh."
            )
        case shoal.errors.DeadlinePassed():
            return (
                "Fetching a model may take longer than a call may last: run the example again, "
                "or first `shoal models load`."
            )
    return ""


@asynccontextmanager
async def mesh(
    endpoint: str | None, models: Sequence[str] = ()
) -> AsyncIterator[shoal.AsyncClient]:
    """Yield a client of the mesh at `endpoint`.

    Without an endpoint, start a mesh with `models` (`org/name=/path`) for the context.
    """
    if endpoint:
        async with shoal.AsyncClient(endpoint) as client:
            await client.healthy(timeout=10)  # fails early if the address is wrong
            yield client
        return
    found = accelerators("auto", os.environ)
    workers, threads = layout(None, None, len(found))
    models, stores = known_models([*models], os.environ), known_stores(os.environ)
    settings = Settings(
        port=0, workers=workers, threads=threads, accelerators=found, models=models, stores=stores
    )
    starting = console.status(f"starting a mesh: Redis, a router and {workers} worker(s)")
    starting.start()
    try:
        async with running(settings) as local:
            starting.stop()
            async with shoal.AsyncClient(local.address) as client:
                yield client
    finally:
        starting.stop()


@asynccontextmanager
async def model_or_random(
    endpoint: str | None, model: str, name: str, write: Callable[[Path], None]
) -> AsyncIterator[tuple[shoal.AsyncClient, str]]:
    """Yield a client and the id of the model to call.

    Args:
        endpoint: Address of a running mesh; None starts one.
        model: The model to call; empty for one with random weights.
        name: Id of the model with random weights.
        write: Writes the checkpoint with random weights into a folder.
    """
    if model:
        async with mesh(endpoint) as client:
            yield client, model
        return
    if endpoint:
        raise Advice(
            "--endpoint needs --model: a running mesh does not know the model with random "
            "weights that this example makes"
        )
    with tempfile.TemporaryDirectory(prefix="shoal-random-") as folder:
        write(Path(folder))
        async with mesh(None, [f"{name}={folder}"]) as client:
            yield client, name


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; call the yielded function with the completed amount."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, completed=done)


async def warm(client: shoal.AsyncClient, embedder: str) -> None:
    """Load the embedder by a first request, so that later timings do not include the load."""
    began = time.perf_counter()
    await client.encode(embedder, "Hello, mesh", representations="dense", timeout=TIMEOUT)
    console.print(f"{embedder} loaded in {time.perf_counter() - began:.1f} s", highlight=False)


async def encode(
    client: shoal.AsyncClient, model: str, texts: Sequence[str], what: str, role: shoal.tasks.Role
) -> Floats:
    """Return unit vectors, [texts, dimensions]."""
    with progress(what, len(texts)) as show:
        answer = await client.encode(
            model,
            texts,
            role=role,
            representations="dense",
            normalize=True,
            timeout=TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    return answer.dequantize()


async def gather(what: str, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the results of the calls in order, IN_FLIGHT of them running concurrently.

    The first error cancels the other calls and is raised.
    """
    slots, done = asyncio.Semaphore(IN_FLIGHT), 0
    with progress(what, len(calls)) as show:

        async def one(call: Callable[[], Awaitable[T]]) -> T:
            nonlocal done
            async with slots:
                result = await call()
            done += 1
            show(done)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def rows(name: str) -> list[list[str]]:
    """Read the rows of a file of examples/data (tools/wordnet.py documents the columns)."""
    with gzip.open(DATA / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file]


def table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout: words in the first column, numbers in the others."""
    drawn = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        drawn.add_row(*line)
    Console().print(drawn)


def print_json(result: object) -> None:
    json.dump(result, sys.stdout, indent=2)
    print()
