"""Rules of every plan, for any fleet, and that plans converge."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.fleet import WorkerModelRecord, WorkerRecord
from libs.queue import LaneKey
from services.scheduler.planning.placement import (
    HEARTBEATS_MS,
    KEPT_SECONDS,
    Order,
    PlanInput,
    SentOrder,
    plan,
)
from services.scheduler.planning.pool_workers import MAX_CONCURRENT_LOADS
from tests.scheduler.fleets import (
    BROKEN,
    COLD,
    DOWNLOADING,
    LOADING,
    NOW_MS,
    RESIDENT,
    WARM,
    Model,
    World,
    holds,
    state,
    worker,
)

SIZES = dict(zip("abcdefgh", (5, 10, 15, 20, 30, 40, 60, 80), strict=True))
LOADING_STATES = (LOADING, DOWNLOADING)
TOKENS = (0, 0, 1, 50, 2000, 10**6)


def record(chance: random.Random, model: str) -> WorkerModelRecord:
    kind = chance.choice((RESIDENT, RESIDENT, RESIDENT, COLD, WARM, LOADING, DOWNLOADING))
    return holds(
        model,
        kind,
        0 if kind == DOWNLOADING or (kind == LOADING and chance.random() < 0.5) else SIZES[model],
        speed=chance.choice((0.0, 100.0, 1000.0)),
        load_seconds=chance.choice((0.2, 2.0, 30.0)),
        idle=chance.choice((0.5, 20.0, 1000.0)),
        since=chance.choice((0.0, 15.0, 90.0, 1000.0)),
        pinned=chance.random() < 0.15,
        held_jobs=chance.choice((0, 0, 1)),
        leaving=kind == RESIDENT and chance.random() < 0.1,
    )


def some_worker(chance: random.Random, name: str) -> WorkerRecord:
    held = [record(chance, model) for model in chance.sample("abcdefgh", chance.randrange(6))]
    used = sum(one.bytes for one in held if one.state in (RESIDENT, LOADING))
    return worker(
        name,
        *held,
        memory=used + chance.choice((0, 10, 30, 100)),
        draining=chance.random() < 0.15,
        preempted_in=60.0 if chance.random() < 0.15 else None,
        beat_ms=NOW_MS - chance.randrange(2000),
        plan=chance.randrange(4),
        local=chance.random() < 0.3,
    )


def some_order(chance: random.Random, name: str) -> SentOrder:
    order = Order(chance.choice(("load", "evict")), chance.choice("abcdefgh"), "cpu", name, "1")
    return SentOrder(
        order, chance.randrange(1, 4), NOW_MS - chance.choice((100, 3000, HEARTBEATS_MS))
    )


def some_input(seed: int) -> PlanInput:
    chance = random.Random(seed)
    names = [f"w{number}" for number in range(chance.randrange(6))]
    failures = {model: {name: BROKEN for name in names if chance.random() < 0.2} for model in "abc"}
    return state(
        *(some_worker(chance, name) for name in names),
        queued={model: chance.choice(TOKENS) for model in SIZES},
        rates={model: float(chance.choice(TOKENS)) for model in SIZES},
        failures={model: failed for model, failed in failures.items() if failed},
        sizes=SIZES,
        sent=tuple(some_order(chance, name) for name in names if chance.random() < 0.3),
        draw=chance.randrange(4),
    )


inputs = st.integers(0, 2**32).map(some_input)
many = settings(max_examples=400, deadline=None)


@many
@given(inputs)
def test_every_plan_keeps_the_rules(asked: PlanInput) -> None:
    orders = plan(asked).orders
    loads = [order for order in orders if order.kind == "load"]
    check_memory(loads, asked)
    check_places(loads, asked)
    for order in orders:
        if order.kind == "evict":
            check_eviction(order, asked)


def check_memory(loads: list[Order], asked: PlanInput) -> None:
    """Assert that the models ordered on a worker fit next to its pinned models and loads in
    progress.
    """
    promised: Counter[str] = Counter()
    for order in loads:
        promised[order.worker_id] += SIZES[order.model]
    for name, size in promised.items():
        models = asked.fleet.workers[name].models.values()
        incoming = sum(SIZES[one.model] for one in models if one.state in LOADING_STATES)
        pinned = sum(
            one.bytes for one in models if one.state == RESIDENT and one.pinned and not one.leaving
        )
        assert size <= asked.fleet.workers[name].memory_bytes - incoming - pinned


def check_places(loads: list[Order], asked: PlanInput) -> None:
    """Only on workers that take models, do not hold this one and did not fail to load it; not too
    many at once.
    """
    assert len({(order.model, order.worker_id) for order in loads}) == len(loads)
    for order in loads:
        one = asked.fleet.workers[order.worker_id]
        assert (order.pool, order.epoch) == (one.pool, one.epoch)
        assert not one.draining
        assert one.preempted_in_seconds is None
        assert one.worker_id not in asked.fleet.failures.get(order.model, {})
        assert may_have(one, order.model, asked)
        assert (
            one.state(order.model) not in (*LOADING_STATES, RESIDENT)
            or one.models[order.model].leaving
        )
    assert (
        max(Counter(order.worker_id for order in loads).values(), default=0) <= MAX_CONCURRENT_LOADS
    )


def may_have(one: WorkerRecord, model: str, asked: PlanInput) -> bool:
    """Return whether the worker can get the model's files, or no worker that has them can load
    it.
    """
    failed = asked.fleet.failures.get(model, {})
    able = [
        other
        for other in asked.fleet.workers.values()
        if model in other.models and other.worker_id not in failed
    ]
    return (
        model in one.models
        or not one.local_models_only
        or not [other for other in able if not other.is_going]
    )


def check_eviction(order: Order, asked: PlanInput) -> None:
    """Assert that only surplus idle copies without a recent load are evicted."""
    one = asked.fleet.workers[order.worker_id]
    held = one.models[order.model]
    assert held.state == RESIDENT
    assert not held.held_jobs
    assert not held.pinned
    assert not held.leaving
    resident = held.resident_seconds + (asked.fleet.now_ms - one.heartbeat_ms) / 1000
    assert resident >= max(KEPT_SECONDS, 10 * held.load_seconds)
    assert not asked.gauges[LaneKey("cpu", order.model)].queued_tokens
    others = [
        other for other in asked.fleet.workers.values() if other is not one and not other.is_going
    ]
    assert any(other.state(order.model) == RESIDENT for other in others)


@many
@given(inputs)
def test_same_input_in_any_order_gives_the_same_plan(asked: PlanInput) -> None:
    workers = list(asked.fleet.workers.values())[::-1]
    gauges = dict(list(asked.gauges.items())[::-1])
    turned = state(*workers, sizes=SIZES, failures=asked.fleet.failures)
    assert plan(asked) == plan(
        PlanInput(turned.fleet, gauges, asked.rates, {}, asked.sent, asked.draw)
    )


@many
@given(inputs)
def test_cold_model_with_work_is_placed_if_a_worker_could_hold_it(asked: PlanInput) -> None:
    """Assert that of several models without a copy, those with more waiting work are loaded
    first.
    """
    staying = [one for one in asked.fleet.workers.values() if not one.is_going]
    for model in SIZES:
        lane = LaneKey("cpu", model)
        if not asked.gauges[lane].queued_tokens or any(is_served(one, model) for one in staying):
            continue
        made = plan(PlanInput(asked.fleet, {lane: asked.gauges[lane]}, {}, {}, (), asked.draw))
        failed = asked.fleet.failures.get(model, {})
        able = [
            one for one in staying if one.worker_id not in failed and may_have(one, model, asked)
        ]
        rooms = [room_bytes(one) for one in able if loading(one) < MAX_CONCURRENT_LOADS]
        if asked.fleet.verdict(model, "cpu") is not None or max(rooms, default=-1) < SIZES[model]:
            assert model not in {order.model for order in made.orders}
            assert made.notes[model].startswith(("held back", "given up"))
        else:
            assert [order.kind for order in made.orders if order.model == model] == ["load"]


def is_served(one: WorkerRecord, model: str) -> bool:
    return one.state(model) in (*LOADING_STATES, RESIDENT) and not one.models[model].leaving


def loading(one: WorkerRecord) -> int:
    return sum(held.state in LOADING_STATES for held in one.models.values())


def room_bytes(one: WorkerRecord) -> int:
    """Return whether the model fits if every unpinned model is evicted: only this model has waiting
    work.
    """
    models = one.models.values()
    unseen = sum(
        SIZES[held.model] for held in models if held.state in LOADING_STATES and not held.bytes
    )
    return (
        one.memory_bytes
        - one.used_bytes
        - unseen
        + sum(held.bytes for held in models if may_leave(held))
    )


def may_leave(held: WorkerModelRecord) -> bool:
    return held.state == RESIDENT and (held.leaving or not held.pinned)


def some_world(seed: int) -> World:
    """Draw a fleet with enough memory and time for all models; one of them may need more than one
    copy.
    """
    chance = random.Random(seed)
    count = chance.randrange(2, 6)
    models = {}
    for name in "abcdefgh"[: chance.randrange(1, 9)]:
        speed = chance.choice((100.0, 1000.0))
        share = chance.choice(
            (0.0, 0.02, 0.1, 0.2, 1.4 if count > 3 and name == "a" else 0.3)
        )  # of a worker's time
        models[name] = Model(
            chance.randrange(5, 26), chance.choice((0.3, 3.0)), speed, share * speed
        )
    while sum(model.rate / model.speed for model in models.values()) > 0.5 * count:
        for model in models.values():
            model.rate /= 2
    return World({f"w{number}": 110 for number in range(count)}, models)


worlds = st.integers(0, 2**32).map(some_world)
few = settings(max_examples=30, deadline=None)


@few
@given(worlds)
def test_plans_converge_under_constant_load(world: World) -> None:
    for _ in range(120):
        world.step()
    assert [made.orders for made in world.plans[-60:] if made.orders] == []
    for name, model in world.models.items():
        assert bool(world.copies(name)) == bool(model.rate)
        assert model.done >= 0.5 * model.rate * world.now


@few
@given(worlds, st.integers(0, 4))
def test_plans_converge_after_worker_loss(world: World, lost: int) -> None:
    for model in world.models.values():
        model.rate /= 4
    for _ in range(30):
        world.step()
    name = sorted(world.memory)[lost % len(world.memory)]
    if len(world.memory) > 2:
        del world.memory[name], world.held[name]
    for _ in range(100):
        world.step()
    assert [made.orders for made in world.plans[-60:] if made.orders] == []
    assert all(world.copies(name) for name, model in world.models.items() if model.rate)


def test_more_models_in_use_than_there_is_room_for_take_turns() -> None:
    world = World({"w": 100}, {name: Model(24, 0.5, 1000.0, 100.0) for name in "abcde"})
    for _ in range(240):
        world.step()
    done = {name: model.done / (model.rate * world.now) for name, model in world.models.items()}
    assert min(done.values()) > 0.6, done
