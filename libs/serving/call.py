"""The call that the current task answers: what the interceptor learned before it called the handler."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from libs.errors import InvalidInput

REQUEST_ID_HEADER: Final = "x-request-id"
TENANT_HEADER: Final = "x-shoal-tenant"
DEFAULT_TENANT: Final = "default"

_PRINTABLE: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC: its method (`/package.Service/Method`), its ids, and the request's bytes as they came."""

    method: str
    request_id: str
    tenant: str
    body: bytes


_CURRENT: ContextVar[Call] = ContextVar("shoal_call")


def current_call() -> Call:
    """The call that this task answers. Only for handlers behind the interceptor."""
    return _CURRENT.get()


def enter_call(call: Call) -> None:
    """gRPC runs each RPC in a task of its own, so nothing has to be reset."""
    _CURRENT.set(call)


def header(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str:
    """The first value of a metadata key, or empty."""
    return next((str(value) for key, value in metadata or () if key == name), "")


def new_request_id() -> str:
    return secrets.token_hex(16)


def checked_id(value: str, default: str, name: str) -> str:
    """`value`, or `default` if empty. Raises InvalidInput for what is not 1..128 printable ASCII characters without spaces."""
    if not value:
        return default
    if not _PRINTABLE.fullmatch(value):
        raise InvalidInput(f"metadata {name} must be 1..128 printable ASCII characters without spaces", field=name)
    return value
