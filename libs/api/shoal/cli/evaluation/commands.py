"""`shoal eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.console import SafeConsole, emit, note, show
from shoal.cli.evaluation import report
from shoal.cli.evaluation.data import read_pairs, read_retrieval
from shoal.cli.evaluation.running import BATCH_TEXTS, compare_pairs, rerank, retrieve
from shoal.cli.options import Json, OpenClient, connected


@connected
def evaluate(
    open_client: OpenClient,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            exists=True,
            help=(
                "A folder in BEIR's layout, or a .csv, .tsv or .jsonl file of sentence1, "
                "sentence2, score."
            ),
        ),
    ],
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="A model that encodes. May be repeated.")
    ],
    reranker: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that scores the 100 best documents of each --model. May be repeated."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="The judgements to use: qrels/SPLIT.tsv.")] = "test",
    without_labels: Annotated[
        bool,
        typer.Option(
            "--without-labels",
            help="Print how far the models' rankings agree; no judgements are read.",
        ),
    ] = False,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            max=BATCH_TEXTS,
            help="Texts per call; use fewer for a model that takes minutes for them.",
        ),
    ] = BATCH_TEXTS,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the results to this file: .png or .svg (needs matplotlib)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how well models rank: nDCG@10 and recall@100 of queries, or Spearman's correlation of
    scored pairs.

    Every document is compared with every query; documents are encoded once for each model and held
    in memory.
    """
    if plot is not None:
        report.check_plot(plot)
    if not data.is_dir() and (reranker or without_labels):
        raise typer.BadParameter(
            "--reranker and --without-labels are for a folder in BEIR's layout"
        )
    if without_labels and len(model) * (1 + len(reranker or ())) < 2:
        raise typer.BadParameter("--without-labels compares models: give two")
    console = SafeConsole(stderr=True)
    title = data.resolve().stem
    if data.is_dir():
        found = read_retrieval(data, split, with_labels=not without_labels)
        client = open_client()
        runs = []
        with console.status(Text(title)) as status:
            for name in model:
                base = retrieve(
                    client, name, found, lambda words: status.update(Text(words)), batch
                )
                runs.append(base)
                runs += [
                    rerank(client, one, base, found, lambda words: status.update(Text(words)))
                    for one in reranker or ()
                ]
        rows = report.agreement_rows(runs) if without_labels else report.retrieval_rows(runs, found)
        title = f"{title}: {len(found.queries):,} queries, {len(found.documents):,} documents"
    else:
        pairs = read_pairs(data)
        client = open_client()
        with console.status(Text(title)) as status:
            scored = [
                compare_pairs(client, name, pairs, lambda words: status.update(Text(words)), batch)
                for name in model
            ]
        rows = report.pair_rows(scored, pairs)
        title = f"{title}: {len(pairs.scores):,} pairs"
    if plot is not None:
        report.plot(rows, title, plot)
        note(f"plot: {plot}")
    if as_json:
        emit(rows)
    else:
        show(report.as_table(rows, title))
