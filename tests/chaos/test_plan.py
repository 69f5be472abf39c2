"""Plans follow from their seed, and keep faults apart that must not meet."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.chaos.plan import AT_ONCE, Kind, Planned, Servers, concerns, kinds, plan

ROUTERS, WORKERS, SCHEDULERS = (
    ["router-0", "router-1"],
    ["worker-0", "worker-1", "worker-2"],
    ["scheduler-0", "scheduler-1"],
)
EDGES = ["edge-0", "edge-1"]
NODE_TIMEOUT = 2.0


def all_kinds(is_long: bool = True) -> list[Kind]:
    return kinds(ROUTERS, WORKERS, SCHEDULERS, EDGES, lease=2.0, is_long=is_long, has_machines=True)


def make_plan(seed: int, seconds: float = 600.0, per_minute: float = 30.0) -> list[Planned]:
    return plan(all_kinds(), seed=seed, seconds=seconds, per_minute=per_minute)


def test_seed_decides_everything() -> None:
    assert make_plan(1) == make_plan(1)
    assert make_plan(1) != make_plan(2)


@pytest.mark.parametrize("seed", range(5))
def test_few_overlap_and_never_on_one_process(seed: int) -> None:
    faults = make_plan(seed)
    for fault in faults:
        meanwhile = [
            other
            for other in faults
            if other.begin <= fault.begin < other.begin + other.seconds and other is not fault
        ]
        assert len(meanwhile) < AT_ONCE
        assert not any(concerns(other.target) & concerns(fault.target) for other in meanwhile)
    assert any(one.begin + one.seconds > other.begin for one, other in pairwise(faults))


def test_long_run_has_all_kinds_and_a_short_one_the_core() -> None:
    assert {fault.kind for fault in make_plan(3)} == {kind.name for kind in all_kinds()}
    core = {kind.name for kind in all_kinds() if kind.core}
    assert core <= {fault.kind for fault in make_plan(3, seconds=40.0, per_minute=45.0)}


def nodes_kinds(servers: Servers) -> list[Kind]:
    return kinds(
        ROUTERS,
        WORKERS,
        SCHEDULERS,
        EDGES,
        lease=2.0,
        is_long=True,
        servers=servers,
        node_timeout=NODE_TIMEOUT,
    )


def test_sentinels_have_the_faults_of_nodes_and_no_slots_to_move() -> None:
    of_cluster, of_sentinels = (
        {kind.name for kind in nodes_kinds(servers)} for servers in ("cluster", "sentinel")
    )
    assert of_sentinels - of_cluster == {"kill sentinel"}
    assert of_cluster - of_sentinels == {"move slot"}
    assert {"kill master", "freeze master", "fail over master", "kill replica"} <= of_sentinels
    assert not any(
        ">redis" in target for kind in nodes_kinds("sentinel") for target in kind.targets
    )


def test_cluster_has_faults_of_its_nodes_and_none_of_links_to_redis() -> None:
    found = nodes_kinds("cluster")
    planned = plan(found, seed=6, seconds=600.0, per_minute=30.0)
    happening = {fault.kind for fault in planned}
    assert {
        "kill master",
        "freeze master",
        "fail over master",
        "kill replica",
        "move slot",
        "redis is full",
        "flush scripts",
        "kill router",
    } <= happening
    assert not happening & {"kill redis", "freeze redis"}
    assert not any(">redis" in fault.target for fault in planned)
    frozen = [fault.seconds for fault in planned if fault.kind == "freeze master"]
    assert min(frozen) > NODE_TIMEOUT
    assert all(concerns(kind.targets[0]) == {"redis"} for kind in found if "master" in kind.name)


def test_plan_has_the_requested_number_of_faults() -> None:
    faults = make_plan(4)
    assert len(faults) == 300
    assert 500 < faults[-1].begin < 700


def test_link_concerns_its_ends_but_not_redis() -> None:
    assert concerns("worker-0>router-1") == {"worker-0", "router-1"}
    assert concerns("clients>router-0") == {"router-0"}
    assert concerns("router-0>redis") == {"router-0"}
    assert concerns("redis") == {"redis"}


def test_target_has_its_rest() -> None:
    found = [
        Kind("kill worker", ["worker-0", "worker-1"], 0.0, 1.0),
        Kind("kill router", ["router"], 0.0, 1.0),
    ]
    last: dict[str, float] = {}
    for fault in plan(found, seed=5, seconds=600, per_minute=8, rest=25.0):
        assert fault.begin - last.get(fault.target, -25.0) >= 25.0
        last[fault.target] = fault.begin + fault.seconds
    assert len(last) == 3
