"""Reads evaluation data: a folder in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv),
or a file of scored pairs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

MAX_DOCUMENTS: Final = 1_000_000
MAX_QUERIES: Final = 100_000
MAX_JUDGEMENTS: Final = 10_000_000
MAX_PAIRS: Final = 1_000_000
MAX_LINE_CHARACTERS: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Queries, documents and judgements.

    Args:
        documents: texts by id, title and text joined by a space as BEIR joins them.
        queries: texts by id; with judgements, only queries that have a relevant document.
        judgements: the relevance of judged documents by query; empty without labels.
    """

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    judgements: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class SimilarityPairs:
    """Pairs of texts with the similarity that people gave them."""

    first: Sequence[str]
    second: Sequence[str]
    scores: Sequence[float]


def read_retrieval(folder: Path, split: str, *, with_labels: bool) -> Retrieval:
    """Return the data of a folder in BEIR's layout. Raises BadParameter for what cannot be read."""
    documents = {
        key: f"{row.get('title') or ''} {row.get('text') or ''}".strip()
        for key, row in _objects(folder / "corpus.jsonl", MAX_DOCUMENTS)
    }
    queries = {
        key: str(row.get("text") or "")
        for key, row in _objects(folder / "queries.jsonl", MAX_QUERIES)
    }
    if not with_labels:
        return _checked(Retrieval(documents, queries, {}), folder)
    judgements = _judgements(folder / "qrels" / f"{split}.tsv")
    kept = {
        key: text
        for key, text in queries.items()
        if any(grade > 0 for grade in judgements.get(key, {}).values())
    }
    return _checked(Retrieval(documents, kept, judgements), folder)


def read_pairs(path: Path) -> SimilarityPairs:
    """Pairs of a .jsonl, .csv or .tsv file with sentence1, sentence2 and score. Raises BadParameter
    for what cannot be read.
    """
    rows = [_pair(path, number, row) for number, row in enumerate(_rows(path), start=1)]
    if not rows:
        raise typer.BadParameter(f"{path}: has no pairs")
    return SimilarityPairs(*zip(*rows, strict=True))


def _rows(path: Path) -> Iterator[Sequence[Any]]:
    names = ("sentence1", "sentence2", "score")
    if path.suffix == ".jsonl":
        for number, line in enumerate(_lines(path, MAX_PAIRS), start=1):
            row = _object(path, number, line)
            yield [row.get(name) for name in names]
        return
    reader = csv.reader(_lines(path, MAX_PAIRS), delimiter="\t" if path.suffix == ".tsv" else ",")
    for number, cells in enumerate(reader):
        if number or tuple(cells[:3]) != names:
            yield cells


def _pair(path: Path, number: int, row: Sequence[Any]) -> tuple[str, str, float]:
    try:
        first, second, score = row
        return str(first), str(second), float(score)
    except (TypeError, ValueError):
        raise typer.BadParameter(
            f"{path}: pair {number} is not two sentences and a score"
        ) from None


def _judgements(path: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for number, line in enumerate(_lines(path, MAX_JUDGEMENTS), start=1):
        cells = line.split("\t")
        if number == 1 and cells[-1].strip() == "score":
            continue
        try:
            query, document, grade = cells[0], cells[-2], int(cells[-1])
        except (IndexError, ValueError):
            raise typer.BadParameter(
                f"{path}: line {number} is not query-id, corpus-id and score, with tabs"
            ) from None
        found.setdefault(query, {})[document] = grade
    return found


def _objects(path: Path, most: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = set()
    for number, line in enumerate(_lines(path, most), start=1):
        row = _object(path, number, line)
        key = str(row.get("_id", ""))
        if not key or key in seen:
            raise typer.BadParameter(
                f"{path}: line {number} has no `_id` that no line before it has"
            )
        seen.add(key)
        yield key, row


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path}: line {number} is not JSON: {str(error)[:100]}") from None
    if not isinstance(row, dict):
        raise typer.BadParameter(f"{path}: line {number} is not a JSON object")
    return row


def _lines(path: Path, most: int) -> Iterator[str]:
    """Yield the lines that are not empty. Raises BadParameter for a file that is missing, or has
    more or longer ones.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            count = 0
            while line := file.readline(MAX_LINE_CHARACTERS + 1):
                if len(line) > MAX_LINE_CHARACTERS:
                    raise typer.BadParameter(
                        f"{path}: a line has more than {MAX_LINE_CHARACTERS:,} characters"
                    )
                if not line.strip():
                    continue
                count += 1
                if count > most:
                    raise typer.BadParameter(f"{path}: has more than {most:,} lines")
                yield line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: cannot be read: {error}") from None


def _checked(found: Retrieval, folder: Path) -> Retrieval:
    if not found.documents or not found.queries:
        raise typer.BadParameter(
            f"{folder}: has no documents, or no query with a relevant document"
        )
    return found
