"""The settings of submitted jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.bulk.failures import without_credentials

from libs import setting
from services.edge.jobs.roots import is_root

_TIB: Final = 1 << 40


def _parse_prices(text: str) -> Mapping[str, float]:
    """Parse pool=price, separated by commas. Raises ValueError."""
    found = {}
    for part in setting.split(text):
        pool, _, number = part.partition("=")
        found[pool.strip()] = float(number)
    return found


def _are_prices(prices: Mapping[str, float]) -> bool:
    return all(pool and 0 <= price < math.inf for pool, price in prices.items())


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The locations that submitted jobs may read and write, and their limits.

    Without roots the edge accepts and runs no jobs.
    """

    roots: tuple[str, ...] = setting.items(
        "SHOAL_JOBS_ROOTS",
        (),
        setting.Allowed(
            "absolute directories, or URLs such as s3://bucket/prefix, separated by commas",
            lambda roots: all(map(is_root, roots)),
        ),
        "The directories and URLs below which the input and output of submitted jobs must be. "
        "{tenant} in one stands for the name of the tenant. Empty: the edge accepts no jobs. It "
        "also needs SHOAL_BATCHES_URL, where jobs are recorded.",
        log=lambda roots: without_credentials(",".join(roots)),
    )
    tenant_jobs: int = setting.integer(
        "SHOAL_JOBS_TENANT_JOBS",
        20,
        "jobs",
        setting.in_range(1, 1000),
        "The maximum number of submitted jobs of a tenant that wait or run.",
    )
    input_bytes: int = setting.integer(
        "SHOAL_JOBS_INPUT_BYTES",
        _TIB,
        "bytes",
        setting.at_least(1),
        "The maximum size of the input of a submitted job, as it is stored.",
    )
    tenant_output_bytes: int = setting.integer(
        "SHOAL_JOBS_TENANT_OUTPUT_BYTES",
        16 * _TIB,
        "bytes",
        setting.at_least(1),
        "The maximum size of the outputs of all submitted jobs of a tenant that the edge has a "
        "record of. A job at which it is exceeded fails.",
    )
    process_bytes: int = setting.integer(
        "SHOAL_JOBS_PROCESS_BYTES",
        3 << 29,
        "bytes",
        setting.at_least(1 << 28),
        "The maximum memory (RLIMIT_DATA) of the process of a submitted job, of which an edge has "
        "up to four. A job that needs more fails.",
    )
    in_flight: int = setting.integer(
        "SHOAL_JOBS_IN_FLIGHT",
        8,
        "chunks",
        setting.in_range(1, 1000),
        "The maximum number of chunks that a submitted job has in flight. It sends fewer while the "
        "mesh refuses some.",
    )
    prices: Mapping[str, float] = setting.parsed(
        "SHOAL_JOBS_PRICES",
        "pool=price, separated by commas",
        _parse_prices,
        dict,
        "The price of a worker for an hour, by pool, in any currency: submitted jobs report their "
        "cost to tenants that may see the workers.",
        setting.Allowed("pools and their prices, such as l4=0.7,h100=4", _are_prices),
        default_text="none",
    )

    def __post_init__(self) -> None:
        setting.check_fields(self)
