"""Parsing of requests, and the paths of errors in them."""

from __future__ import annotations

from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from libs.serving.calls.decode import (
    MAX_FIELDS,
    MAX_REQUEST_BYTES,
    SCANNED_BYTES,
    find_invalid_text,
    parse,
    request_type,
)

LABELS = b"\x1a\x07\x0a\x01a\x0a\x02\xc3\x28"
"""Wire bytes of entities {labels: ["a", bad]}."""


def place(kind: type[Message], data: bytes) -> str:
    return find_invalid_text(cast(Descriptor, kind.DESCRIPTOR), data)


def test_request_types_are_found_by_method() -> None:
    assert request_type("/shoal.v1.InferenceService/Encode") is pb.EncodeRequest
    assert request_type("/shoal.v1.InferenceService/Nothing") is None


def test_path_of_invalid_text_in_a_repeated_field_is_found() -> None:
    assert place(pb.ExtractRequest, LABELS) == "entities.labels[1]"


@given(st.binary(max_size=200))
def test_random_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        pb.EncodeRequest.FromString(data)
        is_valid = True
    except DecodeError:
        is_valid = False
    if is_valid:
        assert parse(pb.EncodeRequest, data).SerializeToString() is not None
    else:
        with pytest.raises(InvalidInput):
            parse(pb.EncodeRequest, data)


@given(st.integers(0, 30), st.binary(min_size=1, max_size=8))
def test_invalid_text_is_found_at_its_index(index: int, text: bytes) -> None:
    items = b"".join(b"\x12\x03\x0a\x01x" for _ in range(index))
    data = items + b"\x12" + bytes([len(text) + 2]) + b"\x0a" + bytes([len(text)]) + text
    try:
        text.decode()
        expected = ""
    except UnicodeDecodeError:
        expected = f"items[{index}].text"
    assert place(pb.EncodeRequest, data) == expected


def test_too_large_request_is_refused_with_size_and_limit() -> None:
    with pytest.raises(InvalidInput, match=r"67,108,865 bytes.*67,108,864"):
        parse(pb.EncodeRequest, bytes(MAX_REQUEST_BYTES + 1))


def test_search_for_invalid_text_is_bounded() -> None:
    data = b"\x12\x00" * 200_000 + b"\x0a\x01\xff"
    assert len(data) < SCANNED_BYTES
    with pytest.raises(InvalidInput, match=r"not a valid shoal\.v1\.EncodeRequest"):
        parse(pb.EncodeRequest, data)


CROWDS = {
    "empty items": b"\x12\x00" * 1_000_000,
    "one item with a million entities": b"\x12\x80\x89\x7a" + b"\x1a\x00" * 1_000_000,
    "a text given a million times": b"\x12\x80\x89\x7a" + b"\x0a\x00" * 1_000_000,
    "representations in one piece": pb.EncodeRequest(
        representations=[pb.REPRESENTATION_DENSE] * 2_000_000
    ).SerializeToString(),
    "unknown fields": b"\xa0\x06\x00" * 1_000_000,
    "items behind the begin of a group": b"\xa3\x06" + b"\x12\x00" * 1_000_000 + b"\xa4\x06",
}


@pytest.mark.parametrize("name", CROWDS)
def test_request_with_too_many_fields_is_refused_before_parsing(name: str) -> None:
    assert len(CROWDS[name]) > SCANNED_BYTES
    with pytest.raises(InvalidInput, match=f"more than {MAX_FIELDS:,} fields"):
        parse(pb.EncodeRequest, CROWDS[name])


def test_maximum_number_of_items_passes() -> None:
    request = pb.EncodeRequest(
        items=[pb.Item(text="x" * 200, entities=[pb.Entity(start=0, end=1)] * 10)] * 10_000
    )
    assert len(request.SerializeToString()) > SCANNED_BYTES
    assert parse(pb.EncodeRequest, request.SerializeToString()) == request
