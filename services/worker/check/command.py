"""`shoal models check`: explains how Shoal reads a model's files, and tests whether it runs. Needs
no mesh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from shoal.cli.console import SafeConsole, emit, print_error, show, size, table

from libs.catalog.overrides import Overrides
from libs.errors import ShoalError
from libs.store import Copy, is_model_id
from services.worker.check.explain import ModelReport, Test, inspect
from services.worker.check.model_files import OnProgress, find_model
from services.worker.machine import disk
from services.worker.settings import Settings

_FLOAT32_BYTES = 4
_MEMORY = Path("/proc/meminfo")


def check(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint directories, or IDs (SHOAL_MODELS, SHOAL_STORES).",
        ),
    ],
    no_test: Annotated[
        bool, typer.Option("--no-test", help="Only read the files; do not load and run the model.")
    ] = False,
    name: Annotated[
        str,
        typer.Option("--as", metavar="ID", help="Use the catalog card of this ID for a directory."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain how a model's files are read or why they are refused, and test the model on this
    machine's CPU.

    Exit code 0: all models pass; 1: a model is refused, not found, or fails a test.
    """
    if name and (len(models) > 1 or not is_model_id(name)):
        raise typer.BadParameter(
            "give one directory and an id of the form org/name", param_hint="--as"
        )
    try:
        settings = Settings.from_env(os.environ)
    except ShoalError as error:
        print_error(error.message, [], "")
        raise typer.Exit(2) from None
    reports = []
    for target in models:
        report = _checked(settings, target, name, test=not no_test)
        reports.append(report)
        if not as_json:
            _show(report)
    if as_json:
        emit([_plain(report) for report in reports])
    if not all(report.good for report in reports):
        raise typer.Exit(1)


def _checked(settings: Settings, target: str, name: str, *, test: bool) -> ModelReport:
    with _progress(target) as on_progress:
        try:
            model, copy = find_model(settings, target, name, on_progress)
        except ShoalError as error:
            return ModelReport(target, None, refused=error.message, skipped="nothing to test")
        try:
            overrides = settings.catalog.overrides(model)
            on_progress(f"{model}: reading its files")
            report = inspect(copy.directory, model, overrides, copy.base)
            skipped = _skipped(report, copy, test)
            if skipped:
                return replace(report, skipped=skipped)
            return _tested(report, copy, overrides, on_progress, in_int8=settings.dtype == "int8")
        finally:
            copy.close()


def _skipped(report: ModelReport, copy: Copy, wanted: bool) -> str:
    """Return the reason to skip the self-test, "" to run it."""
    if report.refused:
        return "the model is refused"
    if not wanted:
        return "--no-test"
    parts = [part for part in (copy.directory, copy.base) if part is not None]
    needed, free = sum(disk.weight_bytes(part, _FLOAT32_BYTES) for part in parts), _free_bytes()
    if free is not None and needed > free:
        return f"float32 needs {size(needed)} of memory, {size(free)} are free"
    return ""


def _free_bytes() -> int | None:
    """Return the memory that is available without swapping, None if the system does not report
    it.
    """
    lines = _MEMORY.read_text().splitlines() if _MEMORY.exists() else []
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def _tested(
    report: ModelReport,
    copy: Copy,
    overrides: Overrides | None,
    on_progress: OnProgress,
    *,
    in_int8: bool,
) -> ModelReport:
    on_progress(f"{report.model}: importing torch")
    from services.worker.check import generation, selftest

    done: list[Test] = []
    try:
        if report.card is not None and report.card.kind == "generative":
            tests = generation.run(copy.directory, report.model, overrides)
        else:
            tests = selftest.run(
                copy.directory, report.model, overrides, in_int8=in_int8, base=copy.base
            )
        for test in tests:
            done.append(test)
            on_progress(f"{report.model}: {test.name}")
    except ShoalError as error:
        return replace(report, tests=tuple(done), refused=error.message)
    return replace(report, tests=tuple(done))


@contextmanager
def _progress(target: str) -> Iterator[OnProgress]:
    """Show progress on stderr, if it is a terminal."""
    console = SafeConsole(stderr=True)
    with console.status(Text(target)) as status:
        yield lambda words: status.update(Text(words))


def _plain(report: ModelReport) -> dict[str, object]:
    """Return the report as JSON-serialisable values."""
    return asdict(report) | {
        "directory": None if report.directory is None else str(report.directory),
        "parameters": report.parameters,
        "good": report.good,
    }


def _show(report: ModelReport) -> None:
    place = "" if report.directory is None else f" in {report.directory}"
    show(Text.assemble((report.model, "bold"), f"{place}: ", _verdict(report)))
    if report.refused:
        show(Text(f"  {report.refused}", style="red"))
    if report.facts:
        show(_facts(report))
    if report.files:
        show(_files(report))
    for words in report.converted:
        show(Text(f"  converted: {words}"))
    for words in report.ignored:
        show(Text(f"  ignored: {words}"))
    if report.tests:
        show(_tests(report))
    if report.skipped:
        show(Text(f"  no self-test: {report.skipped}"))


def _verdict(report: ModelReport) -> tuple[str, str]:
    """Return the verdict and its colour."""
    if report.refused:
        return "refused", "bold red"
    if report.skipped:
        return "files are readable; weights were not tested", "yellow"
    return ("good", "bold green") if report.good else ("fails", "bold red")


def _facts(report: ModelReport) -> Table:
    made = table("facts from the files", "fact", "value", "why")
    for fact in report.facts:
        made.add_row(fact.what, fact.value, "\n".join(fact.why))
    return made


def _files(report: ModelReport) -> Table:
    made = table(
        f"{report.parameters:,} parameters",
        "file",
        "tensors",
        "type",
        "numbers",
        "size",
        right=("tensors", "numbers", "size"),
    )
    for file in report.files:
        for kind in file.bytes:
            made.add_row(
                file.file,
                str(file.tensors),
                kind,
                f"{file.numbers[kind]:,}",
                size(file.bytes[kind]),
            )
    return made


def _tests(report: ModelReport) -> Table:
    made = table("self-test on this CPU", "test", "", "measured")
    for test in report.tests:
        made.add_row(
            test.name,
            Text("ok", style="green") if test.passed else Text("FAILS", style="bold red"),
            test.detail,
        )
    return made
