"""Routing of requests to pools: the catalog's order, overflow, pools that fail or do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.overrides import Catalog, Overrides
from libs.catalog.pools import Pools, PoolSpec
from libs.errors import InvalidInput, NoCapacity
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from services.router.admission.routing.routes import (
    Backlog,
    Routes,
    Target,
    choose_lane,
    has_other_pool,
    refuse_pool,
)

MODEL = "a/b"
ANY = Target(MODEL)
ADAPTER = "o/adapter"
RESIDENT, LOADING, COLD = (
    models_pb2.MODEL_STATE_RESIDENT,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_COLD,
)
NAMES = ("cpu", "l4-spot", "a100", "h100")
POOLS = Pools(
    "cpu", {name: PoolSpec(name, cold_start_seconds=40.0, node_seconds=20.0) for name in NAMES}
)


def card(*pools: str) -> Catalog:
    return Catalog({MODEL: Overrides("cards.yaml:1", pools=pools)})


FILE = Routes(POOLS, card("l4-spot", "a100"))
NO_FILE = Routes(Pools(), Catalog(), "cpu")


def worker(
    worker_id: str,
    pool: str,
    state: models_pb2.ModelState = RESIDENT,
    *,
    speed: float = 100.0,
    load_seconds: float = 2.0,
    adapters: Sequence[str] = (),
) -> WorkerRecord:
    record = WorkerModelRecord(
        model=MODEL, state=state, bytes=1, load_seconds=load_seconds, tokens_per_second=speed,
        idle_seconds=0.0, pinned=False,
        adapters=tuple(adapters),
    )  # fmt: skip
    return WorkerRecord(
        worker_id=worker_id, epoch="e", pool=pool, device="d", memory_bytes=1, used_bytes=0,
        batch_tokens=4096,
        draining=False, heartbeat_ms=0, models={MODEL: record},
    )  # fmt: skip


def fleet(*workers: WorkerRecord, failed: Sequence[str] = ()) -> FleetSnapshot:
    """`failed`: workers that cannot load the model."""
    failures = {
        MODEL: {
            name: worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="why") for name in failed
        }
    }
    return FleetSnapshot({one.worker_id: one for one in workers}, {}, failures, 0)


def chosen(
    snapshot: FleetSnapshot,
    backlog: Backlog | None = None,
    *,
    routes: Routes = FILE,
    target: Target = ANY,
    seconds: float = 60.0,
    without: Sequence[str] = (),
) -> str:
    lane = choose_lane(target, routes, snapshot, backlog or {}, seconds, without)
    assert (lane.model, lane.adapter) == (target.model, target.adapter)
    return lane.pool


L4, A100 = worker("l", "l4-spot"), worker("a", "a100")


def test_first_pool_serves_while_it_is_in_time() -> None:
    both = fleet(L4, A100)
    assert chosen(both) == "l4-spot"
    assert chosen(both, {("l4-spot", MODEL): 3000}) == "l4-spot"
    assert chosen(both, {("l4-spot", MODEL): 3001}) == "a100"
    # ... as measured by the request's remaining time.
    assert chosen(both, {("l4-spot", MODEL): 3001}, seconds=70.0) == "l4-spot"
    # When all are late, the least late.
    assert chosen(both, {("l4-spot", MODEL): 4000, ("a100", MODEL): 5000}) == "l4-spot"
    assert chosen(both, {("l4-spot", MODEL): 5000, ("a100", MODEL): 4000}) == "a100"


def test_cold_pool_gets_only_requests_with_time_left_while_another_is_resident() -> None:
    cold = worker("l", "l4-spot", COLD, load_seconds=2.0)
    assert chosen(fleet(cold, A100), seconds=60.0) == "l4-spot"
    assert chosen(fleet(cold, A100), seconds=10.0) == "a100"
    assert chosen(fleet(replace(L4, models={}), A100), seconds=10.0) == "a100"
    # No pool has it: the first pool, if that is in time.
    assert chosen(fleet(cold, worker("a", "a100", COLD)), seconds=10.0) == "l4-spot"
    # The one that has it is late.
    assert chosen(fleet(cold, A100), {("a100", MODEL): 10_000}, seconds=10.0) == "l4-spot"
    # A copy that is being loaded is as far away as a load takes.
    loading = worker("l", "l4-spot", LOADING)
    assert [chosen(fleet(loading, A100), seconds=left) for left in (10.0, 60.0)] == [
        "a100",
        "l4-spot",
    ]


def test_pool_without_workers_must_be_started_first() -> None:
    assert chosen(fleet(A100)) == "a100"
    assert chosen(fleet(A100), {("a100", MODEL): 10_000}) == "l4-spot"
    assert chosen(fleet(A100), seconds=1000.0) == "l4-spot"
    assert chosen(fleet()) == "l4-spot"
    # Without a file no pool is known to start a worker.
    by_card = Routes(Pools(), card("l4-spot", "a100"))
    assert chosen(fleet(A100), {("a100", MODEL): 10**9}, routes=by_card, seconds=1000.0) == "a100"
    assert chosen(fleet(), routes=by_card) == "l4-spot"


def test_workers_that_leave_do_not_count() -> None:
    assert chosen(fleet(replace(L4, preempted_in_seconds=20.0), A100)) == "a100"
    assert chosen(fleet(replace(L4, draining=True), A100)) == "a100"
    leaving = {MODEL: replace(L4.models[MODEL], leaving=True)}
    assert chosen(fleet(replace(L4, models=leaving), A100), seconds=10.0) == "a100"


def test_pool_that_cannot_serve_the_model_is_passed_over() -> None:
    broken = fleet(worker("l", "l4-spot", models_pb2.MODEL_STATE_FAILED), A100, failed=["l"])
    assert chosen(broken) == "a100"
    assert chosen(fleet(L4, A100), without=["l4-spot"]) == "a100"
    # With none left the first is answered, to be refused.
    assert chosen(fleet(L4, A100), without=["l4-spot", "a100"]) == "l4-spot"
    assert has_other_pool(Target(MODEL), FILE, fleet(L4, A100), ["l4-spot"])
    assert has_other_pool(Target(MODEL), FILE, fleet(L4), ["l4-spot"])
    assert not has_other_pool(Target(MODEL), FILE, broken, ["a100"])
    assert not has_other_pool(Target(MODEL, pool="l4-spot"), FILE, fleet(L4, A100), ["l4-spot"])
    assert not has_other_pool(
        Target(MODEL), Routes(Pools(), card("l4-spot", "a100")), fleet(L4), ["l4-spot"]
    )


def test_pool_that_has_the_adapter_is_nearer() -> None:
    target = Target(MODEL, ADAPTER)
    tuned = worker("a", "a100", adapters=[ADAPTER])
    assert chosen(fleet(L4, tuned), target=target, seconds=60.0) == "l4-spot"
    assert chosen(fleet(L4, tuned), target=target, seconds=0.9) == "a100"
    two = (worker("x", "cpu"), worker("y", "cpu"))
    assert chosen(fleet(*two, tuned), target=target, routes=NO_FILE) == "a100"
    assert chosen(fleet(*two, A100), target=target, routes=NO_FILE) == "cpu"


def test_reported_card_names_pools_without_catalog() -> None:
    reported = {MODEL: models_pb2.ModelCard(model=MODEL, pools=["a100", "gone"])}
    assert chosen(replace(fleet(L4), cards=reported), routes=Routes(POOLS, Catalog())) == "a100"
    assert chosen(replace(fleet(L4), cards=reported), routes=Routes(POOLS, card("h100"))) == "h100"


def test_without_a_card_it_is_the_default_pool_or_without_a_file_the_one_that_has_the_model() -> (
    None
):
    assert chosen(fleet(L4), routes=Routes(POOLS, Catalog())) == "cpu"
    cold = worker("c", "cpu", COLD)
    assert chosen(fleet(L4, cold), routes=NO_FILE) == "l4-spot"
    assert chosen(fleet(L4, cold), routes=NO_FILE, target=Target("other/one")) == "cpu"
    assert chosen(fleet(L4), routes=NO_FILE, target=Target("other/one")) == "l4-spot"
    assert chosen(fleet(), routes=NO_FILE) == "cpu"


def test_named_pool_is_used_if_it_exists() -> None:
    assert chosen(fleet(L4), target=Target(MODEL, pool="h100")) == "h100"
    refuse_pool("", FILE, fleet())
    refuse_pool("h100", FILE, fleet())
    with pytest.raises(
        InvalidInput, match="pool 'v100' does not exist; pools: cpu, l4-spot, a100, h100"
    ) as unknown:
        refuse_pool("v100", FILE, fleet(worker("v", "v100")))
    with pytest.raises(
        InvalidInput, match=r"is 'l4 spot', which is not 1\.\.63 letters"
    ) as malformed:
        refuse_pool("l4 spot", NO_FILE, fleet())
    assert unknown.value.field == malformed.value.field == "pool"
    refuse_pool("l4-spot", NO_FILE, fleet(L4))
    refuse_pool("cpu", NO_FILE, fleet(L4))
    with pytest.raises(NoCapacity, match="pool a100 has no worker; pools with workers: l4-spot"):
        refuse_pool("a100", NO_FILE, fleet(L4))


STATES = [
    models_pb2.MODEL_STATE_ABSENT,
    COLD,
    LOADING,
    models_pb2.MODEL_STATE_WARM,
    RESIDENT,
    models_pb2.MODEL_STATE_FAILED,
]
WORKERS = st.lists(
    st.builds(
        worker,
        st.sampled_from([f"w{number}" for number in range(6)]),
        st.sampled_from(NAMES),
        st.sampled_from(STATES),
        speed=st.sampled_from([0.0, 10.0, 1e6]),
        load_seconds=st.sampled_from([0.0, 1.0, 50.0]),
        adapters=st.sampled_from([(), (ADAPTER,)]),
    ),
    max_size=6,
)
ORDERS = st.lists(st.sampled_from(NAMES), unique=True, max_size=3)
TOKENS = st.dictionaries(st.tuples(st.sampled_from(NAMES), st.just(MODEL)), st.integers(0, 10**6))


@given(
    WORKERS,
    ORDERS,
    TOKENS,
    st.sampled_from([0.0, 1.0, 60.0, 86_400.0]),
    st.sampled_from(["", ADAPTER]),
    st.booleans(),
)
def test_chosen_pool_is_allowed_and_deterministic(
    workers: list[WorkerRecord],
    order: list[str],
    backlog: dict[tuple[str, str], int],
    seconds: float,
    adapter: str,
    file: bool,
) -> None:
    routes = Routes(POOLS if file else Pools(), card(*order))
    target = Target(MODEL, adapter)
    found = chosen(fleet(*workers), backlog, routes=routes, target=target, seconds=seconds)
    assert found in (order or (["cpu"] if file else NAMES))
    # The order in which workers are known, and tokens of others, make no difference.
    again = fleet(*reversed({one.worker_id: one for one in workers}.values()))
    assert (
        chosen(
            again,
            {**backlog, ("cpu", "other/one"): 10**9},
            routes=routes,
            target=target,
            seconds=seconds,
        )
        == found
    )


@given(WORKERS, TOKENS, st.sampled_from([1.0, 60.0]))
def test_overflow_only_from_a_pool_that_is_late(
    workers: list[WorkerRecord], backlog: dict[tuple[str, str], int], seconds: float
) -> None:
    """Whatever the other pools look like: one that has the model and nothing to do is not passed
    over.
    """
    others = [one for one in workers if one.pool != "l4-spot"]
    idle = {key: tokens for key, tokens in backlog.items() if key[0] != "l4-spot"}
    assert chosen(fleet(*others, replace(L4, worker_id="own")), idle, seconds=seconds) == "l4-spot"


@given(WORKERS, TOKENS, st.integers(0, 10**6))
def test_more_work_in_a_pool_never_draws_requests_to_it(
    workers: list[WorkerRecord], backlog: dict[tuple[str, str], int], more: int
) -> None:
    before = chosen(fleet(*workers), backlog)
    heavier = {**backlog, ("l4-spot", MODEL): backlog.get(("l4-spot", MODEL), 0) + more}
    assert before == "l4-spot" or chosen(fleet(*workers), heavier) != "l4-spot"
