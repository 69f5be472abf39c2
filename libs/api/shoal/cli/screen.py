"""How `shoal top` draws a picture: a table each for pools, workers, lanes and models, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.console import size
from shoal.cli.picture import LaneLine, ModelLine, Picture, PoolLine, WorkerLine

_UNKNOWN = "-"
# What the widest table has beside a model's name.
_BESIDE_NAMES = 56
_LEAST_NAME = 24


@dataclass(frozen=True, slots=True)
class _Section:
    """A table. `flexible`: how the first columns share what room the others leave; all others are numbers and short words."""

    columns: tuple[str, ...]
    flexible: tuple[int, ...]
    left: tuple[str, ...]
    rows: Sequence[tuple[Text | str, ...]]


def drawn(picture: Picture, head: Text, width: int, height: int | None = None) -> RenderableType:
    """The picture below `head`, in so many lines (None: as many as it takes)."""
    names = max(_LEAST_NAME, width - _BESIDE_NAMES)
    sections = [_pools(picture.pools), _workers(picture.workers), _lanes(picture.lanes, names), _models(picture.models, names)]
    sections = [section for section in sections if section.rows]
    lines = [len(section.rows) for section in sections]
    if height is not None:
        # A table has a line for its columns and one before it; the head has two.
        lines = fitted(lines, height - 2 - 2 * len(sections))
    tables = (part for section, most in zip(sections, lines, strict=True) for part in (Text(), _table(section, most)))
    return Group(head, *(tables if sections else [Text("no workers, no lanes: requests wait until a worker comes", "yellow")]))


def fitted(lines: Sequence[int], room: int) -> list[int]:
    """So many lines for each of several tables that they fit: the longest are cut first."""
    cut = list(lines)
    while sum(cut) > room and max(cut) > 1:
        cut[cut.index(max(cut))] -= 1
    return cut


def _table(section: _Section, most: int) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="bold", pad_edge=False)
    for number, column in enumerate(section.columns):
        ratio = section.flexible[number] if number < len(section.flexible) else None
        is_left = ratio is not None or column in section.left
        made.add_column(column, justify="left" if is_left else "right", no_wrap=True, overflow="ellipsis", ratio=ratio)
    is_cut = most < len(section.rows)
    for row in section.rows[: most - 1 if is_cut else most]:
        made.add_row(*row)
    if is_cut:
        made.add_row(Text(f"… {len(section.rows) - most + 1} more", style="dim"))
    return made


def _pools(pools: Sequence[PoolLine]) -> _Section:
    columns = ("pool", "workers", "desired", "busy", "tokens/s", "queued", "oldest")
    return _Section(columns, (1,), (), [_pool(pool) for pool in pools])


def _pool(pool: PoolLine) -> tuple[Text | str, ...]:
    leaving = f" ({pool.draining} leaving)" if pool.draining else ""
    return (
        pool.pool,
        f"{pool.workers}{leaving}",
        _UNKNOWN if pool.desired_workers is None else str(pool.desired_workers),
        _share(pool.busy),
        _rate(pool.tokens_per_second),
        _tokens(pool.queued_tokens),
        _age(pool.oldest_seconds),
    )


def _workers(workers: Sequence[WorkerLine]) -> _Section:
    columns = ("worker", "resident", "pool", "busy", "memory")
    return _Section(columns, (2, 3), ("pool",), [_worker(worker) for worker in workers])


def _worker(worker: WorkerLine) -> tuple[Text | str, ...]:
    gone = worker.preempted_in_seconds
    leaving = " (draining)" if worker.draining else "" if gone is None else f" (gone in {gone:.0f} s)"
    names = ", ".join(model.rpartition("/")[2] for model in worker.resident)
    return (
        Text.assemble(worker.worker_id, (leaving, "yellow")),
        f"{len(worker.resident)}: {names}" if names else _UNKNOWN,
        worker.pool,
        _share(worker.busy),
        f"{size(worker.used_bytes)} of {size(worker.memory_bytes)}",
    )


def _lanes(lanes: Sequence[LaneLine], room: int) -> _Section:
    """Those with work, the longest first."""
    columns = ("lane", "pool", "jobs", "queued", "at work", "oldest", "tokens/s")
    active = [lane for lane in lanes if lane.queued_tokens or lane.leased_tokens or lane.tokens_per_second]
    active.sort(key=lambda lane: (-lane.queued_tokens, -(lane.tokens_per_second or 0), lane.model))
    return _Section(columns, (1,), ("pool",), [_lane(lane, room) for lane in active])


def _lane(lane: LaneLine, room: int) -> tuple[Text | str, ...]:
    adapter = f" + {lane.adapter}" if lane.adapter else ""
    return (
        _name(lane.model, room) + adapter,
        lane.pool,
        f"{lane.queued_jobs:,}",
        _tokens(lane.queued_tokens),
        _tokens(lane.leased_tokens),
        _age(lane.oldest_seconds),
        _rate(lane.tokens_per_second),
    )


def _models(models: Sequence[ModelLine], room: int) -> _Section:
    """The fastest first, those that failed last."""
    columns = ("model", "state", "on", "size", "can do")
    ordered = sorted(models, key=lambda model: (model.state == "failed", -model.tokens_per_second, model.model))
    return _Section(columns, (1,), ("state",), [_model(model, room) for model in ordered])


def _model(model: ModelLine, room: int) -> tuple[Text | str, ...]:
    return (
        _name(model.model, room),
        Text(model.state, style="red" if model.state == "failed" else ""),
        str(len(model.resident_on)),
        size(model.bytes) if model.bytes else _UNKNOWN,
        f"{_rate(model.tokens_per_second)} tokens/s" if model.tokens_per_second else _UNKNOWN,
    )


def _name(model: str, room: int) -> str:
    """A model's id; where that is too long, without its organisation."""
    return model if len(model) <= room else "…/" + model.rpartition("/")[2]


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share * 100:.0f} %"


def _rate(tokens: float | None) -> str:
    return _UNKNOWN if tokens is None else _tokens(tokens)


def _tokens(count: float) -> str:
    """At most seven characters."""
    if count < 100_000:
        return f"{count:,.0f}"
    return f"{count / 1e3:,.0f} k" if count < 1e6 else f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.1f} G"


def _age(seconds: float) -> str:
    if seconds <= 0:
        return _UNKNOWN
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
