"""Redis behind Sentinels: discovery of the master, and connections only to it. Built on redis-py's
classes.

All Sentinels are asked before each connect, and the answer with the latest failover (configuration
epoch) counts. A server that does not report itself as a master is not used. After a failover every
connection to the former master is closed, blocked and subscribed ones included: no notification
would ever arrive there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from libs.environment import is_loopback_host
from libs.queue.connection.trust import PasswordFile
from libs.queue.connection.urls import SentinelUrl
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

SENTINEL_SECONDS: Final = 1.0
"""A Sentinel that takes longer to answer is skipped."""
_OURS: Final = ("connection_class", "context", "socket_keepalive", "protocol", "driver_info")
"""The options that connections to Sentinels share with those to the master."""
_DEMOTED: Final = ("READONLY", "UNBLOCKED")
"""Errors of a master that has become a replica: for writes (also in scripts), and for commands
blocked on a list.
"""
_BEYOND: Final = (
    "Sentinels name a master on another machine, and traffic would be plain text"
    " (SHOAL_ALLOW_INSECURE=1 allows it)"
)


class NoMaster(MasterNotFoundError):
    """No Sentinel names a usable master. The message gives the reason, without an address."""


class _Sentinels(Sentinel):
    """Asks all Sentinels and takes the newest answer. Single-flight: concurrent connections share
    one discovery.

    redis-py's Sentinel takes the first answer, even of a Sentinel that has just started and names
    the former master. Two concurrent calls may also lose it a Sentinel, since each moves the one
    that answered to the front (redis-py 8.1).
    """

    def __init__(self, clients: list[Redis]) -> None:
        super().__init__([])  # type: ignore[no-untyped-call]
        self.sentinels = clients
        self._discovery: asyncio.Task[tuple[str, int]] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the master. Raises NoMaster."""
        if self._discovery is None or self._discovery.done():
            self._discovery = asyncio.create_task(self._discover(service_name))
        return await asyncio.shield(self._discovery)

    async def aclose(self) -> None:
        if self._discovery is not None:
            self._discovery.cancel()
        await super().aclose()

    async def _discover(self, service: str) -> tuple[str, int]:
        answers = await asyncio.gather(
            *(client.sentinel_masters() for client in self.sentinels), return_exceptions=True
        )
        known = [
            answer[service] for answer in answers if isinstance(answer, dict) and service in answer
        ]
        named = [state for state in known if self.check_master_state(state, service)]
        if not named:
            raise NoMaster(
                _why([answer for answer in answers if isinstance(answer, BaseException)])
            )
        newest = max(named, key=lambda state: int(state["config-epoch"]))
        return str(newest["ip"]), int(newest["port"])


def _why(errors: Sequence[BaseException]) -> str:
    """Return the reason for the error message, without the errors' text, which has addresses."""
    if any(
        isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError)
        for error in errors
    ):
        return "Sentinels refuse our user name and password"
    if any("certificate" in str(error).lower() for error in errors):
        return "the certificate of Sentinels or ours is not trusted"
    if any(isinstance(error, ResponseError) for error in errors):
        return (
            "an address is not a Sentinel, or its Sentinel does not let our user run SENTINEL"
            " MASTERS"
        )
    return "no reachable Sentinel knows a master"


class _MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the master. `is_plain`: without TLS, and so only to this machine."""

    def __init__(
        self, service: str, sentinels: _Sentinels, *, is_plain: bool, **options: Any
    ) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]
        self._is_plain = is_plain

    async def get_master_address(self) -> tuple[str, int]:
        address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
        if self._is_plain and not is_loopback_host(address[0]):
            raise NoMaster(_BEYOND)
        # No await separates reading and setting the address, so only one task closes the
        # connections to the former master.
        before, self.master_address = self.master_address, address
        if before not in (None, address):
            log.warning(
                "redis has another master", extra=fields({"master": f"{address[0]}:{address[1]}"})
            )
            await self.disconnect()
        return address

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


class _MasterConnection(SentinelManagedConnection):
    """A connection that closes when its server is not a master, so that no replica is read or
    written.
    """

    async def connect_to(self, address: tuple[str, int]) -> None:
        self.host, self.port = address
        await super().connect_check_health(check_health=False, retry_socket_connect=False)

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Reconnect before a retry of a command. redis-py reconnects to the former server, without
        asking a Sentinel (redis-py 8.1).
        """
        await self.connect()  # type: ignore[no-untyped-call]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        # INFO rather than ROLE: ACLs made by an earlier version allow it.
        await self.send_command("INFO", "replication", check_health=False)
        if b"role:master" not in await self.read_response(disable_decoding=True):
            raise RedisConnectionError("the server that Sentinels named is not a master")

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if any(word in str(error) for word in _DEMOTED):
                await self.disconnect()
                raise RedisConnectionError("this Redis is no longer a master") from error
            raise


def master_pool(
    url: SentinelUrl,
    options: Mapping[str, Any],
    *,
    password_file: Path | None,
    allow_insecure: bool,
) -> SentinelConnectionPool:
    """Return a pool of connections to the current master.

    Args:
        options: Of a BlockingConnectionPool, with `connection_class`.
        password_file: The Sentinels' password.
        allow_insecure: Otherwise plain text is used only with a master on this machine.
    """
    kind: type[Connection] = options["connection_class"]
    own = {
        name: value
        for name, value in options.items()
        if name not in ("host", "port", "sentinel_username")
    }
    own |= {
        "connection_class": type(f"Master{kind.__name__}", (_MasterConnection, kind), {}),
        "is_plain": "context" not in options and not allow_insecure,
    }
    return _MasterPool(url.service, _Sentinels(_clients(url, options, password_file)), **own)


def _clients(
    url: SentinelUrl, options: Mapping[str, Any], password_file: Path | None
) -> list[Redis]:
    common = {name: options[name] for name in _OURS if name in options}
    common |= {
        "socket_timeout": SENTINEL_SECONDS,
        "socket_connect_timeout": SENTINEL_SECONDS,
        "timeout": SENTINEL_SECONDS,
    }
    common |= {"retry": Retry(NoBackoff(), 0), "max_connections": 1}
    if password_file is not None:
        common["credential_provider"] = PasswordFile(url.user, password_file)
    return [
        Redis.from_pool(BlockingConnectionPool(host=host, port=port, **common))
        for host, port in url.addresses
    ]
