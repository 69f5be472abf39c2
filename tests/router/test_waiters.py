"""Which pull a bell wakes, and what is known of lanes."""

from __future__ import annotations

from libs.queue import LaneKey
from services.router.lanes.waiters import PendingPull, PendingPulls

A, B = LaneKey("cpu", "a/a"), LaneKey("cpu", "b/b")


def waiter(*lanes: LaneKey, can_load: bool = False) -> PendingPull:
    return PendingPull("w", "cpu", lanes, can_load)


async def test_bell_wakes_the_pull_that_wants_the_lane_most() -> None:
    waiters = PendingPulls()
    second, first = waiter(B, A), waiter(A, B)
    waiters.add(second)
    waiters.add(first)
    assert waiters.ring(A) == 1
    assert first.event.is_set()
    assert not second.event.is_set()
    assert waiters.free_count(A) == 1


async def test_jobs_are_shared_among_the_pulls_that_wait() -> None:
    waiters = PendingPulls()
    pulls = [waiter(A) for _ in range(3)]
    for pull in pulls:
        waiters.add(pull)
    assert waiters.ring(A, 8) == 3
    assert [pull.rung[A] for pull in pulls] == [3, 3, 3]
    assert waiters.ring(A, 8) == 0


async def test_pull_that_leaves_passes_its_bell_on() -> None:
    waiters = PendingPulls()
    first, second = waiter(A), waiter(A)
    waiters.add(first)
    waiters.add(second)
    waiters.ring(A)
    waiters.remove(first)
    assert second.rung == {A: 0}


async def test_lane_is_known_to_be_empty_until_it_rings() -> None:
    waiters = PendingPulls()
    pull = waiter(A, B)
    assert waiters.next_lane(pull) == A
    waiters.found_empty(A, waiters.rings(A))
    assert waiters.next_lane(pull) == B
    waiters.found_empty(B, waiters.rings(B))
    assert waiters.next_lane(pull) is None
    before = waiters.rings(B)
    waiters.ring(B)
    assert waiters.next_lane(pull) == B
    waiters.found_empty(B, before)  # the bell rang while it was looked into
    assert waiters.next_lane(pull) == B


async def test_after_a_gap_nothing_is_known() -> None:
    waiters = PendingPulls()
    pull = waiter(A)
    waiters.add(pull)
    waiters.found_empty(A, 0)
    waiters.ring_all()
    assert pull.event.is_set()
    assert waiters.next_lane(pull) == A


async def test_only_free_pulls_with_room_are_offered_a_model() -> None:
    waiters = PendingPulls()
    full, roomy, looking = waiter(A), waiter(A, can_load=True), waiter(A, can_load=True)
    looking.looking_at = A
    for pull in (full, roomy, looking):
        waiters.add(pull)
    assert waiters.loaders("cpu") == [roomy]
    assert waiters.loaders("l4") == []


async def test_lanes_that_nobody_uses_are_forgotten() -> None:
    waiters = PendingPulls()
    waiters.ring(A)
    waiters.found_empty(B, 0)
    waiters.forget_lanes({A})
    assert waiters.rings(A) == 1
    assert waiters.next_lane(waiter(B)) == B


async def test_pull_that_was_woken_early_counts_as_woken() -> None:
    """Its look into the lane is under way when the jobs are queued: one more wake-up would find
    nothing.
    """
    waiters = PendingPulls()
    first, second = waiter(A), waiter(A)
    waiters.add(first)
    waiters.add(second)
    assert waiters.ring_early(A, 1, "job") is first
    assert first.event.is_set()
    first.rung.clear()
    first.looking_at = A
    assert waiters.ring(A, 1, first) == 1
    assert not second.event.is_set()
    assert waiters.ring(A, 2, first) == 2
    assert second.event.is_set()


async def test_pull_that_looked_too_early_is_woken_again() -> None:
    waiters = PendingPulls()
    early = waiter(A)
    waiters.add(early)
    waiters.ring_early(A, 1, "job")
    early.rung.clear()
    early.event.clear()
    assert waiters.ring(A, 1, early) == 1
    assert early.event.is_set()


async def test_nobody_is_woken_early_where_nobody_waits() -> None:
    waiters = PendingPulls()
    assert waiters.ring_early(A, 1, "job") is None
    assert waiters.ring(A, 1, None) == 0


async def test_ring_for_a_worker_ends_its_pulls_and_gives_them_no_more_work() -> None:
    waiters = PendingPulls()
    own, other = PendingPull("w", "cpu", (A,), True), PendingPull("v", "cpu", (A,), True)
    waiters.add(own)
    waiters.add(other)
    waiters.ring_worker("w")
    assert (own.must_beat, own.event.is_set()) == (True, True)
    assert (other.must_beat, other.event.is_set()) == (False, False)
    assert waiters.loaders("cpu") == waiters.holders(A) == [other]


async def test_ring_for_a_worker_waits_for_its_next_pull() -> None:
    waiters = PendingPulls()
    first, second = waiter(A), waiter(A)
    waiters.ring_worker("w")
    waiters.add(first)
    waiters.add(second)
    assert (first.must_beat, second.must_beat) == (True, False)
    # ... unless a heartbeat comes before, or would have come.
    for forget in (lambda: waiters.beaten("v"), lambda: waiters.forget_lanes(set())):
        waiters.ring_worker("v")
        forget()
        late = PendingPull("v", "cpu", (A,), False)
        waiters.add(late)
        assert not late.must_beat


async def test_choosy_pull_looks_once_and_then_at_bells_that_find_nobody_else() -> None:
    waiters = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A, B], False, excludes_tenants=True), waiter(A)
    waiters.add(choosy)
    assert [waiters.next_lane(choosy), choosy.rung.pop(A)] == [A, 0]
    assert [waiters.next_lane(choosy), choosy.rung.pop(B)] == [B, 0]
    assert waiters.next_lane(choosy) is None, "though no lane is known to be empty"
    assert (waiters.ring(A), waiters.free_count(A), waiters.holders(A)) == (0, 0, [])
    assert waiters.ring_early(B, 1, "job") is None
    assert choosy.rung.pop(A) == 0
    waiters.add(common)
    assert waiters.ring(A) == 1
    assert not choosy.rung
    waiters.ring(A)  # the other one is under way
    assert choosy.rung == {A: 0}
    choosy.rung.clear()
    choosy.looking_at = A
    waiters.ring(A)
    assert choosy.rung == {A: 0}, "it may be looking too early"
    newer = PendingPull("w", "cpu", [A, B], False, excludes_tenants=True)
    waiters.add(newer)
    assert (choosy.is_ended, newer.is_ended) == (True, False)
    newer.rung.clear()
    waiters.ring(A)
    assert newer.rung == {A: 0}
    waiters.remove(common)
    waiters.remove(choosy)
    waiters.remove(newer)
    assert waiters.ring(A) == 0


async def test_choosy_pull_looks_once_at_what_other_pulls_leave() -> None:
    waiters = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A], False, excludes_tenants=True), waiter(A)

    def look() -> None:
        choosy.rung.clear()
        waiters.looks(choosy, A)
        choosy.looking_at = None

    waiters.add(choosy)
    look()
    waiters.ring(A, is_new=False)
    assert not choosy.rung, "nothing has come since it looked"
    waiters.add(common)
    waiters.ring(A)
    assert not choosy.rung, "the other pull looks"
    waiters.remove(common)
    look()
    waiters.ring(A, is_new=False)
    assert not choosy.rung
    waiters.ring(A)
    waiters.looks(choosy, A)
    choosy.rung.clear()
    waiters.ring(A)
    assert choosy.rung == {A: 0}, "new jobs came while it looked"


async def test_choosy_pull_that_was_not_rung_for_looks_at_what_is_left() -> None:
    waiters = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A], False, excludes_tenants=True), waiter(A)
    waiters.add(choosy)
    choosy.rung.clear()
    waiters.looks(choosy, A)
    choosy.looking_at = None
    waiters.add(common)
    waiters.ring(A)
    common.rung.clear()
    waiters.looks(common, A)
    assert not choosy.rung
    waiters.ring(A, is_new=False)
    assert choosy.rung == {A: 0}
