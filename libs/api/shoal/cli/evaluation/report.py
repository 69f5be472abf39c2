"""The results of an evaluation as a table, as JSON, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import typer
from rich.table import Table

from shoal.cli.console import size, table
from shoal.cli.evaluation import metrics
from shoal.cli.evaluation.data import Retrieval, SimilarityPairs
from shoal.cli.evaluation.running import EvaluationRun, PairRun

PLOT_FORMATS: Final = (".png", ".svg")
NDCG, RECALL, SPEARMAN, OVERLAP, RBO = (
    "nDCG@10",
    "recall@100",
    "Spearman x 100",
    "overlap@10",
    "rank-biased overlap",
)

Row = Mapping[str, str | float]


def retrieval_rows(runs: Sequence[EvaluationRun], data: Retrieval) -> list[Row]:
    """Return the means over queries of each run."""
    return [
        {
            "model": run.name,
            NDCG: _mean(
                [
                    metrics.ndcg(found, data.judgements[query], 10)
                    for query, found in run.rankings.items()
                ]
            ),
            RECALL: _mean(
                [
                    metrics.recall(found, data.judgements[query], 100)
                    for query, found in run.rankings.items()
                ]
            ),
            "tokens/s": run.tokens_per_second,
            "p50 ms": run.p50_seconds * 1000,
            "bytes": run.bytes,
        }
        for run in runs
    ]


def agreement_rows(runs: Sequence[EvaluationRun]) -> list[Row]:
    """Return how far the rankings of each pair of runs agree; no judgements are needed."""
    return [
        {
            "model": f"{one.name} : {two.name}",
            OVERLAP: _mean(
                [
                    metrics.overlap(found, two.rankings[query], 10)
                    for query, found in one.rankings.items()
                ]
            ),
            RBO: _mean(
                [
                    metrics.rank_biased_overlap(found, two.rankings[query], 100)
                    for query, found in one.rankings.items()
                ]
            ),
        }
        for one, two in combinations(runs, 2)
    ]


def pair_rows(runs: Sequence[PairRun], data: SimilarityPairs) -> list[Row]:
    """Spearman's correlation of each run with the scores that people gave."""
    return [
        {
            "model": run.name,
            SPEARMAN: 100 * metrics.spearman(run.similarities, data.scores),
            "tokens/s": run.tokens_per_second,
            "bytes": run.bytes,
        }
        for run in runs
    ]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def as_table(rows: Sequence[Row], title: str) -> Table:
    """Return the rows with numbers as people read them."""
    columns = list(rows[0])
    made = table(title, *columns, right=tuple(columns[1:]))
    for row in rows:
        made.add_row(*(_shown(name, value) for name, value in row.items()))
    return made


def _shown(name: str, value: str | float) -> str:
    if isinstance(value, str):
        return value
    if name == "bytes":
        return size(int(value)) if value else "unknown"
    digits = {"tokens/s": 0, "p50 ms": 1, SPEARMAN: 2}.get(name, 4)
    return f"{value:,.{digits}f}"


def check_plot(path: Path) -> None:
    """Raise BadParameter for a file that cannot be drawn to, and without matplotlib: before the
    work, not after it.
    """
    if path.suffix.lower() not in PLOT_FORMATS:
        raise typer.BadParameter(
            f"a plot's file must end in {' or '.join(PLOT_FORMATS)}, not {path.name!r}"
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise typer.BadParameter("plots need matplotlib: pip install 'shoal[plot]'") from None


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the quality of each row as a bar, or over tokens per second where they were measured."""
    from matplotlib.figure import Figure

    quality = list(rows[0])[1]
    names, values = [str(row["model"]) for row in rows], [float(row[quality]) for row in rows]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if "tokens/s" in rows[0]:
        for name, value, row in zip(names, values, rows, strict=True):
            axes.plot([float(row["tokens/s"])], [value], marker="o", linestyle="", label=name)
        axes.set_xlabel("tokens per second")
        axes.set_ylabel(quality)
        axes.legend(frameon=False)
    else:
        axes.barh(names, values)
        axes.set_xlabel(quality)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
