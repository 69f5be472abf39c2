"""The call that the current task answers, as the interceptor recorded it before it called the handler."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from libs.errors import InvalidInput
from libs.serving.security.identity import ANONYMOUS, Identity, is_printable

REQUEST_ID_HEADER: Final = "x-request-id"
TENANT_HEADER: Final = "x-shoal-tenant"


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC: its method (`/package.Service/Method`), its ids, the request's bytes as received, and the caller's identity.

    `tenant` is the authorised one, not just the one that the caller named.
    """

    method: str
    request_id: str
    tenant: str
    body: bytes
    identity: Identity = ANONYMOUS


_CURRENT: ContextVar[Call] = ContextVar("shoal_call")


def current_call() -> Call:
    """The call that this task answers. Only for handlers behind the interceptor."""
    return _CURRENT.get()


def enter_call(call: Call) -> None:
    """Sets the current call. gRPC runs each RPC in a task of its own, so nothing has to be reset."""
    _CURRENT.set(call)


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The first value of each metadata key."""
    headers: dict[str, str] = {}
    for key, value in metadata:
        headers.setdefault(key, str(value))
    return headers


def new_request_id() -> str:
    return secrets.token_hex(16)


def checked_id(value: str, default: str, name: str) -> str:
    """`value`, or `default` if empty. Raises InvalidInput for what is not 1..128 printable ASCII characters without spaces."""
    if not value:
        return default
    if not is_printable(value):
        raise InvalidInput(f"metadata {name} must be 1..128 printable ASCII characters without spaces", field=name)
    return value
