"""Requests taken apart and put together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2, worker_pb2

from libs.errors import InputTooLong, InternalError
from services.router.admission.splitting import RequestPart, split
from services.router.lanes import chunks
from services.router.lanes.codec import (
    JobHeader,
    Response,
    failed,
    job_payloads,
    job_result,
    merge_encode,
    merge_extract,
    merge_score,
    ranking,
)

STAMP = JobHeader("request", 2000, 1000)


def tensor(values: np.ndarray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32,
        shape=values.shape,
        data=values.astype("<f4").tobytes(),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 100))
def test_jobs_hold_the_request_in_order(costs: list[int], target: int) -> None:
    texts = [f"text {number}" for number in range(len(costs))]
    request = pb.EncodeRequest(
        model="a/b", items=[pb.Item(text=text) for text in texts], role=pb.ROLE_QUERY, dimensions=7
    )
    parts = split(costs, target)
    payloads = job_payloads(request, parts, [str(part.first) for part in parts], STAMP)
    jobs = [worker_pb2.Job.FromString(payload) for payload in payloads]
    assert [item.text for job in jobs for item in job.encode.items] == texts
    assert [(job.job_id, job.first_item) for job in jobs] == [
        (str(part.first), part.first) for part in parts
    ]
    assert {(job.encode.model, job.encode.role, job.encode.dimensions) for job in jobs} == {
        ("a/b", pb.ROLE_QUERY, 7)
    }
    assert {(job.request_id, job.deadline_unix_ms, job.queued_unix_ms) for job in jobs} == {
        ("request", 2000, 1000)
    }


def test_every_job_of_a_score_has_the_query() -> None:
    documents = [pb.Item(text=str(number)) for number in range(3)]
    request = pb.ScoreRequest(model="a/b", query=pb.Item(text="q"), documents=documents)
    payloads = job_payloads(
        request, [RequestPart(0, 2, 1), RequestPart(2, 1, 1)], ["x", "y"], STAMP
    )
    jobs = [worker_pb2.Job.FromString(payload).score for payload in payloads]
    assert [(job.query.text, [item.text for item in job.documents]) for job in jobs] == [
        ("q", ["0", "1"]),
        ("q", ["2"]),
    ]


def test_items_keep_their_entities() -> None:
    items = [pb.Item(text="abc", entities=[pb.Entity(start=0, end=number)]) for number in (1, 2, 3)]
    request = pb.ExtractRequest(model="a/b", items=items, relations=pb.RelationsTask(labels=["in"]))
    payloads = job_payloads(
        request, [RequestPart(0, 2, 1), RequestPart(2, 1, 1)], ["x", "y"], STAMP
    )
    jobs = [worker_pb2.Job.FromString(payload).extract for payload in payloads]
    assert [[item.entities[0].end for item in job.items] for job in jobs] == [[1, 2], [3]]


def test_dense_answers_are_joined_by_row() -> None:
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    parts: list[Response] = [
        pb.EncodeResponse(dense=tensor(part), model_revision="r")
        for part in (values[:2], values[2:])
    ]
    merged = merge_encode(parts)
    assert merged.dense == tensor(values)
    assert merged.model_revision == "r"
    assert not merged.HasField("sparse")


def test_quantised_answers_keep_their_scales() -> None:
    parts = [
        tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_UINT8,
            shape=[1, 2],
            data=b"ab",
            scale=b"1111",
            offset=b"2222",
        ),
        tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_UINT8,
            shape=[2, 2],
            data=b"cdef",
            scale=b"33334444",
            offset=b"55556666",
        ),
    ]
    merged = merge_encode([pb.EncodeResponse(dense=part) for part in parts]).dense
    assert (list(merged.shape), merged.data) == ([3, 2], b"abcdef")
    assert (merged.scale, merged.offset) == (b"111133334444", b"222255556666")


def test_multi_vectors_and_sparse_rows_are_joined() -> None:
    ragged = [
        tensor_pb2.Ragged(values=tensor(np.ones((3, 2))), offsets=[0, 1, 3]),
        tensor_pb2.Ragged(values=tensor(np.zeros((2, 2))), offsets=[0, 2]),
    ]
    sparse = [
        tensor_pb2.SparseMatrix(
            columns=9, offsets=[0, 2], indices=b"11112222", values=tensor(np.array([1.0, 2.0]))
        ),
        tensor_pb2.SparseMatrix(
            columns=9, offsets=[0, 0, 1], indices=b"3333", values=tensor(np.array([3.0]))
        ),
    ]
    parts: list[Response] = [
        pb.EncodeResponse(multi_vector=first, sparse=second)
        for first, second in zip(ragged, sparse, strict=True)
    ]
    merged = merge_encode(parts)
    assert list(merged.multi_vector.offsets) == [0, 1, 3, 5]
    assert list(merged.multi_vector.values.shape) == [5, 2]
    assert list(merged.sparse.offsets) == [0, 2, 2, 3]
    assert merged.sparse.indices == b"111122223333"
    assert merged.sparse.values == tensor(np.array([1.0, 2.0, 3.0]))


def test_usage_adds_up_and_timings_are_the_largest() -> None:
    parts: list[Response] = [
        pb.ExtractResponse(
            usage=pb.Usage(input_tokens=tokens),
            timings=pb.Timings(queue_seconds=wait, forward_seconds=1.0),
        )
        for tokens, wait in ((3, 0.5), (4, 0.25))
    ]
    merged = merge_extract(parts)
    assert merged.usage.input_tokens == 7
    assert (merged.timings.queue_seconds, merged.timings.forward_seconds) == (0.5, 1.0)


def test_scores_are_ranked_whole() -> None:
    parts = [
        pb.ScoreResponse(scores=tensor(np.array(scores))) for scores in ([0.1, 0.9], [0.9, 0.5])
    ]
    merged = merge_score(parts, 3)
    assert list(merged.ranking) == [1, 2, 3]
    assert list(merged.scores.shape) == [4]
    assert list(merge_score(parts[:1], 0).ranking) == [1, 0]


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=50), st.integers(0, 60))
def test_ranking_is_the_best_in_document_order(scores: list[float], top_n: int) -> None:
    expected = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert ranking(np.array(scores, np.float32), top_n) == (expected[:top_n] if top_n else expected)


def test_nan_scores_rank_last() -> None:
    assert ranking(np.array([np.nan, 0.5, -np.inf], np.float32), 0) == [1, 2, 0]


def test_failure_is_raised_as_it_was() -> None:
    with pytest.raises(InputTooLong, match="600 tokens") as raised:
        job_result(failed(InputTooLong("600 tokens", field="items[3].text")))
    assert raised.value.field == "items[3].text"
    with pytest.raises(InternalError):
        job_result(b"")


def test_answers_that_do_not_fit_together_are_our_fault() -> None:
    dense = pb.EncodeResponse(dense=tensor(np.ones((1, 4))))
    for other in (
        pb.EncodeResponse(),
        pb.EncodeResponse(dense=tensor(np.ones((1, 3)))),
        pb.ScoreResponse(),
    ):
        with pytest.raises(InternalError):
            merge_encode([dense, other])


def test_answers_leave_memory_as_they_are_merged() -> None:
    parts: list[Response] = [
        pb.ExtractResponse(results=[pb.Extraction(text=text)]) for text in "ab"
    ]
    assert [result.text for result in merge_extract(parts).results] == ["a", "b"]
    assert not parts


def test_one_sparse_answer_with_weights_left_out_marks_all() -> None:
    rows = [
        tensor_pb2.SparseMatrix(
            columns=9,
            offsets=[0, 1],
            indices=b"\1\0\0\0",
            values=tensor(np.array([1.0])),
            truncated=cut,
        )
        for cut in (False, True)
    ]
    assert merge_encode([pb.EncodeResponse(sparse=part) for part in rows]).sparse.truncated
    (only,) = chunks.split(pb.EncodeResponse(sparse=rows[1]))
    assert only.sparse.truncated
