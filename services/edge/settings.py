"""The edge's configuration, read once from the environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

from shoal.transport.addresses import is_local
from shoal.transport.trust import Tls, tls_from

from libs import setting
from libs.environment import check
from libs.errors import InvalidInput
from libs.serving.security.settings import Security, is_loopback
from libs.serving.watched import Watched
from libs.telemetry.exposition import parse_address
from services.edge.aliases import watch_aliases
from services.edge.batches.settings import BatchSettings
from services.edge.cl100k import installed_cl100k
from services.edge.compression import Compression
from services.edge.console.access import origin_name
from services.edge.jobs.roots import overlap
from services.edge.jobs.settings import JobSettings
from services.edge.messages.names import AliasNames
from services.edge.messages.vocabulary import Vocabulary, read_vocabulary

DEFAULT_ADDRESS: Final = "127.0.0.1:8080"
_ROUTERS_TLS: Final = (
    ("SHOAL_TLS", "SHOAL_ROUTERS_TLS", "1: use TLS with the system's authorities."),
    (
        "SHOAL_TLS_CA",
        "SHOAL_ROUTERS_CA",
        "The authorities that sign the routers' certificates, a PEM file.",
    ),
    ("SHOAL_TLS_CERT", "SHOAL_ROUTERS_CERT", "The edge's client certificate, a PEM file."),
    ("SHOAL_TLS_KEY", "SHOAL_ROUTERS_KEY", "The key of SHOAL_ROUTERS_CERT, a PEM file."),
    (
        "SHOAL_TLS_NAME",
        "SHOAL_ROUTERS_NAME",
        "The name in the routers' certificate, if it is not that of the address.",
    ),
)
"""Variables of a client, those of the edge with the same meaning, and their descriptions."""
_ROUTERS_CHECK: Final = ("tokens", "jwks", "issuer", "audience")
"""Fields of `Security` that an edge has no use for: routers check the callers' tokens."""
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
)


def _installed_vocabulary() -> Vocabulary | None:
    path = installed_cl100k()
    return _read_vocabulary(str(path)) if path else None


def _read_vocabulary(path: str) -> Vocabulary:
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


def _has_console(environ: setting.Environ) -> bool:
    """Return whether the console would listen only on this machine, for callers without
    certificates.
    """
    address = (
        environ.get("SHOAL_CONSOLE_ADDRESS") or environ.get("SHOAL_HTTP_ADDRESS") or DEFAULT_ADDRESS
    )
    return is_loopback(address) and not environ.get("SHOAL_TLS_CLIENT_CA")


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
        origin_name(text)
    except ValueError:
        return False
    return True


def _is_host(name: str) -> bool:
    return (
        name == name.lower()
        and name.isascii()
        and all(letter.isalnum() or letter in "-." for letter in name)
    )


def _is_address(address: str) -> bool:
    try:
        parse_address(address)
    except InvalidInput:
        return False
    return True


def _parse_tei_addresses(text: str) -> tuple[tuple[str, str], ...]:
    """Parse host:port=model, separated by commas."""
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    return tuple((address.strip(), model.strip()) for address, _, model in parts)


def _format_tei_addresses(tei_addresses: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{address}={model}" if model else address for address, model in tei_addresses)


def _routers_tls(environ: setting.Environ) -> Tls | None:
    """Read SHOAL_ROUTERS_…, which correspond to a worker's SHOAL_TLS_…: SHOAL_TLS_… configure the
    edge as a server.
    """
    try:
        tls = tls_from({ours: environ.get(theirs, "") for ours, theirs, _ in _ROUTERS_TLS})
        if tls is not None:
            tls.read()
    except ValueError as error:
        message = str(error)
        for ours, theirs, _ in _ROUTERS_TLS:
            if ours != "SHOAL_TLS":
                message = message.replace(ours, theirs)
        raise InvalidInput(message, field="SHOAL_ROUTERS_CA") from None
    return tls


_ADDRESS: Final = setting.Allowed("host:port", _is_address)
_HOSTS: Final = setting.Allowed(
    "names without ports, in lower case, separated by commas",
    lambda hosts: all(map(_is_host, hosts)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one edge process. Times in seconds, sizes in bytes."""

    edge_id: str = setting.identity("SHOAL_EDGE_ID", "edge", "The edge's name in logs and metrics.")
    address: str = setting.text(
        "SHOAL_HTTP_ADDRESS", DEFAULT_ADDRESS, "The listening address of HTTP.", _ADDRESS
    )
    security: Security = setting.group(
        partial(Security.from_env, without=_ROUTERS_CHECK),
        setting.list_variables(Security, without=_ROUTERS_CHECK),
        Security,
        lambda security: security.describe(without=_ROUTERS_CHECK),
    )
    """TLS for callers. Their tokens are passed on, and routers check them."""
    tei_http: tuple[tuple[str, str], ...] = setting.parsed(
        "SHOAL_TEI_HTTP_ADDRESSES",
        "list",
        _parse_tei_addresses,
        tuple,
        "Addresses that serve TEI's paths for one model, each with the model.",
        setting.Allowed(
            "host:port=model, or several separated by commas",
            lambda addresses: all(_is_address(address) and model for address, model in addresses),
        ),
        log=_format_tei_addresses,
    )
    tei_grpc: tuple[tuple[str, str], ...] = setting.parsed(
        "SHOAL_TEI_GRPC_ADDRESSES",
        "list",
        _parse_tei_addresses,
        tuple,
        "Addresses of TEI's gRPC API, each with its model. An address without a model serves the "
        "aliases embed, rerank and predict.",
        setting.Allowed(
            "host:port or host:port=model, or several separated by commas",
            lambda addresses: all(_is_address(address) for address, _ in addresses),
        ),
        log=_format_tei_addresses,
    )
    routers: tuple[str, ...] = setting.routers()
    routers_tls: Tls | None = setting.group(
        _routers_tls,
        setting.documented({theirs: description for _, theirs, description in _ROUTERS_TLS}),
        lambda: None,
        lambda tls: "none" if tls is None else "mutual" if tls.certificate_chain else "on",
    )
    """TLS for routers."""
    aliases: Watched[AliasNames] = setting.parsed(
        "SHOAL_ALIASES",
        "YAML file",
        lambda given: watch_aliases(Path(given)),
        lambda: Watched.fixed(AliasNames({})),
        "The file of aliases: names that clients send, each with its model.",
        log=lambda aliases: len(aliases.content.aliases),
    )
    vocabulary: Vocabulary | None = setting.parsed(
        "SHOAL_CL100K",
        "path",
        lambda given: None if given == "none" else _read_vocabulary(given),
        lambda: None,
        "The vocabulary of OpenAI's cl100k_base tokenizer, which converts token ids in `input` to "
        "text. none: they are refused.",
        unset=lambda _: _installed_vocabulary(),
        default_text="the file of an installed package, if there is one",
        log=lambda vocabulary: 0 if vocabulary is None else len(vocabulary.tokens),
        log_name="cl100k",
    )
    hosts: tuple[str, ...] = setting.items(
        "SHOAL_HTTP_HOSTS",
        (),
        _HOSTS,
        "Names that the Host of a request may have in addition to this machine's and to addresses, "
        "if routers accept anonymous calls.",
    )
    origins: tuple[str, ...] = setting.items(
        "SHOAL_HTTP_ORIGINS",
        (),
        setting.Allowed(
            "origins such as https://app.example, http://[::1]:3000 or tauri://localhost, in lower "
            "case, separated by commas",
            lambda origins: all(map(_is_origin, origins)),
        ),
        "Origins of web pages that may call the edge, by CORS. Empty: no foreign page may.",
    )
    console: bool = setting.flag(
        "SHOAL_CONSOLE",
        False,
        "Whether the console is served.",
        unset=_has_console,
        default_text="1 on loopback without client certificates, else 0",
    )
    console_address: str = setting.text(
        "SHOAL_CONSOLE_ADDRESS",
        "",
        "The console's address. Empty: SHOAL_HTTP_ADDRESS.",
        setting.Allowed("host:port", lambda address: not address or _is_address(address)),
    )
    console_hosts: tuple[str, ...] = setting.items(
        "SHOAL_CONSOLE_HOSTS",
        (),
        _HOSTS,
        "Names under which browsers may open the console, in addition to this machine's loopback.",
    )
    console_origins: tuple[str, ...] = setting.items(
        "SHOAL_CONSOLE_ORIGINS",
        (),
        setting.Allowed(
            "origins such as https://mesh.example or https://mesh.example:8443, in lower case, "
            "separated by commas",
            lambda origins: all(map(_is_console_origin, origins)),
        ),
        "Origins under which browsers know the console behind a proxy. Their names become allowed "
        "hosts. Empty: the origin must match the Host.",
    )
    metrics_address: str = setting.metrics_address()
    body_bytes: int = setting.integer(
        "SHOAL_HTTP_BODY_BYTES",
        64 << 20,
        "bytes",
        setting.in_range(1024, 1 << 30),
        "The maximum size of a request's body.",
    )
    in_flight_bytes: int = setting.integer(
        "SHOAL_HTTP_IN_FLIGHT_BYTES",
        512 << 20,
        "bytes",
        setting.at_least(0, "at least SHOAL_HTTP_BODY_BYTES"),
        "The memory limit of bodies of requests in flight; above it new requests are refused with "
        "QUEUE_FULL.",
    )
    compression: Compression = setting.choice(
        "SHOAL_HTTP_COMPRESSION",
        "auto",
        get_args(Compression),
        "Whether answers are compressed for clients that accept it. auto: for callers beyond this "
        "machine.",
    )
    connections: int = setting.integer(
        "SHOAL_HTTP_CONNECTIONS",
        10_000,
        "connections",
        setting.in_range(1, 1_000_000),
        "Maximum open connections.",
    )
    header_seconds: float = setting.seconds(
        "SHOAL_HTTP_HEADER_SECONDS",
        10.0,
        setting.above(0, 3600),
        "The time limit of a request's head.",
    )
    body_seconds: float = setting.seconds(
        "SHOAL_HTTP_BODY_SECONDS",
        60.0,
        setting.above(0, 3600),
        "The time limit of a request's body.",
    )
    body_pause_seconds: float = setting.seconds(
        "SHOAL_HTTP_BODY_PAUSE_SECONDS",
        10.0,
        setting.above(0, 3600),
        "The time limit between two pieces of a request's body.",
    )
    idle_seconds: float = setting.seconds(
        "SHOAL_HTTP_IDLE_SECONDS",
        75.0,
        setting.above(0, 3600),
        "The time limit of an idle connection. It must exceed the load balancer's idle timeout "
        "(usually 60 s), or clients see resets.",
    )
    deadline_seconds: float = setting.seconds(
        "SHOAL_DEADLINE_SECONDS",
        60.0,
        setting.above(0, "SHOAL_LONGEST_DEADLINE_SECONDS"),
        "The deadline of requests that specify none.",
    )
    max_deadline_seconds: float = setting.seconds(
        "SHOAL_LONGEST_DEADLINE_SECONDS",
        600.0,
        setting.above(0, 86_400),
        "Maximum deadline that a request may name.",
        log_name="longest_deadline_seconds",
    )
    grace_seconds: float = setting.seconds(
        "SHOAL_GRACE_SECONDS",
        25.0,
        setting.in_range(0, 600),
        "The time limit of requests in flight after SIGTERM.",
    )
    batches: BatchSettings = setting.group(
        partial(setting.read, BatchSettings),
        setting.list_variables(BatchSettings),
        BatchSettings,
        lambda batches: {
            f"batches_{name}": value for name, value in setting.describe(batches).items()
        },
    )
    """The storage of files and batches; none by default."""
    jobs: JobSettings = setting.group(
        partial(setting.read, JobSettings),
        setting.list_variables(JobSettings),
        JobSettings,
        lambda jobs: {f"jobs_{name}": value for name, value in setting.describe(jobs).items()},
    )
    """Locations that submitted jobs may read and write; none by default."""
    log_level: setting.LogLevel = setting.log_level()

    def __post_init__(self) -> None:
        setting.check_fields(self)
        self._check_limits()
        self._check_trust()

    def _check_limits(self) -> None:
        """Raise InvalidInput for a value that contradicts that of another variable."""
        check(
            self.in_flight_bytes >= self.body_bytes,
            "SHOAL_HTTP_IN_FLIGHT_BYTES",
            f"at least SHOAL_HTTP_BODY_BYTES ({self.body_bytes}), not {self.in_flight_bytes}",
        )
        check(
            self.deadline_seconds <= self.max_deadline_seconds,
            "SHOAL_DEADLINE_SECONDS",
            f"at most SHOAL_LONGEST_DEADLINE_SECONDS ({self.max_deadline_seconds:g}), "
            f"not {self.deadline_seconds:g}",
        )
        if self.jobs.roots:
            check(
                bool(self.batches.url),
                "SHOAL_JOBS_ROOTS",
                "set together with SHOAL_BATCHES_URL, where jobs are recorded",
            )
            for root in self.jobs.roots:
                check(
                    not overlap(root, self.batches.location),
                    "SHOAL_JOBS_ROOTS",
                    f"apart from SHOAL_BATCHES_URL, which jobs must not read or write; {root} is "
                    "not",
                )

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
    def from_env(environ: setting.Environ) -> Settings:
        """Read the variables. Raises InvalidInput that names the variable and the allowed
        values.
        """
        return setting.read(Settings, environ)

    def describe(self) -> dict[str, setting.Loggable]:
        """Return the values for the log line at startup."""
        console = "off" if not self.console else self.console_address or self.address
        return setting.describe(self, ("console_address",)) | {"console": console}
