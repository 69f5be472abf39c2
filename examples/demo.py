"""Encode a library of paragraphs, search it, rerank the hits and label their topics.

`make demo` runs it. It starts a mesh on this machine (Redis, a router, one worker per core) and
stops it at the end.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shoal
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from libs.errors import ShoalError
from services.local.devices import accelerators, layout
from services.local.mesh import running
from services.local.settings import MINILM, Settings, known_models

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 600.0
"""Deadline of a request: 512 paragraphs take minutes on two slow or busy cores."""
SHELVES = (ROOT, ROOT / "docs", ROOT / "docs" / "design", Path("/usr/share/common-licenses"))
QUERIES = (
    "Who may use the patents of the people who wrote the software?",
    "What happens to a job when its worker dies?",
    "Is there any warranty if the program does not work?",
)
LABELS = {
    "law": "licence, copyright and legal terms",
    "operations": "running, deploying and operating servers",
    "interface": "programming interfaces, requests and errors",
}
NEXT_STEP = f"""Next: keep a mesh running, and send it texts from a second terminal.
  . .venv/bin/activate && shoal up
  . .venv/bin/activate && shoal encode {MINILM} "Hello, mesh"
README.md goes on from here; docs/quickstart.md has your own models."""
HITS, SHOWN = 20, 3
console = Console()


@dataclass(frozen=True, slots=True)
class Paragraph:
    page: str
    text: str


def paragraphs() -> list[Paragraph]:
    """Return paragraphs of the repository's pages and of Debian's licence texts."""
    found = []
    for page in _pages():
        for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8", errors="replace")):
            text = " ".join(block.split())
            if len(text) >= 40 and not text.startswith(("|", "```")):
                found.append(Paragraph(page.name, text))
    return found


def _pages() -> Iterable[Path]:
    for shelf in SHELVES:
        if shelf.is_dir():
            yield from (
                page
                for page in sorted(shelf.iterdir())
                if page.is_file() and _is_prose(page) and not page.is_symlink()
            )


def _is_prose(page: Path) -> bool:
    return page.suffix == ".md" or page.name == "LICENSE" or page.parent.name == "common-licenses"


async def main() -> int:
    found = accelerators("auto", os.environ)
    workers, threads = layout(None, None, len(found))
    library = paragraphs()
    console.rule("[bold]Shoal[/bold]")
    settings = Settings(
        port=0,
        workers=workers,
        threads=threads,
        accelerators=found,
        models=known_models([], os.environ),
    )
    began = time.perf_counter()
    starting = console.status(f"starting Redis, a router and {workers} worker(s)")
    starting.start()
    try:
        async with running(settings) as mesh:
            starting.stop()
            console.print(
                f"up in {time.perf_counter() - began:.1f} s: {workers} worker(s) x {threads} "
                f"thread(s) on {mesh.address}"
            )
            async with shoal.AsyncClient(mesh.address, timeout=TIMEOUT_SECONDS) as client:
                vectors = await encode(client, library)
                await search(client, library, vectors)
    except (ShoalError, shoal.ShoalError) as error:
        console.print(f"[red]error:[/red] {error}")
        return 1
    finally:
        starting.stop()
    console.rule("stopped")
    console.print(NEXT_STEP, highlight=False, soft_wrap=True)
    return 0


async def encode(client: shoal.AsyncClient, library: list[Paragraph]) -> NDArray[np.number]:
    """Encode all paragraphs as unit vectors, [paragraphs, 384]."""
    began = time.perf_counter()
    await client.encode(MINILM, ["load the model"])
    console.print(f"{MINILM} loaded by the first request in {time.perf_counter() - began:.1f} s")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("encoding paragraphs", total=len(library))
        began = time.perf_counter()
        answer = await client.encode(
            MINILM,
            [paragraph.text for paragraph in library],
            on_progress=lambda done, total: progress.update(task, completed=done),
        )
        seconds = time.perf_counter() - began
    tokens = answer.usage.input_tokens
    console.print(
        f"encoded [bold]{len(library)}[/bold] paragraphs, {tokens:,} tokens in {seconds:.1f} s: "
        f"[bold]{tokens / seconds:,.0f} tokens/s[/bold], {len(library) / seconds:,.0f} paragraphs/s"
    )
    return answer.dense


async def search(
    client: shoal.AsyncClient, library: list[Paragraph], vectors: NDArray[np.number]
) -> None:
    """Print each query's nearest paragraphs, reranked by Score and labelled by Extract."""
    questions = (await client.encode(MINILM, list(QUERIES))).dense
    for query, question in zip(QUERIES, questions, strict=True):
        began = time.perf_counter()
        hits = [library[index] for index in np.argsort(-(vectors @ question))[:HITS]]
        ranked = await client.score(MINILM, query, [hit.text for hit in hits], top_n=SHOWN)
        best = [(hits[index], float(ranked.scores[index])) for index in ranked.ranking]
        labels = await client.classify(
            MINILM,
            [hit.text for hit, _ in best],
            labels=list(LABELS.values()),
            hypothesis="This text is about {}.",
        )
        names = {prompt: name for name, prompt in LABELS.items()}
        table = Table(
            title=f"{query}  [dim]({1000 * (time.perf_counter() - began):.0f} ms)[/dim]",
            title_justify="left",
        )
        for heading in ("score", "about", "page", "paragraph"):
            table.add_column(heading, no_wrap=heading != "paragraph")
        for (hit, value), found in zip(best, labels.results, strict=True):
            table.add_row(
                f"{value:.3f}", names[found.labels[0].label], hit.page, _shortened(hit.text)
            )
        console.print(table)


def _shortened(text: str, length: int = 150) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
