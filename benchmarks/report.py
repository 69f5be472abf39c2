"""What was measured, and what it says: medians, ratios against the targets, tables and JSON. Pure, apart from printing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

LATENCY_TARGET_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Name:
    """What a measure is of. `layout`: processes x threads of the forward pass; `shape`: how the texts were sent."""

    engine: str
    dtype: str
    layout: str
    shape: str

    def __str__(self) -> str:
        return f"{self.engine} {self.dtype}, {self.layout}, {self.shape}"


@dataclass(slots=True)
class Series:
    """Seconds of each round for the same texts, and the lowest cosine of a vector to sentence-transformers' in float32."""

    name: Name
    seconds: list[float] = field(default_factory=list)
    cosine: float = float("nan")


@dataclass(frozen=True, slots=True)
class Query:
    """One query at idle, in seconds: what the client waited, and for the mesh the stages that its answer tells."""

    total: float
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def besides_forward(self) -> float:
        return self.total - self.stages.get("forward", 0.0)


@dataclass(slots=True)
class Latency:
    """Single short queries, one after another, with nothing else going on."""

    engine: str
    dtype: str
    rounds: list[list[Query]] = field(default_factory=list)

    @property
    def queries(self) -> list[Query]:
        return [query for queries in self.rounds for query in queries]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of the issue and what was measured: the median over the rounds, and its range."""

    text: str
    bound: float
    unit: str
    values: tuple[float, ...]
    at_most: bool = False

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `machine` and `notes` say where and under what conditions."""

    machine: dict[str, str]
    notes: list[str]
    texts: int
    tokens: int
    series: list[Series]
    latencies: list[Latency]
    targets: list[Target]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def find(series: Sequence[Series], engine: str, dtype: str, shape: str, layout: str = "") -> Series | None:
    """The series of that name; `layout` empty: whichever."""
    for one in series:
        if (one.name.engine, one.name.dtype, one.name.shape) == (engine, dtype, shape) and layout in ("", one.name.layout):
            return one
    return None


def ratios(fast: Series, slow: Series) -> tuple[float, ...]:
    """How many times as fast, round by round: neighbours in time, so that the machine's drift cancels."""
    return tuple(other / own for own, other in zip(fast.seconds, slow.seconds, strict=True))


def targets(series: Sequence[Series], latencies: Sequence[Latency], threads: str, layout: str) -> list[Target]:
    """The targets that this run can tell about. `threads`: the layout of one process with all threads; `layout`: the mesh's."""
    peer32 = find(series, "sentence-transformers", "float32", "batch 32")
    peer16 = find(series, "sentence-transformers", "bfloat16", "batch 32")
    own32 = find(series, "forward alone", "float32", "batch 32", threads)
    own16 = find(series, "forward alone", "bfloat16", "batch 32", threads)
    alike = find(series, "forward alone", "bfloat16", "batch 32", layout)
    bulk = find(series, "mesh", "bfloat16", "1 x all")
    singles = find(series, "mesh", "bfloat16", "64 at once")
    infinity = find(series, "Infinity", "bfloat16", "64 at once")
    compared = [
        ("forward alone bfloat16 / sentence-transformers float32", 3.5, own16, peer32),
        ("forward alone bfloat16 / sentence-transformers bfloat16", 1.4, own16, peer16),
        ("forward alone float32 / sentence-transformers float32", 2.3, own32, peer32),
        (f"mesh, one request, bfloat16 / forward alone, {layout}", 0.9, bulk, alike),
        ("mesh, 64 single texts, bfloat16 / Infinity, the same", 3.0, singles, infinity),
    ]
    found = [Target(text, bound, "x", ratios(a, b)) for text, bound, a, b in compared if a is not None and b is not None]
    for latency in (latency for latency in latencies if latency.engine == "mesh"):
        medians = tuple(percentile([query.besides_forward for query in queries], 0.5) * 1e3 for queries in latency.rounds)
        found.append(
            Target("all but the forward of a single query at idle, p50", LATENCY_TARGET_SECONDS * 1e3, "ms", medians, at_most=True)
        )
    return found


def print_report(report: Report, console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in report.machine.items()), style="dim")
    console.print(_throughput(report), _latency(report.latencies), _targets(report.targets))
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")


def _spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def _throughput(report: Report) -> Table:
    baseline = find(report.series, "sentence-transformers", "float32", "batch 32")
    table = Table(title=f"Throughput: median of {len(report.series[0].seconds)} rounds (lowest-highest)", title_justify="left")
    for heading in ("engine", "type", "processes x threads", "texts sent"):
        table.add_column(heading)
    for heading in ("sentences/s", "tokens/s", "x first", "cosine"):
        table.add_column(heading, justify="right")
    for series in report.series:
        name = series.name
        sentences = [report.texts / seconds for seconds in series.seconds]
        times = f"{median(ratios(series, baseline)):.2f}" if baseline else ""
        tokens = f"{report.tokens / median(series.seconds):,.0f}"
        table.add_row(name.engine, name.dtype, name.layout, name.shape, _spread(sentences), tokens, times, f"{series.cosine:.5f}")
    return table


def _latency(latencies: Sequence[Latency]) -> Table:
    table = Table(title="One short query at idle, milliseconds", title_justify="left")
    for heading in ("engine", "type", "queries", "p50", "p99", "besides the forward p50", "p99", "stages (medians)"):
        table.add_column(heading, justify="left" if heading in ("engine", "type", "stages (medians)") else "right")
    for latency in latencies:
        queries = latency.queries
        totals, rest = [query.total * 1e3 for query in queries], [query.besides_forward * 1e3 for query in queries]
        stages = {name: median(query.stages[name] * 1e3 for query in queries) for name in queries[0].stages}
        parts = [f"{percentile(rest, share):.2f}" if stages else "unknown" for share in (0.5, 0.99)]
        told = ", ".join(f"{name} {value:.2f}" for name, value in stages.items())
        p50, p99 = (f"{percentile(totals, share):.2f}" for share in (0.5, 0.99))
        table.add_row(latency.engine, latency.dtype, str(len(queries)), p50, p99, *parts, told)
    return table


def _targets(found: Sequence[Target]) -> Table:
    table = Table(title="Targets: medians of the rounds' own ratios", title_justify="left")
    for heading in ("target", "bound", "measured", ""):
        table.add_column(heading, justify="left" if heading in ("target", "") else "right")
    for target in found:
        bound = f"{'≤' if target.at_most else '≥'} {target.bound:g} {target.unit}"
        verdict = "[green]met[/]" if target.met else "[red]not met[/]"
        table.add_row(target.text, bound, f"{_spread(target.values, 2)} {target.unit}", verdict)
    return table


def to_json(report: Report) -> dict[str, object]:
    """All of it, seconds of every round and query included."""
    return {
        "machine": report.machine,
        "notes": report.notes,
        "texts": report.texts,
        "tokens": report.tokens,
        "throughput": [_series_json(series, report) for series in report.series],
        "latency": [_latency_json(latency) for latency in report.latencies],
        "targets": [
            {"target": one.text, "bound": one.bound, "at_most": one.at_most, "unit": one.unit, "measured": one.value}
            | {"rounds": one.values, "met": one.met}
            for one in report.targets
        ],
    }


def _series_json(series: Series, report: Report) -> dict[str, object]:
    name = series.name
    middle = median(series.seconds)
    return {
        "engine": name.engine,
        "dtype": name.dtype,
        "layout": name.layout,
        "shape": name.shape,
        "round_seconds": series.seconds,
        "sentences_per_second": report.texts / middle,
        "tokens_per_second": report.tokens / middle,
        "lowest_cosine": series.cosine,
    }


def _latency_json(latency: Latency) -> dict[str, object]:
    totals = [query.total for query in latency.queries]
    rest = [query.besides_forward for query in latency.queries]
    told = {"besides_forward_p50_seconds": percentile(rest, 0.5), "besides_forward_p99_seconds": percentile(rest, 0.99)}
    return {
        "engine": latency.engine,
        "dtype": latency.dtype,
        "queries": len(totals),
        "p50_seconds": percentile(totals, 0.5),
        "p99_seconds": percentile(totals, 0.99),
        "rounds": [[{"total": query.total} | query.stages for query in queries] for queries in latency.rounds],
    } | (told if latency.queries[0].stages else {})
