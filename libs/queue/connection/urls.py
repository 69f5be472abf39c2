"""Validate Redis URLs, and print them without secrets for logs.

The URL of Sentinels has the usual form (Celery, LangChain, redis-sentinel-url): several addresses,
then their name for the master, then the database. The URL of a cluster names some of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, urlsplit

from libs.environment import check

SENTINEL_PORT: Final = 26379
REDIS_PORT: Final = 6379
_VISIBLE: Final = re.compile(r"[!-~]{1,4096}")
_SCHEMES: Final = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel"),
    *("redis+cluster", "rediss+cluster"),
)
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_DATABASE: Final = re.compile(r"(/\d{0,4})?", re.ASCII)
_ARGUMENTS: Final = ("username", "password", "client_name")
_SENTINEL: Final = re.compile(
    r"(rediss?)\+sentinel://([^/?#]*@)?([^/?#@]+)/([A-Za-z0-9._-]{1,128})(/\d{0,4})?(\?.*)?",
    re.ASCII,
)
_CLUSTER: Final = re.compile(r"(rediss?)\+cluster://([^/?#]*@)?([^/?#@]+)/?(\?.*)?", re.ASCII)
_MAX_NODES: Final = 16
_ESCAPES: Final = (
    "in a password, write characters other than A-Z a-z 0-9 . _ - as %XX, such as %2F for /"
)
_FORM: Final = (
    "redis://[user:password@]host[:port][/database], rediss:// likewise, or"
    " unix://[user:password@]/path, with ?db=, host=, username=, password= or client_name= and"
    f" nothing else; {_ESCAPES}"
)
_SENTINEL_FORM: Final = (
    "redis+sentinel://[user:password@]host[:port][,host[:port]…]/master[/database], or"
    f" rediss+sentinel:// likewise, with 1 to {_MAX_NODES} Sentinels and their name for the"
    " master, and with ?db=, username=, password=, client_name= or sentinel_username= and nothing"
    f" else; {_ESCAPES}"
)
_CLUSTER_FORM: Final = (
    "redis+cluster://[user:password@]host[:port][,host[:port]…], or rediss+cluster:// likewise,"
    f" with 1 to {_MAX_NODES} nodes of the cluster, without a database (a cluster has only database"
    f" 0), and with ?username=, password= or client_name= and nothing else; {_ESCAPES}"
)


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """The URL of a cluster."""

    each: tuple[str, ...]
    """One `redis://` or `rediss://` URL per named node."""

    @staticmethod
    def parse(url: str) -> ClusterUrl | None:
        """Split a URL of this form, without validating its parts; None for a URL of another
        form.
        """
        found = _CLUSTER.fullmatch(url)
        if found is None:
            return None
        scheme, user, hosts, query = found.groups("")
        return ClusterUrl(tuple(f"{scheme}://{user}{host}{query}" for host in hosts.split(",")))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each node."""
        parts = [urlsplit(url) for url in self.each]
        return [(part.hostname or "", part.port or REDIS_PORT) for part in parts]


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The URL of Sentinels and of their master."""

    service: str
    """The Sentinels' name for the master."""
    each: tuple[str, ...]
    """One `redis://` or `rediss://` URL per Sentinel, with the master's user, password and
    database.
    """

    @staticmethod
    def parse(url: str) -> SentinelUrl | None:
        """Split a URL of this form, without validating its parts; None for a URL of another
        form.
        """
        found = _SENTINEL.fullmatch(url)
        if found is None:
            return None
        scheme, user, hosts, service, database, query = found.groups("")
        return SentinelUrl(
            service, tuple(f"{scheme}://{user}{host}{database}{query}" for host in hosts.split(","))
        )

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each Sentinel."""
        parts = [urlsplit(url) for url in self.each]
        return [(part.hostname or "", part.port or SENTINEL_PORT) for part in parts]

    @property
    def user(self) -> str:
        """Return our user name at the Sentinels; empty for their user `default`."""
        return parse_qs(urlsplit(self.each[0]).query).get("sentinel_username", [""])[0]


def check_redis_url(url: str) -> None:
    """Raise InvalidInput for an invalid URL. The error repeats no part of it: a malformed password
    may be parsed as any part.
    """
    name = "SHOAL_REDIS_URL"
    is_known = url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))
    check(
        is_known,
        name,
        "redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or"
        " rediss+cluster://",
    )
    if url.partition("://")[0].endswith("+cluster"):
        cluster = ClusterUrl.parse(url)
        check(cluster is not None and _are_nodes(cluster), name, _CLUSTER_FORM)
    elif _is_sentinel(url):
        sentinels = SentinelUrl.parse(url)
        check(sentinels is not None and _are_sentinels(sentinels), name, _SENTINEL_FORM)
    else:
        check(_is_redis_url(url), name, _FORM)


def is_tls(url: str) -> bool:
    """Return whether the URL requires TLS, and so verified certificates."""
    return url.startswith(("rediss:", "rediss+"))


def servers(url: str) -> tuple[str, ...]:
    """Return the URL of the server, or of each Sentinel or named node, in a form that redis-py
    reads. `url` must be valid (`check_redis_url`).
    """
    several = SentinelUrl.parse(url) or ClusterUrl.parse(url)
    return (url,) if several is None else several.each


def without_password(url: str) -> str:
    """Return a valid URL without secrets, for logs."""
    parts = urlsplit(servers(url)[0])
    if (cluster := ClusterUrl.parse(url)) is not None:
        return f"{parts.scheme}+cluster://{_listed(cluster.addresses)}"
    if (sentinels := SentinelUrl.parse(url)) is not None:
        named = _listed(sentinels.addresses)
        return f"{parts.scheme}+sentinel://{named}/{sentinels.service}{parts.path}"
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _listed(addresses: Sequence[tuple[str, int]]) -> str:
    return ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses
    )


def _are_nodes(cluster: ClusterUrl) -> bool:
    is_each = all(_is_redis_url(url) and urlsplit(url).hostname for url in cluster.each)
    query = parse_qs(urlsplit(cluster.each[0]).query)
    return is_each and len(cluster.each) <= _MAX_NODES and not query.keys() & {"host", "db"}


def _is_sentinel(url: str) -> bool:
    return url.partition("://")[0].endswith("+sentinel")


def _are_sentinels(sentinels: SentinelUrl) -> bool:
    is_each = all(
        _is_redis_url(url, ("sentinel_username",)) and urlsplit(url).hostname
        for url in sentinels.each
    )
    return (
        is_each
        and len(sentinels.each) <= _MAX_NODES
        and "host" not in parse_qs(urlsplit(sentinels.each[0]).query)
    )


def _is_redis_url(url: str, more: Sequence[str] = ()) -> bool:
    """Return whether the URL of one server is valid. `more`: names of further allowed arguments."""
    if not _VISIBLE.fullmatch(url) or "#" in url:
        return False
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
        arguments = parse_qs(parts.query, strict_parsing=bool(parts.query), max_num_fields=10)
    except ValueError:
        return False
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme == "unix":
        # An @ in the path is most likely the end of a password after one slash too many.
        is_place = not place and bool(parts.path.strip("/")) and "@" not in parts.path
    else:
        # Without a host, the server is localhost or the query's `host`.
        is_place = bool(_HOST.fullmatch(parts.hostname or "localhost")) and bool(
            _DATABASE.fullmatch(parts.path)
        )
        is_place = is_place and not (has_port and not parts.hostname) and not place.endswith(":")
    return is_place and all(_is_argument(name, values, more) for name, values in arguments.items())


def _is_argument(name: str, values: Sequence[str], more: Sequence[str]) -> bool:
    if len(values) != 1:
        return False
    if name == "db":
        return bool(_DATABASE.fullmatch(f"/{values[0]}"))
    # `ssl_…` passes here: RedisTrust.check refuses it, and names the setting to use instead.
    is_host = name == "host" and bool(_HOST.fullmatch(values[0]))
    return is_host or name in _ARGUMENTS or name in more or name.startswith("ssl_")
