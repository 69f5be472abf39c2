"""Reads the mesh's pools from pools.yaml (SHOAL_POOLS): the hardware of each, the bounds and times
of its scaling, its cost.

Read when a router or a scheduler starts, and again when the file changes
(`libs/serving/watched.py`). `POOLS` is the only definition of the file's keys; `schema.py`
generates the JSON schema from it. Without a file, every name that a worker gives as its pool is a
pool with the defaults of `PoolSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, get_args

import yaml

from libs.catalog.overrides import Catalog
from libs.catalog.shapes import At, ByteCount, Choice, Count, Flag, Key, Named, Number, Record, Text
from libs.errors import InvalidInput

Device = Literal["cpu", "cuda"]
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
WORDS: Final = "1..63 letters, digits, '.', '_' or '-'"
DEFAULT: Final = "cpu"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool: workers of one kind of hardware, scaled as one.

    Attributes:
        memory_bytes: Memory of a worker's device for models; 0: as its workers report.
        spot: Machines may be preempted at short notice.
        cold_start_seconds: From requesting a worker until it serves, on a running machine.
        node_seconds: Additional seconds if a machine has to be provisioned first.
        drain_seconds: Seconds in which a backlog should be worked off.
        keep_warm_seconds: How long the last worker stays without work; None: as long as a new one
            takes to start.
        target_utilization: Share of its time that a worker should be busy.
        cost_per_hour: Cost of one worker, in any currency.
        fallback_for: The pool that this one replaces when that one's workers do not start.
    """

    name: str
    device: Device = "cpu"
    memory_bytes: int = 0
    spot: bool = False
    min_workers: int = 0
    max_workers: int = 10
    cold_start_seconds: float = 60.0
    node_seconds: float = 0.0
    drain_seconds: float = 30.0
    keep_warm_seconds: float | None = None
    target_utilization: float = 0.75
    cost_per_hour: float = 0.0
    fallback_for: str = ""


@dataclass(frozen=True, slots=True)
class Pools:
    """The mesh's pools.

    Attributes:
        by_name: The pools of the file; empty without one.
        default: The pool of models for which the catalog names none.
    """

    default: str = DEFAULT
    by_name: Mapping[str, PoolSpec] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return ", ".join(self.by_name) or "as workers name them"

    @property
    def is_configured(self) -> bool:
        """True with a pool file; then only its pools exist."""
        return bool(self.by_name)

    def spec(self, name: str) -> PoolSpec:
        """Return the pool with this name; PoolSpec's defaults if no file describes it."""
        return self.by_name.get(name) or PoolSpec(name)

    def names_for(
        self, model: str, catalog: Catalog, reported: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the names of the model's pools, best first.

        Their source is this process' catalog, else a worker's card (`reported`). Empty if
        neither names a pool, or if the pool file has none of them.
        """
        overrides = catalog.overrides(model)
        named = tuple(reported) if overrides is None or overrides.pools is None else overrides.pools
        return tuple(name for name in named if not self.is_configured or name in self.by_name)


_NAME = Text(NAME, WORDS)
_POOL = Record(
    lambda **values: PoolSpec("", **values),
    {
        "device": Key(Choice(get_args(Device)), "what its workers compute on", needed=True),
        "memory_bytes": Key(
            ByteCount(), "bytes of a worker's device for models, default as its workers report"
        ),
        "spot": Key(
            Flag(), "whether its machines may be taken away at short notice, default false"
        ),
        "min_workers": Key(Count(0), "workers that are always there, default 0"),
        "max_workers": Key(Count(0), "workers that are there at most, default 10"),
        "cold_start_seconds": Key(
            Number(),
            (
                "seconds from asking for a worker until it serves, on a machine that is there, "
                "default 60"
            ),
        ),
        "node_seconds": Key(
            Number(), "seconds more if a machine must be provisioned first, default 0"
        ),
        "drain_seconds": Key(
            Number(1), "seconds in which a backlog should be worked off, default 30"
        ),
        "keep_warm_seconds": Key(
            Number(),
            (
                "seconds for which the last worker stays without work, default as long as a new "
                "one would take to start"
            ),
        ),
        "target_utilization": Key(
            Number(0.05, 1), "share of its time that a worker should be busy, default 0.75"
        ),
        "cost_per_hour": Key(Number(), "cost of a worker in an hour, in any currency, default 0"),
        "fallback_for": Key(
            _NAME,
            "the pool that this one replaces when that one's workers do not start, default none",
        ),
    },
)
POOLS = Record(
    lambda **values: values,
    {
        "default": Key(
            _NAME, "pool of models for which the catalog names none, default the first of the file"
        ),
        "pools": Key(Named(_NAME, _POOL), "the pools by name", needed=True),
    },
)


def read_pools(path: Path) -> Pools:
    """Return the pools of the file. Raises InvalidInput naming file, line and key."""
    at = At(str(path), whole="the file")
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidInput(
            f"{path}:{line}: is not YAML: {error.problem}", field="SHOAL_POOLS"
        ) from error
    except (OSError, RecursionError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}", field="SHOAL_POOLS") from error
    if node is None:
        raise InvalidInput(f"{path}:1: the file is empty", field="SHOAL_POOLS")
    found = POOLS.read(node, at)
    by_name = {name: replace(spec, name=name) for name, spec in found["pools"].items()}
    for name, spec in by_name.items():
        if spec.min_workers > spec.max_workers:
            where = _value(node, "pools", name, "min_workers")
            raise at.key(f"pools.{name}.min_workers").wrong(
                where, f"is {spec.min_workers}, above max_workers {spec.max_workers}"
            )
        primary = by_name.get(spec.fallback_for)
        if spec.fallback_for and (primary is None or primary is spec or primary.fallback_for):
            where = _value(node, "pools", name, "fallback_for")
            raise at.key(f"pools.{name}.fallback_for").wrong(
                where,
                (
                    f"is {spec.fallback_for!r}: it must name another pool, and one that has no "
                    "fallback_for itself"
                ),
            )
    default = found.get("default", next(iter(by_name)))
    if default not in by_name:
        raise at.key("default").wrong(
            _value(node, "default"), f"is {default!r}, which is none of {', '.join(by_name)}"
        )
    return Pools(default, MappingProxyType(by_name))


def check_cards(pools: Pools, catalog: Catalog) -> None:
    """Raise InvalidInput, naming file and line, for a card with a pool that is not in the file."""
    for overrides in catalog.cards():
        for name in overrides.pools or ():
            if pools.is_configured and name not in pools.by_name:
                problem = (
                    f"`pools` names {name!r}, which is not a pool of pools.yaml; its pools are: "
                    f"{pools}"
                )
                raise InvalidInput(f"{overrides.source}: {problem}", field="SHOAL_CATALOG")


def _value(node: yaml.Node, *keys: str) -> yaml.Node:
    """Return the node at a path of keys, which must exist."""
    for key in keys:
        node = next(value for name, value in node.value if name.value == key)
    return node
