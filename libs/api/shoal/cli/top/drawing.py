"""Draws the snapshots of `shoal top`: a table each for pools, workers, lanes and models, readable
at 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.console import size
from shoal.cli.top.history import LaneLine, ModelLine, PoolLine, Snapshot, WorkerLine

_UNKNOWN = "-"
# Columns of the widest table without the model's name.
_OTHER_COLUMNS = 56
_MIN_NAME_WIDTH = 24


@dataclass(frozen=True, slots=True)
class _Section:
    """A table.

    Attributes:
        flexible: The shares of the first columns in the width that the others leave; the others are
            narrow.
    """

    columns: tuple[str, ...]
    flexible: tuple[int, ...]
    left: tuple[str, ...]
    rows: Sequence[tuple[Text | str, ...]]


def drawn(snapshot: Snapshot, head: Text, width: int, height: int | None = None) -> RenderableType:
    """Return the tables below `head`, in at most `height` lines (None: any number)."""
    names = max(_MIN_NAME_WIDTH, width - _OTHER_COLUMNS)
    sections = [
        _pools(snapshot.pools),
        _workers(snapshot.workers),
        _lanes(snapshot.lanes, names),
        _models(snapshot.models, names),
    ]
    sections = [section for section in sections if section.rows]
    lines = [len(section.rows) for section in sections]
    if height is not None:
        # A table has a line for its columns and one before it; the head has two.
        lines = fitted(lines, height - 2 - 2 * len(sections))
    tables = (
        part
        for section, max_rows in zip(sections, lines, strict=True)
        for part in (Text(), _table(section, max_rows))
    )
    return Group(
        head,
        *(
            tables
            if sections
            else [Text("no workers, no lanes: requests wait until a worker starts", "yellow")]
        ),
    )


def fitted(lines: Sequence[int], room: int) -> list[int]:
    """Return the number of lines for each table so that all fit into `room`: the longest are cut
    first.
    """
    cut = list(lines)
    while sum(cut) > room and max(cut) > 1:
        cut[cut.index(max(cut))] -= 1
    return cut


def _table(section: _Section, max_rows: int) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="bold", pad_edge=False)
    for number, column in enumerate(section.columns):
        ratio = section.flexible[number] if number < len(section.flexible) else None
        is_left = ratio is not None or column in section.left
        made.add_column(
            column,
            justify="left" if is_left else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=ratio,
        )
    is_cut = max_rows < len(section.rows)
    for row in section.rows[: max_rows - 1 if is_cut else max_rows]:
        made.add_row(*row)
    if is_cut:
        made.add_row(Text(f"… {len(section.rows) - max_rows + 1} more", style="dim"))
    return made


def _pools(pools: Sequence[PoolLine]) -> _Section:
    columns = ("pool", "workers", "desired", "busy", "tokens/s", "queued", "oldest")
    return _Section(columns, (1,), (), [_pool(pool) for pool in pools])


def _pool(pool: PoolLine) -> tuple[Text | str, ...]:
    draining = f" ({pool.draining} draining)" if pool.draining else ""
    return (
        pool.pool,
        f"{pool.workers}{draining}",
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
    preempted = worker.preempted_in_seconds
    departure = (
        " (draining)"
        if worker.draining
        else ""
        if preempted is None
        else f" (preempted in {preempted:.0f} s)"
    )
    names = ", ".join(model.rpartition("/")[2] for model in worker.resident)
    return (
        Text.assemble(worker.worker_id, (departure, "yellow")),
        f"{len(worker.resident)}: {names}" if names else _UNKNOWN,
        worker.pool,
        _share(worker.busy),
        f"{size(worker.used_bytes)} of {size(worker.memory_bytes)}",
    )


def _lanes(lanes: Sequence[LaneLine], room: int) -> _Section:
    """Lanes with work, the longest queue first."""
    columns = ("lane", "pool", "jobs", "queued", "leased", "oldest", "tokens/s")
    active = [
        lane for lane in lanes if lane.queued_tokens or lane.leased_tokens or lane.tokens_per_second
    ]
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
    """Return the table of models, the fastest first and failed ones last."""
    columns = ("model", "state", "on", "size", "throughput")
    ordered = sorted(
        models, key=lambda model: (model.state == "failed", -model.tokens_per_second, model.model)
    )
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
    """Return a model's id; where that is too long, without its organisation."""
    return model if len(model) <= room else "…/" + model.rpartition("/")[2]


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share * 100:.0f} %"


def _rate(tokens: float | None) -> str:
    return _UNKNOWN if tokens is None else _tokens(tokens)


def _tokens(count: float) -> str:
    """Return a count of tokens in at most seven characters."""
    if count < 100_000:
        return f"{count:,.0f}"
    return (
        f"{count / 1e3:,.0f} k"
        if count < 1e6
        else f"{count / 1e6:,.1f} M"
        if count < 1e9
        else f"{count / 1e9:,.1f} G"
    )


def _age(seconds: float) -> str:
    if seconds <= 0:
        return _UNKNOWN
    return (
        f"{seconds:.1f} s"
        if seconds < 10
        else f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
    )
