"""Results of simulations as tables, JSON, and a plot of stall time (requests waiting for loads)
over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text
from shoal.cli.console import size, table

from libs.errors import InvalidInput
from services.scheduler.simulate import scaling
from services.scheduler.simulate.engine import SimulatedFleet, SimulationOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASE: Final = "lru"
"""The policy to which the stall times of the other policies are relative."""
PLOT_FORMATS: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One trace on one fleet under one policy."""

    trace: str
    fleet: SimulatedFleet
    outcome: SimulationOutcome


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Means over the runs of one policy on one fleet with all traces."""

    fleet: SimulatedFleet
    policy: str
    stall_seconds: float
    relative_stall: float | None
    """The stall time divided by that of BASE; None if BASE was not run."""
    miss_rate: float
    cold_loads: float
    warm_loads: float
    evictions: float
    bytes_loaded: float
    loading_share: float
    """Average number of concurrent loads on a worker."""
    wait_p50: float
    wait_p99: float
    refused: float


def rows(runs: Sequence[SimulationRun]) -> list[ReportRow]:
    """Return one row for each fleet and policy, in the order of the runs."""
    groups: dict[tuple[SimulatedFleet, str], list[SimulationOutcome]] = {}
    for run in runs:
        groups.setdefault((run.fleet, run.outcome.policy), []).append(run.outcome)
    return [_row(fleet, policy, outcomes, groups) for (fleet, policy), outcomes in groups.items()]


def _row(
    fleet: SimulatedFleet,
    policy: str,
    outcomes: Sequence[SimulationOutcome],
    groups: Mapping[tuple[SimulatedFleet, str], Sequence[SimulationOutcome]],
) -> ReportRow:
    count = len(outcomes)
    stall = sum(one.stall_seconds for one in outcomes)
    base = sum(one.stall_seconds for one in groups.get((fleet, BASE), ()))
    return ReportRow(
        fleet=fleet,
        policy=policy,
        stall_seconds=stall / count,
        relative_stall=stall / base if base else None,
        miss_rate=sum(one.misses for one in outcomes)
        / max(1, sum(one.requests for one in outcomes)),
        cold_loads=sum(one.cold_loads for one in outcomes) / count,
        warm_loads=sum(one.warm_loads for one in outcomes) / count,
        evictions=sum(one.evictions for one in outcomes) / count,
        bytes_loaded=sum(one.bytes_loaded for one in outcomes) / count,
        loading_share=stall / max(1e-9, sum(one.seconds for one in outcomes)) / fleet.workers,
        wait_p50=sum(one.wait_p50 for one in outcomes) / count,
        wait_p99=sum(one.wait_p99 for one in outcomes) / count,
        refused=sum(one.refused for one in outcomes) / count,
    )


def as_json(runs: Sequence[SimulationRun]) -> list[dict[str, object]]:
    """Return every run as values for JSON, in bytes and seconds."""
    return [{"trace": run.trace, "fleet": asdict(run.fleet), **asdict(run.outcome)} for run in runs]


def as_table(runs: Sequence[SimulationRun]) -> Table:
    """Return a table in which the minimum stall time of each fleet is green."""
    traces = list(dict.fromkeys(run.trace for run in runs))
    found = rows(runs)
    least = {
        fleet: min(row.stall_seconds for row in found if row.fleet == fleet)
        for fleet in {row.fleet for row in found}
    }
    columns = (
        "stall",
        "of LRU's",
        "misses",
        "cold",
        "warm",
        "evicted",
        "read",
        "loading",
        "p50",
        "p99",
    )
    refused = ("refused",) if any(row.refused for row in found) else ()
    title = traces[0] if len(traces) == 1 else f"{traces[0]} and {len(traces) - 1} more, mean"
    made = table(title, "fleet", "policy", *columns, *refused, right=(*columns, *refused))
    last = None
    for row in found:
        values: list[Text | str] = [
            Text(
                f"{row.stall_seconds:,.1f} s",
                style="green" if row.stall_seconds == least[row.fleet] else "",
            ),
            "" if row.relative_stall is None else f"{row.relative_stall:.0%}",
            f"{row.miss_rate:.1%}",
            f"{row.cold_loads:,.0f}",
            f"{row.warm_loads:,.0f}",
            f"{row.evictions:,.0f}",
            size(row.bytes_loaded),
            f"{row.loading_share:.0%}",
            _seconds(row.wait_p50),
            _seconds(row.wait_p99),
        ]
        made.add_row(
            "" if row.fleet == last else describe(row.fleet),
            row.policy,
            *values,
            *[f"{row.refused:,.0f}"] * len(refused),
        )
        last = row.fleet
    return made


def describe(fleet: SimulatedFleet) -> str:
    """Describe a fleet in a few words."""
    host = f" + {size(fleet.host_bytes)} host" if fleet.host_bytes else ""
    return f"{fleet.workers} x {size(fleet.memory_bytes)}{host}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """One pool's outcomes, one for each seed."""

    cluster: scaling.Cluster
    outcomes: Sequence[scaling.ScalingOutcome]

    def mean(self, number: Callable[[scaling.ScalingOutcome], float]) -> float:
        return sum(map(number, self.outcomes)) / len(self.outcomes)


def scaling_json(runs: Sequence[ScalingRun]) -> list[dict[str, object]]:
    """Return every run as values for JSON, in seconds."""
    return [
        {"cluster": asdict(run.cluster), **asdict(outcome)}
        for run in runs
        for outcome in run.outcomes
    ]


def scaling_table(runs: Sequence[ScalingRun]) -> Table:
    """Return a table with one row for each pool."""
    columns = (
        "start",
        "cooldown",
        "believed start",
        "longest",
        "held",
        "machines",
        "cold starts",
        "p50",
        "p99",
    )
    made = table("scaling to zero", *columns, right=columns)
    for run in runs:
        made.add_row(
            f"{run.cluster.start_seconds:g} s",
            f"{run.cluster.cooldown_seconds:g} s",
            f"{run.mean(lambda one: one.cold_start_seconds[-1]):,.0f} s",
            f"{max(one.longest_cold_start_seconds for one in run.outcomes):,.0f} s",
            f"{run.mean(lambda one: one.held_share):.1%}",
            f"{run.mean(lambda one: one.machines):.2f}",
            f"{run.mean(lambda one: one.starts):,.0f}",
            _seconds(run.mean(lambda one: one.wait_p50)),
            _seconds(run.mean(lambda one: one.wait_p99)),
        )
    return made


def plot(runs: Sequence[SimulationRun], path: Path) -> None:
    """Plot the stall time by policy to `path`: lines over memory if fleets differ in memory, else
    bars. Raises InvalidInput if matplotlib is not installed.
    """
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InvalidInput(
            f"a plot's file must end in {', '.join(PLOT_FORMATS)}, not {path.name!r}", field="plot"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput(
            "plots need matplotlib: pip install 'shoal-mesh[plot]'", field="plot"
        ) from None
    found = rows(runs)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if len({row.fleet.memory_bytes for row in found}) > 1:
        _lines(axes, found)
    else:
        _bars(axes, found)
    axes.set_ylabel("seconds of loading that requests waited for")
    axes.set_ylim(bottom=0)
    axes.set_title(runs[0].trace)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _lines(axes: Axes, found: Sequence[ReportRow]) -> None:
    """Plot one line for each policy and count of workers."""
    counts = {row.fleet.workers for row in found}
    for policy in dict.fromkeys(row.policy for row in found):
        for workers in sorted(counts):
            points = sorted(
                (row.fleet.memory_bytes / 2**30, row.stall_seconds)
                for row in found
                if row.policy == policy and row.fleet.workers == workers
            )
            label = policy if len(counts) == 1 else f"{policy}, {workers} workers"
            axes.plot(
                [gib for gib, _ in points], [stall for _, stall in points], marker="o", label=label
            )
    axes.set_xlabel("memory for models on each worker, GiB")
    axes.legend(frameon=False)


def _bars(axes: Axes, found: Sequence[ReportRow]) -> None:
    several = len({row.fleet for row in found}) > 1
    labels = [f"{row.policy}\n{describe(row.fleet)}" if several else row.policy for row in found]
    bars = axes.bar(range(len(found)), [row.stall_seconds for row in found], width=0.6)
    axes.set_xticks(range(len(found)), labels)
    axes.bar_label(
        bars, ["" if row.relative_stall is None else f"{row.relative_stall:.0%}" for row in found]
    )
