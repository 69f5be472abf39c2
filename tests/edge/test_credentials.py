"""The conversion of a request's headers to the metadata of the router call."""

from __future__ import annotations

import pytest

from services.edge.credentials import (
    CallerTrust,
    decode_headers,
    read_request_id,
    read_timeout,
    router_metadata,
    trace_metadata,
)
from services.edge.messages.base import HttpError

CERTIFICATE = {"subjectAltName": (("DNS", "a"), ("URI", "spiffe://shoal/client/acme"))}


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ({"authorization": "Bearer abc"}, "Bearer abc"),
        ({"authorization": "bearer  abc "}, "Bearer abc"),
        ({"authorization": "abc"}, "Bearer abc"),
        ({"authorization": "Bearer"}, None),
        ({"api-key": "abc"}, "Bearer abc"),
        ({}, None),
    ],
)
def test_token_is_sent_in_the_form_that_routers_read(
    headers: dict[str, str], credential: str | None
) -> None:
    metadata = dict(router_metadata(headers, "r", None, CallerTrust()))
    assert metadata.get("authorization") == credential
    assert metadata["x-request-id"] == "r"


@pytest.mark.parametrize(
    "given", ["Basic abc", "Bearer a b", "Bearer \x7f", "Bearer " + "a" * 8193]
)
def test_unusable_token_is_refused(given: str) -> None:
    with pytest.raises(HttpError, match=r"Bearer|token"):
        router_metadata({"authorization": given}, "r", None, CallerTrust())


def test_token_is_required_where_the_edge_vouches() -> None:
    with pytest.raises(HttpError, match="credential"):
        router_metadata({}, "r", None, CallerTrust(vouches=True))


def test_certificate_names_the_tenant_and_is_preferred_to_a_token() -> None:
    trust = CallerTrust(certificates="shoal", vouches=True)
    metadata = dict(router_metadata({"authorization": "Bearer a"}, "r", CERTIFICATE, trust))
    assert metadata["x-shoal-tenant"] == "acme"
    assert "authorization" not in metadata


def test_certificate_does_not_allow_another_tenant() -> None:
    with pytest.raises(HttpError, match="tenant"):
        router_metadata(
            {"x-shoal-tenant": "other"}, "r", CERTIFICATE, CallerTrust(certificates="shoal")
        )


def test_first_value_of_a_header_counts() -> None:
    assert decode_headers([(b"a", b"1"), (b"a", b"2")]) == {"a": "1"}


def test_request_id_of_the_caller_is_kept_if_it_is_printable() -> None:
    assert read_request_id({"x-request-id": "mine"}, "new") == "mine"
    assert read_request_id({}, "new") == "new"
    with pytest.raises(HttpError, match="x-request-id"):
        read_request_id({"x-request-id": "a b"}, "new")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 60.0),
        ({"x-request-timeout": "1.5"}, 1.5),
        ({"x-stainless-timeout": "7"}, 7.0),
        ({"x-request-timeout": "1", "x-stainless-timeout": "7"}, 1.0),
        ({"x-request-timeout": "1e9"}, 600.0),
    ],
)
def test_timeout_is_the_callers_up_to_the_longest(headers: dict[str, str], seconds: float) -> None:
    assert read_timeout(headers, 60.0, 600.0) == seconds


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan"])
def test_invalid_timeout_is_refused(given: str) -> None:
    with pytest.raises(HttpError, match="x-request-timeout"):
        read_timeout({"x-request-timeout": given}, 60.0, 600.0)


def test_trace_of_the_edge_replaces_that_of_the_caller() -> None:
    headers = {"traceparent": "theirs", "tracestate": "a=b"}
    assert trace_metadata(headers, "ours") == (("traceparent", "ours"), ("tracestate", "a=b"))
    assert trace_metadata({"traceparent": "theirs"}, "") == (("traceparent", "theirs"),)
    assert trace_metadata({"tracestate": "a=b"}, "") == ()
