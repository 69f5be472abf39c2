"""The faults, their targets and times, all from the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Servers = Literal["single", "sentinel", "cluster"]
"""The queue's Redis: one server, a master and a replica under three Sentinels, or a cluster of six
nodes.
"""
AT_ONCE: Final = 2
"""Faults that may overlap."""
ALONE: Final = 0.5
"""Share of the faults that are alone, in a run that has time for it."""
ALONE_GAP_SECONDS: Final = 2.5
LEADER: Final = "leader"
"""The scheduler that leads when the fault begins."""
EVERYBODY: Final = "everybody"
NODE_SHARE: Final = 2
"""Faults of each kind of the nodes of a Redis for one of each other kind."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Args:
        targets: candidates, of which it chooses one. shortest, longest: bounds in seconds of its
        duration, or until a killed process is restarted. core: part of every run, however short.
    """

    name: str
    targets: Sequence[str]
    shortest: float
    longest: float
    core: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault of a run.

    Args:
        begin: seconds from the start of the run.
        seconds: its duration.
        alone: no other fault overlaps, so its recovery can be measured.
        dice: 0..1, for the kind's further choices.
    """

    number: int
    kind: str
    target: str
    begin: float
    seconds: float
    alone: bool
    dice: float


def kinds(
    routers: Sequence[str],
    workers: Sequence[str],
    schedulers: Sequence[str],
    edges: Sequence[str] = (),
    *,
    lease: float,
    is_long: bool,
    away: float = 1.0,
    has_machines: bool = False,
    servers: Servers = "single",
    node_timeout: float = 0.0,
) -> list[Kind]:
    """Return all kinds; those of edges only where there are any.

    Args:
        lease: in seconds.
        is_long: The run has time for faults that take a minute to recover from.
        away: Maximum seconds until a killed worker, router or edge is restarted.
        has_machines: The clock and the disk of Redis can be changed.
        node_timeout: Seconds after which another node takes a master of a cluster, or under
        Sentinels, for failed.
    """
    frozen = (lease + 0.5, lease + 3.0)
    client_links = [f"clients>{router}" for router in routers]
    worker_links = [f"{worker}>{router}" for worker in workers for router in routers] + [
        f"{worker}>" for worker in workers
    ]
    redis_links = [f"{router}>redis" for router in routers]
    scheduler_links = [f"{scheduler}>redis" for scheduler in schedulers]
    found = [
        Kind("kill worker", workers, max(0.0, away - 1.0), away, core=True),
        Kind("kill router", routers, max(0.0, away - 1.0), away, core=True),
        Kind("kill scheduler", schedulers, 0.0, 2.0),
        Kind("kill redis", ["redis"], 0.0, 1.0, core=True),
        Kind("stop worker", workers, 0.0, 0.5, core=True),
        Kind("stop router", routers, 0.0, 0.5, core=True),
        Kind("stop scheduler", schedulers, 0.0, 0.5),
        Kind("freeze worker", workers, *frozen, core=True),
        Kind("freeze router", routers, 1.0, 5.0, core=True),
        Kind("freeze leader", [LEADER], 3.5, 5.0),
        Kind("freeze redis", ["redis"], 0.8, 2.0, core=True),
        Kind("redis is full", ["redis"], 0.5, 2.5, core=True),
        Kind("flush scripts", ["redis"], 0.0, 0.0, core=True),
        Kind("wrong clock of worker", workers, 2.0, 6.0, core=True),
        Kind("wrong clock of router", routers, 2.0, 6.0),
        Kind("full disk", [EVERYBODY, *workers] if is_long else workers, 2.0, 4.0, core=True),
    ]
    if has_machines:
        found += [
            Kind("wrong clock of redis", ["redis"], 2.0, 6.0),
            Kind("slow disk of redis", ["redis"], 2.0, 6.0),
        ]
    if servers != "single":
        found = [kind for kind in found if kind.name not in ("kill redis", "freeze redis")]
        found += NODE_SHARE * _node_kinds(servers, node_timeout)
        redis_links = scheduler_links = []  # clients connect to the addresses that nodes announce
    if edges:
        found += [
            Kind("kill edge", edges, max(0.0, away - 1.0), away, core=True),
            Kind("stop edge", edges, 0.0, 0.5, core=True),
            Kind("freeze edge", edges, 1.0, 5.0),
        ]
    for ends, links, is_core in (
        ("clients>router", client_links, True),
        ("worker>router", worker_links, True),
        ("router>redis", redis_links, True),
        ("scheduler>redis", scheduler_links, False),
    ):
        if not links:
            continue
        found += [
            Kind(f"silence {ends}", links, 1.0, 6.0, core=is_core),
            Kind(f"half silence {ends}", links, 1.0, 6.0),
            Kind(f"cut {ends}", links, 0.0, 1.5),
            Kind(f"slow {ends}", links, 1.0, 5.0),
            Kind(f"narrow {ends}", links, 1.0, 5.0),
        ]
    return found


def _node_kinds(servers: Servers, node_timeout: float) -> list[Kind]:
    """Return the kinds of faults of the nodes of a Redis. All have one target, so one is over, and
    the nodes whole again, before the next begins.
    """
    own = (
        Kind("move slot", ["redis"], 0.0, 0.0, core=True)
        if servers == "cluster"
        else Kind("kill sentinel", ["redis"], 0.0, 4.0, core=True)
    )
    return [
        # The time from the takeover of its replica until it is restarted.
        Kind("kill master", ["redis"], 0.0, 2.0, core=True),
        Kind("freeze master", ["redis"], node_timeout + 1.0, node_timeout + 6.0, core=True),
        Kind("fail over master", ["redis"], 0.0, 0.0, core=True),
        Kind("kill replica", ["redis"], 0.0, 2.0, core=True),
        own,
    ]


def plan(
    found: Sequence[Kind], *, seed: int, seconds: float, per_minute: float, rest: float = 0.0
) -> list[Planned]:
    """Return the faults of a run in order of their beginnings; they may begin later than planned.

    At most two overlap, and never two on one target. If they do not fit, the last begin after the
    run's end.

    Args:
        seconds, per_minute: length of the run and rate of faults, which give their number.
        rest: seconds without a fault on a target after each.
    """
    generator = random.Random(seed)
    deck = _deck(found, generator)
    gap = 60.0 / per_minute
    faults: list[Planned] = []
    begin = generator.uniform(0.2, 0.6) * gap
    for number in range(round(seconds * per_minute / 60.0) if found else 0):
        kind = next(deck)
        target = generator.choice(kind.targets)
        lasts = min(generator.uniform(kind.shortest, kind.longest), max(kind.shortest, 2 * gap))
        begin = _free(faults, target, begin, rest)
        alone = generator.random() < ALONE and gap >= ALONE_GAP_SECONDS
        faults.append(
            Planned(
                number,
                kind.name,
                target,
                round(begin, 3),
                round(lasts, 3),
                alone,
                generator.random(),
            )
        )
        begin += generator.choice((0.3, 1.2, 1.4)) * gap
    return faults


def concerns(target: str) -> set[str]:
    """Return the processes that a fault on `target` excludes from other faults."""
    if target in (LEADER, EVERYBODY):
        return {target}
    return {end for end in target.split(">") if end and end != "clients"} - (
        {"redis"} if ">" in target else set()
    )


def _deck(found: Sequence[Kind], generator: random.Random) -> Iterator[Kind]:
    """Every kind once, the core kinds first, and again: so a short run has as many kinds as it
    can.
    """
    while True:
        for is_core in (True, False):
            part = [kind for kind in found if kind.core == is_core]
            generator.shuffle(part)
            yield from part


def _free(faults: Sequence[Planned], target: str, begin: float, rest: float) -> float:
    """The first moment from `begin` on at which a fault may begin on `target`."""
    while True:
        going_on = [fault for fault in faults if fault.begin + fault.seconds > begin]
        on_target = [fault for fault in faults if concerns(fault.target) & concerns(target)]
        in_the_way = [
            fault.begin + fault.seconds + rest
            for fault in on_target
            if fault.begin + fault.seconds + rest > begin
        ]
        if len(going_on) < AT_ONCE and not in_the_way:
            return begin
        begin = min(in_the_way or [fault.begin + fault.seconds for fault in going_on]) + 0.001
