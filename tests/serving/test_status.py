"""Client text never makes an error undeliverable."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2, status_pb2

from libs.errors import InvalidInput
from libs.serving.calls.status import to_status

HEADERS_BYTES = 8192
"""Size of headers that gRPC peers accept."""


@pytest.mark.parametrize("letter", ["a", "ü", "🐟", "\ud800", '"'])
def test_every_error_fits_into_headers(letter: str) -> None:
    status = to_status(InvalidInput(letter * 100_000, field=f"items[{letter * 5000}]"), "request")
    rich = status_pb2.Status.FromString(status.details)
    assert rich.message == status.message
    assert status.message.endswith("…")
    violations = error_details_pb2.BadRequest()
    assert rich.details[1].Unpack(violations)
    assert violations.field_violations[0].field.startswith("items[")
    assert len(quote(status.message)) + len(base64.b64encode(status.details)) < HEADERS_BYTES - 1024


def test_short_error_is_unchanged() -> None:
    assert (
        to_status(InvalidInput("zu lang: „Fisch“ 🐟"), "request").message == "zu lang: „Fisch“ 🐟"
    )
