"""What a router is told at its start, read once from the environment."""

from __future__ import annotations

import math
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from libs.errors import InvalidInput

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one router process. Times in seconds unless named otherwise."""

    router_id: str
    """Unique in the mesh; names the list in which Redis keeps this router's answers."""
    address: str = "127.0.0.1:50051"
    redis_url: str = "redis://127.0.0.1:6379/0"
    default_pool: str = "cpu"
    """Where a model is queued that is resident nowhere."""
    tenant_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Shares of a busy lane; a tenant not named here has 1."""
    max_queued_tokens: int = 20_000_000
    """Cap of a lane, in estimated tokens: requests beyond it are refused with QueueFull."""
    default_deadline_seconds: float = 60.0
    """For calls that set none."""
    grace_seconds: float = 25.0
    """How long calls in flight may take after SIGTERM."""
    lease_ms: int = 15_000
    max_attempts: int = 3
    """Workers that may die with a job before it is given up."""
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        _check(bool(_NAME.fullmatch(self.router_id)), "SHOAL_ROUTER_ID", "1..63 letters, digits, '.', '_' or '-'")
        _check(bool(_NAME.fullmatch(self.default_pool)), "SHOAL_DEFAULT_POOL", "1..63 letters, digits, '.', '_' or '-'")
        _check(bool(self.address), "SHOAL_ADDRESS", "host:port or unix:path")
        _check(urlsplit(self.redis_url).scheme in {"redis", "rediss", "unix"}, "SHOAL_REDIS_URL", "redis://, rediss:// or unix://")
        weights = self.tenant_weights.values()
        _check(all(math.isfinite(weight) and weight > 0 for weight in weights), "SHOAL_TENANT_WEIGHTS", "numbers above 0")
        _check(self.max_queued_tokens >= 1, "SHOAL_MAX_QUEUED_TOKENS", "at least 1")
        _check(0 < self.default_deadline_seconds <= 86_400, "SHOAL_DEADLINE_SECONDS", "above 0, at most 86400")
        _check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")
        _check(1000 <= self.lease_ms <= 600_000, "SHOAL_LEASE_MS", "1000..600000")
        _check(1 <= self.max_attempts <= 100, "SHOAL_MAX_ATTEMPTS", "1..100")
        _check(self.log_level in get_args(LogLevel), "SHOAL_LOG_LEVEL", f"one of {', '.join(get_args(LogLevel))}")

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Reads SHOAL_* variables; raises InvalidInput naming the variable and what it may be."""
        return Settings(
            router_id=environ.get("SHOAL_ROUTER_ID") or _random_id(),
            address=environ.get("SHOAL_ADDRESS") or "127.0.0.1:50051",
            redis_url=environ.get("SHOAL_REDIS_URL") or "redis://127.0.0.1:6379/0",
            default_pool=environ.get("SHOAL_DEFAULT_POOL") or environ.get("SHOAL_POOL") or "cpu",
            tenant_weights=parse_weights(environ.get("SHOAL_TENANT_WEIGHTS", "")),
            max_queued_tokens=int(_number(environ, "SHOAL_MAX_QUEUED_TOKENS", 20_000_000)),
            default_deadline_seconds=_number(environ, "SHOAL_DEADLINE_SECONDS", 60.0),
            grace_seconds=_number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            lease_ms=int(_number(environ, "SHOAL_LEASE_MS", 15_000)),
            max_attempts=int(_number(environ, "SHOAL_MAX_ATTEMPTS", 3)),
            log_level=_level(environ.get("SHOAL_LOG_LEVEL") or "INFO"),
        )

    def describe(self) -> dict[str, str | float]:
        """For the one log line at the start; the password of the Redis URL is left out."""
        url = urlsplit(self.redis_url)
        return {
            "router_id": self.router_id,
            "address": self.address,
            "redis": f"{url.scheme}://{url.hostname or ''}{url.path}",
            "default_pool": self.default_pool,
            "tenant_weights": ",".join(f"{tenant}={weight:g}" for tenant, weight in self.tenant_weights.items()),
            "max_queued_tokens": self.max_queued_tokens,
            "default_deadline_seconds": self.default_deadline_seconds,
            "grace_seconds": self.grace_seconds,
            "lease_ms": self.lease_ms,
            "max_attempts": self.max_attempts,
        }


def parse_weights(text: str) -> Mapping[str, float]:
    """`a=1,b=2` as {"a": 1.0, "b": 2.0}. Raises InvalidInput."""
    weights = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        tenant, equals, weight = entry.rpartition("=")
        try:
            weights[tenant] = float(weight)
        except ValueError:
            equals = ""
        _check(bool(tenant and equals), "SHOAL_TENANT_WEIGHTS", "entries `tenant=weight` separated by commas")
    return MappingProxyType(weights)


def _random_id() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].strip("-.")
    return f"{host or 'router'}-{secrets.token_hex(4)}"


def _check(holds: bool, name: str, allowed: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} must be {allowed}", field=name)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    _check(math.isfinite(value), name, f"a number, not {text!r}")
    return value


def _level(text: str) -> LogLevel:
    for level in get_args(LogLevel):
        if text == level:
            return text  # type: ignore[return-value]
    raise InvalidInput(f"SHOAL_LOG_LEVEL must be one of {', '.join(get_args(LogLevel))}", field="SHOAL_LOG_LEVEL")
