"""Weights, rate limits and quotas of tenants: the file SHOAL_TENANTS, its content, and charging
requests to the rates.

`TENANTS` is the only definition of the file's keys. The file is read again when it changes, by
`Upkeep.refresh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import yaml

from libs.catalog.shapes import At, Count, Key, Named, Number, Record, Text
from libs.errors import InvalidInput, RateLimited
from libs.queue.rates import RateLimit, Rates
from libs.serving.watched import Watched

VARIABLE: Final = "SHOAL_TENANTS"


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of one request to its tenant's rate limit."""

    rates: Rates
    tenant: str
    rate: RateLimit
    tokens: int

    async def refund(self) -> None:
        """Undo the charge."""
        await self.rates.give_back(self.tenant, self.rate, self.tokens)

    async def refund_unused(self, tokens: int) -> None:
        """Give back the tokens that the request did not use, at most those that were charged. The
        request stays charged.
        """
        unused = min(tokens, self.tokens)
        await self.rates.give_back(self.tenant, self.rate, unused, requests=0)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The limits of one tenant; 0: no limit."""

    weight: float = 1.0
    """Fair-queueing weight in a busy lane."""
    rate: RateLimit = field(default_factory=RateLimit)
    """Rate limit over all routers."""
    queued_tokens: int = 0
    """Quota: estimated tokens that may wait at each router, in all lanes together."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants: those that the file names, and `default` for all others."""

    default: Tenant = field(default_factory=Tenant)
    by_name: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))

    def tenant(self, name: str) -> Tenant:
        return self.by_name.get(name, self.default)

    def __str__(self) -> str:
        return ", ".join(self.by_name) or "none by name"


class TenantLimits:
    """The limits of tenants, and the rates over all routers to which requests are charged."""

    def __init__(self, tenants: Watched[Tenants], rates: Rates) -> None:
        self._tenants = tenants
        self._rates = rates

    def tenant(self, name: str) -> Tenant:
        return self._tenants.content.tenant(name)

    async def charge(self, name: str, tenant: Tenant, tokens: int) -> Charge | None:
        """Charge a request to its tenant's rate limit; None without one. Raises RateLimited without
        charging.
        """
        if not tenant.rate.is_limited:
            return None
        wait = await self._rates.take(name, tenant.rate, tokens)
        if wait > 0:
            raise RateLimited(
                f"tenant {name} is limited to {tenant.rate}; this request would pass in"
                f" {wait:.3f} s",
                retry_after=wait,
            )
        return Charge(self._rates, name, tenant.rate, tokens)


DEFAULT_TENANTS: Final = Tenants()
"""Without a file: the defaults for all tenants."""
_NAME = Text(r"[\x21-\x7e]{1,128}", "1..128 printable ASCII characters without spaces")
_TENANT = Record(
    lambda **values: values,
    {
        "weight": Key(
            Number(0.001, 1000),
            "share of a busy lane relative to the weights of other tenants, default 1",
        ),
        "requests_per_second": Key(
            Number(), "requests per second over all routers, default 0: no limit"
        ),
        "tokens_per_second": Key(
            Number(), "estimated tokens per second over all routers, default 0: no limit"
        ),
        "burst_seconds": Key(
            Number(0.001, 3600), "seconds of unused rate that may be used in one burst, default 5"
        ),
        "queued_tokens": Key(
            Count(0), "estimated tokens that may wait at each router, default 0: no limit"
        ),
    },
)
TENANTS = Record(
    lambda **values: values,
    {
        "default": Key(
            _TENANT,
            "defaults for tenants that are not named, and for keys that a named tenant omits",
        ),
        "tenants": Key(Named(_NAME, _TENANT), "tenants by name"),
    },
)


def parse_tenants(text: str, path: str) -> Tenants:
    """Parse the text of the file `path`. Raises InvalidInput naming file, line and key. Pure."""
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidInput(
            f"{path}:{line}: is not YAML: {error.problem}", field=VARIABLE
        ) from error
    except (RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path}: is not YAML: {error}", field=VARIABLE) from error
    if node is None:
        raise InvalidInput(f"{path}:1: the file is empty", field=VARIABLE)
    found = TENANTS.read(node, At(path, whole="the file"))
    default = _tenant(Tenant(), found.get("default", {}))
    by_name = {name: _tenant(default, values) for name, values in found.get("tenants", {}).items()}
    return Tenants(default, MappingProxyType(by_name))


def _tenant(base: Tenant, values: Mapping[str, float]) -> Tenant:
    rates = {
        name: value for name, value in values.items() if name not in ("weight", "queued_tokens")
    }
    return Tenant(
        values.get("weight", base.weight),
        replace(base.rate, **rates),
        int(values.get("queued_tokens", base.queued_tokens)),
    )


def watch_tenants(path: Path) -> Watched[Tenants]:
    """Watch the file. Raises InvalidInput: a router does not start with an invalid file."""
    return Watched([path], partial(read_tenants, path))


def read_tenants(path: Path) -> Tenants:
    """Read the tenants of a file. Raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}", field=VARIABLE) from error
    return parse_tenants(text, str(path))
