"""Compares the rankings of two models: the data to compare on, and the results as tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from shoal.bulk.inputs import open_source
from shoal.bulk.matching import find_input
from shoal.bulk.spec import BulkRecipe
from shoal.cli.console import preview, show, table
from shoal.cli.evaluation import metrics, report
from shoal.cli.evaluation.data import MAX_DOCUMENTS, MAX_QUERIES, Retrieval, read_retrieval
from shoal.cli.evaluation.running import EvaluationRun, retrieve
from shoal.cli.inference.files import Selection, read_records
from shoal.client import Client

SHOWN_QUERIES: Final = 5
"""Queries with the least overlap that are shown."""
SEED: Final = 0


def read_folder(folder: Path, split: str, sample: int) -> Retrieval:
    """Return the data of a folder in BEIR's layout, with judgements if it has them. Raises
    BadParameter.

    Args:
        sample: Maximum number of documents; judged ones are kept before others; 0: all.
    """
    with_labels = (folder / "qrels" / f"{split}.tsv").exists()
    found = read_retrieval(folder, split, with_labels=with_labels)
    judged = {document for grades in found.judgements.values() for document in grades}
    documents = _sampled(found.documents, sample, judged)
    return Retrieval(documents, found.queries, found.judgements)


def read_files(queries: Path, corpus: str, column: str, sample: int) -> Retrieval:
    """Return queries, one per line or in a column `text`, and a sample of the texts of a Parquet
    file or lines of JSON. Raises BadParameter, InputError, JobError.
    """
    records = read_records(queries, Selection(None, None, skips_invalid=False))
    if not 1 <= len(records) <= MAX_QUERIES:
        raise typer.BadParameter(
            f"{queries} has {len(records):,} queries; 1 to {MAX_QUERIES:,} can be compared"
        )
    texts = _reservoir(_texts(corpus, column), sample or MAX_DOCUMENTS)
    if not texts:
        raise typer.BadParameter(f"{corpus} has no texts in the column {column!r}")
    return Retrieval(texts, {str(n): one.text for n, one in enumerate(records)}, {})


def compare(
    client: Client,
    models: Sequence[str],
    data: Retrieval,
    on_progress: Callable[[str], None],
    batch: int,
) -> dict[str, Any]:
    """Rank the documents by both models, and return the results as JSON values."""
    old, new = (retrieve(client, model, data, on_progress, batch) for model in models)
    return {
        "documents": len(data.documents),
        "queries": len(data.queries),
        "agreement": dict(report.agreement_rows([old, new])[0]),
        "models": [dict(row) for row in report.retrieval_rows([old, new], data)]
        if data.judgements
        else [],
        "least_overlap": _least_overlap(old, new, data),
    }


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the results of `compare` as tables."""
    size = f"{found['queries']:,} queries, {found['documents']:,} documents"
    show(report.as_table([found["agreement"]], size))
    if found["models"]:
        show(report.as_table(found["models"], "by the judgements"))
    made = table("queries with the least overlap", "query", report.OVERLAP, right=(report.OVERLAP,))
    for row in found["least_overlap"]:
        made.add_row(preview(row["query"]), f"{row[report.OVERLAP]:.4f}")
    show(made)


def _least_overlap(old: EvaluationRun, new: EvaluationRun, data: Retrieval) -> list[dict[str, Any]]:
    overlaps = [
        (metrics.overlap(ranking, new.rankings[query], 10), query)
        for query, ranking in old.rankings.items()
    ]
    return [
        {"query": data.queries[query], report.OVERLAP: overlap}
        for overlap, query in sorted(overlaps)[:SHOWN_QUERIES]
    ]


def _sampled(documents: Mapping[str, str], sample: int, kept: set[str]) -> Mapping[str, str]:
    if not sample or len(documents) <= sample:
        return documents
    others = [key for key in documents if key not in kept]
    drawn = random.Random(SEED).sample(  # noqa: S311  # a sample, not a secret
        others, max(0, min(len(others), sample - len(kept)))
    )
    chosen = kept.union(drawn)
    return {key: text for key, text in documents.items() if key in chosen}


def _texts(corpus: str, column: str) -> Iterator[str]:
    recipe = BulkRecipe("encode", "sample/of-texts", text=column)
    for chunk in open_source(find_input(corpus), recipe).chunks(lambda _: True):
        yield from filter(None, chunk.texts)


def _reservoir(texts: Iterator[str], size: int) -> dict[str, str]:
    """Return a uniform sample of a stream by Vitter's algorithm R, as texts by their index."""
    drawn = random.Random(SEED)  # noqa: S311  # a sample, not a secret
    kept: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        if index < size:
            kept.append((index, text))
        elif (place := drawn.randrange(index + 1)) < size:
            kept[place] = index, text
    return {str(index): text for index, text in sorted(kept)}
