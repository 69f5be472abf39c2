"""Prefetching: decides which pulls to have in flight. Decisions only.

The first step of the request path in the worker; `puller.py` carries out the decisions.

Redis shares a lane fairly between callers, and the batcher shares the device; but a job that is
still in its lane cannot overtake while the worker is full. So the worker limits its prefetch:

1. It holds at most one and a half batches of a lane, plus one pull. Texts that a generative model
  has begun do not count, and a batch has texts that its memory can keep (`Runner.batch_tokens`).
2. It fetches part of that just before the device is free.
3. It always has a pull in flight for lanes with few waiting tokens, whatever waits of other lanes,
   and one for tenants with few waiting tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

# Target depth. `make bench-fairness` judges it; the limits below follow from it.

TARGET_BATCHES: Final = 3 / 2
"""Batches of a lane waiting here above which only pulls that exclude its heaviest tenants are sent:
the next batch, and one pull.
"""

LOW_WATERMARK_BATCHES: Final = TARGET_BATCHES / 4
"""Batches of a lane waiting here below which the lane is always pulled: less than one pull
brings.
"""

FULL_LANE_BATCHES: Final = 2 * TARGET_BATCHES
"""Batches of a lane waiting here above which it is not pulled for any tenant, however many tenants
it has. Here and in MAX_BATCHES a tenant counts for at most one batch: a single job may be many
batches large, and must not block all other tenants.
"""

MAX_BATCHES: Final = 2 * FULL_LANE_BATCHES
"""Maximum token budgets waiting here over all lanes: two full lanes. Beyond that nothing is
pulled.
"""

MAX_EXCLUDED_TENANTS: Final = 16
"""Maximum tenants that a pull excludes."""

# Lead time.

LEAD_SECONDS: Final = (0.004, 0.02)
"""Bounds of the time before the device becomes free at which the last pull is sent."""

PROMPT_SECONDS: Final = 0.05
"""A slower pull has waited at the router for work, so it does not measure the round trip."""

QUICK_BATCH_SECONDS: Final = 0.03
"""Shorter batches end before a pull returns. Lanes with such batches have two pulls in flight, each
for a whole batch; others have one.
"""

# Cap.

MAX_PULLS: Final = 8
"""Maximum pulls in flight. Each brings at most its tokens (or one larger job), which with
MAX_BATCHES bounds the waiting tokens.
"""

RESERVED_PULLS: Final = MAX_PULLS // 4
"""Pulls of MAX_PULLS reserved for lanes without one, so that second pulls cannot take them."""

SIZE_STEP: Final = 4
"""Ratio of the batch sizes by which lanes are grouped. A large one makes fewer sizes than pulls."""

MIN_SIZE_DIVISOR: Final = SIZE_STEP ** (MAX_PULLS // 2 - 1)
"""Divisor of the token budget that gives the smallest of these sizes, so that they are at most half
as many as pulls.
"""

LaneName = tuple[str, str]
"""Model and adapter; "" for no adapter."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull in flight or to be sent."""

    lanes: frozenset[LaneName]
    can_load: bool
    """Whether the reply may name a model to load."""
    tokens: int
    """Token budget."""
    except_tenants: frozenset[str] = frozenset()
    """Excluded tenants."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """The state of one lane in this worker."""

    waiting_tokens: int = 0
    """Tokens that are pulled and not yet in a forward pass."""
    batch_tokens: int = 1 << 30
    """Size of one batch."""
    batch_seconds: float = 0.0
    """Duration of one batch; 0 if unknown."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """Interactive waiting tokens by tenant."""

    def counted(self, most: int) -> int:
        """Return the waiting tokens, counting each tenant (and all bulk work) for at most
        `most`.
        """
        bulk = self.waiting_tokens - sum(self.tenants.values())
        return sum(min(tokens, most) for tokens in self.tenants.values()) + min(max(bulk, 0), most)


@dataclass(frozen=True, slots=True)
class Situation:
    """The worker's state, the input of `plan_pulls`."""

    lanes: Mapping[LaneName, LaneState]
    """Lanes of loaded models."""
    can_load: bool
    in_flight: tuple[Pull, ...]
    waiting_tokens: int
    """Waiting tokens of all lanes."""
    busy_seconds: float
    """Time until the device is free."""
    lead_seconds: float
    """The `seconds` of `Lead`."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Pulls to start now."""

    pulls: tuple[Pull, ...] = ()
    replan_seconds: float | None = None
    """Time after which to plan again even if nothing happens; None if not needed."""


class Lead:
    """Estimates the lead of the last pull for the next batch before the device is free.

    Measured as the time of a pull and its tokenising. Jobs of a later pull miss the batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.01

    def add(self, seconds: float) -> None:
        """Add a measurement: the time from sending a pull until its jobs were tokenised."""
        if seconds < PROMPT_SECONDS:
            least, most = LEAD_SECONDS
            self.seconds += 0.1 * (min(max(1.25 * seconds, least), most) - self.seconds)


def plan_pulls(situation: Situation, budget_tokens: int) -> PullPlan:
    """Decide which pulls to start. `budget_tokens` is the size of the largest batch.

    A pull asks for half a batch, or for a whole one where batches are quick.

    1. Idle worker: two pulls for all lanes, so that one waits at the router during the other's job.
    2. Busy device: one pull for the lanes with few waiting tokens.
    3. Device nearly free: also a pull for lanes with up to one and a half waiting batches. Jobs
       that arrived during the batch are then pulled together and are answered in one call.
    4. Lanes above these limits: a pull that excludes the tenants with the most waiting tokens,
       unless batches are too quick for it to matter. A light tenant is then in the next batch,
       whatever others have in the lane.
    """
    s = situation
    beyond = sum(state.waiting_tokens - state.counted(budget_tokens) for state in s.lanes.values())
    if s.waiting_tokens - beyond >= MAX_BATCHES * budget_tokens:
        return PullPlan()
    is_late = s.busy_seconds <= s.lead_seconds
    replan_seconds = None if is_late or not s.waiting_tokens else s.busy_seconds - s.lead_seconds
    common = tuple(pull for pull in s.in_flight if not pull.except_tenants)
    excluding = tuple(pull for pull in s.in_flight if pull.except_tenants)
    first_pulls: list[Pull] = []
    further_pulls: list[Pull] = []
    for size, lanes in _by_size(s.lanes, budget_tokens).items():
        is_quick = any(0 < state.batch_seconds < QUICK_BATCH_SECONDS for state in lanes.values())
        tokens = size if is_quick else max(1, size // 2)
        most = size * (TARGET_BATCHES if is_late else LOW_WATERMARK_BATCHES)
        wanted = frozenset(name for name, state in lanes.items() if state.waiting_tokens <= most)
        if wanted:
            is_dry = is_late and not any(lanes[name].waiting_tokens for name in wanted)
            copies = 2 if is_dry and (is_quick or not s.waiting_tokens) else 1
            missing = [Pull(wanted, s.can_load, tokens)] * (copies - _pulls_for(wanted, common))
            is_pulled = copies > len(missing)
            first_pulls += missing[: 0 if is_pulled else 1]
            further_pulls += missing[0 if is_pulled else 1 :]
        others = {name: state for name, state in lanes.items() if name not in wanted}
        for pull in _excluding_pulls(others, size, tokens, excluding, is_quick=is_quick):
            is_pulled = any(pull.lanes <= one.lanes for one in s.in_flight)
            (further_pulls if is_pulled else first_pulls).append(pull)
    if s.can_load and not any(pull.can_load for pull in (*s.in_flight, *first_pulls)):
        empty = frozenset(name for name, state in s.lanes.items() if not state.waiting_tokens)
        first_pulls.append(Pull(empty, True, max(1, budget_tokens // 2)))
    first_pulls = first_pulls[: MAX_PULLS - len(s.in_flight)]
    return PullPlan(
        (
            *first_pulls,
            *further_pulls[
                : max(0, MAX_PULLS - RESERVED_PULLS - len(s.in_flight) - len(first_pulls))
            ],
        ),
        replan_seconds,
    )


def _excluding_pulls(
    lanes: Mapping[LaneName, LaneState],
    size: int,
    tokens: int,
    in_flight: tuple[Pull, ...],
    *,
    is_quick: bool,
) -> Iterator[Pull]:
    """Yield pulls for full lanes that exclude their heaviest tenants, unless one is in flight."""
    for name, state in lanes.items():
        heavy = _heaviest(state.tenants)
        is_pulled = any(name in pull.lanes and pull.except_tenants <= heavy for pull in in_flight)
        is_soon = is_quick and state.waiting_tokens <= size * FULL_LANE_BATCHES
        if heavy and not (is_soon or is_pulled) and state.counted(size) <= size * FULL_LANE_BATCHES:
            yield Pull(frozenset({name}), False, tokens, heavy)


def _heaviest(tenants: Mapping[str, int]) -> frozenset[str]:
    """Return up to MAX_EXCLUDED_TENANTS tenants with at least half as much as the heaviest."""
    most = max(tenants.values(), default=0)
    heavy = [tenant for tenant, tokens in tenants.items() if tokens >= most / 2]
    return frozenset(sorted(heavy, key=tenants.__getitem__)[-MAX_EXCLUDED_TENANTS:])


def _by_size(
    lanes: Mapping[LaneName, LaneState], budget_tokens: int
) -> dict[int, dict[LaneName, LaneState]]:
    """Group lanes by batch size. A pull has one token budget, and one that is small for a fast
    model would block a slow one.
    """
    sizes: dict[int, dict[LaneName, LaneState]] = {}
    for name, state in lanes.items():
        size = budget_tokens
        while size > max(state.batch_tokens * 2, budget_tokens // MIN_SIZE_DIVISOR):
            size //= SIZE_STEP
        sizes.setdefault(max(1, size), {})[name] = state
    return sizes


def _pulls_for(lanes: frozenset[LaneName], in_flight: tuple[Pull, ...]) -> int:
    """Return how many pulls in flight cover the least-covered lane."""
    return min(sum(lane in pull.lanes for pull in in_flight) for lane in lanes)
