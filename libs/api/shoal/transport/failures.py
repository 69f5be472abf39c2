"""Conversion of the status of a failed gRPC call to a ShoalError. This is the only reader of
google.rpc details in the client.
"""

from __future__ import annotations

import re
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from shoal.errors import BY_CODE, BY_REASON, CannotConnect, ShoalError, TlsFailed

DOMAIN = "shoal"


def translate(error: grpc.RpcError, address: str) -> ShoalError:
    """Return the ShoalError that a failed gRPC call means."""
    trailing: Any = (
        error.trailing_metadata() or ()
    )  # Pairs in both; the stubs know only blocking gRPC's.
    details: bytes = next(
        (value for key, value in trailing if key == "grpc-status-details-bin"), b""
    )
    return decode(error.code().name, error.details() or "", details, address=address)


# Parts of BoringSSL's messages, which gRPC passes on, and what each means; the first match counts.
_HANDSHAKE_FAILURES = (
    ("certificate has expired", "has a certificate that has expired"),
    (
        "certificate is not yet valid",
        "has a certificate that is not valid yet; check the clocks of both machines",
    ),
    ("unsupported certificate purpose", "has a certificate that is not a server certificate"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "has a certificate from an authority that this client does not trust",
    ),
    ("WRONG_VERSION_NUMBER", "does not use TLS"),
    ("handshake failed", "failed the TLS handshake with this client"),
)

_NO_CONNECTION = ("last error: ", "DNS resolution failed")
"""Parts of gRPC's messages for a call that found no connection; the message for a connection that
broke has neither.
"""


def decode(code: str, text: str, details: bytes, *, address: str) -> ShoalError:
    """Return the error for the status of a failed call.

    UNAVAILABLE without our ErrorInfo originates in the network, not in a router. CANCELLED means
    that the router ended with calls in flight: a caller that cancels its own call does not get
    here.

    Args:
        code: The gRPC status name.
        details: The serialised google.rpc.Status of the trailing metadata
            (`grpc-status-details-bin`); may be empty.
    """
    info, bad, retry = _details(details)
    if info is None and code in ("UNAVAILABLE", "CANCELLED"):
        return _cannot_connect(address, text)
    if info is None and code == "DEADLINE_EXCEEDED":
        text = (
            "no answer within the timeout; the first request to a model includes loading it and "
            "may need a longer timeout"
        )
    reason = info.reason if info is not None else ""
    kind = BY_REASON.get(reason) or BY_CODE.get(code, ShoalError)
    field = bad.field_violations[0].field if bad is not None and bad.field_violations else ""
    if info is not None and not field:  # BadRequest is for INVALID_ARGUMENT only
        field = info.metadata.get("field", "")
    after = None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    error = kind(text or f"the call failed with {code}", field=field)
    error.code, error.retry_after = code, after
    error.reason = reason or (kind.reason if kind.code == code else code)
    return error


def _cannot_connect(address: str, text: str) -> CannotConnect:
    # "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:50051: Ssl handshake
    # failed ..."
    cause = text.partition("last error: ")[2] or text
    if match := re.search(r"Peer name (\S+) is not in peer certificate", cause):
        return TlsFailed(
            f"the router at {address} has a certificate that is not valid for the name {match[1]}"
        )
    for part, meaning in _HANDSHAKE_FAILURES:
        if part in cause:
            return TlsFailed(f"the router at {address} {meaning}")
    if "Socket closed" in cause:
        cause = (
            "it closed the connection; it may require TLS, or a client certificate that it "
            "trusts and that has not expired"
        )
    error = CannotConnect(f"cannot reach a router at {address}: {cause}")
    error.was_sent = not any(part in text for part in _NO_CONNECTION)
    return error


def _details(
    data: bytes,
) -> tuple[
    error_details_pb2.ErrorInfo | None,
    error_details_pb2.BadRequest | None,
    error_details_pb2.RetryInfo | None,
]:
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    has_info = has_bad = has_retry = False
    try:
        for detail in status_pb2.Status.FromString(data).details:
            has_info = has_info or (detail.Unpack(info) and info.domain == DOMAIN)
            has_bad = has_bad or detail.Unpack(bad)
            has_retry = has_retry or detail.Unpack(retry)
    except DecodeError:  # details are optional: those that cannot be parsed are ignored
        return (None, None, None)
    return (info if has_info else None, bad if has_bad else None, retry if has_retry else None)
