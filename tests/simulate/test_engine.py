"""The simulator against cases worked out by hand, and what must hold for every trace, fleet and
policy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import InvalidInput
from libs.eviction import POLICIES
from services.scheduler.simulate.engine import (
    CLAIRVOYANT,
    Event,
    SimulatedFleet,
    SimulationOutcome,
    simulate,
)
from services.scheduler.simulate.generate import TraceShape, bursty, uniform, zipf
from services.scheduler.simulate.trace import ModelCost, Trace, TraceRequest

ALL = (*POLICIES, CLAIRVOYANT)
FLEET = SimulatedFleet(100, batch_seconds=0.0)


def make_trace(models: list[ModelCost], *requests: tuple[float, str, int]) -> Trace:
    return Trace(
        "by hand", [TraceRequest(*one) for one in requests], {one.model: one for one in models}
    )


def cost(name: str, size: int = 60, load: float = 1.0, warm: float | None = None) -> ModelCost:
    """100 tokens a second."""
    return ModelCost(name, size, load, warm, 100.0)


def replayed(
    trace: Trace, fleet: SimulatedFleet = FLEET, policy: str = "lru"
) -> tuple[SimulationOutcome, list[tuple[float, str, str]]]:
    """The outcome, and when what happened to which model."""
    events: list[Event] = []
    outcome = simulate(trace, fleet, policy, watch=events.append)
    return outcome, [(round(event.at, 6), event.what, event.model) for event in events]


def test_two_models_that_take_turns_where_one_has_room() -> None:
    """Model a waits 1 s for its load, then 0; b waits 2 s; a is loaded again in 1 s. Each computes
    for 0.1 s.
    """
    trace = make_trace(
        [cost("a"), cost("b", load=2.0)], (0, "a", 10), (5, "a", 10), (20, "b", 10), (40, "a", 10)
    )
    outcome, events = replayed(trace)
    assert events == [
        (0, "load", "a"), (1, "loaded", "a"),
        (20, "evict", "a"), (20, "freed", "a"), (20, "load", "b"), (22, "loaded", "b"),
        (40, "evict", "b"), (40, "freed", "b"), (40, "load", "a"), (41, "loaded", "a"),
    ]  # fmt: skip
    reported = asdict(outcome)
    assert reported.pop("policy") == "lru"
    assert reported == pytest.approx(
        {
            "requests": 4, "refused": 0, "misses": 3, "cold_loads": 3, "warm_loads": 0,
            "evictions": 2, "stall_seconds": 4.0,
            "bytes_loaded": 180, "wait_mean": 1.0, "wait_p50": 1.0, "wait_p99": 2.0,
            "seconds": 41.1, "peak_bytes": 60,
        }
    )  # fmt: skip


def test_lru_evicts_old_models_and_cost_aware_policies_cheap_ones() -> None:
    """Model a costs 10 s and is the oldest when c needs memory. LRU evicts it and pays again; the
    others evict b, which is not used again.
    """
    models = [cost("a", 60, load=10.0), cost("b", 40), cost("c", 40)]
    trace = make_trace(models, (0, "a", 10), (20, "b", 10), (40, "c", 10), (60, "a", 10))
    stalls = {policy: replayed(trace, policy=policy)[0].stall_seconds for policy in ALL}
    assert stalls == {"lru": 22.0, "cost": 12.0, "gdsf": 12.0, CLAIRVOYANT: 12.0}


def test_clairvoyant_evicts_the_model_that_is_used_last() -> None:
    models = [cost("a", 40), cost("b", 40), cost("c", 40)]
    trace = make_trace(
        models, (0, "a", 1), (20, "b", 1), (40, "c", 1), (60, "a", 1), (80, "c", 1), (100, "b", 1)
    )
    assert replayed(trace, policy=CLAIRVOYANT)[0].cold_loads == 4
    assert replayed(trace, policy="lru")[0].cold_loads == 5


def test_busy_model_is_not_evicted_for_little_work() -> None:
    """Model a computes from 1 to 11; b, with 0.1 s of work, arrives at 2 and may not evict it
    before it is done.
    """
    trace = make_trace([cost("a"), cost("b", load=2.0)], (0, "a", 1000), (2, "b", 10))
    outcome, events = replayed(trace)
    assert events[2:] == [
        (11, "evict", "a"),
        (11, "freed", "a"),
        (11, "load", "b"),
        (13, "loaded", "b"),
    ]
    assert outcome.wait_p99 == pytest.approx(11.0)


def test_busy_model_leaves_in_two_phases_for_much_more_work() -> None:
    """Model b has 30 s of work at 2, more than twice a's 10: a takes no more work, but finishes its
    batch at 11.

    a's second request, at 3, waits for a to be loaded again, until b has idled at 43.
    """
    trace = make_trace(
        [cost("a"), cost("b", load=2.0)], (0, "a", 1000), (2, "b", 3000), (3, "a", 10)
    )
    outcome, events = replayed(trace)
    assert events[2:] == [
        (2, "evict", "a"), (11, "freed", "a"), (11, "load", "b"), (13, "loaded", "b"),
        (43, "evict", "b"), (43, "freed", "b"), (43, "load", "a"), (44, "loaded", "a"),
    ]  # fmt: skip
    assert (outcome.requests, outcome.misses) == (3, 3)
    assert outcome.wait_p99 == pytest.approx(41.0)


def test_loads_beyond_the_limit_wait_for_their_turn() -> None:
    trace = make_trace([cost(name, 10) for name in "abc"], (0, "a", 1), (0, "b", 1), (0, "c", 1))
    assert replayed(trace, replace(FLEET, max_loads=1))[0].wait_p99 == pytest.approx(3.0)
    assert replayed(trace, replace(FLEET, max_loads=2))[0].wait_p99 == pytest.approx(2.0)
    assert replayed(trace, replace(FLEET, max_loads=3))[0].wait_p99 == pytest.approx(
        1.02
    )  # two forward passes before it


def test_evicted_model_is_reloaded_from_host_memory() -> None:
    """The host has no memory for a, b and c when c leaves for a: b is dropped, the oldest without
    waiting requests.
    """
    models = [cost("a", warm=0.2), cost("b", warm=0.2), cost("c", warm=0.2)]
    asked = [(20.0 * number, name, 1) for number, name in enumerate("abacab")]
    outcome, events = replayed(make_trace(models, *asked), replace(FLEET, host_bytes=120))
    assert [(what, model) for _, what,
    model in events if what in ("load", "warm load", "dropped")] == [
        ("load", "a"), ("load", "b"), ("warm load", "a"), ("load", "c"), ("dropped", "b"),
        ("warm load", "a"), ("load", "b"),
    ]  # fmt: skip
    assert (outcome.cold_loads, outcome.warm_loads) == (4, 2)
    assert outcome.stall_seconds == pytest.approx(4.4)
    # With room for one only, a is waited for and stays, so that b is dropped when it leaves, and so
    # on.
    little = replayed(make_trace(models, *asked), replace(FLEET, host_bytes=119))[0]
    assert (little.cold_loads, little.warm_loads) == (4, 2)


def test_requests_of_one_model_share_its_load_and_its_batch() -> None:
    trace = make_trace([cost("a")], (0, "a", 100), (0.5, "a", 100), (0.9, "a", 100))
    outcome, _ = replayed(trace)
    assert (outcome.misses, outcome.cold_loads, outcome.stall_seconds) == (3, 1, 1.0)
    assert outcome.seconds == pytest.approx(4.0)
    assert outcome.wait_p99 == pytest.approx(1.0)
    # With a budget of 200 tokens the third waits for the batch of the first two.
    assert replayed(trace, replace(FLEET, batch_tokens=200))[0].wait_p99 == pytest.approx(2.1)


def test_closed_loop_client_waits_for_its_answer() -> None:
    trace = make_trace([cost("a"), cost("b")], (0, "a", 10), (0, "b", 10), (5, "a", 10))
    outcome, events = replayed(trace, replace(FLEET, clients=1))
    assert [event for event in events if event[1] == "load"] == [
        (0, "load", "a"),
        (1.1, "load", "b"),
        (5, "load", "a"),
    ]
    assert outcome.wait_p99 == pytest.approx(1.0)


def test_workers_may_learn_late_that_queue_is_empty() -> None:
    """Model b's request is counted while b loads, at 20, and again only at 40: until then b counts
    as backlogged, and a leaves for c.
    """
    trace = make_trace(
        [cost("a", 50), cost("b", 50, load=0.2), cost("c", 50)],
        (0, "a", 1),
        (19.9, "b", 1),
        (30, "c", 1),
    )
    assert (30, "evict", "b") in replayed(trace, policy="cost")[1]
    assert (30, "evict", "a") in replayed(trace, replace(FLEET, count_seconds=20.0), policy="cost")[
        1
    ]


def test_model_that_fits_nowhere_is_refused_and_the_rest_goes_on() -> None:
    outcome, _ = replayed(make_trace([cost("a"), cost("huge", 101)], (0, "huge", 1), (0, "a", 1)))
    assert (outcome.requests, outcome.refused, outcome.cold_loads) == (2, 1, 1)


def test_two_workers_share_the_models_and_a_hot_one_gets_a_second_copy() -> None:
    """Six requests of 10 s each arrive at once: 60 s of work against a load of 1 s."""
    asked = [(0.0, "b", 1), *[(5.0, "a", 1000) for _ in range(6)]]
    outcome, events = replayed(
        make_trace([cost("a"), cost("b")], *asked), replace(FLEET, workers=2, batch_tokens=1000)
    )
    assert Counter(model for _, what, model in events if what == "load") == {"b": 1, "a": 2}
    assert outcome.stall_seconds == pytest.approx(2.0)  # the second copy of a stalls no request
    one = replayed(make_trace([cost("a"), cost("b")], *asked), replace(FLEET, batch_tokens=1000))[0]
    assert outcome.seconds < 0.6 * one.seconds


def test_wrong_settings_are_refused_with_their_name() -> None:
    with pytest.raises(InvalidInput, match="policy must be one of cost, lru, gdsf, clairvoyant"):
        simulate(make_trace([]), FLEET, "mru")
    with pytest.raises(InvalidInput, match="memory_bytes must be at least 1"):
        SimulatedFleet(0)


names = st.sampled_from("abcdef")
traces = st.lists(
    st.tuples(st.integers(0, 300).map(lambda tenths: tenths / 10), names, st.integers(1, 400)),
    max_size=60,
)
models = st.fixed_dictionaries(
    {
        name: st.builds(
            cost,
            st.just(name),
            st.integers(1, 70),
            st.integers(0, 50).map(lambda tenths: tenths / 10),
        )
        for name in "abcdef"
    }
)
fleets = st.builds(
    SimulatedFleet,
    memory_bytes=st.integers(60, 150),
    workers=st.integers(1, 3),
    host_bytes=st.sampled_from([0, 0, 50, 120]),
    max_loads=st.integers(1, 3),
    batch_tokens=st.integers(1, 1000),
    batch_seconds=st.sampled_from([0.0, 0.01]),
    clients=st.integers(0, 3),
    count_seconds=st.sampled_from([0.0, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(traces, models, fleets, st.sampled_from(ALL))
def test_every_request_is_answered_and_no_budget_exceeded(
    asked: list[tuple[float, str, int]],
    models: dict[str, ModelCost],
    fleet: SimulatedFleet,
    policy: str,
) -> None:
    trace = make_trace(list(models.values()), *sorted(asked))
    events: list[Event] = []
    outcome = simulate(trace, fleet, policy, watch=events.append)
    assert simulate(trace, fleet, policy) == outcome
    assert outcome.requests == len(asked)
    assert outcome.refused == sum(models[model].bytes > fleet.memory_bytes for _, model, _ in asked)
    counted = Counter(event.what for event in events)
    assert counted["load"] == outcome.cold_loads
    assert counted["warm load"] == outcome.warm_loads
    assert counted["evict"] == outcome.evictions
    assert 0 <= outcome.wait_p50 <= outcome.wait_p99
    assert outcome.misses <= outcome.requests
    assert (
        outcome.stall_seconds
        <= sum(models[event.model].load_seconds for event in events if "load" in event.what.split())
        + 1e-9
    )
    held: dict[int, dict[str, str]] = {number: {} for number in range(fleet.workers)}
    warm = dict.fromkeys(held, 0)
    follows = {
        "load": None,
        "warm load": None,
        "loaded": "load",
        "evict": "loaded",
        "freed": "evict",
    }
    for event in events:
        on_worker = held[event.worker]
        if event.what in ("kept", "dropped", "warm load"):
            warm[event.worker] += event.bytes if event.what == "kept" else -event.bytes
            assert 0 <= warm[event.worker] <= fleet.host_bytes
        if event.what in ("kept", "dropped"):
            continue
        assert on_worker.get(event.model) == follows[event.what], event
        if event.what == "freed":
            del on_worker[event.model]
        else:
            on_worker[event.model] = "load" if event.what == "warm load" else event.what
        used = sum(models[model].bytes for model in on_worker)
        assert used <= min(fleet.memory_bytes, outcome.peak_bytes)


@pytest.mark.parametrize("make", [zipf, bursty, uniform])
def test_made_traces_are_the_same_for_the_same_seed_and_rise_in_time(make: object) -> None:
    shape = TraceShape(models=12, requests=400, rate=1.0)
    trace = make(shape, 3)  # type: ignore[operator]
    assert trace == make(shape, 3)  # type: ignore[operator]
    assert trace.requests != make(shape, 4).requests  # type: ignore[operator]
    times = [request.at for request in trace.requests]
    assert times == sorted(times)
    assert len(times) == 400
    assert {request.model for request in trace.requests} == set(trace.models)


def test_default_policy_stalls_for_at_most_nine_tenths_of_lrus_time_on_the_zipf_trace() -> None:
    """Eighty models of 0.1 to 16 GiB, room for a quarter of them, popularity by Zipf's law."""
    stalls = dict.fromkeys(("lru", "cost", CLAIRVOYANT), 0.0)
    for seed in range(2):
        trace = zipf(TraceShape(models=80, requests=3000, rate=0.1, skew=1.1), seed)
        memory = sum(model.bytes for model in trace.models.values()) // 4
        for policy in stalls:
            stalls[policy] += simulate(trace, SimulatedFleet(memory), policy).stall_seconds
    assert stalls["cost"] <= 0.9 * stalls["lru"]
    assert stalls[CLAIRVOYANT] < stalls["cost"]
