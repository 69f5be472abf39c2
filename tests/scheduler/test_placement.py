"""Decisions of a plan, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libs.fleet import WorkerRecord
from services.scheduler.planning.placement import HEARTBEATS_MS, Order, PlanInput, SentOrder, plan
from services.scheduler.planning.pool_workers import MAX_CONCURRENT_LOADS
from tests.scheduler.fleets import (
    BROKEN,
    COLD,
    DOWNLOADING,
    LOADING,
    NOW_MS,
    RESIDENT,
    WARM,
    evictions,
    gauge,
    holds,
    loads,
    state,
    worker,
)


def sent(kind: str, model: str, worker_id: str, *, ago_ms: int = 100, plan: int = 5) -> SentOrder:
    return SentOrder(Order(kind, model, "cpu", worker_id, "1"), plan, NOW_MS - ago_ms)  # type: ignore[arg-type]


def test_idle_fleet_gets_no_orders() -> None:
    made = plan(state(worker("w", holds("a"), holds("b", COLD)), queued={"a": 100}))
    assert (made.orders, dict(made.notes), made.is_waiting) == ((), {}, False)
    assert plan(state()).orders == ()


def test_cold_model_with_work_is_loaded() -> None:
    made = plan(state(worker("w", holds("a", COLD, 0)), queued={"a": 1}, sizes={"a": 50}))
    assert made.orders == (Order("load", "a", "cpu", "w", "1"),)
    assert made.notes["a"] == "loads on w: 1 tokens wait and no worker has it"


def test_unmeasured_models_are_ranked_by_their_size_until_the_pool_has_measured_one() -> None:
    sizes = {"small": 10**8, "large": 10**10}
    queued = {"small": 300, "large": 200}
    empty = worker("w", memory=10**12)
    assert [one.model for one in plan(state(empty, queued=queued, sizes=sizes)).orders] == [
        "large",
        "small",
    ]
    measured = worker("w", holds("b", speed=100.0), memory=10**12)
    assert [one.model for one in plan(state(measured, queued=queued, sizes=sizes)).orders] == [
        "small",
        "large",
    ]


@pytest.mark.parametrize(
    "incoming", [holds("a", LOADING, 0), holds("a", DOWNLOADING, 0)], ids=["loading", "downloading"]
)
def test_model_on_its_way_is_not_loaded_again(incoming: object) -> None:
    assert plan(state(worker("w", incoming), worker("v"), queued={"a": 10**6})).orders == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("best", "others"),
    [
        pytest.param(
            worker("x", holds("a", WARM)),
            [worker("w", holds("a", COLD)), worker("v")],
            id="warm before on disk",
        ),
        pytest.param(
            worker("x", holds("a", COLD)), [worker("w"), worker("v")], id="on disk before absent"
        ),
        pytest.param(
            worker("x"),
            [worker("w", holds("b", speed=1.0)), worker("v", holds("b", speed=1.0))],
            id="idle before busy",
        ),
        pytest.param(
            worker("x"),
            [worker("w", holds("c", LOADING)), worker("v", holds("d", LOADING))],
            id="without loads",
        ),
        pytest.param(
            worker("x"),
            [worker("w", holds("c", size=80)), worker("v", holds("d", size=80))],
            id="free before evicting",
        ),
        pytest.param(
            worker("x", holds("a", WARM), holds("c", size=80)),
            [worker("w", holds("a", COLD)), worker("v")],
            id="evicting for warm",
        ),
        pytest.param(
            worker("x", holds("c", size=80)),
            [
                worker("w", holds("d", size=80, held_jobs=1)),
                worker("v", holds("e", size=80, pinned=True)),
            ],
            id="idle victims before busy ones, pinned ones never",
        ),
    ],
)
def test_load_goes_to_best_worker(best: WorkerRecord, others: list[WorkerRecord]) -> None:
    queued = {"a": 10} | ({"b": 50} if "b" in others[0].models else {})
    for draw in range(4):
        assert loads(plan(state(best, *others, queued=queued, sizes={"a": 50}, draw=draw)))[
            "a"
        ] == ["x"]
        assert loads(plan(state(*others[::-1], best, queued=queued, sizes={"a": 50}, draw=draw)))[
            "a"
        ] == ["x"]


def test_among_alike_workers_chance_decides_and_the_same_number_alike() -> None:
    workers = [worker(f"w{number}", holds("a", COLD)) for number in range(8)]
    chosen = {
        draw: loads(plan(state(*workers, queued={"a": 1}, draw=draw)))["a"][0] for draw in range(60)
    }
    assert len(set(chosen.values())) == 8
    assert chosen[7] == loads(plan(state(*workers, queued={"a": 1}, draw=7)))["a"][0]


def test_plan_spreads_its_loads() -> None:
    workers = [worker(f"w{number}") for number in range(6)]
    made = loads(
        plan(
            state(
                *workers,
                queued={f"m{number}": 10 for number in range(6)},
                sizes=dict.fromkeys("m", 1),
            )
        )
    )
    assert {placed[0] for placed in made.values()} == {one.worker_id for one in workers}


def test_only_worker_with_the_model_on_disk_is_found_among_many() -> None:
    workers = [worker(f"w{number:03}") for number in range(100)]
    workers[71] = worker("w071", holds("a", COLD), holds("b", speed=1000.0))
    assert loads(plan(state(*workers, queued={"a": 1, "b": 1000})))["a"] == ["w071"]


def test_workers_that_cannot_fetch_get_only_models_on_their_disk() -> None:
    here, busy = (
        worker("here", holds("a", COLD), local=True),
        worker("busy", holds("a", COLD), holds("b", speed=10.0), local=True),
    )
    lacks, fetches = worker("lacks", local=True), worker("fetches")
    queued = {"a": 10, "b": 1000}
    for draw in range(4):
        assert loads(plan(state(busy, lacks, queued=queued, draw=draw)))["a"] == ["busy"]
        assert loads(plan(state(busy, lacks, fetches, queued=queued, draw=draw)))["a"] == [
            "fetches"
        ]
        assert loads(plan(state(here, busy, lacks, queued=queued, draw=draw)))["a"] == ["here"]


def test_workers_without_files_are_tried_if_no_holder_can_load() -> None:
    assert loads(plan(state(worker("lacks", local=True), queued={"a": 10}))) == {"a": ["lacks"]}
    broken = worker("broken", holds("a", COLD), local=True)
    failures = {"a": {"broken": BROKEN}}
    assert loads(
        plan(state(broken, worker("lacks", local=True), queued={"a": 10}, failures=failures))
    ) == {"a": ["lacks"]}


@pytest.mark.parametrize(
    "excluded",
    [
        worker("x", draining=True),
        worker("x", preempted_in=100.0),
        worker("x", beat_ms=NOW_MS - HEARTBEATS_MS),
        worker("x", pool="gpu"),
        worker("x", memory=49),
        worker("x", holds("c", size=60, pinned=True)),
        worker("x", *(holds(f"l{number}", LOADING, 0) for number in range(MAX_CONCURRENT_LOADS))),
    ],
    ids=[
        "draining",
        "preempted",
        "silent",
        "other pool",
        "too small",
        "pinned full",
        "loading enough",
    ],
)
def test_ineligible_workers_get_no_loads(excluded: WorkerRecord) -> None:
    made = plan(state(excluded, queued={"a": 10}, sizes={"a": 50}))
    assert made.orders == ()
    assert made.notes["a"].startswith("held back: ")
    assert made.is_waiting == (excluded.held[0].state == LOADING if excluded.held else False)
    assert loads(plan(state(excluded, worker("w"), queued={"a": 10}, sizes={"a": 50}))) == {
        "a": ["w"]
    }


def test_workers_that_failed_are_excluded_and_after_three_the_model_is_given_up() -> None:
    workers = [worker(name) for name in "uvwx"]
    two = {"a": {"u": BROKEN, "v": BROKEN}}
    assert loads(plan(state(*workers[:3], queued={"a": 1}, failures=two))) == {"a": ["w"]}
    three = {"a": two["a"] | {"w": BROKEN}}
    made = plan(state(*workers, queued={"a": 1}, failures=three))
    assert made.orders == ()
    assert made.notes["a"] == "given up in pool cpu: no such tensor"


def test_model_with_most_waiting_work_is_loaded_first() -> None:
    made = plan(
        state(
            worker("w", memory=60),
            queued={"a": 100, "b": 10_000, "c": 1000},
            sizes=dict.fromkeys("abc", 50),
        )
    )
    assert loads(made) == {"b": ["w"]}
    assert {model for model, note in made.notes.items() if note.startswith("held back")} == {
        "a",
        "c",
    }


def test_long_waiting_model_precedes_larger_backlog() -> None:
    asked = state(
        worker("w", memory=60), queued={"a": 100, "b": 10_000}, sizes=dict.fromkeys("ab", 50)
    )
    assert loads(plan(replace(asked, waiting_since_ms={("cpu", "a"): NOW_MS - 60_000}))) == {
        "a": ["w"]
    }


def test_order_that_heartbeats_do_not_show_yet_is_not_given_again() -> None:
    workers = [worker("v", beat_ms=NOW_MS - 1000), worker("w", beat_ms=NOW_MS - 1000)]
    assert plan(state(*workers, queued={"a": 1}, sent=(sent("load", "a", "w"),))).orders == ()
    late = sent("load", "a", "w", ago_ms=HEARTBEATS_MS)
    assert "a" in loads(plan(state(*workers, queued={"a": 1}, sent=(late,))))
    obeyed = [worker("v"), worker("w", plan=5)]
    assert "a" in loads(plan(state(*obeyed, queued={"a": 1}, sent=(sent("load", "a", "w"),))))
    restarted = [worker("v"), replace(worker("w", beat_ms=NOW_MS - 1000), epoch="2")]
    assert "a" in loads(plan(state(*restarted, queued={"a": 1}, sent=(sent("load", "a", "w"),))))


def test_memory_of_an_order_under_way_is_taken() -> None:
    one = worker("w", memory=60, beat_ms=NOW_MS - 1000)
    asked = state(
        one, queued={"a": 1, "b": 1}, sizes={"a": 50, "b": 50}, sent=(sent("load", "a", "w"),)
    )
    assert plan(asked).orders == ()
    assert loads(plan(replace(asked, sent=()))) != {}
    unknown = state(
        worker("w", holds("a", DOWNLOADING, 0), memory=60),
        queued={"b": 1},
        sizes={"a": 50, "b": 50},
    )
    assert plan(unknown).orders == ()


def test_memory_of_leaving_models_counts_as_free() -> None:
    assert loads(
        plan(
            state(worker("w", holds("b", size=90, leaving=True)), queued={"a": 1}, sizes={"a": 50})
        )
    ) == {"a": ["w"]}
    evicting = worker("w", holds("b", size=90, held_jobs=1), beat_ms=NOW_MS - 1000)
    asked = state(evicting, queued={"a": 1}, sizes={"a": 50}, sent=(sent("evict", "b", "w"),))
    assert loads(plan(asked)) == {"a": ["w"]}


def test_model_in_use_yields_only_to_much_more_work() -> None:
    busy = worker("w", holds("b", size=90, held_jobs=1, speed=1000.0))
    little = plan(state(busy, queued={"a": 1900, "b": 1000}, sizes={"a": 50}))
    assert little.orders == ()
    assert (
        little.notes["a"]
        == "held back: loads are in progress, or the resident models have more work waiting"
    )
    assert loads(plan(state(busy, queued={"a": 2100, "b": 1000}, sizes={"a": 50}))) == {"a": ["w"]}


def test_second_copy_loads_if_queued_work_would_wait_longer_than_a_load() -> None:
    served = worker("v", holds("a", speed=1000.0, load_seconds=2.0))
    assert plan(state(served, worker("w"), queued={"a": 2000})).orders == ()
    made = plan(state(served, worker("w"), queued={"a": 2100}))
    assert made.orders == (Order("load", "a", "cpu", "w", "1", ("v",)),)
    # Not where it would wait as long for other work.
    elsewhere = worker("w", holds("b", speed=1000.0))
    assert plan(state(served, elsewhere, queued={"a": 4000, "b": 2000})).orders == ()
    assert loads(plan(state(served, elsewhere, queued={"a": 4001, "b": 1999}))) == {"a": ["w"]}
    # Nor before the speed of the first was measured.
    unmeasured = worker("v", holds("a", speed=0.0))
    assert plan(state(unmeasured, worker("w"), queued={"a": 10**9})).orders == ()


def test_copies_double_at_most() -> None:
    workers = [worker("v", holds("a", speed=10.0)), *(worker(f"w{number}") for number in range(9))]
    assert len(loads(plan(state(*workers, queued={"a": 10**6})))["a"]) == 1
    three = [worker(f"v{number}", holds("a", speed=10.0)) for number in range(3)]
    assert len(loads(plan(state(*three, *workers[1:], queued={"a": 10**6})))["a"]) == 3
    assert len(loads(plan(state(*three, *workers[1:], queued={"a": 160})))["a"]) == 3
    # 50 tokens by 5 copies of 10 a second take no longer than a load.
    assert len(loads(plan(state(*three, *workers[1:], queued={"a": 50})))["a"]) == 2


def test_further_copy_displaces_only_models_that_were_idle_for_long() -> None:
    served = worker("v", holds("a", size=50, speed=10.0))
    young, used = holds("b", size=90, since=30.0), holds("b", size=90, held_jobs=1)
    for other in (young, used, holds("b", size=90, since=90.0, load_seconds=10.0)):
        assert plan(state(served, worker("w", other), queued={"a": 10**6})).orders == ()
    assert loads(
        plan(state(served, worker("w", holds("b", size=90, since=61.0)), queued={"a": 10**6}))
    ) == {"a": ["w"]}


def test_surplus_copies_leave_where_their_memory_is_needed() -> None:
    spare = worker("w", holds("b", size=60, idle=200.0), holds("c", size=40, idle=500.0))
    other = worker("v", holds("b", size=60, idle=200.0), holds("d", size=40, held_jobs=1))
    made = plan(state(spare, other, queued={"a": 10}, sizes={"a": 60}))
    assert made.orders[0].kind == "evict"
    assert evictions(made) == {
        ("b", loads(made)["a"][0])
    }  # one of two copies, and not the last one of c
    assert plan(state(spare, other)).orders == ()  # nothing needs their memory
    # A copy that arrivals need is none too many: 900 tokens a second at 1000 a copy are more than
    # one can take at 70 %.
    needed = plan(state(spare, other, queued={"a": 10}, rates={"b": 900.0}, sizes={"a": 60}))
    assert loads(needed)["a"] == ["w"] or loads(needed)["a"] == ["v"]
    assert evictions(needed) == set()


@pytest.mark.parametrize(
    "kept",
    [
        holds("b", size=90, pinned=True),
        holds("b", size=90, held_jobs=1),
        holds("b", size=90, idle=100.0),
        holds("b", size=90, since=50.0, idle=50.0),
        holds("b", size=90, since=190.0, idle=190.0, load_seconds=20.0),
    ],
    ids=["pinned", "in use", "used lately", "loaded lately", "loaded lately for its load time"],
)
def test_surplus_copy_is_not_evicted_without_need(kept: object) -> None:
    workers = [worker("w", kept), worker("v", holds("b", size=10, held_jobs=1), memory=20)]  # type: ignore[arg-type]
    assert evictions(plan(state(*workers, queued={"a": 10**6}, sizes={"a": 60}))) == set()


def test_models_of_workers_that_leave_are_placed_elsewhere_first() -> None:
    going = worker("u", holds("a", size=50, speed=1000.0), preempted_in=90.0)
    small = worker("w", memory=60)
    asked = state(going, small, queued={"b": 10**6}, rates={"a": 100.0}, sizes={"b": 50})
    assert loads(plan(asked)) == {"a": ["w"]}
    drained = state(
        replace(going, draining=True, preempted_in_seconds=None),
        small,
        queued={"b": 10**6, "a": 1},
        sizes={"b": 50},
    )
    assert loads(plan(drained)) == {"a": ["w"]}
    silent = state(
        worker("u", holds("a", size=50), beat_ms=NOW_MS - HEARTBEATS_MS), small, rates={"a": 100.0}
    )
    assert loads(plan(silent)) == {"a": ["w"]}
    safe = state(
        going,
        worker("v", holds("a", size=50)),
        small,
        queued={"b": 1},
        rates={"a": 100.0},
        sizes={"b": 50},
    )
    assert loads(plan(safe)) == {"b": ["w"]}


def test_recently_used_models_move_from_preempted_worker_into_free_memory() -> None:
    going = worker(
        "u", holds("a", size=50, idle=60.0), holds("old", size=10, idle=5000.0), preempted_in=90.0
    )
    assert loads(plan(state(going, worker("w")))) == {"a": ["w"]}
    assert plan(state(going, worker("w", holds("b", size=90)))).orders == ()
    assert (
        plan(state(replace(going, draining=True, preempted_in_seconds=None), worker("w"))).orders
        == ()
    )


def test_lanes_with_adapters_need_their_model() -> None:
    asked = state(worker("w"), queued={})
    lane = gauge("a", 10, adapter="org/lora")
    assert loads(plan(replace(asked, gauges={lane.lane: lane}))) == {"a": ["w"]}
    resident = state(worker("v", holds("a")), worker("w"))
    assert plan(replace(resident, gauges={lane.lane: lane})).orders == ()


def test_pool_without_workers_is_noted() -> None:
    assert (
        plan(state(queued={"a": 1})).notes["a"]
        == "held back: pool cpu has no worker that takes models"
    )


def test_size_that_only_a_disk_knows_counts() -> None:
    workers = [worker("v", holds("a", COLD, 90), memory=50), worker("w", memory=80), worker("x")]
    assert loads(plan(state(*workers, queued={"a": 1}))) == {"a": ["x"]}


def test_order_of_the_input_does_not_matter() -> None:
    workers = [worker(f"w{number}", holds("b"), holds("a", COLD)) for number in range(20)]
    queued = {"a": 10, "c": 20, "d": 20, "b": 10**6}
    backwards: PlanInput = state(*workers[::-1], queued=dict(reversed(queued.items())))
    assert plan(state(*workers, queued=queued)) == plan(backwards)


def test_states_are_those_of_the_wire() -> None:
    assert holds("a", RESIDENT) in worker("w", holds("a", RESIDENT), holds("b", COLD)).held
