"""The settings of a scheduler, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from libs.catalog.pools import Pools, read_pools
from libs.environment import LOG_LEVELS, LogLevel, check, check_name, choice, number, random_id
from libs.eviction import DEFAULT, POLICIES
from libs.queue import RedisTrust
from libs.queue.connection.urls import without_password
from libs.serving import Security
from libs.serving.watched import Watched


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one scheduler process."""

    scheduler_id: str
    """Unique in the mesh. Schedulers of one mesh differ in nothing else: one of them leads."""
    address: str = "127.0.0.1:50053"
    """The address that KEDA calls."""
    security: Security = field(default_factory=Security)
    """TLS and authentication. Without it any caller is allowed, on loopback only."""
    metrics_address: str = ""
    """The address that Prometheus scrapes, host:port, plain HTTP without credentials. Empty:
    none.
    """
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    redis_trust: RedisTrust = field(default_factory=RedisTrust)
    pools: Watched[Pools] = field(default_factory=lambda: Watched.fixed(Pools()))
    """The pools of SHOAL_POOLS; without it, every pool that a worker names."""
    eviction: str = DEFAULT
    """The eviction policy by which the workers' victims are predicted; same as their
    SHOAL_EVICTION.
    """
    lease_ms: int = 15_000
    """The models of a worker that was silent for this time are placed again; same as SHOAL_LEASE_MS
    of the routers.
    """
    grace_seconds: float = 10.0
    """Time for calls in flight to finish after SIGTERM."""
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        check_name(self.scheduler_id, "SHOAL_SCHEDULER_ID")
        check(bool(self.address), "SHOAL_SCHEDULER_ADDRESS", "host:port or unix:path")
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)
        check(self.eviction in POLICIES, "SHOAL_EVICTION", f"one of {', '.join(POLICIES)}")
        check(1000 <= self.lease_ms <= 600_000, "SHOAL_LEASE_MS", "1000..600000")
        check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")

    @property
    def instance(self) -> str:
        return self.scheduler_id

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Read SHOAL_* variables. Raises InvalidInput naming the variable and its allowed values,
        or the file, line and key.
        """
        pools = environ.get("SHOAL_POOLS", "")
        return Settings(
            scheduler_id=environ.get("SHOAL_SCHEDULER_ID") or random_id("scheduler"),
            address=environ.get("SHOAL_SCHEDULER_ADDRESS") or "127.0.0.1:50053",
            security=Security.from_env(environ),
            metrics_address=environ.get("SHOAL_METRICS_ADDRESS", ""),
            redis_url=environ.get("SHOAL_REDIS_URL") or "redis://127.0.0.1:6379/0",
            redis_trust=RedisTrust.from_env(environ),
            pools=Watched([Path(pools)], partial(read_pools, Path(pools)))
            if pools
            else Watched.fixed(Pools()),
            eviction=environ.get("SHOAL_EVICTION") or DEFAULT,
            lease_ms=int(number(environ, "SHOAL_LEASE_MS", 15_000)),
            grace_seconds=number(environ, "SHOAL_GRACE_SECONDS", 10.0),
            log_level=choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str | float]:
        """Return the settings for the log line at the start, without the password of the Redis
        URL.
        """
        return {
            "scheduler_id": self.scheduler_id,
            "address": self.address,
            **self.security.describe(),
            "metrics_address": self.metrics_address,
            "redis": without_password(self.redis_url),
            "redis_trust": self.redis_trust.describe(),
            "pools": str(self.pools.content),
            "eviction": self.eviction,
            "lease_ms": self.lease_ms,
            "grace_seconds": self.grace_seconds,
        }
