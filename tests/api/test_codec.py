from __future__ import annotations

import numpy as np
import pytest
from shoal.errors import InternalError
from shoal.requests import codec
from shoal.results import Floats
from shoal.v1 import inference_pb2, models_pb2, tensor_pb2

from tests.api import wire


@pytest.fixture
def values() -> Floats:
    return np.random.default_rng(7).standard_normal((5, 20)).astype(np.float32)


def test_float32_is_a_view_of_the_received_bytes(values: Floats) -> None:
    vectors = codec.vectors(wire.tensor(values, tensor_pb2.DATA_TYPE_FLOAT32))
    assert (vectors.data_type, vectors.dimensions, str(vectors.array.dtype)) == (
        "float32",
        20,
        "float32",
    )
    assert not vectors.array.flags.owndata
    assert not vectors.array.flags.writeable
    np.testing.assert_array_equal(vectors.array, values)
    np.testing.assert_array_equal(vectors.dequantize(), values)


def test_float16_stays_float16(values: Floats) -> None:
    vectors = codec.vectors(wire.tensor(values, tensor_pb2.DATA_TYPE_FLOAT16))
    assert (vectors.data_type, str(vectors.array.dtype)) == ("float16", "float16")
    np.testing.assert_array_equal(vectors.array, values.astype(np.float16))
    assert vectors.dequantize().dtype == np.float32


def test_bfloat16_becomes_float32_exactly() -> None:
    exact = np.array([[1.0, -2.5, 0.0, 3.0e38, 1.1754944e-38, np.inf]], dtype=np.float32)
    exact = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
    vectors = codec.vectors(wire.tensor(exact, tensor_pb2.DATA_TYPE_BFLOAT16))
    assert (vectors.data_type, str(vectors.array.dtype)) == ("bfloat16", "float32")
    np.testing.assert_array_equal(vectors.array, exact)


@pytest.mark.parametrize("data_type", [tensor_pb2.DATA_TYPE_INT8, tensor_pb2.DATA_TYPE_UINT8])
def test_bytes_can_be_undone_to_half_a_step(values: Floats, data_type: tensor_pb2.DataType) -> None:
    vectors = codec.vectors(wire.tensor(values, data_type))
    assert vectors.array.dtype == (np.int8 if data_type == tensor_pb2.DATA_TYPE_INT8 else np.uint8)
    assert vectors.scale is not None
    assert (vectors.offset is None) == (data_type == tensor_pb2.DATA_TYPE_INT8)
    assert (np.abs(vectors.dequantize() - values) <= vectors.scale[:, None] * 0.501).all()


@pytest.mark.parametrize("dimensions", [8, 12, 20])
def test_binary_unpacks_to_signs(values: Floats, dimensions: int) -> None:
    values = values[:, :dimensions]
    vectors = codec.vectors(wire.tensor(values, tensor_pb2.DATA_TYPE_BINARY))
    assert (vectors.data_type, vectors.dimensions) == ("binary", dimensions)
    assert vectors.array.shape == (5, (dimensions + 7) // 8)
    np.testing.assert_array_equal(vectors.bits(), values > 0)
    np.testing.assert_array_equal(vectors.dequantize(), np.where(values > 0, 1, -1))


def test_bits_are_for_binary_only(values: Floats) -> None:
    with pytest.raises(ValueError, match="float32"):
        codec.vectors(wire.tensor(values, tensor_pb2.DATA_TYPE_FLOAT32)).bits()


def test_newer_data_type_is_named_as_such() -> None:
    with pytest.raises(InternalError, match="data type 0"):
        codec.vectors(tensor_pb2.Tensor(shape=[1, 1], data=b"1234"))


@pytest.mark.parametrize("data_type", [tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_BFLOAT16])
def test_ragged_rows_are_views(data_type: tensor_pb2.DataType) -> None:
    rows = [np.full((length, 3), length, np.float32) for length in (2, 0, 5, 1)]
    ragged = codec.ragged(wire.ragged(rows, data_type))
    assert len(ragged) == 4
    for mine, given in zip(ragged, rows, strict=True):
        np.testing.assert_array_equal(mine, given)
    assert np.shares_memory(ragged[2], ragged.values)
    np.testing.assert_array_equal(ragged[-1], rows[3])
    with pytest.raises(IndexError):
        ragged[4]


def test_scale_that_overflows_is_decoded_without_a_warning() -> None:
    values = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_INT8, shape=[1, 2], data=b"\x7f\x00")
    values.scale = np.array([3e38], np.float32).tobytes()
    ragged = codec.ragged(tensor_pb2.Ragged(values=values, offsets=[0, 1]))
    assert ragged[0].tolist() == [[float("inf"), 0.0]]


def test_sparse_rows_and_scipy() -> None:
    rows = [{3: 1.0, 7: 2.0}, {}, {0: 0.5}]
    sparse = codec.sparse(wire.sparse(rows, columns=10))
    assert sparse.shape == (3, 10)
    assert [
        dict(zip(columns.tolist(), weights.tolist(), strict=True)) for columns, weights in sparse
    ] == rows
    dense = sparse.to_scipy().toarray()
    assert dense.shape == (3, 10)
    assert (dense[0, 3], dense[0, 7], dense[2, 0], dense.sum()) == (1.0, 2.0, 0.5, 3.5)


def test_only_sent_fields_are_set() -> None:
    result = codec.encode_result(
        inference_pb2.EncodeResponse(model_revision="r", usage={"input_tokens": 3})
    )
    assert result.representations == ()
    assert (result.usage.input_tokens, result.revision, result.timings.total_seconds) == (
        3,
        "r",
        0.0,
    )
    for form in ("dense", "vectors", "sparse", "multi_vector"):
        asked = "dense" if form == "vectors" else form
        with pytest.raises(
            ValueError,
            match=rf'this result has no {asked} representation, .*representations=\["{asked}"\]',
        ):
            getattr(result, form)
    with pytest.raises(ValueError, match="no dense representation"):
        result.dequantize()


def test_extraction_keeps_every_kind() -> None:
    entity = inference_pb2.Entity(start=1, end=3, label="A", score=0.5, text="bc")
    relation = inference_pb2.Relation(head=entity, tail=entity, label="same", score=0.25)
    region = inference_pb2.Region(left=1, top=2, right=3, bottom=4, label="cat", score=0.75)
    label = inference_pb2.LabelScore(label="x", score=-0.5)
    message = inference_pb2.Extraction(
        entities=[entity],
        labels=[label],
        relations=[relation],
        regions=[region],
        text="t",
        truncated=True,
    )
    (found,) = codec.extract_result(inference_pb2.ExtractResponse(results=[message]))
    assert (found.entities[0].start, found.entities[0].end, found.entities[0].text) == (1, 3, "bc")
    assert found.relations[0].tail == found.entities[0]
    assert found.truncated
    assert (found.regions[0].bottom, found.labels[0].score, found.text) == (4.0, -0.5, "t")


def test_model_without_a_card() -> None:
    model = codec.model(
        models_pb2.Model(model="a/b", state=models_pb2.MODEL_STATE_FAILED, last_error="why")
    )
    assert (model.state, model.card, model.places, model.last_error) == ("failed", None, (), "why")


F32 = tensor_pb2.DATA_TYPE_FLOAT32
HOSTILE: dict[str, inference_pb2.EncodeResponse] = {
    "no shape": inference_pb2.EncodeResponse(dense=tensor_pb2.Tensor(data_type=F32)),
    "a negative shape": inference_pb2.EncodeResponse(
        dense=tensor_pb2.Tensor(data_type=F32, shape=[-1, 4], data=bytes(16))
    ),
    "other bytes": inference_pb2.EncodeResponse(
        dense=tensor_pb2.Tensor(data_type=F32, shape=[1, 4], data=bytes(15))
    ),
    "a huge shape": inference_pb2.EncodeResponse(
        dense=tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_BINARY, shape=[1, 2**63 - 1], data=b""
        )
    ),
    "scales of other rows": inference_pb2.EncodeResponse(
        dense=tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_INT8, shape=[1, 4], data=bytes(4), scale=bytes(8)
        )
    ),
    "offsets beyond the rows": inference_pb2.EncodeResponse(
        multi_vector=tensor_pb2.Ragged(
            values=tensor_pb2.Tensor(data_type=F32, shape=[1, 1], data=bytes(4)), offsets=[0, 9]
        )
    ),
    "a column that is none": inference_pb2.EncodeResponse(
        sparse=tensor_pb2.SparseMatrix(
            columns=2,
            offsets=[0, 1],
            indices=b"\xff\xff\xff\xff",
            values=tensor_pb2.Tensor(data_type=F32, shape=[1], data=bytes(4)),
        )
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_answer_that_does_not_fit_together_is_a_shoal_error(name: str) -> None:
    with pytest.raises(InternalError, match="cannot be read"):
        codec.encode_result(HOSTILE[name])


def test_scores_and_rankings_fit_each_other() -> None:
    scores = tensor_pb2.Tensor(data_type=F32, shape=[1], data=bytes(4))
    with pytest.raises(InternalError, match="ranking"):
        codec.score_result(inference_pb2.ScoreResponse(scores=scores, ranking=[1]))
    with pytest.raises(InternalError):
        codec.score_result(inference_pb2.ScoreResponse(scores=tensor_pb2.Tensor(data=b"abc")))


def test_unknown_enum_values_are_shown_by_number() -> None:
    message = models_pb2.Model(model="org/name", state=99, card=models_pb2.ModelCard(tasks=[77]))  # type: ignore[arg-type, list-item]
    found = codec.model(message)
    assert found.state == "unknown_99"
    assert found.card is not None
    assert found.card.tasks == ("unknown_77",)
