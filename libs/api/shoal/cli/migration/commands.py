"""`shoal migrate`: the steps of a change of an alias to another embedding model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from shoal.bulk.failures import JobError
from shoal.bulk.places import place
from shoal.cli.bulk.arguments import JobLimitOptions, JobServing, OptionalFiles, recipe
from shoal.cli.bulk.running import continued, job_state, loaded, print_state, reported, run
from shoal.cli.console import SafeConsole, counted, emit, note, show, table
from shoal.cli.evaluation.running import BATCH_TEXTS
from shoal.cli.migration.aliases import AliasName, print_aliases
from shoal.cli.migration.comparison import compare as compare_models
from shoal.cli.migration.comparison import print_comparison, read_files, read_folder
from shoal.cli.model_names import NextModel
from shoal.cli.options import ConnectionOptions, Json, OpenClient, connected, grouped, reachable
from shoal.errors import InvalidInput
from shoal.results import EncodeResult
from shoal.status import Alias
from shoal.tasks import Role

PROBE: Final = "shoal"
"""The text that shows the dimensions and embedding ids of both models."""
DEFAULT_SAMPLE: Final = 10_000

migrate = typer.Typer(
    no_args_is_help=True,
    help="Change the embedding model of an alias while queries are answered.",
)


@migrate.command()
@grouped
def start(
    alias: AliasName,
    *,
    to: NextModel,
    files: OptionalFiles,
    role: Annotated[
        Role, typer.Option(help="Selects the model's prompt for the corpus.")
    ] = "document",
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Record a change to another model and, with --input, encode the corpus by it. The same command
    again continues.
    """
    if bool(files.source) != bool(files.output):
        raise typer.BadParameter("--input and --output belong together")
    with connection.open() as client:
        reachable(client)
        old = client.aliases.get(alias)
        old.started(to, files.output)
        by_old = client.encode(old.model, [PROBE], role=role)
        by_new = client.encode(to, [PROBE], role=role, adapter=serving.adapter, pool=serving.pool)
        changed = client.aliases.start(alias, to, output=files.output)
    _note_start(changed, by_old, by_new)
    if not files.source:
        if as_json:
            emit(asdict(changed))
        return
    with reported():
        where = place(files.output)
        made = recipe(to, files, serving, verb="encode", options={"role": role})
        manifest = continued(where, files.source, made, limits)
        if manifest.state == "completed":
            print_state(where, manifest, as_json=as_json)
            return
        run(where, manifest, connection, as_json=as_json)


@migrate.command()
@connected
def compare(
    open_client: OpenClient,
    alias: AliasName,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A folder in BEIR's layout: corpus.jsonl, queries.jsonl, and qrels/SPLIT.tsv for "
            "nDCG@10.",
            show_default=False,
        ),
    ] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A file of queries, one per line.", show_default=False
        ),
    ] = None,
    corpus: Annotated[
        str,
        typer.Option(
            "--input", "-i", help="The corpus, .parquet, .jsonl, .csv or .tsv.", show_default=False
        ),
    ] = "",
    column: Annotated[str, typer.Option(help="Column of the corpus with the texts.")] = "text",
    sample: Annotated[
        int,
        typer.Option(
            min=0,
            help="Documents drawn from the corpus; judged ones are always in it; 0 takes all.",
        ),
    ] = DEFAULT_SAMPLE,
    split: Annotated[str, typer.Option(help="The judgements of --data: qrels/SPLIT.tsv.")] = "test",
    batch: Annotated[
        int, typer.Option(min=1, max=BATCH_TEXTS, help="Texts per call.")
    ] = BATCH_TEXTS,
    as_json: Json = False,
) -> None:
    """Compare the rankings of both models: overlap@10, rank-biased overlap and, with judgements,
    nDCG@10.
    """
    if data is None and (queries is None or not corpus):
        raise typer.BadParameter("give --data FOLDER, or --queries FILE and --input CORPUS")
    if data is not None and (queries is not None or corpus):
        raise typer.BadParameter("--data has queries and corpus: leave out --queries and --input")
    client = open_client()
    models = _both(client.aliases.get(alias))
    with reported():
        found = (
            read_files(queries, corpus, column, sample)
            if data is None and queries is not None
            else read_folder(data or Path(), split, sample)
        )
    with SafeConsole(stderr=True).status(Text(alias)) as status:
        results = compare_models(
            client, models, found, lambda words: status.update(Text(words)), batch
        )
    if as_json:
        emit({"alias": alias, "old": models[0], "new": models[1], **results})
    else:
        print_comparison(results)


@migrate.command()
@connected
def switch(open_client: OpenClient, alias: AliasName, as_json: Json = False) -> None:
    """Serve the alias from the new model: requests that are sent afterwards get its vectors."""
    _print_moved(open_client().aliases.switch(alias), as_json)


@migrate.command()
@connected
def rollback(open_client: OpenClient, alias: AliasName, as_json: Json = False) -> None:
    """Serve the alias from the previous model again. The change stays in progress."""
    _print_moved(open_client().aliases.rollback(alias), as_json)


@migrate.command()
@connected
def finish(open_client: OpenClient, alias: AliasName, as_json: Json = False) -> None:
    """End a change: keep the model that serves the alias now, and drop the other one."""
    found = open_client().aliases.finish(alias)
    if as_json:
        emit(asdict(found))
    else:
        note(f"{found.name} stays with {found.model}")


@migrate.command()
@connected
def status(
    open_client: OpenClient,
    alias: Annotated[
        str,
        typer.Argument(metavar="[ALIAS]", help="One alias; default all.", show_default=False),
    ] = "",
    as_json: Json = False,
) -> None:
    """Show changes in progress, and their jobs if this machine can read them."""
    client = open_client()
    found = [client.aliases.get(alias)] if alias else client.aliases.list()
    changing = [one for one in found if one.other_model]
    if as_json:
        emit([{**asdict(one), "job": _job_state(one.output)} for one in changing])
        return
    if not changing:
        print_aliases(found, as_json=False)
        return
    made = table("", "alias", "current model", "next model", "previous model", "job", "next step")
    for one in changing:
        made.add_row(
            one.name,
            one.model,
            one.next_model,
            one.previous_model,
            _job_state(one.output),
            _next_step(one),
        )
    show(made)


def _both(alias: Alias) -> tuple[str, str]:
    """Return the old and the new model of a change. Raises InvalidInput without one."""
    if alias.next_model:
        return alias.model, alias.next_model
    if alias.previous_model:
        return alias.previous_model, alias.model
    raise InvalidInput(
        f"alias {alias.name}: no change is in progress: `shoal migrate start {alias.name} --to "
        "MODEL` begins one",
        field="alias",
    )


def _note_start(alias: Alias, by_old: EncodeResult, by_new: EncodeResult) -> None:
    note(f"{alias.name}: {alias.model} answers, {alias.next_model} is next")
    note(f"embedding ids: {by_old.embedding_id} -> {by_new.embedding_id}")
    if by_old.embedding_id and by_old.embedding_id == by_new.embedding_id:
        note("both models give the same vectors: the index can stay")
        return
    forms = (by_old.representations, by_new.representations)
    if forms[0] != forms[1]:
        what = f"other forms ({', '.join(forms[0])} -> {', '.join(forms[1])})"
    elif "dense" in forms[0] and by_old.vectors.dimensions != by_new.vectors.dimensions:
        what = f"other dimensions ({by_old.vectors.dimensions} -> {by_new.vectors.dimensions})"
    else:
        what = "other vectors of the same form"
    note(f"the new model gives {what}: they need a new index next to the old one")


def _print_moved(found: Alias, as_json: bool) -> None:
    if as_json:
        emit(asdict(found))
        return
    note(f"{found.name}: {found.model} answers on all routers")
    note(_next_step(found))


def _next_step(alias: Alias) -> str:
    if alias.next_model:
        return f"shoal migrate compare {alias.name}, then switch (finish gives the change up)"
    return f"shoal migrate finish {alias.name}, or rollback"


def _job_state(output: str) -> str:
    """Return the state and rows of the job in an output location; empty without one."""
    if not output:
        return ""
    with suppress(JobError, OSError, ImportError):
        where, manifest = loaded(output)
        return f"{job_state(where, manifest)}, {counted(manifest.rows, 'row')}"
    return f"{output} cannot be read from here"
