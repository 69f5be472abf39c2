from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.errors import ModelChanged
from shoal.requests import codec
from shoal.requests.merging import merge_encode, merge_score
from shoal.requests.plan import spans
from shoal.results import EncodeResult
from shoal.v1 import inference_pb2, tensor_pb2

from tests.api import wire


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 12), st.integers(1, 60))
def test_spans_cover_every_item_once_within_the_bounds(
    lengths: list[int], items: int, characters: int
) -> None:
    found = spans(lengths, max_items=items, max_characters=characters)
    assert [index for span in found for index in span] == list(range(len(lengths)))
    for span in found:
        assert len(span) <= items
        assert len(span) <= 1 or sum(lengths[index] for index in span) <= characters


def test_remainder_does_not_run_alone() -> None:
    assert [len(span) for span in spans([1] * 513, max_items=512, max_characters=10**6)] == [
        257,
        256,
    ]


def test_empty_list_has_no_parts() -> None:
    assert spans([], max_items=512, max_characters=100) == []


def encoded(
    rows: Sequence[Sequence[float]], data_type: tensor_pb2.DataType, *, revision: str = "r"
) -> EncodeResult:
    values = np.array(rows, dtype=np.float32)
    response = inference_pb2.EncodeResponse(
        dense=wire.tensor(values, data_type),
        sparse=wire.sparse([{index + 1: row[0]} for index, row in enumerate(rows)], columns=9),
        multi_vector=wire.ragged(
            [values[: index + 1] for index in range(len(rows))], tensor_pb2.DATA_TYPE_FLOAT32
        ),
        model_revision=revision,
        usage={"input_tokens": len(rows)},
        timings={"queue_seconds": rows[0][0], "forward_seconds": 1 / rows[0][0]},
    )
    return codec.encode_result(response)


@pytest.mark.parametrize("data_type", [value for value in tensor_pb2.DataType.values() if value])
def test_parts_merge_into_the_result_of_one_request(data_type: tensor_pb2.DataType) -> None:
    first, second, third = (
        [[1.0, -2.0], [3.0, 4.0]],
        [[5.0, 6.5]],
        [[-7.0, 8.0], [9.0, -1.0], [2.0, 3.0]],
    )
    merged = merge_encode([encoded(rows, data_type) for rows in (first, second, third)])
    whole = encoded([*first, *second, *third], data_type)
    assert merged.dense is not None
    assert whole.dense is not None
    np.testing.assert_array_equal(merged.dense, whole.dense)
    np.testing.assert_array_equal(merged.dequantize(), whole.dequantize())
    assert not merged.dense.flags.writeable
    assert merged.sparse is not None
    assert merged.sparse.shape == (6, 9)
    assert [columns.tolist() for columns, _ in merged.sparse] == [[1], [2], [1], [1], [2], [3]]
    assert merged.multi_vector is not None
    assert [len(row) for row in merged.multi_vector] == [1, 2, 1, 1, 2, 3]
    np.testing.assert_array_equal(merged.multi_vector[5], np.array(third, np.float32))
    assert merged.usage.input_tokens == 6
    assert (merged.timings.queue_seconds, merged.timings.forward_seconds) == (5.0, 1.0)


def test_single_part_is_not_copied() -> None:
    part = encoded([[1.0, 2.0]], tensor_pb2.DATA_TYPE_FLOAT32)
    assert merge_encode([part]) is part


def test_rows_of_two_revisions_are_never_mixed() -> None:
    old = encoded([[1.0]], tensor_pb2.DATA_TYPE_FLOAT32, revision="old")
    new = encoded([[1.0]], tensor_pb2.DATA_TYPE_FLOAT32, revision="new")
    with pytest.raises(ModelChanged, match="old to new"):
        merge_encode([old, old, new])


def test_merged_ranking_keeps_document_order_of_equals() -> None:
    def scored(scores: list[float]) -> inference_pb2.ScoreResponse:
        return inference_pb2.ScoreResponse(
            scores=wire.tensor(np.array(scores, np.float32), tensor_pb2.DATA_TYPE_FLOAT32)
        )

    results = [codec.score_result(scored(scores)) for scores in ([1.0, 3.0], [3.0, -1.0], [2.0])]
    assert merge_score(results, top_n=0).ranking.tolist() == [1, 2, 4, 0, 3]
    assert merge_score(results, top_n=2).ranking.tolist() == [1, 2]
    assert merge_score(results, top_n=99).scores.tolist() == [1.0, 3.0, 3.0, -1.0, 2.0]
