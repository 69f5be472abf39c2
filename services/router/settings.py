"""A router's configuration, read once from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libs import processes
from libs.catalog.cards import parse_folders
from libs.processes import Process
from libs.queue.connection.trust import RedisTrust, redis_trust_settings, redis_url_setting
from libs.serving.security.settings import Security, security_settings
from libs.serving.watched import Watched
from libs.settings import (
    ADDRESS,
    NAME,
    Allowed,
    Environ,
    Loggable,
    LogLevel,
    above,
    at_least,
    check_fields,
    describe_settings,
    group,
    identity,
    in_range,
    integer,
    log_level_setting,
    metrics_address_setting,
    number,
    parsed,
    path,
    read_settings,
    text,
    variables_of,
)
from services.router.admission.routing.routes import Routes
from services.router.admission.routing.routes_files import watch_routes
from services.router.admission.tenants import DEFAULT_TENANTS, Tenants, watch_tenants


@dataclass(frozen=True, slots=True)
class RoutingFiles:
    """The settings from which the routes are made."""

    pools: Path | None = path(
        "SHOAL_POOLS",
        None,
        "The file of pools. Without it, every pool that a worker names exists.",
        "YAML file",
    )
    catalog: tuple[Path, ...] = parsed(
        "SHOAL_CATALOG",
        "folders, separated by colons",
        parse_folders,
        tuple,
        "Folders of cards, the same as the workers'. Gives the pools of models before a worker "
        "reports them.",
    )
    default_pool: str = text(
        "SHOAL_DEFAULT_POOL",
        "",
        "The pool in which work for a model that is resident nowhere is queued. The default of "
        "SHOAL_POOLS replaces it.",
        Allowed(NAME.text, lambda pool: not pool or NAME.holds(pool)),
        default_text="`SHOAL_POOL`",
    )
    pool: str = text(
        "SHOAL_POOL",
        "cpu",
        "The pool of a worker that runs next to the router, without SHOAL_DEFAULT_POOL.",
        NAME,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def watch(environ: Environ) -> Watched[Routes]:
        """Read the routes, and read them again when their files change. Raises InvalidInput."""
        files = read_settings(RoutingFiles, environ)
        return watch_routes(files.pools, files.catalog, files.default_pool or files.pool)


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one router process. Times are in seconds unless their name has a unit."""

    router_id: str = identity(
        "SHOAL_ROUTER_ID",
        "router",
        "Unique in the mesh; names the list in which Redis keeps this router's answers.",
    )
    address: str = text("SHOAL_ADDRESS", "127.0.0.1:50051", "The listening address.", ADDRESS)
    security: Security = security_settings()
    """TLS, authentication and authorisation. Without credentials any caller is allowed, on loopback
    only.
    """
    connection_seconds: float = number(
        "SHOAL_CONNECTION_SECONDS",
        300.0,
        "seconds",
        in_range(0, 86_400),
        "Connections are closed after about this time, so that clients find new routers; calls in "
        "flight finish. 0: never.",
    )
    metrics_address: str = metrics_address_setting()
    redis_url: str = redis_url_setting()
    redis_trust: RedisTrust = redis_trust_settings()
    routes: Watched[Routes] = group(
        RoutingFiles.watch,
        variables_of(RoutingFiles),
        lambda: Watched.fixed(Routes()),
        lambda routes: _describe_routes(routes.content),
    )
    tenants: Watched[Tenants] = parsed(
        "SHOAL_TENANTS",
        "YAML file",
        lambda given: watch_tenants(Path(given)),
        lambda: Watched.fixed(DEFAULT_TENANTS),
        "The file of shares, rates and quotas, read again when it changes. Without a file all "
        "tenants are equal.",
        log=lambda tenants: str(tenants.content),
    )
    processes: Watched[tuple[Process, ...]] = parsed(
        "SHOAL_PROCESSES",
        "JSON file",
        lambda given: Watched([Path(given)], partial(processes.read, Path(given))),
        lambda: Watched.fixed(()),
        "The file to which `shoal up` writes the status of its processes for MeshService.",
    )
    max_queued_tokens: int = integer(
        "SHOAL_MAX_QUEUED_TOKENS",
        20_000_000,
        "tokens",
        at_least(1),
        "Maximum estimated tokens in a lane; requests beyond it are refused with QueueFull.",
        has_exponent=True,
    )
    max_queued_seconds: float = number(
        "SHOAL_MAX_QUEUED_SECONDS",
        60.0,
        "seconds",
        above(0),
        "Maximum estimated wait of a request in a lane, whatever its deadline; ten times that for "
        "bulk.",
    )
    in_flight_bytes: int = integer(
        "SHOAL_IN_FLIGHT_BYTES",
        1 << 30,
        "bytes",
        at_least(1 << 20),
        "Maximum memory of this process for requests in flight; new ones beyond it are refused "
        "with QueueFull.",
        has_exponent=True,
    )
    default_deadline_seconds: float = number(
        "SHOAL_DEADLINE_SECONDS",
        60.0,
        "seconds",
        above(0, 86_400),
        "Deadline of calls that set none.",
    )
    grace_seconds: float = number(
        "SHOAL_GRACE_SECONDS",
        25.0,
        "seconds",
        in_range(0, 600),
        "Time for calls in flight to finish after SIGTERM.",
    )
    lease_ms: int = integer(
        "SHOAL_LEASE_MS",
        15_000,
        "milliseconds",
        in_range(1000, 600_000),
        "Jobs of a worker that was silent for this time are queued again.",
        has_exponent=True,
    )
    max_attempts: int = integer(
        "SHOAL_MAX_ATTEMPTS",
        3,
        "attempts",
        in_range(1, 100),
        "A job is given up after this number of workers died with it.",
        has_exponent=True,
    )
    claim_after_seconds: float = number(
        "SHOAL_CLAIM_AFTER_SECONDS",
        0.5,
        "seconds",
        in_range(0, 60),
        "A model that no worker has is left to the leading scheduler for this time before a "
        "waiting worker may claim it.",
    )
    log_level: LogLevel = log_level_setting()

    def __post_init__(self) -> None:
        check_fields(self)
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)

    @property
    def instance(self) -> str:
        return self.router_id

    @staticmethod
    def from_env(environ: Environ) -> Settings:
        """Read the variables. Raises InvalidInput naming the variable and its allowed values, or
        the file, line and key.
        """
        return read_settings(Settings, environ)

    def describe(self) -> dict[str, Loggable]:
        """Return the settings for the log line at the start, without secrets."""
        return describe_settings(self, without=["processes"])


def _describe_routes(routes: Routes) -> dict[str, Loggable]:
    return {
        "default_pool": routes.default,
        "pools": str(routes.pools),
        "catalog": str(routes.catalog),
    }
