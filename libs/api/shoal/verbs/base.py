"""The base classes of both clients: the settings of a connection, and the object that sends
requests.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from typing import NoReturn, SupportsIndex

from shoal.calls.caller import Caller, CallLimits
from shoal.calls.retry import RetryPolicy
from shoal.transport.addresses import DEFAULT_ADDRESS, RouterAddresses, parse
from shoal.transport.trust import Tls, Trust, flag, tls_from, token_from
from shoal.transport.wire import Metadata, Transport

_HEADER = re.compile(r"[ -~]*")


class ClientBase:
    """The common part of both clients. The first call connects. Raises ValueError for invalid
    arguments.

    Args:
        address: `host:port`, or several separated by commas: one is used until it fails, then the
            next. Default: the environment variable SHOAL_ADDRESS, else 127.0.0.1:50051.
        tenant: The tenant for fair queueing.
        token: A bearer token, or a function that returns the current one, such as
            `TokenFile(path)`; default: SHOAL_TOKEN, else the token in the file SHOAL_TOKEN_FILE. It
            is sent only over TLS or to this machine, unless `token_without_tls`.
        token_without_tls: Send the token without TLS, too; default: SHOAL_TOKEN_WITHOUT_TLS=1.
        tls: True for the system's certificates, `Tls(...)`, or False; default: from SHOAL_TLS=1,
            SHOAL_TLS_CA, SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_NAME. Files of certificates
            and tokens are read again when they change.
        timeout: Seconds for one request, including retries.
        request_items, request_characters: A call of more items, or about more characters, is split
            into requests.
        concurrency: Number of requests of one call in flight at a time.
        retry: When failed requests are sent again.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        tenant: str = "",
        token: str | Callable[[], str] | None = None,
        token_without_tls: bool | None = None,
        tls: Tls | bool | None = None,
        timeout: float = 60.0,
        concurrency: int = 4,
        request_items: int = 512,
        request_characters: int = 1 << 20,
        retry: RetryPolicy | None = None,
    ) -> None:
        addresses = parse(address or os.environ.get("SHOAL_ADDRESS") or DEFAULT_ADDRESS)
        trust = _trust(tls, token, token_without_tls)
        trust.check(addresses)
        self.address = ",".join(addresses)
        self._caller = Caller(
            self._open_transport(trust.tls),
            # Clients with the same list begin at different routers.
            RouterAddresses(addresses, start=random.randrange(len(addresses))),  # noqa: S311
            metadata=_metadata(tenant, trust),
            limits=CallLimits(timeout, concurrency, request_items, request_characters),
            policy=retry or RetryPolicy(),
        )

    def __repr__(self) -> str:
        """Without the token."""
        return f"{type(self).__name__}({self.address!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds connections and a token, so it cannot be pickled or "
            "copied: create one per process, "
            f"or send a shoal.ModelHandle(model, address={self.address!r}), which can be pickled"
        )

    def _open_transport(self, tls: Tls | None) -> Transport:
        raise NotImplementedError


class ModelsBase:
    """Lists and controls models; available as `client.models`."""

    def __init__(self, client: ClientBase) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"{self._client!r}.models"


class AliasesBase:
    """Lists and moves aliases of the mesh; available as `client.aliases`."""

    def __init__(self, client: ClientBase) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"{self._client!r}.aliases"


def _trust(
    tls: Tls | bool | None, token: str | Callable[[], str] | None, token_without_tls: bool | None
) -> Trust:
    """Return the connection settings of the arguments, and of the environment for those that are
    None. Raises ValueError.
    """
    return Trust(
        tls_from() if tls is None else Tls() if tls is True else tls or None,
        token_from() if token is None else token,
        flag(os.environ, "SHOAL_TOKEN_WITHOUT_TLS")
        if token_without_tls is None
        else token_without_tls,
    )


def _metadata(tenant: str, trust: Trust) -> Callable[[], Metadata]:
    if not _HEADER.fullmatch(tenant):  # gRPC's own error would show all headers, the token's too.
        raise ValueError(f"a tenant's name must be visible ASCII characters, not {tenant!r}")
    fixed: Metadata = (("x-shoal-tenant", tenant),) if tenant else ()
    return lambda: (*fixed, *trust.metadata())
