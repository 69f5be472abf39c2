"""The pull that a notification wakes, and the lanes that are known to be empty."""

from __future__ import annotations

from libs.queue import LaneKey
from services.router.lanes.pending_pulls import PendingPull, PendingPulls

A, B = LaneKey("cpu", "a/a"), LaneKey("cpu", "b/b")


def make_pull(*lanes: LaneKey, can_load: bool = False) -> PendingPull:
    return PendingPull("w", "cpu", lanes, can_load)


async def test_notification_wakes_pull_that_ranks_lane_highest() -> None:
    pending_pulls = PendingPulls()
    second, first = make_pull(B, A), make_pull(A, B)
    pending_pulls.add(second)
    pending_pulls.add(first)
    assert pending_pulls.notify(A) == 1
    assert first.event.is_set()
    assert not second.event.is_set()
    assert pending_pulls.free_count(A) == 1


async def test_jobs_are_shared_among_the_pulls_that_wait() -> None:
    pending_pulls = PendingPulls()
    pulls = [make_pull(A) for _ in range(3)]
    for pull in pulls:
        pending_pulls.add(pull)
    assert pending_pulls.notify(A, 8) == 3
    assert [pull.notified[A] for pull in pulls] == [3, 3, 3]
    assert pending_pulls.notify(A, 8) == 0


async def test_ended_pull_passes_its_notification_on() -> None:
    pending_pulls = PendingPulls()
    first, second = make_pull(A), make_pull(A)
    pending_pulls.add(first)
    pending_pulls.add(second)
    pending_pulls.notify(A)
    pending_pulls.remove(first)
    assert second.notified == {A: 0}


async def test_lane_is_known_to_be_empty_until_notified() -> None:
    pending_pulls = PendingPulls()
    pull = make_pull(A, B)
    assert pending_pulls.next_lane(pull) == A
    pending_pulls.found_empty(A, pending_pulls.notifications(A))
    assert pending_pulls.next_lane(pull) == B
    pending_pulls.found_empty(B, pending_pulls.notifications(B))
    assert pending_pulls.next_lane(pull) is None
    before = pending_pulls.notifications(B)
    pending_pulls.notify(B)
    assert pending_pulls.next_lane(pull) == B
    pending_pulls.found_empty(B, before)  # notified while it was read
    assert pending_pulls.next_lane(pull) == B


async def test_missed_notifications_reset_empty_lanes() -> None:
    pending_pulls = PendingPulls()
    pull = make_pull(A)
    pending_pulls.add(pull)
    pending_pulls.found_empty(A, 0)
    pending_pulls.wake_all()
    assert pull.event.is_set()
    assert pending_pulls.next_lane(pull) == A


async def test_empty_lanes_are_read_again_once_a_minute() -> None:
    """Not all at once, and one by each pull."""
    pending_pulls = PendingPulls()
    lanes = [LaneKey("cpu", f"a/{number}") for number in range(120)]
    pulls = [make_pull(*lanes) for _ in range(3)]

    def read() -> list[LaneKey]:
        found = [lane for pull in pulls for lane in pull.notified]
        for pull in pulls:
            pull.notified.clear()
        for lane in found:
            pending_pulls.found_empty(lane, pending_pulls.notifications(lane))
        return found

    for pull in pulls:
        pending_pulls.add(pull)
    for lane in lanes:
        pending_pulls.found_empty(lane, 0)
    for minute in range(2):
        for second in range(59 * (1 - minute)):
            pending_pulls.remind()
            assert not read(), second
        for first in range(0, 120, 2):
            pending_pulls.remind()
            assert read() == lanes[first : first + 2]
    assert all(pending_pulls.next_lane(pull) is None for pull in pulls)


async def test_only_free_pulls_with_room_are_offered_a_model() -> None:
    pending_pulls = PendingPulls()
    full, roomy, looking = make_pull(A), make_pull(A, can_load=True), make_pull(A, can_load=True)
    looking.pulling_from = A
    for pull in (full, roomy, looking):
        pending_pulls.add(pull)
    assert pending_pulls.loaders("cpu") == [roomy]
    assert pending_pulls.loaders("l4") == []


async def test_unused_lanes_are_forgotten() -> None:
    pending_pulls = PendingPulls()
    pending_pulls.notify(A)
    pending_pulls.found_empty(B, 0)
    pending_pulls.forget_lanes({A})
    assert pending_pulls.notifications(A) == 1
    assert pending_pulls.next_lane(make_pull(B)) == B


async def test_pull_that_was_woken_early_counts_as_woken() -> None:
    """Its look into the lane is under way when the jobs are queued: one more wake-up would find
    nothing.
    """
    pending_pulls = PendingPulls()
    first, second = make_pull(A), make_pull(A)
    pending_pulls.add(first)
    pending_pulls.add(second)
    assert pending_pulls.wake_early(A, 1, "job") is first
    assert first.event.is_set()
    first.notified.clear()
    first.pulling_from = A
    assert pending_pulls.notify(A, 1, first) == 1
    assert not second.event.is_set()
    assert pending_pulls.notify(A, 2, first) == 2
    assert second.event.is_set()


async def test_pull_that_looked_too_early_is_woken_again() -> None:
    pending_pulls = PendingPulls()
    early = make_pull(A)
    pending_pulls.add(early)
    pending_pulls.wake_early(A, 1, "job")
    early.notified.clear()
    early.event.clear()
    assert pending_pulls.notify(A, 1, early) == 1
    assert early.event.is_set()


async def test_early_wake_without_waiting_pull_does_nothing() -> None:
    pending_pulls = PendingPulls()
    assert pending_pulls.wake_early(A, 1, "job") is None
    assert pending_pulls.notify(A, 1, None) == 0


async def test_notification_for_a_worker_ends_its_pulls() -> None:
    pending_pulls = PendingPulls()
    own, other = PendingPull("w", "cpu", (A,), True), PendingPull("v", "cpu", (A,), True)
    pending_pulls.add(own)
    pending_pulls.add(other)
    pending_pulls.notify_worker("w")
    assert (own.must_send_heartbeat, own.event.is_set()) == (True, True)
    assert (other.must_send_heartbeat, other.event.is_set()) == (False, False)
    assert pending_pulls.loaders("cpu") == pending_pulls.holders(A) == [other]


async def test_notification_for_a_worker_waits_for_its_next_pull() -> None:
    pending_pulls = PendingPulls()
    first, second = make_pull(A), make_pull(A)
    pending_pulls.notify_worker("w")
    pending_pulls.add(first)
    pending_pulls.add(second)
    assert (first.must_send_heartbeat, second.must_send_heartbeat) == (True, False)
    # ... unless a heartbeat arrives before, or should have arrived.
    for forget in (
        lambda: pending_pulls.heartbeat_received("v"),
        lambda: pending_pulls.forget_lanes(set()),
    ):
        pending_pulls.notify_worker("v")
        forget()
        late = PendingPull("v", "cpu", (A,), False)
        pending_pulls.add(late)
        assert not late.must_send_heartbeat


async def test_excluding_pull_reads_once_then_only_without_other_pulls() -> None:
    pending_pulls = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A, B], False, exclude_tenants=True), make_pull(A)
    pending_pulls.add(choosy)
    assert [pending_pulls.next_lane(choosy), choosy.notified.pop(A)] == [A, 0]
    assert [pending_pulls.next_lane(choosy), choosy.notified.pop(B)] == [B, 0]
    assert pending_pulls.next_lane(choosy) is None, "though no lane is known to be empty"
    assert (pending_pulls.notify(A), pending_pulls.free_count(A), pending_pulls.holders(A)) == (
        0,
        0,
        [],
    )
    assert pending_pulls.wake_early(B, 1, "job") is None
    assert choosy.notified.pop(A) == 0
    pending_pulls.add(common)
    assert pending_pulls.notify(A) == 1
    assert not choosy.notified
    pending_pulls.notify(A)  # the other one is under way
    assert choosy.notified == {A: 0}
    choosy.notified.clear()
    choosy.pulling_from = A
    pending_pulls.notify(A)
    assert choosy.notified == {A: 0}, "it may be looking too early"
    newer = PendingPull("w", "cpu", [A, B], False, exclude_tenants=True)
    pending_pulls.add(newer)
    assert (choosy.is_ended, newer.is_ended) == (True, False)
    newer.notified.clear()
    pending_pulls.notify(A)
    assert newer.notified == {A: 0}
    pending_pulls.remove(common)
    pending_pulls.remove(choosy)
    pending_pulls.remove(newer)
    assert pending_pulls.notify(A) == 0


async def test_excluding_pull_reads_remaining_jobs_once() -> None:
    pending_pulls = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A], False, exclude_tenants=True), make_pull(A)

    def poll() -> None:
        choosy.notified.clear()
        pending_pulls.begin_pull(choosy, A)
        choosy.pulling_from = None

    pending_pulls.add(choosy)
    poll()
    pending_pulls.notify(A, is_new=False)
    assert not choosy.notified, "no job has arrived since it looked"
    pending_pulls.add(common)
    pending_pulls.notify(A)
    assert not choosy.notified, "the other pull looks"
    pending_pulls.remove(common)
    poll()
    pending_pulls.notify(A, is_new=False)
    assert not choosy.notified
    pending_pulls.notify(A)
    pending_pulls.begin_pull(choosy, A)
    choosy.notified.clear()
    pending_pulls.notify(A)
    assert choosy.notified == {A: 0}, "new jobs arrived while it looked"


async def test_unnotified_excluding_pull_reads_remaining_jobs() -> None:
    pending_pulls = PendingPulls()
    choosy, common = PendingPull("w", "cpu", [A], False, exclude_tenants=True), make_pull(A)
    pending_pulls.add(choosy)
    choosy.notified.clear()
    pending_pulls.begin_pull(choosy, A)
    choosy.pulling_from = None
    pending_pulls.add(common)
    pending_pulls.notify(A)
    common.notified.clear()
    pending_pulls.begin_pull(common, A)
    assert not choosy.notified
    pending_pulls.notify(A, is_new=False)
    assert choosy.notified == {A: 0}
