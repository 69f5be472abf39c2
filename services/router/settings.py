"""A router's configuration, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from libs import processes
from libs.catalog.cards import parse_folders
from libs.environment import LOG_LEVELS, LogLevel, check, check_name, choice, number, random_id
from libs.processes import Process
from libs.queue import RedisTrust
from libs.queue.connection.urls import without_password
from libs.serving import Security
from libs.serving.watched import Watched
from services.router.admission.routing.routes import Routes
from services.router.admission.routing.routes_files import watch_routes
from services.router.admission.tenants import DEFAULT_TENANTS, Tenants, watch_tenants


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one router process. Times are in seconds unless their name has a unit."""

    router_id: str
    """Unique in the mesh; names the list in which Redis keeps this router's answers."""
    address: str = "127.0.0.1:50051"
    security: Security = field(default_factory=Security)
    """TLS, authentication and authorisation. Without credentials any caller is allowed, on loopback
    only.
    """
    connection_seconds: float = 300.0
    """Connections are closed after about this time, so that clients find new routers; calls in
    flight finish. 0: never.
    """
    metrics_address: str = ""
    """Address that Prometheus scrapes: host:port, plain HTTP without credentials. Empty: none."""
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    redis_trust: RedisTrust = field(default_factory=RedisTrust)
    routes: Watched[Routes] = field(default_factory=lambda: Watched.fixed(Routes()))
    """Routing, from these settings:

    - SHOAL_POOLS: the pools file; without it every pool that a worker names exists.
    - SHOAL_CATALOG: the same as the workers'; gives the pools of models before a worker reports
      them.
    - SHOAL_DEFAULT_POOL: queues work for models that are resident nowhere. The pools file's default
      replaces it.
    """
    tenants: Watched[Tenants] = field(default_factory=lambda: Watched.fixed(DEFAULT_TENANTS))
    """The file of shares, rates and quotas (`tenants.py`), read again when it changes. Without a
    file all tenants are equal.
    """
    processes: Watched[tuple[Process, ...]] = field(default_factory=lambda: Watched.fixed(()))
    """From the file SHOAL_PROCESSES, to which `shoal up` writes the status of its processes for
    MeshService.
    """
    max_queued_tokens: int = 20_000_000
    """Maximum estimated tokens in a lane; requests beyond it are refused with QueueFull."""
    max_queued_seconds: float = 60.0
    """Maximum estimated wait of a request in a lane, whatever its deadline; ten times that for
    bulk.
    """
    in_flight_bytes: int = 1 << 30
    """Maximum memory of this process for requests in flight; new ones beyond it are refused with
    QueueFull.
    """
    default_deadline_seconds: float = 60.0
    """Deadline of calls that set none."""
    grace_seconds: float = 25.0
    """Time for calls in flight to finish after SIGTERM."""
    lease_ms: int = 15_000
    max_attempts: int = 3
    """A job is given up after this number of workers died with it."""
    claim_after_seconds: float = 0.5
    """A model that no worker has is left to the leading scheduler for this time before a waiting
    worker may claim it.
    """
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        check_name(self.router_id, "SHOAL_ROUTER_ID")
        check(bool(self.address), "SHOAL_ADDRESS", "host:port or unix:path")
        check(0 <= self.connection_seconds <= 86_400, "SHOAL_CONNECTION_SECONDS", "0..86400")
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)
        check(self.max_queued_tokens >= 1, "SHOAL_MAX_QUEUED_TOKENS", "at least 1")
        check(self.max_queued_seconds > 0, "SHOAL_MAX_QUEUED_SECONDS", "above 0")
        check(self.in_flight_bytes >= 1 << 20, "SHOAL_IN_FLIGHT_BYTES", "at least 1048576")
        check(
            0 < self.default_deadline_seconds <= 86_400,
            "SHOAL_DEADLINE_SECONDS",
            "above 0, at most 86400",
        )
        check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")
        check(1000 <= self.lease_ms <= 600_000, "SHOAL_LEASE_MS", "1000..600000")
        check(1 <= self.max_attempts <= 100, "SHOAL_MAX_ATTEMPTS", "1..100")
        check(0 <= self.claim_after_seconds <= 60, "SHOAL_CLAIM_AFTER_SECONDS", "0..60")

    @property
    def instance(self) -> str:
        return self.router_id

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Read SHOAL_* variables. Raises InvalidInput naming the variable and its allowed
        values.
        """
        return Settings(
            router_id=environ.get("SHOAL_ROUTER_ID") or random_id("router"),
            address=environ.get("SHOAL_ADDRESS") or "127.0.0.1:50051",
            security=Security.from_env(environ),
            connection_seconds=number(environ, "SHOAL_CONNECTION_SECONDS", 300.0),
            metrics_address=environ.get("SHOAL_METRICS_ADDRESS", ""),
            redis_url=environ.get("SHOAL_REDIS_URL") or "redis://127.0.0.1:6379/0",
            redis_trust=RedisTrust.from_env(environ),
            routes=_routes(environ),
            tenants=_tenants(environ),
            processes=_processes(environ),
            max_queued_tokens=int(number(environ, "SHOAL_MAX_QUEUED_TOKENS", 20_000_000)),
            max_queued_seconds=number(environ, "SHOAL_MAX_QUEUED_SECONDS", 60.0),
            in_flight_bytes=int(number(environ, "SHOAL_IN_FLIGHT_BYTES", 1 << 30)),
            default_deadline_seconds=number(environ, "SHOAL_DEADLINE_SECONDS", 60.0),
            grace_seconds=number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            lease_ms=int(number(environ, "SHOAL_LEASE_MS", 15_000)),
            max_attempts=int(number(environ, "SHOAL_MAX_ATTEMPTS", 3)),
            claim_after_seconds=number(environ, "SHOAL_CLAIM_AFTER_SECONDS", 0.5),
            log_level=choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str | float]:
        """Return the settings for the log line at the start, without the password of the Redis
        URL.
        """
        return {
            "router_id": self.router_id,
            "address": self.address,
            **self.security.describe(),
            "connection_seconds": self.connection_seconds,
            "metrics_address": self.metrics_address,
            "redis": without_password(self.redis_url),
            "redis_trust": self.redis_trust.describe(),
            "default_pool": self.routes.content.default,
            "pools": str(self.routes.content.pools),
            "catalog": str(self.routes.content.catalog),
            "tenants": str(self.tenants.content),
            "max_queued_tokens": self.max_queued_tokens,
            "max_queued_seconds": self.max_queued_seconds,
            "in_flight_bytes": self.in_flight_bytes,
            "default_deadline_seconds": self.default_deadline_seconds,
            "grace_seconds": self.grace_seconds,
            "lease_ms": self.lease_ms,
            "max_attempts": self.max_attempts,
            "claim_after_seconds": self.claim_after_seconds,
        }


def _processes(environ: Mapping[str, str]) -> Watched[tuple[Process, ...]]:
    path = environ.get("SHOAL_PROCESSES", "")
    return Watched([Path(path)], partial(processes.read, Path(path))) if path else Watched.fixed(())


def _tenants(environ: Mapping[str, str]) -> Watched[Tenants]:
    path = environ.get("SHOAL_TENANTS", "")
    return watch_tenants(Path(path)) if path else Watched.fixed(DEFAULT_TENANTS)


def _routes(environ: Mapping[str, str]) -> Watched[Routes]:
    default_pool = environ.get("SHOAL_DEFAULT_POOL") or environ.get("SHOAL_POOL") or "cpu"
    check_name(default_pool, "SHOAL_DEFAULT_POOL")
    pools = environ.get("SHOAL_POOLS", "")
    return watch_routes(
        Path(pools) if pools else None,
        parse_folders(environ.get("SHOAL_CATALOG", "")),
        default_pool,
    )
