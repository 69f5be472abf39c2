"""The stub worker of `make bench-router` speaks the protocol of the day: a real router takes its
answers.
"""

from __future__ import annotations

from benchmarks.mesh.router import stubbed


async def test_texts_are_answered_by_the_stub() -> None:
    async with stubbed(clients=2) as mesh:
        turn = await mesh.turn(callers=5, seconds=2.0)
    assert turn.answers >= 5
    assert turn.jobs_a_pull >= 1
    assert {"router", "redis", "stub worker", "client 0", "client 1"} == set(turn.micros)
