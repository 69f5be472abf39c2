"""Which pulls to have in flight: decisions only.

On the way of a request before everything else in the worker; `intake.py` acts on what is decided here.

What lies in a lane is shared out fairly by Redis, what lies here by the batcher. What neither can do is to let a job overtake that
is still there while the room here is full. So little is kept here of each lane, at most one batch and a half and what one pull
brings; some of it is fetched just before the device is free; lanes of which little waits here are always asked for, however much
there is of others; and so are jobs of tenants of whom little waits here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LEAD_SECONDS: Final = (0.004, 0.02)
"""At least and at most so long before the device is free more is asked for."""

PROMPT_SECONDS: Final = 0.05
"""A pull that takes longer has waited for work."""

LITTLE: Final = 3 / 8
"""A lane of which at most that part of a batch waits is asked for at any time: it has not yet given what a pull asks for."""

MUCH: Final = 3 / 2
"""Of a lane of which more batches than that wait nothing is asked for."""

FULL: Final = 3
"""Of a lane of which more batches than that wait nobody is asked for: there may be very many tenants. Here and in MOST_BATCHES a
tenant counts for a batch at most: one job may be many batches large, and must not keep all others out."""

MOST_LEFT_OUT: Final = 16
"""Tenants that a pull leaves out."""

QUICK_SECONDS: Final = 0.03
"""Batches that take less are over before a pull is: two of a lane are kept ready, by pulls for whole ones. Of others one."""

MOST_BATCHES: Final = 6
"""Token budgets that may wait here, of all lanes together; beyond that nothing is pulled."""

MOST_PULLS: Final = 8
"""In flight. Each brings its tokens at most (or one larger job), so that never more wait than MOST_BATCHES and these together."""

SMALLEST_SIZE: Final = 64
"""Into so many parts a pull's budget is cut at most."""

KEPT_PULLS: Final = 2
"""Of these, for lanes that nobody asks for yet: a second pull for some must not keep others from their first."""

LaneName = tuple[str, str]
"""Model and adapter; an empty adapter is none."""


@dataclass(frozen=True, slots=True)
class Pull:
    """In flight, or to be sent: for which lanes, whether it may be answered with a model to load, and for how many tokens."""

    lanes: frozenset[LaneName]
    can_load: bool
    tokens: int
    except_tenants: frozenset[str] = frozenset()
    """Others only."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """Of one lane here.

    `waiting_tokens`: pulled, not yet in a forward pass, tokenised or not; `tenants`: of each tenant.
    `batch_tokens`, `batch_seconds`: of one batch; 0 seconds: unknown.
    """

    waiting_tokens: int = 0
    batch_tokens: int = 1 << 30
    batch_seconds: float = 0.0
    tenants: Mapping[str, int] = field(default_factory=dict)

    def counted(self, most: int) -> int:
        """Tokens that wait, of each tenant (and of all bulk together) `most` at most."""
        bulk = self.waiting_tokens - sum(self.tenants.values())
        return sum(min(tokens, most) for tokens in self.tenants.values()) + min(max(bulk, 0), most)


@dataclass(frozen=True, slots=True)
class Situation:
    """Of the worker now.

    `lanes`: of what is loaded. `waiting_tokens`: of all lanes. `busy_seconds`: until the device is free. `lead_seconds`: `Lead`.
    """

    lanes: Mapping[LaneName, LaneState]
    can_load: bool
    flying: tuple[Pull, ...]
    waiting_tokens: int
    busy_seconds: float
    lead_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Pulls to start now, and after how many seconds to look again even if nothing happens (None: no need)."""

    pulls: tuple[Pull, ...] = ()
    look_again: float | None = None


class Lead:
    """How long before the device is free the last work for the next batch must be asked for: what a pull and its tokenising take,
    measured. Later is in vain, and whoever comes in between waits for one more batch."""

    def __init__(self) -> None:
        self.seconds = 0.01

    def heard(self, seconds: float) -> None:
        """So long after it was sent a pull's jobs were tokenised."""
        if seconds < PROMPT_SECONDS:
            least, most = LEAD_SECONDS
            self.seconds += 0.1 * (min(max(1.25 * seconds, least), most) - self.seconds)


def plan_pulls(situation: Situation, budget_tokens: int) -> Plan:
    """`budget_tokens`: of the largest batch. A pull asks for half of one.

    At idle two pulls for everything are in flight, so that one is waiting at the router while the other's job is worked on. While
    the device is busy one asks for lanes of which little waits here. Of others more is asked for when the device is nearly free,
    unless more than one and a half batches wait: what arrives in between then comes in one answer and goes back in one. Until then
    a pull waits for other tenants than those of whom much is here, unless batches are over too soon for it to matter: whoever comes
    with little is in the next batch, whatever others have in the lane.
    """
    s = situation
    beyond = sum(state.waiting_tokens - state.counted(budget_tokens) for state in s.lanes.values())
    if s.waiting_tokens - beyond >= MOST_BATCHES * budget_tokens:
        return Plan()
    is_late = s.busy_seconds <= s.lead_seconds
    look_again = None if is_late or not s.waiting_tokens else s.busy_seconds - s.lead_seconds
    common = tuple(pull for pull in s.flying if not pull.except_tenants)
    choosy = tuple(pull for pull in s.flying if pull.except_tenants)
    firsts: list[Pull] = []
    seconds: list[Pull] = []
    for size, lanes in _by_size(s.lanes, budget_tokens).items():
        is_quick = any(0 < state.batch_seconds < QUICK_SECONDS for state in lanes.values())
        tokens = size if is_quick else max(1, size // 2)
        most = size * (MUCH if is_late else LITTLE)
        wanted = frozenset(name for name, state in lanes.items() if state.waiting_tokens <= most)
        if wanted:
            is_dry = is_late and not any(lanes[name].waiting_tokens for name in wanted)
            copies = 2 if is_dry and (is_quick or not s.waiting_tokens) else 1
            missing = [Pull(wanted, s.can_load, tokens)] * (copies - _asked(wanted, common))
            is_asked = copies > len(missing)
            firsts += missing[: 0 if is_asked else 1]
            seconds += missing[0 if is_asked else 1 :]
        for name, state in lanes.items():
            heavy = _heaviest(state.tenants)
            is_asked = name in wanted or any(name in pull.lanes and pull.except_tenants <= heavy for pull in choosy)
            is_soon = is_quick and state.waiting_tokens <= size * FULL
            if heavy and not (is_soon or is_asked) and state.counted(size) <= size * FULL:
                seconds.append(Pull(frozenset({name}), False, tokens, heavy))
    if s.can_load and not any(pull.can_load for pull in (*s.flying, *firsts)):
        empty = frozenset(name for name, state in s.lanes.items() if not state.waiting_tokens)
        firsts.append(Pull(empty, True, max(1, budget_tokens // 2)))
    firsts = firsts[: MOST_PULLS - len(s.flying)]
    return Plan((*firsts, *seconds[: max(0, MOST_PULLS - KEPT_PULLS - len(s.flying) - len(firsts))]), look_again)


def _heaviest(tenants: Mapping[str, int]) -> frozenset[str]:
    """Those who have at least half as much as who has most."""
    most = max(tenants.values(), default=0)
    heavy = [tenant for tenant, tokens in tenants.items() if tokens >= most / 2]
    return frozenset(sorted(heavy, key=tenants.__getitem__)[-MOST_LEFT_OUT:])


def _by_size(lanes: Mapping[LaneName, LaneState], budget_tokens: int) -> dict[int, dict[LaneName, LaneState]]:
    """Lanes with batches of about the same size: a pull has one budget, and what is little for a fast model blocks a slow one."""
    sizes: dict[int, dict[LaneName, LaneState]] = {}
    for name, state in lanes.items():
        size = budget_tokens
        while size > max(state.batch_tokens * 2, budget_tokens // SMALLEST_SIZE):
            size //= 4  # in large steps, so that there are fewer sizes than pulls
        sizes.setdefault(max(1, size), {})[name] = state
    return sizes


def _asked(lanes: frozenset[LaneName], flying: tuple[Pull, ...]) -> int:
    """How many pulls in flight ask for the lane that is asked for least."""
    return min(sum(lane in pull.lanes for pull in flying) for lane in lanes)
