"""Authentication between router or scheduler and Redis: TLS, and the password from a file. Files
are read again at each connect.

With `rediss://` the server's certificate and host name are always verified. With
`rediss+sentinel://` that holds for Sentinels and for the master that they name, with
`rediss+cluster://` for every master of the cluster.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from shoal.transport.trust import Tls, WatchedCredential

from libs import setting
from libs.environment import check, is_loopback_host
from libs.errors import InvalidInput
from libs.queue.connection.urls import (
    SentinelUrl,
    check_redis_url,
    is_tls,
    servers,
    without_password,
)

_BEYOND: Final = (
    "rediss:// (or rediss+sentinel://, rediss+cluster://; all with TLS) for a Redis beyond this"
    " machine: requests and the password would be sent in plain text. Set SHOAL_ALLOW_INSECURE=1 if"
    " the connection is protected otherwise"
)


@dataclass(frozen=True, slots=True)
class RedisTrust:
    """The files with which a process authenticates Redis and itself."""

    password_file: Path | None = setting.path(
        "SHOAL_REDIS_PASSWORD_FILE", None, "The file that holds the password."
    )
    ca: Path | None = setting.path(
        "SHOAL_REDIS_CA",
        None,
        "The authorities that sign Redis' certificate. Empty: the system's.",
        "PEM file",
    )
    certificate: Path | None = setting.path(
        "SHOAL_REDIS_CERT",
        None,
        "The client certificate, for a Redis that requires one.",
        "PEM file",
    )
    key: Path | None = setting.path(
        "SHOAL_REDIS_KEY", None, "The key of SHOAL_REDIS_CERT.", "PEM file"
    )
    sentinel_password_file: Path | None = setting.path(
        "SHOAL_REDIS_SENTINEL_PASSWORD_FILE",
        None,
        "The file that holds the password of Sentinels, which is separate. Empty: they are asked "
        "without one.",
    )

    @staticmethod
    def from_env(environ: setting.Environ) -> RedisTrust:
        return setting.read(RedisTrust, environ)

    def check(self, url: str, *, allow_insecure: bool = False) -> None:
        """Raise InvalidInput, naming the variable, if these settings are invalid.

        1. They contradict `url`.
        2. A file cannot be used.
        3. Requests and the password would be sent to another machine in plain text without
          `allow_insecure`.
        """
        check_redis_url(url)
        parts = urlsplit(servers(url)[0])
        query = parse_qs(parts.query)
        has_files = self.ca is not None or self.certificate is not None
        check(
            (self.certificate is None) == (self.key is None),
            "SHOAL_REDIS_KEY",
            "set exactly where SHOAL_REDIS_CERT is",
        )
        check(
            is_tls(url) or not has_files,
            "SHOAL_REDIS_URL",
            "rediss:// where SHOAL_REDIS_CA or SHOAL_REDIS_CERT is set",
        )
        check(
            not any(name.startswith("ssl_") for name in query),
            "SHOAL_REDIS_URL",
            "without ssl_…: set SHOAL_REDIS_CA, SHOAL_REDIS_CERT and SHOAL_REDIS_KEY instead;"
            " certificates are always checked",
        )
        has_password = parts.password is not None or "password" in query
        check(
            not (self.password_file and has_password),
            "SHOAL_REDIS_URL",
            "without a password: SHOAL_REDIS_PASSWORD_FILE names one",
        )
        self._check_sentinels(url, query)
        try:
            hosts = [parse_url(one).get("host", "localhost") for one in servers(url)]
        except ValueError:  # its text may repeat a part of the URL
            raise InvalidInput(
                "SHOAL_REDIS_URL is not accepted by the Redis client", field="SHOAL_REDIS_URL"
            ) from None
        is_here = parts.scheme == "unix" or all(is_loopback_host(host) for host in hosts)
        check(is_tls(url) or is_here or allow_insecure, "SHOAL_REDIS_URL", _BEYOND)
        self._check_files()

    def _check_sentinels(self, url: str, query: Mapping[str, object]) -> None:
        file, name = self.sentinel_password_file, "SHOAL_REDIS_SENTINEL_PASSWORD_FILE"
        has_sentinels = SentinelUrl.parse(url) is not None
        check(
            has_sentinels or file is None,
            "SHOAL_REDIS_URL",
            f"redis+sentinel:// or rediss+sentinel:// where {name} is set",
        )
        check(
            file is not None or "sentinel_username" not in query,
            name,
            "set where the URL has a sentinel_username",
        )

    def _check_files(self) -> None:
        try:
            self._tls.read()
        except ValueError as error:
            raise InvalidInput(
                f"SHOAL_REDIS_CA, _CERT, _KEY: {error}", field="SHOAL_REDIS_CA"
            ) from None
        files = {
            "SHOAL_REDIS_PASSWORD_FILE": self.password_file,
            "SHOAL_REDIS_SENTINEL_PASSWORD_FILE": self.sentinel_password_file,
        }
        for name, file in files.items():
            try:
                if file is not None:
                    _password(file)
            except OSError as error:
                raise InvalidInput(
                    f"{name}: {file} cannot be read: {error.strerror}", field=name
                ) from None

    def describe(self) -> str:
        """Return the names of the files, without their contents, for logs."""
        files = {
            "password": self.password_file,
            "ca": self.ca,
            "certificate": self.certificate,
            "Sentinels' password": self.sentinel_password_file,
        }
        return ", ".join(f"{what} {path}" for what, path in files.items() if path is not None)

    def contexts(self) -> Callable[[], ssl.SSLContext]:
        """Return a function that returns the TLS context for the next connection, from the files at
        that time. Raises ValueError if the files cannot be used now.
        """
        return WatchedCredential(
            [path for path in (self.ca, self.certificate, self.key) if path is not None],
            self._context,
        ).get

    @property
    def _tls(self) -> Tls:
        return Tls(self.ca, self.certificate, self.key)

    def _context(self) -> ssl.SSLContext:
        self._tls.read()  # its errors name the file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        else:
            context.load_default_certs()
        if self.certificate is not None and self.key is not None:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        return context


def redis_url_setting() -> str:
    """Declare the URL of Redis."""
    return setting.text(
        "SHOAL_REDIS_URL",
        "redis://127.0.0.1:6379/0",
        "The URL of Redis: redis://, rediss:// or unix://; of its Sentinels: redis+sentinel:// or "
        "rediss+sentinel://; of a cluster's nodes: redis+cluster:// or rediss+cluster://.",
        kind="URL",
        is_secret=True,
        log=without_password,
        log_name="redis",
    )


def redis_trust_settings() -> RedisTrust:
    """Declare the files with which a process authenticates Redis and itself."""
    return setting.group(
        RedisTrust.from_env, setting.list_variables(RedisTrust), RedisTrust, RedisTrust.describe
    )


class TlsConnection(SSLConnection):
    """A connection that creates a new TLS context each time that it connects. redis-py keeps its
    first context, and trusts the system's authorities in addition to the given one.
    """

    def __init__(self, *, context: Callable[[], ssl.SSLContext], **options: Any) -> None:
        super().__init__(**options)
        self._context = context

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**Connection._connection_arguments(self), "ssl": self._context()}


class PasswordFile(CredentialProvider):
    """Provides the user name, and the file's password at the time of a connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = _password(self._path)
        except OSError as error:
            # Raised as a connection failure, which is retried: the file may exist again by then.
            raise RedisConnectionError(
                f"the password file {self._path} cannot be read: {error.strerror}"
            ) from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return await asyncio.to_thread(self.get_credentials)


def _password(path: Path) -> str:
    return path.read_text("utf-8").strip()
