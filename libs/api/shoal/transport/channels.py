"""The pool of gRPC channels of one client, one for each router: opened on first use, and replaced
when certificates have changed.

The pool opens channels through a function that it is given, and returns those to close to its
caller: the client's two transports and the worker's link use different kinds of channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import grpc

from shoal.transport.addresses import is_local
from shoal.transport.methods import Method
from shoal.transport.trust import Pem, Tls
from shoal.version import VERSION

C = TypeVar("C")


# No slots: CPython 3.12.3 (Ubuntu 24.04's) leaves a generic dataclass of `weakref_slot=True`
# without one.
@dataclass(eq=False)
class PooledChannel(Generic[C]):
    """A channel and the number of calls in flight on it. Can be referenced weakly."""

    channel: C
    calls: int = 0
    _methods: dict[str, Any] = field(default_factory=dict)

    def method(self, method: Method[Any, Any]) -> Any:
        """Return gRPC's callable for a unary method, created once for each channel; its message
        types are those of the Method.
        """
        found = self._methods.get(method.path)
        if found is None:
            channel: Any = self.channel
            found = self._methods[method.path] = channel.unary_unary(
                method.path, request_serializer=method.serialize, response_deserializer=method.parse
            )
        return found

    def stream(self, method: Method[Any, Any]) -> Any:
        """Return gRPC's callable for a server-streaming method."""
        channel: Any = self.channel
        return channel.unary_stream(
            method.path, request_serializer=method.serialize, response_deserializer=method.parse
        )

    def exchange(self, method: Method[Any, Any]) -> Any:
        """Return gRPC's callable for a method that streams both ways."""
        channel: Any = self.channel
        return channel.stream_stream(
            method.path, request_serializer=method.serialize, response_deserializer=method.parse
        )


class Channels(Generic[C]):
    """`open` makes a channel to an address, with credentials or (None) without TLS. Threads may
    share one.

    Each call is between an `acquire` and a `release`, which returns the channels that no call uses
    any more, for the caller to close.
    """

    def __init__(
        self, open: Callable[[str, grpc.ChannelCredentials | None], C], tls: Tls | None
    ) -> None:
        self._open = open
        self._watched = tls.watched() if tls is not None else None
        self._lock = threading.Lock()
        # The certificates in use; current channels by address; replaced ones with calls in flight;
        # those to close.
        self._pem: Pem | None = None
        self._current: dict[str, PooledChannel[C]] = {}
        self._retired: set[PooledChannel[C]] = set()
        self._unused: list[C] = []
        self._closed = False

    def acquire(self, address: str) -> PooledChannel[C]:
        """Return the channel for one call to `address`. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            self._renew()
            pooled = self._current.get(address)
            if pooled is None:
                pooled = self._current[address] = PooledChannel(
                    self._open(address, self._credentials())
                )
            pooled.calls += 1
            return pooled

    def release(self, pooled: PooledChannel[C]) -> list[C]:
        """End the use of a channel by one call; return the channels to close."""
        with self._lock:
            pooled.calls -= 1
            if pooled.calls == 0 and pooled in self._retired:
                self._retired.discard(pooled)
                self._unused.append(pooled.channel)
            unused, self._unused = self._unused, []
            return unused

    def discard(self, pooled: PooledChannel[C]) -> None:
        """Replace a channel that cannot connect: the next call to its address opens another."""
        with self._lock:
            for address, current in self._current.items():
                if current is pooled:
                    del self._current[address]
                    self._retire(pooled)
                    return

    def close(self) -> list[C]:
        """Return every channel, for the caller to close; closing them ends calls in flight."""
        with self._lock:
            self._closed = True
            channels = [
                *self._unused,
                *(pooled.channel for pooled in (*self._current.values(), *self._retired)),
            ]
            self._unused, self._current, self._retired = [], {}, set()
            return channels

    def _renew(self) -> None:
        """Retire all channels when the certificates have changed: calls in flight finish on them,
        new calls open new ones.
        """
        pem = self._watched.get() if self._watched is not None else None
        if pem == self._pem:
            return
        self._pem = pem
        for pooled in self._current.values():
            self._retire(pooled)
        self._current = {}

    def _retire(self, pooled: PooledChannel[C]) -> None:
        if pooled.calls:
            self._retired.add(pooled)
        else:
            self._unused.append(pooled.channel)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if self._pem is None:
            return None
        return grpc.ssl_channel_credentials(*self._pem)


ANY_ANSWER: Final = (("x-shoal-max-answer-bytes", "-1"),)
"""Metadata by which a router knows what `grpc.max_receive_message_length` of `channel_options` is:
it is not sent by gRPC, and a router takes gRPC's default of 4 MiB for a client that does not
say."""


def channel_options(address: str, tls: Tls | None) -> list[tuple[str, str | int]]:
    """Return gRPC's settings for the channel to the router at `address`."""
    options: list[tuple[str, str | int]] = [
        ("grpc.primary_user_agent", f"shoal-python/{VERSION}"),
        # 512 documents as multi-vectors are more than 100 MB; the server bounds the messages that
        # it accepts.
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A peer that vanished without a FIN is noticed within 40 s; the server permits pings this
        # often.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A restarted router is found again soon, and one that drops packets is given up for the
        # next address.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # gRPC asks for a name again after 30 s at the earliest: a router that took another's place
        # was found 17 s late.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        # Connections and their backoff are not shared with other clients, nor with this client's
        # next channel to the same router.
        ("grpc.use_local_subchannel_pool", 1),
        # A name with several addresses (a headless Service) is spread over all of them.
        ("grpc.lb_policy_name", "round_robin"),
        # Retries are ours: they honour RetryInfo and change the address.
        ("grpc.service_config_disable_resolution", 1),
    ]
    if is_local(address):
        # A proxy from the environment (https_proxy) would intercept traffic that is meant to stay
        # on this machine.
        options.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
