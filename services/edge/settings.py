"""The edge's configuration, read once from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

from shoal.transport.addresses import is_local
from shoal.transport.trust import Tls, tls_from

from libs.environment import (
    LOG_LEVELS,
    LogLevel,
    check,
    check_name,
    choice,
    integer,
    number,
    random_id,
)
from libs.errors import InvalidInput
from libs.serving import Security
from libs.serving.security.settings import DEFAULT_TRUST_DOMAIN, is_loopback
from libs.serving.watched import Watched
from libs.telemetry.exposition import parse_address
from services.edge.aliases import watch_aliases
from services.edge.cl100k import installed_cl100k
from services.edge.compression import Compression
from services.edge.console.access import name_of
from services.edge.messages.names import Names
from services.edge.messages.vocabulary import Vocabulary, read_vocabulary

_ROUTERS_TLS = (
    "SHOAL_ROUTERS_TLS",
    "SHOAL_ROUTERS_CA",
    "SHOAL_ROUTERS_CERT",
    "SHOAL_ROUTERS_KEY",
    "SHOAL_ROUTERS_NAME",
)
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one edge process. Times in seconds, sizes in bytes."""

    edge_id: str
    address: str = "127.0.0.1:8080"
    security: Security = field(default_factory=Security)
    """TLS for callers: SHOAL_TLS_CERT, SHOAL_TLS_KEY, and SHOAL_TLS_CLIENT_CA if they must present
    certificates. Tokens are passed on, and routers check them.
    """
    tei_http: tuple[tuple[str, str], ...] = ()
    """Addresses that serve TEI's paths for one model, each with the model."""
    tei_grpc: tuple[tuple[str, str], ...] = ()
    """Addresses of TEI's gRPC API, each with its model. An empty model stands for the aliases
    embed, rerank and predict.
    """
    routers: tuple[str, ...] = ("127.0.0.1:50051",)
    routers_tls: Tls | None = None
    """TLS for routers: SHOAL_ROUTERS_CA, SHOAL_ROUTERS_CERT, SHOAL_ROUTERS_KEY, SHOAL_ROUTERS_NAME.
    """
    aliases: Watched[Names] = field(default_factory=lambda: Watched.fixed(Names({})))
    vocabulary: Vocabulary | None = None
    """The vocabulary of OpenAI's cl100k_base tokenizer (SHOAL_CL100K, or an installed package),
    which converts token ids in `input` to text. None refuses them.
    """
    hosts: tuple[str, ...] = ()
    """Names that the Host of a request may have in addition to this machine's and to addresses, if
    routers accept anonymous calls.
    """
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call the edge (https://app.example), by CORS. If empty, no
    foreign page may.
    """
    console: bool = False
    """Whether the console is served."""
    console_address: str = ""
    """The console's address; empty for `address`."""
    console_hosts: tuple[str, ...] = ()
    """Names under which browsers may open the console, in addition to this machine's loopback."""
    console_origins: tuple[str, ...] = ()
    """Origins under which browsers know the console (https://mesh.example) behind a proxy. Their
    names become allowed hosts. If empty, the origin must match the Host.
    """
    metrics_address: str = ""
    """Where Prometheus scrapes: host:port, plain HTTP without credentials. Empty disables it."""
    body_bytes: int = 64 << 20
    """The maximum size of a request's body."""
    in_flight_bytes: int = 512 << 20
    """The memory limit of bodies of requests in flight; above it new requests are refused with
    QUEUE_FULL.
    """
    compression: Compression = "auto"
    """Whether answers are compressed for clients that accept it. auto: for callers beyond this
    machine.
    """
    connections: int = 10_000
    header_seconds: float = 10.0
    """The time limit of a request's head."""
    body_seconds: float = 60.0
    """The time limit of a request's body."""
    body_pause_seconds: float = 10.0
    """The time limit between two pieces of a request's body."""
    idle_seconds: float = 75.0
    """The time limit of an idle connection. It must exceed the load balancer's idle timeout
    (usually 60 s), or clients see resets.
    """
    deadline_seconds: float = 60.0
    """The deadline of requests that specify none."""
    max_deadline_seconds: float = 600.0
    grace_seconds: float = 25.0
    """The time limit of requests in flight after SIGTERM."""
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        check_name(self.edge_id, "SHOAL_EDGE_ID")
        _check_address(self.address)
        for name, tei_addresses in (
            ("SHOAL_TEI_HTTP_ADDRESSES", self.tei_http),
            ("SHOAL_TEI_GRPC_ADDRESSES", self.tei_grpc),
        ):
            for address, _ in tei_addresses:
                _check_address(address, name)
        check(
            all(model for _, model in self.tei_http),
            "SHOAL_TEI_HTTP_ADDRESSES",
            "host:port=model, or several separated by commas",
        )
        check(
            bool(self.routers) and all(self.routers),
            "SHOAL_ROUTERS",
            "host:port, or several separated by commas",
        )
        if self.console_address:
            _check_address(self.console_address, "SHOAL_CONSOLE_ADDRESS")
        for hosts, name in (
            (self.hosts, "SHOAL_HTTP_HOSTS"),
            (self.console_hosts, "SHOAL_CONSOLE_HOSTS"),
        ):
            check(
                all(map(_is_host, hosts)),
                name,
                "names without ports, in lower case, separated by commas",
            )
        allowed = (
            "origins such as https://app.example, http://[::1]:3000 or tauri://localhost, "
            "in lower case, separated by commas"
        )
        check(all(map(_is_origin, self.origins)), "SHOAL_HTTP_ORIGINS", allowed)
        allowed = (
            "origins such as https://mesh.example or https://mesh.example:8443, "
            "in lower case, separated by commas"
        )
        check(all(map(_is_console_origin, self.console_origins)), "SHOAL_CONSOLE_ORIGINS", allowed)
        check(1024 <= self.body_bytes <= 1 << 30, "SHOAL_HTTP_BODY_BYTES", "1024..1073741824")
        check(
            self.in_flight_bytes >= self.body_bytes,
            "SHOAL_HTTP_IN_FLIGHT_BYTES",
            "at least SHOAL_HTTP_BODY_BYTES",
        )
        check(1 <= self.connections <= 1_000_000, "SHOAL_HTTP_CONNECTIONS", "1..1000000")
        for seconds, name in (
            (self.header_seconds, "SHOAL_HTTP_HEADER_SECONDS"),
            (self.body_seconds, "SHOAL_HTTP_BODY_SECONDS"),
            (self.body_pause_seconds, "SHOAL_HTTP_BODY_PAUSE_SECONDS"),
            (self.idle_seconds, "SHOAL_HTTP_IDLE_SECONDS"),
        ):
            check(0 < seconds <= 3600, name, "above 0, at most 3600")
        check(
            0 < self.deadline_seconds <= self.max_deadline_seconds,
            "SHOAL_DEADLINE_SECONDS",
            "above 0, at most SHOAL_LONGEST_DEADLINE_SECONDS",
        )
        check(
            self.max_deadline_seconds <= 86_400,
            "SHOAL_LONGEST_DEADLINE_SECONDS",
            "at most 86400",
        )
        check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")
        self._check_trust()

    def _check_trust(self) -> None:
        """Raise InvalidInput if credentials or texts would travel unencrypted beyond this
        machine.
        """
        if self.security.allow_insecure:
            return
        if not self.is_local and self.security.cert is None:
            address = next(address for address in self.addresses if not is_loopback(address))
            raise InvalidInput(
                f"refusing to listen on {address}, beyond this machine, without TLS: set "
                "SHOAL_TLS_CERT "
                "and SHOAL_TLS_KEY, or SHOAL_ALLOW_INSECURE=1 if something else protects it",
                field="SHOAL_ALLOW_INSECURE",
            )
        if self.routers_tls is None and not all(map(is_local, self.routers)):
            raise InvalidInput(
                f"refusing to pass tokens to {', '.join(self.routers)} without TLS: set "
                "SHOAL_ROUTERS_CA, or SHOAL_ALLOW_INSECURE=1 if something else protects that "
                "network",
                field="SHOAL_ROUTERS_CA",
            )

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can connect."""
        return all(map(is_loopback, self.addresses))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return all addresses that accept requests."""
        return (
            self.address,
            *self._console_addresses,
            *(address for address, _ in (*self.tei_http, *self.tei_grpc)),
        )

    @property
    def _console_addresses(self) -> tuple[str, ...]:
        return (self.console_address,) if self.console and self.console_address else ()

    @property
    def vouches(self) -> bool:
        """Return whether routers accept calls without a token because of the edge's certificate."""
        return self.routers_tls is not None and self.routers_tls.certificate_chain is not None

    @property
    def instance(self) -> str:
        return self.edge_id

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Read SHOAL_* variables. Raises InvalidInput that names the variable and the allowed
        values.
        """
        aliases = environ.get("SHOAL_ALIASES", "")
        address, console_address = (
            environ.get("SHOAL_HTTP_ADDRESS") or "127.0.0.1:8080",
            environ.get("SHOAL_CONSOLE_ADDRESS", ""),
        )
        security = _security(environ)
        return Settings(
            edge_id=environ.get("SHOAL_EDGE_ID") or random_id("edge"),
            address=address,
            security=security,
            tei_http=_parse_tei_addresses(environ.get("SHOAL_TEI_HTTP_ADDRESSES", "")),
            tei_grpc=_parse_tei_addresses(environ.get("SHOAL_TEI_GRPC_ADDRESSES", "")),
            hosts=_list(environ.get("SHOAL_HTTP_HOSTS", "")),
            origins=_list(environ.get("SHOAL_HTTP_ORIGINS", "")),
            console=_has_console(
                environ.get("SHOAL_CONSOLE", ""), console_address or address, security
            ),
            console_address=console_address,
            console_hosts=_list(environ.get("SHOAL_CONSOLE_HOSTS", "")),
            console_origins=_list(environ.get("SHOAL_CONSOLE_ORIGINS", "")),
            routers=tuple(
                part.strip()
                for part in (environ.get("SHOAL_ROUTERS") or "127.0.0.1:50051").split(",")
            ),
            routers_tls=_routers_tls(environ),
            aliases=watch_aliases(Path(aliases)) if aliases else Watched.fixed(Names({})),
            vocabulary=_vocabulary(environ.get("SHOAL_CL100K", "")),
            metrics_address=environ.get("SHOAL_METRICS_ADDRESS", ""),
            body_bytes=integer(environ, "SHOAL_HTTP_BODY_BYTES", 64 << 20),
            in_flight_bytes=integer(environ, "SHOAL_HTTP_IN_FLIGHT_BYTES", 512 << 20),
            compression=choice(environ, "SHOAL_HTTP_COMPRESSION", "auto", get_args(Compression)),
            connections=integer(environ, "SHOAL_HTTP_CONNECTIONS", 10_000),
            header_seconds=number(environ, "SHOAL_HTTP_HEADER_SECONDS", 10.0),
            body_seconds=number(environ, "SHOAL_HTTP_BODY_SECONDS", 60.0),
            body_pause_seconds=number(environ, "SHOAL_HTTP_BODY_PAUSE_SECONDS", 10.0),
            idle_seconds=number(environ, "SHOAL_HTTP_IDLE_SECONDS", 75.0),
            deadline_seconds=number(environ, "SHOAL_DEADLINE_SECONDS", 60.0),
            max_deadline_seconds=number(environ, "SHOAL_LONGEST_DEADLINE_SECONDS", 600.0),
            grace_seconds=number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            log_level=choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str | float]:
        """Return the values for the log line at startup."""
        security = self.security
        return {
            "edge_id": self.edge_id,
            "address": self.address,
            "tei_http": _format_tei_addresses(self.tei_http),
            "tei_grpc": _format_tei_addresses(self.tei_grpc),
            "tls": "none"
            if security.cert is None
            else "callers present certificates"
            if security.client_ca
            else "on",
            "allow_insecure": security.allow_insecure,
            "health_address": security.health_address,
            "routers": ", ".join(self.routers),
            "routers_tls": "none"
            if self.routers_tls is None
            else "mutual"
            if self.vouches
            else "on",
            "aliases": len(self.aliases.content.aliases),
            "cl100k": len(self.vocabulary.tokens) if self.vocabulary is not None else 0,
            "hosts": ", ".join(self.hosts),
            "origins": ", ".join(self.origins),
            "console": "off" if not self.console else self.console_address or self.address,
            "console_origins": ", ".join(self.console_origins),
            "metrics_address": self.metrics_address,
            "body_bytes": self.body_bytes,
            "in_flight_bytes": self.in_flight_bytes,
            "compression": self.compression,
            "connections": self.connections,
            "header_seconds": self.header_seconds,
            "body_seconds": self.body_seconds,
            "body_pause_seconds": self.body_pause_seconds,
            "idle_seconds": self.idle_seconds,
            "deadline_seconds": self.deadline_seconds,
            "longest_deadline_seconds": self.max_deadline_seconds,
            "grace_seconds": self.grace_seconds,
        }


def _security(environ: Mapping[str, str]) -> Security:
    """Read TLS without SHOAL_TOKENS and SHOAL_JWKS: routers check the callers' tokens."""
    allow = environ.get("SHOAL_ALLOW_INSECURE") or "0"
    check(allow in ("0", "1"), "SHOAL_ALLOW_INSECURE", "0 or 1")
    cert, key, authorities = (
        environ.get(name, "") for name in ("SHOAL_TLS_CERT", "SHOAL_TLS_KEY", "SHOAL_TLS_CLIENT_CA")
    )
    security = Security(
        cert=Path(cert) if cert else None,
        key=Path(key) if key else None,
        client_ca=Path(authorities) if authorities else None,
        trust_domain=environ.get("SHOAL_TRUST_DOMAIN") or DEFAULT_TRUST_DOMAIN,
        allow_insecure=allow == "1",
        health_address=environ.get("SHOAL_HEALTH_ADDRESS", ""),
    )
    security.check_files()
    return security


def _vocabulary(given: str) -> Vocabulary | None:
    """Read the vocabulary from `given`: a path, empty for an installed package's file if one
    exists, or `none`.
    """
    if given == "none":
        return None
    path = given or installed_cl100k()
    if not path:
        return None
    try:
        return read_vocabulary(Path(path).read_bytes())
    except OSError as error:
        raise InvalidInput(
            f"SHOAL_CL100K: {path} cannot be read: {error.strerror}", field="SHOAL_CL100K"
        ) from error
    except ValueError as error:
        raise InvalidInput(
            f"SHOAL_CL100K: {path} is not a tiktoken file: {error}", field="SHOAL_CL100K"
        ) from error


def _has_console(given: str, address: str, security: Security) -> bool:
    """Return SHOAL_CONSOLE if set; otherwise whether the console would listen only on this machine,
    for callers without certificates.
    """
    check(given in ("", "0", "1"), "SHOAL_CONSOLE", "0 or 1")
    if given:
        return given == "1"
    return is_loopback(address) and security.client_ca is None


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _is_origin(text: str) -> bool:
    """Return whether a browser, or an app based on one, can send this Origin: any scheme, no path,
    no port that is the scheme's default.
    """
    found = _ORIGIN.fullmatch(text)
    return found is not None and (found["scheme"], found["port"]) not in (
        ("http", "80"),
        ("https", "443"),
    )


def _is_console_origin(text: str) -> bool:
    try:
        name_of(text)
    except ValueError:
        return False
    return True


def _is_host(name: str) -> bool:
    return (
        name == name.lower()
        and name.isascii()
        and all(letter.isalnum() or letter in "-." for letter in name)
    )


def _check_address(address: str, name: str = "SHOAL_HTTP_ADDRESS") -> None:
    try:
        parse_address(address)
    except InvalidInput:
        raise InvalidInput(f"{name} must be host:port, not {address!r}", field=name) from None


def _parse_tei_addresses(text: str) -> tuple[tuple[str, str], ...]:
    """Parse host:port=model, separated by commas."""
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    return tuple((address.strip(), model.strip()) for address, _, model in parts)


def _format_tei_addresses(tei_addresses: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{address}={model}" if model else address for address, model in tei_addresses)


def _routers_tls(environ: Mapping[str, str]) -> Tls | None:
    """Read SHOAL_ROUTERS_…, which correspond to a worker's SHOAL_TLS_…: SHOAL_TLS_… configure the
    edge as a server.
    """
    renamed = {
        name.replace("SHOAL_ROUTERS_TLS", "SHOAL_TLS").replace("SHOAL_ROUTERS_", "SHOAL_TLS_"): name
        for name in _ROUTERS_TLS
    }
    try:
        tls = tls_from({ours: environ.get(theirs, "") for ours, theirs in renamed.items()})
        if tls is not None:
            tls.read()
    except ValueError as error:
        message = str(error)
        for ours, theirs in renamed.items():
            if ours != "SHOAL_TLS":
                message = message.replace(ours, theirs)
        raise InvalidInput(message, field="SHOAL_ROUTERS_CA") from None
    return tls
