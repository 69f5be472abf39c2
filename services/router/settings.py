"""A router's configuration, read once from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libs import processes, setting
from libs.catalog.cards import parse_folders
from libs.processes import Process
from libs.queue.connection.trust import RedisTrust, redis_trust_settings, redis_url_setting
from libs.queue.keys import queue_slots_setting
from libs.serving.security.settings import Security, security_settings
from libs.serving.watched import Watched
from services.router.admission.routing.routes import Routes
from services.router.admission.routing.routes_files import watch_routes
from services.router.admission.tenants import DEFAULT_TENANTS, Tenants, watch_tenants


@dataclass(frozen=True, slots=True)
class RoutingFiles:
    """The settings from which the routes are made."""

    pools: Path | None = setting.path(
        "SHOAL_POOLS",
        None,
        "The file of pools. Without it, every pool that a worker names exists.",
        "YAML file",
    )
    catalog: tuple[Path, ...] = setting.parsed(
        "SHOAL_CATALOG",
        "folders, separated by colons",
        parse_folders,
        tuple,
        "Folders of cards, the same as the workers'. Gives the pools of models before a worker "
        "reports them.",
    )
    default_pool: str = setting.text(
        "SHOAL_DEFAULT_POOL",
        "",
        "The pool in which work for a model that is resident nowhere is queued. The default of "
        "SHOAL_POOLS replaces it.",
        setting.Allowed(setting.NAME.text, lambda pool: not pool or setting.NAME.holds(pool)),
        default_text="`SHOAL_POOL`",
    )
    pool: str = setting.text(
        "SHOAL_POOL",
        "cpu",
        "The pool of a worker that runs next to the router, without SHOAL_DEFAULT_POOL.",
        setting.NAME,
    )

    def __post_init__(self) -> None:
        setting.check_fields(self)

    @staticmethod
    def watch(environ: setting.Environ) -> Watched[Routes]:
        """Read the routes, and read them again when their files change. Raises InvalidInput."""
        files = setting.read(RoutingFiles, environ)
        return watch_routes(files.pools, files.catalog, files.default_pool or files.pool)


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one router process. Times are in seconds unless their name has a unit."""

    router_id: str = setting.identity(
        "SHOAL_ROUTER_ID",
        "router",
        "Unique in the mesh; names the list in which Redis keeps this router's answers.",
    )
    address: str = setting.text(
        "SHOAL_ADDRESS", "127.0.0.1:50051", "The listening address.", setting.ADDRESS
    )
    security: Security = security_settings()
    """TLS, authentication and authorisation. Without credentials any caller is allowed, on loopback
    only.
    """
    connection_seconds: float = setting.seconds(
        "SHOAL_CONNECTION_SECONDS",
        300.0,
        setting.in_range(0, 86_400),
        "Connections are closed after about this time, so that clients find new routers; calls in "
        "flight finish. 0: never.",
    )
    metrics_address: str = setting.metrics_address()
    redis_url: str = redis_url_setting()
    redis_trust: RedisTrust = redis_trust_settings()
    queue_slots: int = queue_slots_setting()
    routes: Watched[Routes] = setting.group(
        RoutingFiles.watch,
        setting.list_variables(RoutingFiles),
        lambda: Watched.fixed(Routes()),
        lambda routes: _describe_routes(routes.content),
    )
    tenants: Watched[Tenants] = setting.parsed(
        "SHOAL_TENANTS",
        "YAML file",
        lambda given: watch_tenants(Path(given)),
        lambda: Watched.fixed(DEFAULT_TENANTS),
        "The file of shares, rates and quotas, read again when it changes. Without a file all "
        "tenants are equal.",
        log=lambda tenants: str(tenants.content),
    )
    processes: Watched[tuple[Process, ...]] = setting.parsed(
        "SHOAL_PROCESSES",
        "JSON file",
        lambda given: Watched([Path(given)], partial(processes.read, Path(given))),
        lambda: Watched.fixed(()),
        "The file to which `shoal up` writes the status of its processes for MeshService.",
    )
    max_queued_tokens: int = setting.integer(
        "SHOAL_MAX_QUEUED_TOKENS",
        20_000_000,
        "tokens",
        setting.at_least(1),
        "Maximum estimated tokens in a lane; requests beyond it are refused with QueueFull.",
        has_exponent=True,
    )
    max_queued_seconds: float = setting.seconds(
        "SHOAL_MAX_QUEUED_SECONDS",
        60.0,
        setting.above(0),
        "Maximum estimated wait of a request in a lane, whatever its deadline; ten times that for "
        "bulk.",
    )
    in_flight_bytes: int = setting.integer(
        "SHOAL_IN_FLIGHT_BYTES",
        1 << 30,
        "bytes",
        setting.at_least(1 << 20),
        "Maximum memory of this process for requests in flight; new ones beyond it are refused "
        "with QueueFull.",
        has_exponent=True,
    )
    default_deadline_seconds: float = setting.seconds(
        "SHOAL_DEADLINE_SECONDS", 60.0, setting.above(0, 86_400), "Deadline of calls that set none."
    )
    grace_seconds: float = setting.seconds(
        "SHOAL_GRACE_SECONDS",
        25.0,
        setting.in_range(0, 600),
        "Time for calls in flight to finish after SIGTERM.",
    )
    lease_ms: int = setting.integer(
        "SHOAL_LEASE_MS",
        15_000,
        "milliseconds",
        setting.in_range(1000, 600_000),
        "Jobs of a worker that was silent for this time are queued again.",
        has_exponent=True,
    )
    max_attempts: int = setting.integer(
        "SHOAL_MAX_ATTEMPTS",
        3,
        "attempts",
        setting.in_range(1, 100),
        "A job is given up after this number of workers died with it.",
        has_exponent=True,
    )
    claim_after_seconds: float = setting.seconds(
        "SHOAL_CLAIM_AFTER_SECONDS",
        0.5,
        setting.in_range(0, 60),
        "A model that no worker has is left to the leading scheduler for this time before a "
        "waiting worker may claim it.",
    )
    log_level: setting.LogLevel = setting.log_level()

    def __post_init__(self) -> None:
        setting.check_fields(self)
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)

    @property
    def instance(self) -> str:
        return self.router_id

    @staticmethod
    def from_env(environ: setting.Environ) -> Settings:
        """Read the variables. Raises InvalidInput naming the variable and its allowed values, or
        the file, line and key.
        """
        return setting.read(Settings, environ)

    def describe(self) -> dict[str, setting.Loggable]:
        """Return the settings for the log line at the start, without secrets."""
        return setting.describe(self, without=["processes"])


def _describe_routes(routes: Routes) -> dict[str, setting.Loggable]:
    return {
        "default_pool": routes.default,
        "pools": str(routes.pools),
        "catalog": str(routes.catalog),
    }
