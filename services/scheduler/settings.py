"""The settings of a scheduler, read once from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libs import setting
from libs.catalog.pools import Pools, read_pools
from libs.eviction import DEFAULT, POLICIES
from libs.queue.connection.trust import RedisTrust, redis_trust_settings, redis_url_setting
from libs.queue.keys import queue_slots_setting
from libs.serving.security.settings import Security, security_settings
from libs.serving.watched import Watched


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one scheduler process."""

    scheduler_id: str = setting.identity(
        "SHOAL_SCHEDULER_ID",
        "scheduler",
        "Unique in the mesh. Schedulers of one mesh differ in nothing else: one of them leads.",
    )
    address: str = setting.text(
        "SHOAL_SCHEDULER_ADDRESS",
        "127.0.0.1:50053",
        "The address that KEDA calls.",
        setting.ADDRESS,
    )
    security: Security = security_settings()
    """TLS and authentication. Without it any caller is allowed, on loopback only."""
    metrics_address: str = setting.metrics_address()
    redis_url: str = redis_url_setting()
    redis_trust: RedisTrust = redis_trust_settings()
    queue_slots: int = queue_slots_setting()
    pools: Watched[Pools] = setting.parsed(
        "SHOAL_POOLS",
        "YAML file",
        lambda given: Watched([Path(given)], partial(read_pools, Path(given))),
        lambda: Watched.fixed(Pools()),
        "The file of pools. Without it, every pool that a worker names exists.",
        log=lambda pools: str(pools.content),
    )
    eviction: str = setting.choice(
        "SHOAL_EVICTION",
        DEFAULT,
        tuple(POLICIES),
        "The eviction policy by which the workers' victims are predicted; same as their "
        "SHOAL_EVICTION.",
    )
    lease_ms: int = setting.integer(
        "SHOAL_LEASE_MS",
        15_000,
        "milliseconds",
        setting.in_range(1000, 600_000),
        "The models of a worker that was silent for this time are placed again; same as "
        "SHOAL_LEASE_MS of the routers.",
        has_exponent=True,
    )
    grace_seconds: float = setting.seconds(
        "SHOAL_GRACE_SECONDS",
        10.0,
        setting.in_range(0, 600),
        "Time for calls in flight to finish after SIGTERM.",
    )
    log_level: setting.LogLevel = setting.log_level()

    def __post_init__(self) -> None:
        setting.check_fields(self)
        self.redis_trust.check(self.redis_url, allow_insecure=self.security.allow_insecure)

    @property
    def instance(self) -> str:
        return self.scheduler_id

    @staticmethod
    def from_env(environ: setting.Environ) -> Settings:
        """Read the variables. Raises InvalidInput naming the variable and its allowed values, or
        the file, line and key.
        """
        return setting.read(Settings, environ)

    def describe(self) -> dict[str, setting.Loggable]:
        """Return the settings for the log line at the start, without secrets."""
        return setting.describe(self)
