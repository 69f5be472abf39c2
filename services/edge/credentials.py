"""Convert a request's headers to the metadata of the router call: credential, tenant, request id,
trace, deadline.

The edge does not check tokens. It only keeps callers from using the edge's certificate, and reports
the caller that a client certificate names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal.transport.channels import ANY_ANSWER
from shoal.transport.wire import Metadata

from libs.errors import PermissionDenied, Unauthenticated
from libs.serving.calls.call import REQUEST_ID_HEADER, TENANT_HEADER
from libs.serving.security.authentication import certified
from libs.serving.security.identity import is_printable
from libs.telemetry.traces import TRACEPARENT, TRACESTATE
from services.edge.messages.base import HttpError, invalid

AUTHORIZATION: Final = "authorization"
API_KEY: Final = "api-key"
"""The header in which Azure-style clients send their key."""
TIMEOUTS: Final = ("x-request-timeout", "x-stainless-read-timeout", "x-stainless-timeout")
"""Headers with the caller's timeout in seconds: Shoal's and those of OpenAI's clients."""
_MAX_TOKEN: Final = 8192
"""Maximum characters of a token."""
_CALLERS: Final = ("client", "admin")


@dataclass(frozen=True, slots=True)
class CallerTrust:
    """Requirements for callers.

    Attributes:
        certificates: The SPIFFE trust domain of client certificates; empty if callers present none.
        vouches: Routers would accept a call without a token because of the edge's certificate, so
            the edge must require one.
    """

    certificates: str = ""
    vouches: bool = False


def decode_headers(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the first value of each header by its name in lower case."""
    found: dict[str, str] = {}
    for name, value in raw:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def read_request_id(headers: Mapping[str, str], new: str) -> str:
    """Return the caller's request id, which is also the idempotency key, or `new` if it sent none.
    Raises HttpError for an invalid id.
    """
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and not is_printable(given):
        raise invalid(
            "the header x-request-id must be 1..128 printable ASCII characters without spaces",
            REQUEST_ID_HEADER,
        )
    return given or new


def read_timeout(headers: Mapping[str, str], default: float, longest: float) -> float:
    """Return the seconds for which the caller waits for the answer, at most `longest`; `default` if
    it does not say. Raises HttpError for an invalid number.
    """
    for name in TIMEOUTS:
        text = headers.get(name, "")
        if not text:
            continue
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if seconds > 0:
            return min(seconds, longest)
        if name == TIMEOUTS[0]:
            raise invalid(f"the header {name} must be a number of seconds above 0", name)
    return default


def router_metadata(
    headers: Mapping[str, str],
    request_id: str,
    certificate: Mapping[str, Any] | None,
    trust: CallerTrust,
) -> Metadata:
    """Return the metadata for the router, without the trace. It includes the note that the edge
    accepts messages of any size.

    Raises HttpError for a credential that cannot be passed on.

    A certificate that names a caller is preferred to a token: OpenAI's clients always send a token,
    and a mesh that authenticates by certificates does not accept any.
    """
    metadata = [(REQUEST_ID_HEADER, request_id), *ANY_ANSWER]
    bearer = _bearer(headers)
    tenant = headers.get(TENANT_HEADER, "")
    uris = _uris(certificate)
    if trust.certificates and (uris or not bearer):
        tenant = _certified_tenant(uris, tenant, trust.certificates)
    elif bearer:
        metadata.append((AUTHORIZATION, bearer))
    elif trust.vouches:
        raise HttpError(
            "UNAUTHENTICATED",
            "this call needs a credential: send the header `Authorization: Bearer <token>`",
        )
    if tenant:
        if not is_printable(tenant):
            raise invalid(
                (
                    "the header x-shoal-tenant must be 1..128 printable ASCII characters without "
                    "spaces"
                ),
                TENANT_HEADER,
            )
        metadata.append((TENANT_HEADER, tenant))
    return tuple(metadata)


def trace_metadata(headers: Mapping[str, str], traceparent: str) -> Metadata:
    """Return the trace context of the edge's span, or else the caller's."""
    found = traceparent or headers.get(TRACEPARENT, "")
    if not found or not is_printable(found):
        return ()
    state = headers.get(TRACESTATE, "")
    return (
        (TRACEPARENT, found),
        *([(TRACESTATE, state)] if state.isascii() and state.isprintable() and state else []),
    )


def _bearer(headers: Mapping[str, str]) -> str:
    """Return `Bearer <token>`, the form that routers read, or "" without a token. Some clients omit
    the word Bearer or send it without a token. Raises HttpError for an unusable token.
    """
    given = headers.get(AUTHORIZATION, "").strip()
    kind, _, token = given.partition(" ")
    if not given:
        token = headers.get(API_KEY, "").strip()
    elif not token:
        token = "" if kind.lower() == "bearer" else kind
    elif kind.lower() != "bearer":
        raise HttpError("UNAUTHENTICATED", "the header Authorization must be `Bearer <token>`")
    token = token.strip()
    if not token:
        return ""
    if len(token) > _MAX_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise HttpError(
            "UNAUTHENTICATED", "the token must be 1..8192 printable ASCII characters without spaces"
        )
    return f"Bearer {token}"


def _uris(certificate: Mapping[str, Any] | None) -> list[bytes]:
    """Return the URIs of a caller's certificate, given in the form of ssl.SSLObject.getpeercert."""
    return [
        value.encode()
        for kind, value in (certificate or {}).get("subjectAltName", ())
        if kind == "URI"
    ]


def _certified_tenant(uris: Sequence[bytes], named: str, trust_domain: str) -> str:
    """Return the tenant for which a caller's certificate allows the call. Raises HttpError."""
    try:
        identity = certified(uris, trust_domain)
        if identity.role not in _CALLERS:
            raise PermissionDenied(
                f"role {identity.role} may not call inference: it needs role client or admin"
            )
        return identity.tenant_for(named)
    except (Unauthenticated, PermissionDenied) as error:
        raise HttpError(error.reason, error.message) from None
