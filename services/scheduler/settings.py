"""The settings of a scheduler, read once from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libs.catalog.pools import Pools, read_pools
from libs.eviction import DEFAULT, POLICIES
from libs.queue.connection.trust import RedisTrust, redis_trust_settings, redis_url_setting
from libs.serving.security.settings import Security, security_settings
from libs.serving.watched import Watched
from libs.settings import (
    ADDRESS,
    Environ,
    Loggable,
    LogLevel,
    check_fields,
    choice,
    describe_settings,
    identity,
    in_range,
    integer,
    log_level_setting,
    metrics_address_setting,
    number,
    parsed,
    read_settings,
    text,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one scheduler process."""

    scheduler_id: str = identity(
        "SHOAL_SCHEDULER_ID",
        "scheduler",
        "Unique in the mesh. Schedulers of one mesh differ in nothing else: one of them leads.",
    )
    address: str = text(
        "SHOAL_SCHEDULER_ADDRESS", "127.0.0.1:50053", "The address that KEDA calls.", ADDRESS
    )
    security: Security = security_settings()
    """TLS and authentication. Without it any caller is allowed, on loopback only."""
    metrics_address: str = metrics_address_setting()
    redis_url: str = redis_url_setting()
    redis_trust: RedisTrust = redis_trust_settings()
    pools: Watched[Pools] = parsed(
        "SHOAL_POOLS",
        "YAML file",
        lambda given: Watched([Path(given)], partial(read_pools, Path(given))),
        lambda: Watched.fixed(Pools()),
        "The file of pools. Without it, every pool that a worker names exists.",
        log=lambda pools: str(pools.content),
    )
    eviction: str = choice(
        "SHOAL_EVICTION",
        DEFAULT,
        tuple(POLICIES),
        "The eviction policy by which the workers' victims are predicted; same as their "
        "SHOAL_EVICTION.",
    )
    lease_ms: int = integer(
        "SHOAL_LEASE_MS",
        15_000,
        "milliseconds",
        in_range(1000, 600_000),
        "The models of a worker that was silent for this time are placed again; same as "
        "SHOAL_LEASE_MS of the routers.",
        has_exponent=True,
    )
    grace_seconds: float = number(
        "SHOAL_GRACE_SECONDS",
        10.0,
        "seconds",
        in_range(0, 600),
        "Time for calls in flight to finish after SIGTERM.",
    )
    log_level: LogLevel = log_level_setting()

    def __post_init__(self) -> None:
        check_fields(self)
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)

    @property
    def instance(self) -> str:
        return self.scheduler_id

    @staticmethod
    def from_env(environ: Environ) -> Settings:
        """Read the variables. Raises InvalidInput naming the variable and its allowed values, or
        the file, line and key.
        """
        return read_settings(Settings, environ)

    def describe(self) -> dict[str, Loggable]:
        """Return the settings for the log line at the start, without secrets."""
        return describe_settings(self)
