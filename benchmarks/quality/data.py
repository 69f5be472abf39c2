"""Writes the evaluation sets, in the forms that `shoal eval` reads. No judgement is invented.

- lee: 50 news texts with the mean similarity that people gave each two (Lee, Pincombe and Welsh,
  2005), in gensim's test data. Each text is also a query with five grades, among 100 more news
  texts of the same source, without judgements.
- docstrings: the documentation of functions of networkx and SymPy. A query is the first sentence,
  its one relevant document is the rest of the same docstring. That is a known-item search: it
  compares models and formats with each other, not with published tables.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.packages.fetching import CACHE, Wheel, fetch

GENSIM: Final = Wheel(
    "gensim",
    "4.4.0",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    tag="cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64",
)
SOURCES: Final = (
    Wheel("networkx", "3.5", "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec"),
    Wheel("sympy", "1.14.0", "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5"),
)
DOCUMENTS: Final = 300
MAX_BODY_CHARACTERS: Final = 300
MAX_UNJUDGED: Final = 100
MIN_BODY_CHARACTERS: Final = 200
SUMMARY_CHARACTERS: Final = range(30, 200)
GRADES: Final = 5
_DOCTEST: Final = re.compile(r"^\s*(>>>|\.\.\.|\.\. )", re.MULTILINE)
_UNDERLINE: Final = re.compile(r"^\s*[-=~]{3,}\s*$", re.MULTILINE)


def write_lee(folder: Path) -> tuple[Path, Path]:
    """Write the folder of a retrieval set, and a file of scored pairs. Returns both paths."""
    with zipfile.ZipFile(fetch(GENSIM, CACHE)) as opened:
        judged, others, table = (
            opened.read(f"gensim/test/test_data/{name}").decode("cp1252")
            for name in ("lee.cor", "lee_background.cor", "similarities0-1.txt")
        )
    texts = judged.splitlines()
    rows = [[float(cell) for cell in line.split("\t")] for line in table.splitlines()]
    documents = {f"lee-{number}": text for number, text in enumerate(texts)}
    queries = dict(documents)
    documents |= {
        f"background-{number}": text
        for number, text in enumerate(others.splitlines()[:MAX_UNJUDGED])
    }
    # The table has its upper half only; the texts are compared with each other in both directions.
    similar = {
        (one, two): rows[min(one, two)][max(one, two)]
        for one in range(len(texts))
        for two in range(len(texts))
        if one != two
    }
    judgements: dict[str, dict[str, int]] = {}
    for (one, two), score in similar.items():
        judgements.setdefault(f"lee-{one}", {})[f"lee-{two}"] = grade(score)
    pairs = folder / "lee-pairs.jsonl"
    retrieval = _write(folder / "lee", documents, queries, judgements)
    lines = (
        json.dumps({"sentence1": texts[one], "sentence2": texts[two], "score": score})
        for (one, two), score in similar.items()
        if one < two
    )
    pairs.write_text("\n".join(lines) + "\n")
    return retrieval, pairs


def grade(similarity: float) -> int:
    """A similarity of 0 to 1 as a grade of 0 to 4. People gave 1 (unrelated) to 5, so 0.2 is the
    lowest.
    """
    return round((similarity * GRADES) - 1)


def write_docstrings(folder: Path, documents: int = DOCUMENTS) -> Path:
    """Write the folder of the known-item set of at most `documents` docstrings, and return it."""
    found: list[tuple[str, str, str]] = []
    for wheel in SOURCES:
        with zipfile.ZipFile(fetch(wheel, CACHE)) as opened:
            for name in sorted(opened.namelist()):
                if name.endswith(".py") and "/tests/" not in name and ".dist-info" not in name:
                    found += [
                        (f"{name}:{function}", *parts)
                        for function, parts in split_docstrings(opened.read(name).decode())
                    ]
    return _write(folder / "docstrings", *known_items(found, documents))


def split_docstrings(source: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The name, first paragraph and rest of each public function's docstring that has enough of
    both.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
        kept = [_UNDERLINE.sub("", part) for part in paragraphs[1:] if not _DOCTEST.search(part)]
        summary, body = (" ".join(" ".join(parts).split()) for parts in (paragraphs[:1], kept))
        if (
            len(summary) in SUMMARY_CHARACTERS
            and len(body) >= MIN_BODY_CHARACTERS
            and not _DOCTEST.search(summary)
        ):
            yield node.name, (summary, body[:MAX_BODY_CHARACTERS])


def known_items(
    found: list[tuple[str, str, str]], most: int = DOCUMENTS
) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, Mapping[str, int]]]:
    """Documents, queries and judgements of docstrings (name, first paragraph, rest). Texts that
    occur twice are left out.
    """
    summaries, bodies = (
        Counter(summary for _, summary, _ in found),
        Counter(body for _, _, body in found),
    )
    unique = {
        name: (summary, body)
        for name, summary, body in found
        if summaries[summary] == bodies[body] == 1
    }
    names = sorted(unique, key=lambda name: hashlib.sha256(name.encode()).digest())[:most]
    documents = {name: unique[name][1] for name in names}
    queries = {f"query {name}": unique[name][0] for name in names}
    return documents, queries, {f"query {name}": {name: 1} for name in names}


def _write(
    folder: Path,
    documents: Mapping[str, str],
    queries: Mapping[str, str],
    judgements: Mapping[str, Mapping[str, int]],
) -> Path:
    """Write BEIR's layout."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": key, "text": text}) for key, text in texts.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = [
        f"{query}\t{document}\t{grade_}"
        for query, found in judgements.items()
        for document, grade_ in found.items()
    ]
    (folder / "qrels" / "test.tsv").write_text(
        "\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n"
    )
    return folder
