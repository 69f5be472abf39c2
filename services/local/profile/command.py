"""`shoal profile`: a model's forward pass on this machine, part by part, and requests through a
temporary mesh.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from shoal.cli.console import SafeConsole, emit, note, print_error, show
from shoal.cli.failures import exit_on_failure
from shoal.cli.options import Json

from libs.errors import InvalidInput, ShoalError
from libs.store import check_urls
from services.local import settings as local
from services.local.profile import report
from services.worker.check.model_files import OnProgress, find_model
from services.worker.settings import DeviceChoice, DtypeChoice, Settings, parse_shelves

if TYPE_CHECKING:
    from libs.models import Work
    from services.local.profile.request import RequestProfile
    from services.worker.profile.forward import ForwardProfile

_KINETO_SILENT = "99"
"""A level above all of Kineto's. Otherwise torch's profiler prints a line when it starts and one
when it stops.
"""
_HELP_OFFERED = (
    "A model's location: org/name=/path/to/checkpoint, or a folder with subfolders <org>/<name>. "
    "May be repeated."
)
_HELP_TEXTS = (
    "File with one text per line, repeated until the batch is full. Default: generated texts of "
    "log-normal lengths."
)


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Directory of a checkpoint, or an id (--model, SHOAL_MODELS, SHOAL_STORES).",
        ),
    ],
    offered: Annotated[list[str] | None, typer.Option("--model", help=_HELP_OFFERED)] = None,
    texts: Annotated[Path | None, typer.Option(help=_HELP_TEXTS)] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the batch. 0: the token budget of a worker.")
    ] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="Device of the computation.")] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="Number format of the computation.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of threads on a CPU. Default: all cores.")
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1, help="Number of forward passes with the profiler, and of those without it."
        ),
    ] = 20,
    requests: Annotated[
        int,
        typer.Option(min=0, help="Number of requests, of one text each. 0: no mesh is started."),
    ] = 50,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the profiler's trace to this file, for ui.perfetto.dev: .json."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the parts to this file: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the time of each part of a model's forward pass, and of each stage of a request."""
    with exit_on_failure(), _errors_on_stderr():
        _check_files(trace, plot)
        settings = replace(
            Settings.from_env(os.environ),
            models=parse_shelves(local.known_models(offered or [], os.environ)),
            stores=check_urls(local.known_stores(os.environ)),
            device=device,
            dtype=dtype,
            threads=threads or local.available_cores(),
            batch_tokens=batch_tokens,
        )
        lines = None if texts is None else _lines(texts)
        with _progress(model) as on_progress:
            forward, request = _measured(settings, model, lines, runs, requests, trace, on_progress)
        if plot is not None:
            report.plot(forward, request, plot)
        if as_json:
            emit(report.as_json(forward, request))
        else:
            show(report.forward_table(forward))
            if request is not None:
                show(report.request_table(request))
        for what, path in (("trace", trace), ("plot", plot)):
            if path is not None:
                note(f"{what}: {path}")


def _measured(
    settings: Settings,
    target: str,
    lines: list[str] | None,
    runs: int,
    requests: int,
    trace: Path | None,
    on_progress: OnProgress,
) -> tuple[ForwardProfile, RequestProfile | None]:
    name, copy = find_model(settings, target, "", on_progress)
    try:
        on_progress(f"{name}: importing torch")
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", _KINETO_SILENT
        )  # its library reads it when it is loaded
        from services.worker.profile import forward, texts

        on_progress(f"{name}: loading")
        model, device, most_tokens = forward.load(settings, name, copy)
        given = texts.generated() if lines is None else cycle(lines)
        batch = forward.fill(model, given, most_tokens, settings.batch_items)
        on_progress(f"{name}: forward passes of {batch.tokens:,} tokens")
        measured = forward.profile_forward(
            model, batch, runs=runs, device=device, threads=settings.threads, trace=trace
        )
        if not requests:
            return measured, None
        works = [
            forward.first_work(model, [text])
            for _, text in zip(range(requests), cycle(batch.texts), strict=False)
        ]
        del model
        on_progress(f"{name}: {requests} requests through a mesh")
        return measured, _through_mesh(settings, name, copy.directory, works)
    finally:
        copy.close()


def _through_mesh(
    settings: Settings, name: str, directory: Path, works: list[Work]
) -> RequestProfile:
    try:
        from services.local.profile.request import profile_requests
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"a mesh needs {error.name}: pip install 'shoal-mesh[local]', or leave it out: "
            "--requests 0"
        ) from None
    mesh = local.Settings(
        port=0,
        threads=settings.threads,
        models=f"{name}={directory}",
        dtype=settings.dtype,
        device=settings.device,
    )
    return asyncio.run(profile_requests(mesh, name, works))


def _lines(path: Path) -> list[str]:
    """Return the texts of a file."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8", field="texts") from None
    if not lines:
        raise InvalidInput(f"{path} contains no text", field="texts")
    return lines


def _check_files(trace: Path | None, plot: Path | None) -> None:
    """Check the output files before the measurements begin."""
    if trace is not None and trace.suffix != ".json":
        raise InvalidInput(f"a trace's file must end in .json, not {trace.name!r}", field="trace")
    if plot is not None:
        report.check_plot(plot)
    for path in (trace, plot):
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(f"the directory {path.parent} to write to does not exist")


@contextmanager
def _progress(target: str) -> Iterator[OnProgress]:
    """Report the current step on stderr, if it is a terminal."""
    with SafeConsole(stderr=True).status(Text(target)) as status:
        yield lambda words: status.update(Text(words))


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    """Our errors become words on stderr and exit code 1."""
    try:
        yield
    except ShoalError as error:
        print_error(error.message, [], "")
        raise typer.Exit(1) from None
