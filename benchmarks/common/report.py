"""Results and their evaluation: medians, ratios against the targets, tables and JSON. Pure, apart
from printing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

BATCHES = "batch 32"
SORTED = "batch 32, sorted"
ARRIVAL = "batch 32, in arrival order"
STEADY = "steady, 4 x 128"


@dataclass(frozen=True, slots=True)
class Name:
    """The identity of a measurement.

    Attributes:
        layout: Processes x threads of the forward pass.
        shape: How the texts were sent.
    """

    engine: str
    dtype: str
    layout: str
    shape: str

    def __str__(self) -> str:
        return f"{self.engine} {self.dtype}, {self.layout}, {self.shape}"


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Resources that the mesh used in one run.

    Attributes:
        micros: µs of CPU a text, by role; forward passes are the role `forward`, apart from the
            worker.
        starved, turnaround: Shares of the time in which the devices had work, and stalled.
    """

    micros: dict[str, float]
    starved: float
    turnaround: float


@dataclass(slots=True)
class SpeedSeries:
    """Seconds of each round for the same texts, and the lowest cosine of a vector to
    sentence-transformers' in float32.

    Attributes:
        `beside`: For the mesh, mean seconds of the forward alone just before and after each round's
            run; and the mesh's resource usage.
    """

    name: Name
    seconds: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    usage: list[RunUsage] = field(default_factory=list)
    cosine: float = float("nan")


@dataclass(frozen=True, slots=True)
class IdleQuery:
    """One query at idle, in seconds: the client's waiting time, and for the mesh the stages in its
    answer.
    """

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
    rounds: list[list[IdleQuery]] = field(default_factory=list)

    @property
    def queries(self) -> list[IdleQuery]:
        return [query for queries in self.rounds for query in queries]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop through a router with a stub worker."""

    callers: int
    answers: int
    seconds: float
    micros: dict[str, float]
    """µs of CPU for a request, by process."""
    jobs_a_pull: float
    """Jobs of those of the stub's pulls that returned any."""

    @property
    def rate(self) -> float:
        """Singles/s of all processes together."""
        return self.answers / self.seconds

    @property
    def per_core(self) -> float:
        """Singles/s of the router with a dedicated core."""
        return 1e6 / self.micros["router"]


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """A bound and the measurement: the median over the rounds, and its range."""

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
class RunReport:
    """One run. `machine` and `notes` say where and under what conditions; `routed` are turns of a
    router with a stub worker.
    """

    machine: dict[str, str]
    notes: list[str]
    texts: int
    tokens: int
    series: list[SpeedSeries]
    latencies: list[Latency]
    routed: list[ClosedLoop]
    targets: list[MeasuredTarget]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def find(
    series: Sequence[SpeedSeries], engine: str, dtype: str, shape: str, layout: str = ""
) -> SpeedSeries | None:
    """The series of that name; `layout` empty: whichever."""
    for one in series:
        if (one.name.engine, one.name.dtype, one.name.shape) == (
            engine,
            dtype,
            shape,
        ) and layout in ("", one.name.layout):
            return one
    return None


def ratios(fast: SpeedSeries, slow: SpeedSeries) -> tuple[float, ...]:
    """Return the speed ratios round by round: neighbours in time, so that the machine's drift
    cancels.
    """
    return tuple(other / own for own, other in zip(fast.seconds, slow.seconds, strict=True))


def forward_shares(series: SpeedSeries) -> tuple[float, ...]:
    """The mesh's speed as a share of the forward's alone, round by round."""
    return tuple(forward / own for own, forward in zip(series.seconds, series.beside, strict=True))


def usage(cpu: Mapping[str, float], counted: Mapping[str, float], texts_a_token: float) -> RunUsage:
    """Return the resource usage of a run.

    Args:
        cpu: CPU seconds of the run by role.
        counted: Increase of the workers' counters during the run.
    """
    texts = counted["shoal_tenant_tokens_total"] * texts_a_token
    forward = counted["shoal_device_cpu_seconds_total"]
    spent = {**cpu, "worker": cpu["worker"] - forward, "forward": forward}
    starved, turnaround = (
        counted[f"shoal_device_stalled_seconds_total/{cause}"]
        for cause in ("starved", "turnaround")
    )
    whole = counted["shoal_device_busy_seconds_total"] + starved + turnaround
    return RunUsage(
        {name: seconds / texts * 1e6 for name, seconds in spent.items()},
        starved / whole,
        turnaround / whole,
    )


def targets(
    series: Sequence[SpeedSeries],
    latencies: Sequence[Latency],
    per_core: Mapping[int, Sequence[float]],
    threads: str,
    layout: str,
) -> list[MeasuredTarget]:
    """Return the targets that this run can decide.

    Args:
        per_core: Singles/s per core of a router alone, by callers.
        threads: The layout of one process with all threads.
        layout: The mesh's layout, as "processes x threads".
    """
    found = [*_model_targets(series, threads, layout), *_mesh_targets(series, layout)]
    for latency in (latency for latency in latencies if latency.engine == "mesh"):
        for share, bound in ((0.5, 2.5), (0.99, 5.0)):
            rounds = tuple(
                percentile([query.besides_forward * 1e3 for query in queries], share)
                for queries in latency.rounds
            )
            found.append(
                MeasuredTarget(
                    f"a query at idle without its forward, p{share * 100:.0f}",
                    bound,
                    "ms",
                    rounds,
                    at_most=True,
                )
            )
    found += _idle_targets(latencies)
    for callers, rates in per_core.items():
        found.append(
            MeasuredTarget(
                f"a router alone, {callers} callers: singles/s per core", 2500.0, "", tuple(rates)
            )
        )
    return found


def _idle_targets(latencies: Sequence[Latency]) -> Iterator[MeasuredTarget]:
    """Yield the mesh's latency at idle as a share of each server's."""
    own = next((one for one in latencies if one.engine == "mesh"), None)
    for other in latencies:
        if own is None or other is own:
            continue
        shares = tuple(
            percentile([query.total for query in ours], 0.5)
            / percentile([query.total for query in theirs], 0.5)
            for ours, theirs in zip(own.rounds, other.rounds, strict=True)
        )
        text = f"a query at idle, p50 / {other.engine} {other.dtype}"
        yield MeasuredTarget(text, 1.0, "x", shares, at_most=True)


def _model_targets(
    series: Sequence[SpeedSeries], threads: str, layout: str
) -> Iterator[MeasuredTarget]:
    """The forward alone against others."""
    for dtype, bound in (("float32", 7.0), ("bfloat16", 2.8)):
        peer = find(series, "sentence-transformers", dtype, BATCHES)
        own = find(series, "forward alone", "bfloat16", BATCHES, threads)
        yield from _compared(
            f"forward bfloat16 / sentence-transformers {dtype}, {threads}", bound, own, peer
        )
    for dtype, bound in (("bfloat16", 1.25), ("float32", 1.15)):
        for where in dict.fromkeys((threads, layout)):
            own, peer = (
                find(series, "forward alone", dtype, BATCHES, where),
                find(series, "OpenVINO", dtype, SORTED, where),
            )
            yield from _compared(
                f"forward {dtype} / OpenVINO {dtype} sorted, {where}", bound, own, peer
            )


def _mesh_targets(series: Sequence[SpeedSeries], layout: str) -> Iterator[MeasuredTarget]:
    """The mesh's throughput, CPU and stalls."""
    own = {one.name.shape: one for one in series if one.name.engine == "mesh"}
    for shape, bound in (("1 x all", 0.92), (STEADY, 0.92), ("256 at once", 0.75)):
        if shape in own:
            yield MeasuredTarget(
                f"mesh, {shape} / forward alone, {layout}", bound, "x", forward_shares(own[shape])
            )
    singles = own.get("64 at once")
    for peer, shape, bound in (
        ("Infinity", "64 at once", 4.0),
        ("vLLM", "64 at once", 2.0),
        ("vLLM", "1 x all", 2.0),
    ):
        other = find(series, peer, "bfloat16", shape)
        yield from _compared(f"mesh, {shape} / {peer} bfloat16", bound, own.get(shape), other)
    for role, bound in (("router", 0.45), ("worker", 0.6)):
        # With more threads, others than the device's compute, too, and their time cannot be
        # separated from the rest.
        if singles is not None and (role == "router" or layout.endswith(" 1")):
            spent = tuple(used.micros[role] / 1e3 for used in singles.usage)
            beyond = " beyond the forward" if role == "worker" else ""
            yield MeasuredTarget(
                f"CPU of the {role} for a single{beyond}, 64 at once",
                bound,
                "ms",
                spent,
                at_most=True,
            )
    for shape in ("1 x all", STEADY):
        if shape in own:
            stalled = tuple((used.starved + used.turnaround) * 100 for used in own[shape].usage)
            yield MeasuredTarget(f"stalled devices, {shape}", 2.0, "%", stalled, at_most=True)


def _compared(
    text: str, bound: float, fast: SpeedSeries | None, slow: SpeedSeries | None
) -> Iterator[MeasuredTarget]:
    if fast is not None and slow is not None:
        yield MeasuredTarget(text, bound, "x", ratios(fast, slow))


def print_report(report: RunReport, console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in report.machine.items()), style="dim")
    console.print(
        _throughput(report),
        _usage(report.series),
        _latency(report.latencies),
        _routed(report.routed),
    )
    console.print(_targets(report.targets))
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median (lowest-highest)."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def _throughput(report: RunReport) -> Table:
    baseline = find(report.series, "sentence-transformers", "float32", BATCHES)
    table = Table(
        title=f"Throughput: median of {len(report.series[0].seconds)} rounds (lowest-highest)",
        title_justify="left",
    )
    for heading in ("engine", "type", "processes x threads", "texts sent"):
        table.add_column(heading)
    for heading in ("sentences/s", "tokens/s", "x first", "x forward", "cosine"):
        table.add_column(heading, justify="right")
    for series in report.series:
        name = series.name
        sentences = [report.texts / seconds for seconds in series.seconds]
        times = f"{median(ratios(series, baseline)):.2f}" if baseline else ""
        tokens = f"{report.tokens / median(series.seconds):,.0f}"
        share = spread(forward_shares(series), 2) if series.beside else ""
        cosine = f"{series.cosine:.5f}"
        table.add_row(
            name.engine,
            name.dtype,
            name.layout,
            name.shape,
            spread(sentences),
            tokens,
            times,
            share,
            cosine,
        )
    return table


def _usage(series: Sequence[SpeedSeries]) -> Table:
    """Return the table of the mesh's resource usage."""
    roles = ("client", "router", "redis", "worker", "forward")
    table = Table(
        title="The mesh: µs of CPU a text, and how long devices stalled while there was work",
        title_justify="left",
    )
    for heading in (
        "texts sent",
        *roles[:3],
        "worker beyond the forward",
        "forward",
        "starved %",
        "turnaround %",
    ):
        table.add_column(heading, justify="left" if heading == "texts sent" else "right")
    for one in (one for one in series if one.usage):
        spent = [spread([used.micros[role] for used in one.usage]) for role in roles]
        stalled = [
            spread([used.starved * 100 for used in one.usage], 1),
            spread([used.turnaround * 100 for used in one.usage], 1),
        ]
        table.add_row(one.name.shape, *spent, *stalled)
    return table


def _routed(turns: Sequence[ClosedLoop]) -> Table:
    table = Table(title="A router with a stub worker", title_justify="left")
    for heading in (
        "callers",
        "singles/s of all on these cores",
        "router, µs of CPU a single",
        "singles/s per core",
    ):
        table.add_column(heading, justify="right")
    for callers in dict.fromkeys(turn.callers for turn in turns):
        same = [turn for turn in turns if turn.callers == callers]
        columns = (
            [turn.rate for turn in same],
            [turn.micros["router"] for turn in same],
            [turn.per_core for turn in same],
        )
        table.add_row(str(callers), *map(spread, columns))
    return table


def _latency(latencies: Sequence[Latency]) -> Table:
    table = Table(title="One short query at idle, milliseconds", title_justify="left")
    for heading in (
        "engine",
        "type",
        "queries",
        "p50",
        "p99",
        "without the forward p50",
        "p99",
        "stages (medians)",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("engine", "type", "stages (medians)") else "right",
        )
    for latency in latencies:
        queries = latency.queries
        totals, rest = (
            [query.total * 1e3 for query in queries],
            [query.besides_forward * 1e3 for query in queries],
        )
        stages = {
            name: median(query.stages[name] * 1e3 for query in queries)
            for name in queries[0].stages
        }
        parts = [f"{percentile(rest, share):.2f}" if stages else "unknown" for share in (0.5, 0.99)]
        reported = ", ".join(f"{name} {value:.2f}" for name, value in stages.items())
        p50, p99 = (f"{percentile(totals, share):.2f}" for share in (0.5, 0.99))
        table.add_row(latency.engine, latency.dtype, str(len(queries)), p50, p99, *parts, reported)
    return table


def _targets(found: Sequence[MeasuredTarget]) -> Table:
    table = Table(title="Targets: medians of the rounds' own ratios", title_justify="left")
    for heading in ("target", "bound", "measured", ""):
        table.add_column(heading, justify="left" if heading in ("target", "") else "right")
    for target in found:
        bound = f"{'≤' if target.at_most else '≥'} {target.bound:,g} {target.unit}"
        verdict = "[green]met[/]" if target.met else "[red]not met[/]"
        digits = 2 if target.bound < 1000 else 0
        table.add_row(target.text, bound, f"{spread(target.values, digits)} {target.unit}", verdict)
    return table


def to_json(report: RunReport) -> dict[str, object]:
    """All of it, seconds of every round and query included."""
    return {
        "machine": report.machine,
        "notes": report.notes,
        "texts": report.texts,
        "tokens": report.tokens,
        "throughput": [_series_json(series, report) for series in report.series],
        "latency": [_latency_json(latency) for latency in report.latencies],
        "router_alone": [asdict(turn) for turn in report.routed],
        "targets": [
            {
                "target": one.text,
                "bound": one.bound,
                "at_most": one.at_most,
                "unit": one.unit,
                "measured": one.value,
            }
            | {"rounds": one.values, "met": one.met}
            for one in report.targets
        ],
    }


def _series_json(series: SpeedSeries, report: RunReport) -> dict[str, object]:
    name = series.name
    middle = median(series.seconds)
    return {
        "engine": name.engine,
        "dtype": name.dtype,
        "layout": name.layout,
        "shape": name.shape,
        "round_seconds": series.seconds,
        "forward_beside_seconds": series.beside,
        "usage": [asdict(used) for used in series.usage],
        "sentences_per_second": report.texts / middle,
        "tokens_per_second": report.tokens / middle,
        "lowest_cosine": series.cosine,
    }


def _latency_json(latency: Latency) -> dict[str, object]:
    totals = [query.total for query in latency.queries]
    rest = [query.besides_forward for query in latency.queries]
    reported = {
        "besides_forward_p50_seconds": percentile(rest, 0.5),
        "besides_forward_p99_seconds": percentile(rest, 0.99),
    }
    return {
        "engine": latency.engine,
        "dtype": latency.dtype,
        "queries": len(totals),
        "p50_seconds": percentile(totals, 0.5),
        "p99_seconds": percentile(totals, 0.99),
        "rounds": [
            [{"total": query.total} | query.stages for query in queries]
            for queries in latency.rounds
        ],
    } | (reported if latency.queries[0].stages else {})
