"""Estimate how long copies of a model are busy with queued tokens, and how long a load takes. Pure.

Used wherever a service compares waiting work: admission, routing and load claims in routers, the
plan and the scaler in the scheduler, evictions in workers.

The rule:

1. A copy's speed is the average of the speeds that the model's copies have measured. A copy without
  a measurement, such as one that still loads, counts as average.
2. The copies divide the work evenly: seconds = tokens / (speed * copies).

A model that no copy has measured has no speed by this rule. The assumption depends on the decision:

- Routers assume nothing. They do not refuse a request, pass over its preferred pool or start
  another load because of a guess; the first batch, a moment later, measures the speed.
- The plan and the workers rank models by their work, and a model that has never run must be ranked
  too, or it could never displace another. They use `assumed_speed` with `peers`: they compare
  models on the same hardware, and the average of the peers reflects that hardware.
- The scaler must know the number of workers to start before any worker exists. It uses
  `assumed_speed` without peers: it sums the load of a pool's models, and the average would count a
  large model like a small one.

Tokens of generated texts count by `answer_tokens` everywhere.

The caller also decides which tokens count. Leased tokens count in full where work must not be
underestimated; the scaler counts half of them (`LEASED_SHARE`), their average remainder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

SEED_BYTES_PER_SECOND: Final[Mapping[str, float]] = MappingProxyType({"cpu": 5e11, "cuda": 5e13})
"""An assumed speed of a device as tokens per second times bytes of weights. MiniLM reaches 6,000
tokens/s on one core of a CPU (docs/benchmarks.md); an L4 has a hundred times its arithmetic
throughput.
"""
UNKNOWN_WEIGHT_BYTES: Final = 400_000_000
"""The assumed size of a model of unknown size: an encoder of 100 million parameters in float32."""
MIN_WEIGHT_BYTES: Final = 50_000_000
"""Smaller models are not assumed to be faster than one of this size: fixed costs dominate."""

DEFAULT_ANSWER_TOKENS: Final = 256
"""Assumed tokens of a generated text if its request does not bound them: the default of workers for
a checkpoint without one.
"""

UNKNOWN_LOAD_SECONDS: Final = 5.0
"""Assumed duration of a load of a model of unknown size."""
LOAD_OVERHEAD_SECONDS: Final = 2.0
"""Assumed duration of a load before and after its weights are read."""
LOAD_BYTES_PER_SECOND: Final = 1.5e9
"""Assumed speed of reading weights from a local disk."""


def answer_tokens(max_tokens: int) -> int:
    """Return the tokens that count as work for each text to generate: its longest answer.

    Routers add them to the price of a request; workers count those that an answer did not need when
    it ends. So prices and measured speeds have the same unit, whatever the length of answers.

    Args:
        max_tokens: The request's bound; 0 if it has none.
    """
    return max_tokens or DEFAULT_ANSWER_TOKENS


def average_speed(speeds: Iterable[float]) -> float:
    """Return the average of measured speeds in tokens per second; 0 if all are 0, that is, not
    measured.
    """
    measured = [speed for speed in speeds if speed > 0]
    return sum(measured) / len(measured) if measured else 0.0


def assumed_speed(device: str, weight_bytes: int, peers: Iterable[float] = ()) -> float:
    """Return the tokens per second, above 0, to assume for a model without a measured speed.

    Args:
        device: `cpu`; any other name is an accelerator.
        weight_bytes: Bytes of the model; 0: unknown.
        peers: Speeds of other models on the same hardware, 0 if not measured. Their average counts
            if there is one.
    """
    seed = SEED_BYTES_PER_SECOND["cpu" if device == "cpu" else "cuda"]
    weights = max(weight_bytes or UNKNOWN_WEIGHT_BYTES, MIN_WEIGHT_BYTES)
    return average_speed(peers) or seed / weights


def work_seconds(tokens: float, speed: float, copies: int = 1) -> float:
    """Return how long `copies` of a model are busy with `tokens`.

    Args:
        speed: Tokens per second of one copy, above 0; with `copies=1`, of all copies together.
        copies: A model without a copy counts as having one, which its work would get.
    """
    return tokens / (speed * max(1, copies))


def busy_copies(tokens_per_second: float, speed: float) -> float:
    """Return how many copies of a model its arriving tokens keep busy. `speed`: of one copy in
    tokens per second, above 0.
    """
    return tokens_per_second / speed


def assumed_load_seconds(weight_bytes: int) -> float:
    """Return the duration to assume for a load that no worker has measured. `weight_bytes`: 0 if
    unknown.
    """
    return (
        LOAD_OVERHEAD_SECONDS + weight_bytes / LOAD_BYTES_PER_SECOND
        if weight_bytes
        else UNKNOWN_LOAD_SECONDS
    )
