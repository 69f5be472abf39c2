"""Prefetching: decides which pulls to have in flight. Decisions only.

The first step of the request path in the worker; `puller.py` carries out what is decided here.

Redis shares out the work in a lane fairly, and the batcher the work here; but neither can let a job
that is still in its lane overtake while the worker is full. So the worker keeps little of each
lane, at most one and a half batches and what one pull brings; some of it is fetched just before the
device is free; a pull is always in flight for lanes of which little waits here, however much waits
of others, and one for tenants of which little waits here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

LEAD_SECONDS: Final = (0.004, 0.02)
"""Bounds of the time before the device becomes free at which the last pull is sent."""

PROMPT_SECONDS: Final = 0.05
"""A pull that takes longer has waited at the router for work, and is no measurement of the round
trip.
"""

LITTLE: Final = 3 / 8
"""A lane of which at most this part of a batch waits here is asked for at any time: less than one
pull brings.
"""

MUCH: Final = 3 / 2
"""A lane of which more batches wait here is not asked for, but by a pull that excludes its heaviest
tenants.
"""

FULL: Final = 3
"""A lane of which more batches wait here is asked for no tenant at all: there may be very many
tenants. Here and in MAX_BATCHES a tenant counts for at most one batch: one job may be many batches
large, and must not block all other tenants."""

MAX_LEFT_OUT: Final = 16
"""The most tenants that a pull excludes."""

QUICK_SECONDS: Final = 0.03
"""Shorter batches end before a pull returns: for them two pulls, each for a whole batch, keep a
lane supplied. Others have one.
"""

MAX_BATCHES: Final = 6
"""The most token budgets that may wait here, over all lanes; beyond that nothing is pulled."""

MAX_PULLS: Final = 8
"""The most pulls in flight. Each brings at most its tokens (or one larger job), so what waits here
is bounded by MAX_BATCHES and these."""

MIN_SIZE: Final = 64
"""The smallest batch size that lanes are grouped by is the token budget divided by this."""

KEPT_PULLS: Final = 2
"""Pulls of MAX_PULLS that are reserved for lanes without one: a second pull for a lane must not
keep others from their first.
"""

LaneName = tuple[str, str]
"""Model and adapter; an empty adapter is none."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull in flight or to be sent: its lanes, whether it may be answered with a model to load,
    and its token budget.
    """

    lanes: frozenset[LaneName]
    can_load: bool
    tokens: int
    except_tenants: frozenset[str] = frozenset()
    """Tenants whose jobs the pull excludes."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """What this worker holds of one lane.

    `waiting_tokens`: pulled, not yet in a forward pass, tokenised or not; `tenants`: the
    interactive ones of these by tenant. `batch_tokens`, `batch_seconds`: size and duration of one
    batch; 0 seconds: unknown.
    """

    waiting_tokens: int = 0
    batch_tokens: int = 1 << 30
    batch_seconds: float = 0.0
    tenants: Mapping[str, int] = field(default_factory=dict)

    def counted(self, most: int) -> int:
        """The waiting tokens, where each tenant (and all bulk work together) counts for at most
        `most`.
        """
        bulk = self.waiting_tokens - sum(self.tenants.values())
        return sum(min(tokens, most) for tokens in self.tenants.values()) + min(max(bulk, 0), most)


@dataclass(frozen=True, slots=True)
class Situation:
    """The worker's state, the input of `plan_pulls`.

    `lanes`: those of loaded models. `waiting_tokens`: over all lanes. `busy_seconds`: until the
    device is free. `lead_seconds`: of `Lead`.
    """

    lanes: Mapping[LaneName, LaneState]
    can_load: bool
    flying: tuple[Pull, ...]
    waiting_tokens: int
    busy_seconds: float
    lead_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Pulls to start now, and after how many seconds to plan again even if nothing happens (None:
    no need).
    """

    pulls: tuple[Pull, ...] = ()
    look_again: float | None = None


class Lead:
    """How long before the device is free the last pull for the next batch must be sent: the
    measured time of a pull and its tokenising. A later pull misses that batch, and jobs that arrive
    in between wait for one more."""

    def __init__(self) -> None:
        self.seconds = 0.01

    def add(self, seconds: float) -> None:
        """Adds a measurement: the time from sending a pull until its jobs were tokenised."""
        if seconds < PROMPT_SECONDS:
            least, most = LEAD_SECONDS
            self.seconds += 0.1 * (min(max(1.25 * seconds, least), most) - self.seconds)


def plan_pulls(situation: Situation, budget_tokens: int) -> Plan:
    """`budget_tokens`: of the largest batch. A pull asks for half a batch, or for a whole one where
    batches are quick.

    While the worker is idle, two pulls for all lanes are in flight, so that one waits at the router
    while the other's job is worked on. While the device is busy, one pull asks for the lanes of
    which little waits here. The other lanes are pulled when the device is nearly free, unless more
    than one and a half batches wait: jobs that arrive meanwhile then come in one pull and are
    answered in one call. Until then a pull that excludes the tenants of which much is here waits at
    the router, unless batches are too quick for it to matter: a light tenant is in the next batch,
    whatever others have in the lane.
    """
    s = situation
    beyond = sum(state.waiting_tokens - state.counted(budget_tokens) for state in s.lanes.values())
    if s.waiting_tokens - beyond >= MAX_BATCHES * budget_tokens:
        return Plan()
    is_late = s.busy_seconds <= s.lead_seconds
    look_again = None if is_late or not s.waiting_tokens else s.busy_seconds - s.lead_seconds
    common = tuple(pull for pull in s.flying if not pull.except_tenants)
    excluding = tuple(pull for pull in s.flying if pull.except_tenants)
    first_pulls: list[Pull] = []
    further_pulls: list[Pull] = []
    for size, lanes in _by_size(s.lanes, budget_tokens).items():
        is_quick = any(0 < state.batch_seconds < QUICK_SECONDS for state in lanes.values())
        tokens = size if is_quick else max(1, size // 2)
        most = size * (MUCH if is_late else LITTLE)
        wanted = frozenset(name for name, state in lanes.items() if state.waiting_tokens <= most)
        if wanted:
            is_dry = is_late and not any(lanes[name].waiting_tokens for name in wanted)
            copies = 2 if is_dry and (is_quick or not s.waiting_tokens) else 1
            missing = [Pull(wanted, s.can_load, tokens)] * (copies - _pulls_for(wanted, common))
            is_pulled = copies > len(missing)
            first_pulls += missing[: 0 if is_pulled else 1]
            further_pulls += missing[0 if is_pulled else 1 :]
        others = {name: state for name, state in lanes.items() if name not in wanted}
        further_pulls += _excluding_pulls(others, size, tokens, excluding, is_quick=is_quick)
    if s.can_load and not any(pull.can_load for pull in (*s.flying, *first_pulls)):
        empty = frozenset(name for name, state in s.lanes.items() if not state.waiting_tokens)
        first_pulls.append(Pull(empty, True, max(1, budget_tokens // 2)))
    first_pulls = first_pulls[: MAX_PULLS - len(s.flying)]
    return Plan(
        (
            *first_pulls,
            *further_pulls[: max(0, MAX_PULLS - KEPT_PULLS - len(s.flying) - len(first_pulls))],
        ),
        look_again,
    )


def _excluding_pulls(
    lanes: Mapping[LaneName, LaneState],
    size: int,
    tokens: int,
    flying: tuple[Pull, ...],
    *,
    is_quick: bool,
) -> Iterator[Pull]:
    """Pulls for lanes of which much waits here that exclude the tenants with most of it, unless one
    like it is in `flying`.
    """
    for name, state in lanes.items():
        heavy = _heaviest(state.tenants)
        is_pulled = any(name in pull.lanes and pull.except_tenants <= heavy for pull in flying)
        is_soon = is_quick and state.waiting_tokens <= size * FULL
        if heavy and not (is_soon or is_pulled) and state.counted(size) <= size * FULL:
            yield Pull(frozenset({name}), False, tokens, heavy)


def _heaviest(tenants: Mapping[str, int]) -> frozenset[str]:
    """The tenants that have at least half as much waiting as the heaviest one, MAX_LEFT_OUT at
    most.
    """
    most = max(tenants.values(), default=0)
    heavy = [tenant for tenant, tokens in tenants.items() if tokens >= most / 2]
    return frozenset(sorted(heavy, key=tenants.__getitem__)[-MAX_LEFT_OUT:])


def _by_size(
    lanes: Mapping[LaneName, LaneState], budget_tokens: int
) -> dict[int, dict[LaneName, LaneState]]:
    """Groups lanes by batch size: a pull has one token budget, and one that is small for a fast
    model would block a slow one.
    """
    sizes: dict[int, dict[LaneName, LaneState]] = {}
    for name, state in lanes.items():
        size = budget_tokens
        while size > max(state.batch_tokens * 2, budget_tokens // MIN_SIZE):
            size //= 4  # in large steps, so that there are fewer sizes than pulls
        sizes.setdefault(max(1, size), {})[name] = state
    return sizes


def _pulls_for(lanes: frozenset[LaneName], flying: tuple[Pull, ...]) -> int:
    """How many pulls in flight ask for the lane that is asked for least."""
    return min(sum(lane in pull.lanes for pull in flying) for lane in lanes)
