"""The edge's record of the last hour: steps, percentiles, limits."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb

from services.edge.activity.cost import Cost
from services.edge.activity.history import (
    MAX_REQUESTS,
    STEP_SECONDS,
    STEPS,
    Finished,
    RequestHistory,
)

BEGIN = 1_700_000_000.0


def finished(
    at: float, seconds: float = 0.05, status: int = 200, reason: str = "", cost: Cost | None = None
) -> Finished:
    return Finished(
        at, "id", "/v1/embeddings", status, reason, seconds, cost or Cost("encode", "o/m", 10, 2)
    )


def steps(history: RequestHistory, now: float) -> dict[str, Any]:
    content = history.content(now)
    assert {len(column) for column in content["steps"].values()} == {len(content["steps"]["p50"])}
    found: dict[str, Any] = content["steps"]
    return found


def test_steps_count_requests_errors_and_tokens() -> None:
    history = RequestHistory(BEGIN)
    for status, reason in (
        (200, ""),
        (200, "WORKER_LOST"),
        (400, "INVALID_INPUT"),
        (503, "NO_CAPACITY"),
        (499, ""),
    ):
        history.note_request(finished(BEGIN, status=status, reason=reason))
    found = steps(history, BEGIN + STEP_SECONDS)
    assert found["requests"] == [5, 0]
    assert found["refused"] == [1, 0]
    assert found["failed"] == [2, 0], "an answer that broke off has failed, too"
    assert found["input_tokens"] == [50, 0]
    assert found["output_tokens"] == [10, 0]
    assert found["queued"] == [None, None], "an unknown queue is not an empty one"


@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.9, 59.0])
def test_percentiles_are_accurate_to_ten_percent(seconds: float) -> None:
    history = RequestHistory(BEGIN)
    for at in range(100):
        history.note_request(finished(BEGIN, seconds if at < 98 else 10 * seconds))
    found = steps(history, BEGIN)
    assert found["p50"][0] == pytest.approx(1000 * seconds, rel=0.1)
    assert found["p99"][0] == pytest.approx(10_000 * seconds, rel=0.1)


def test_latencies_beyond_the_bins_are_counted() -> None:
    history = RequestHistory(BEGIN)
    history.note_request(finished(BEGIN, 0.0))
    history.note_request(finished(BEGIN, 1e9))
    assert steps(history, BEGIN)["p50"] == [1.0]
    assert steps(history, BEGIN)["p99"][0] > 1e6


def test_values_older_than_an_hour_are_dropped() -> None:
    history = RequestHistory(BEGIN)
    history.note_request(finished(BEGIN))
    history.note_queue(7, BEGIN)
    history.note_queue(5, BEGIN)
    last = BEGIN + (STEPS - 1) * STEP_SECONDS
    found = steps(history, last)
    assert (found["requests"][0], found["queued"][0], len(found["p50"])) == (1, 7, STEPS)
    found = steps(history, last + STEP_SECONDS)
    assert (sum(found["requests"]), found["queued"], len(found["p50"])) == (
        0,
        [None] * STEPS,
        STEPS,
    )
    # After a long pause, old values of the ring are cleared; if the clock is set back, no value is
    # lost.
    history.note_request(finished(last + 10**6))
    history.note_request(finished(BEGIN))
    assert sum(steps(history, last + 10**6)["requests"]) == 2


def test_memory_is_bounded() -> None:
    history = RequestHistory(BEGIN)
    assert history.array_bytes == 132_480
    tracemalloc.start()
    try:
        for at in range(20_000):
            cost = Cost("encode", f"o/{at:0254}", 1, 1)
            history.note_request(
                Finished(BEGIN + at, f"{at:0128}", "/v1/embeddings", 200, "", 0.05, cost)
            )
        assert tracemalloc.get_traced_memory()[0] < MAX_REQUESTS * 1_500
    finally:
        tracemalloc.stop()
    assert history.array_bytes == 132_480
    assert len(history.content(BEGIN + 20_000)["requests"]) == MAX_REQUESTS


def test_cost_of_several_calls_is_their_sum() -> None:
    cost = Cost()
    reply = pb.ExtractResponse(
        usage=pb.Usage(input_tokens=3, output_tokens=2), timings=pb.Timings(queue_seconds=0.5)
    )
    for _ in range(2):
        cost.note_request(pb.ExtractRequest(model="o/m", text=pb.TextTask()))
        cost.note_reply(reply)
    assert (cost.verb, cost.model, cost.input_tokens, cost.output_tokens, cost.seconds[0]) == (
        "generate",
        "o/m",
        6,
        4,
        1.0,
    )
    cost.note_reply(pb.ExtractStreamResponse(response=reply))
    assert cost.input_tokens == 9
    assert Cost("encode").verb == "encode"


def test_texts_that_were_cut_are_those_of_the_largest_call() -> None:
    cost = Cost()
    for items, is_query in ((2, True), (1, False)):
        usage = pb.Usage(truncated_items=items, truncated_query=is_query)
        cost.note_reply(pb.ScoreResponse(usage=usage))
    assert cost.truncated_inputs == 3
