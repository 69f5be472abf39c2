"""An edge's configuration, read once from the environment."""

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
from services.edge.compression import Compression
from services.edge.console.access import name_of
from services.edge.messages.names import Names
from services.edge.messages.vocabulary import Vocabulary, read_vocabulary
from services.edge.ranks import installed_cl100k

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
    """TLS towards callers: SHOAL_TLS_CERT, SHOAL_TLS_KEY, and SHOAL_TLS_CLIENT_CA where they must
    present certificates. Tokens are passed on: routers check them."""
    tei_http: tuple[tuple[str, str], ...] = ()
    """Addresses at which TEI's paths are one model's, each with the model."""
    tei_grpc: tuple[tuple[str, str], ...] = ()
    """Addresses of TEI's gRPC API, each with its model; an empty one: those of the aliases embed,
    rerank and predict.
    """
    routers: tuple[str, ...] = ("127.0.0.1:50051",)
    routers_tls: Tls | None = None
    """TLS towards routers: SHOAL_ROUTERS_CA, SHOAL_ROUTERS_CERT, SHOAL_ROUTERS_KEY,
    SHOAL_ROUTERS_NAME.
    """
    aliases: Watched[Names] = field(default_factory=lambda: Watched.fixed(Names({})))
    vocabulary: Vocabulary | None = None
    """Of OpenAI's tokenizer cl100k_base (SHOAL_CL100K, or of an installed package), by which
    `input` of token ids is read. None: it is refused."""
    hosts: tuple[str, ...] = ()
    """Names that the Host of a request may have, besides this machine's and addresses, where
    routers let everybody in.
    """
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call the edge (https://app.example), by CORS. None: no page
    elsewhere.
    """
    console: bool = False
    """Whether there is a console."""
    console_address: str = ""
    """Where the console listens. Empty: at `address`."""
    console_hosts: tuple[str, ...] = ()
    """Names by which browsers may open the console, besides those of this machine's loopback."""
    console_origins: tuple[str, ...] = ()
    """Origins under which browsers know the console (https://mesh.example), where a proxy stands
    before it. Their names are among the hosts. None: the origin must be the Host's."""
    metrics_address: str = ""
    """Where Prometheus scrapes: host:port, plain HTTP without credentials. Empty: nowhere."""
    body_bytes: int = 64 << 20
    """The most bytes of a request's body."""
    in_flight_bytes: int = 512 << 20
    """Memory that the bodies of requests in flight may take; beyond it, new ones are refused with
    QUEUE_FULL.
    """
    compression: Compression = "auto"
    """Whether answers are compressed for clients that accept it. auto: for callers beyond this
    machine.
    """
    connections: int = 10_000
    header_seconds: float = 10.0
    """How long a request's head may take to arrive."""
    body_seconds: float = 60.0
    """How long a request's body may take to arrive."""
    body_pause_seconds: float = 10.0
    """How long nothing of a request's body may arrive."""
    idle_seconds: float = 75.0
    """How long a connection may be idle: longer than the load balancer's idle timeout (60 s at most
    of them), or clients see resets."""
    deadline_seconds: float = 60.0
    """For requests that name none."""
    longest_deadline_seconds: float = 600.0
    grace_seconds: float = 25.0
    """How long requests in flight may take after SIGTERM."""
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        check_name(self.edge_id, "SHOAL_EDGE_ID")
        _check_address(self.address)
        for name, doors in (
            ("SHOAL_TEI_HTTP_ADDRESSES", self.tei_http),
            ("SHOAL_TEI_GRPC_ADDRESSES", self.tei_grpc),
        ):
            for address, _ in doors:
                _check_address(address, name)
        check(
            all(model for _, model in self.tei_http),
            "SHOAL_TEI_HTTP_ADDRESSES",
            "host:port=model, or several with commas",
        )
        check(
            bool(self.routers) and all(self.routers),
            "SHOAL_ROUTERS",
            "host:port, or several of them with commas",
        )
        if self.console_address:
            _check_address(self.console_address, "SHOAL_CONSOLE_ADDRESS")
        for hosts, name in (
            (self.hosts, "SHOAL_HTTP_HOSTS"),
            (self.console_hosts, "SHOAL_CONSOLE_HOSTS"),
        ):
            check(
                all(map(_is_host, hosts)), name, "names without ports, in lower case, with commas"
            )
        allowed = "origins such as https://app.example, http://[::1]:3000 or tauri://localhost, in lower case, with commas"
        check(all(map(_is_origin, self.origins)), "SHOAL_HTTP_ORIGINS", allowed)
        allowed = "origins such as https://mesh.example or https://mesh.example:8443, in lower case, with commas"
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
            0 < self.deadline_seconds <= self.longest_deadline_seconds,
            "SHOAL_DEADLINE_SECONDS",
            "above 0, at most the longest",
        )
        check(
            self.longest_deadline_seconds <= 86_400,
            "SHOAL_LONGEST_DEADLINE_SECONDS",
            "at most 86400",
        )
        check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")
        self._check_trust()

    def _check_trust(self) -> None:
        """Raises InvalidInput where credentials or texts would travel in clear text beyond this
        machine.
        """
        if self.security.allow_insecure:
            return
        if not self.is_local and self.security.cert is None:
            address = next(address for address in self.addresses if not is_loopback(address))
            raise InvalidInput(
                f"refusing to listen on {address}, beyond this machine, without TLS: set SHOAL_TLS_CERT and SHOAL_TLS_KEY, or "
                "SHOAL_ALLOW_INSECURE=1 if something else protects it",
                field="SHOAL_ALLOW_INSECURE",
            )
        if self.routers_tls is None and not all(map(is_local, self.routers)):
            raise InvalidInput(
                f"refusing to pass tokens on to {', '.join(self.routers)} without TLS: set SHOAL_ROUTERS_CA, or "
                "SHOAL_ALLOW_INSECURE=1 if something else protects that network",
                field="SHOAL_ROUTERS_CA",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return all(map(is_loopback, self.addresses))

    @property
    def addresses(self) -> tuple[str, ...]:
        """All at which it takes requests."""
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
        """Whether routers take calls without a token for the edge's own, by its certificate."""
        return self.routers_tls is not None and self.routers_tls.certificate_chain is not None

    @property
    def instance(self) -> str:
        return self.edge_id

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Reads SHOAL_* variables; raises InvalidInput naming the variable and what it may be."""
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
            tei_http=_doors(environ.get("SHOAL_TEI_HTTP_ADDRESSES", "")),
            tei_grpc=_doors(environ.get("SHOAL_TEI_GRPC_ADDRESSES", "")),
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
            longest_deadline_seconds=number(environ, "SHOAL_LONGEST_DEADLINE_SECONDS", 600.0),
            grace_seconds=number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            log_level=choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str | float]:
        """For the one log line at the start."""
        security = self.security
        return {
            "edge_id": self.edge_id,
            "address": self.address,
            "tei_http": _shown(self.tei_http),
            "tei_grpc": _shown(self.tei_grpc),
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
            "longest_deadline_seconds": self.longest_deadline_seconds,
            "grace_seconds": self.grace_seconds,
        }


def _security(environ: Mapping[str, str]) -> Security:
    """Without SHOAL_TOKENS and SHOAL_JWKS: what callers send is checked by routers."""
    allow = environ.get("SHOAL_ALLOW_INSECURE") or "0"
    check(allow in ("0", "1"), "SHOAL_ALLOW_INSECURE", "0 or 1")
    cert, key, authorities = (
        environ.get(f"SHOAL_TLS_{name}", "") for name in ("CERT", "KEY", "CLIENT_CA")
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
    """`given`: the path of a file; empty: the file of an installed package, if there is one;
    `none`: no vocabulary.
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
            f"SHOAL_CL100K: {path} is no file of tiktoken's: {error}", field="SHOAL_CL100K"
        ) from error


def _has_console(given: str, address: str, security: Security) -> bool:
    """Unless SHOAL_CONSOLE says it: only where it listens on this machine alone, to callers who
    need no certificate.
    """
    check(given in ("", "0", "1"), "SHOAL_CONSOLE", "0 or 1")
    if given:
        return given == "1"
    return is_loopback(address) and security.client_ca is None


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _is_origin(text: str) -> bool:
    """Whether a browser or an app on one may send it as the Origin of a page: any scheme, no path,
    no port that is the scheme's.
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


def _doors(text: str) -> tuple[tuple[str, str], ...]:
    """host:port=model, with commas between them."""
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    return tuple((address.strip(), model.strip()) for address, _, model in parts)


def _shown(doors: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{address}={model}" if model else address for address, model in doors)


def _routers_tls(environ: Mapping[str, str]) -> Tls | None:
    """As a worker's SHOAL_TLS…, by the names SHOAL_ROUTERS_…: SHOAL_TLS… are those of the edge as a
    server.
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
