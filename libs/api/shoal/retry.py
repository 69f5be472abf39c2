"""When a failed request is sent again: pure decisions, asked by `shoal.call`. The clock and the dice are arguments.

Three bounds hold together: what may be retried at all (a RetryInfo, or no router reached), how often and how long one request is
tried (attempts, its deadline), and how many retries the whole client sends (budgets), so that an overloaded mesh is not given more
work by its callers' impatience. A try for which there was no connection gave the mesh nothing to do: no budget pays for the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.errors import CannotConnect, Overloaded, ShoalError

LONGEST_UNSENT_DELAY: Final = 1.0
"""Seconds between two tries while there is no connection: what waits goes on soon after a router is back."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts`: most tries of one request, the first included. Delays double from `first_delay` to `longest_delay` seconds (1 s
    while there is no connection), and are never shorter than the mesh's RetryInfo."""

    attempts: int = 40
    first_delay: float = 0.05
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_delay < 0 or self.longest_delay < self.first_delay:
            raise ValueError(f"a retry policy needs attempts >= 1 and 0 <= first_delay <= longest_delay, not {self}")


def is_unsent(error: ShoalError) -> bool:
    """Whether there was no connection to send the request on."""
    return isinstance(error, CannotConnect) and not error.was_sent


class RetryBudget:
    """A token bucket shared by all requests of a client: a retry takes a token, time and answers bring them.

    The full bucket lets every request in flight fail over at once when a router dies; after that, retries are at most
    `per_second`, plus a fifth of the requests that succeed (the shape of Finagle's retry budget). An empty bucket delays
    retries instead of failing them: the request's own deadline bounds the wait. Threads may share one: a lost update costs a token.
    """

    def __init__(self, *, capacity: float = 100.0, per_second: float = 10.0, per_success: float = 0.2) -> None:
        self._capacity, self._per_second, self._per_success = capacity, per_second, per_success
        self._tokens = capacity
        self._seen = 0.0

    def succeeded(self) -> None:
        self._tokens = min(self._capacity, self._tokens + self._per_success)

    def wait(self, now: float) -> float:
        """Seconds until a retry may be sent."""
        self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._seen) * self._per_second)
        self._seen = now
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        """Takes a token, which may be one that is still to come: later retries then wait for theirs behind it."""
        self._tokens -= 1.0


class RetryBudgets:
    """One for failing over to another router, and a small one for what the mesh refused because it has too much to do.

    Who comes back to a router that is full adds to what keeps it full. So of a client that asks ten times a second or more, over a
    long overload, at most a sixth comes twice (0.5 / s for the time, 0.1 for each answer, and 5 in all), whatever RetryInfo says.
    """

    def __init__(self) -> None:
        self._failover = RetryBudget()
        self._overload = RetryBudget(capacity=5.0, per_second=0.5, per_success=0.1)

    def succeeded(self) -> None:
        self._failover.succeeded()
        self._overload.succeeded()

    def of(self, error: ShoalError) -> RetryBudget | None:
        """What a retry after `error` is paid from; None: from nothing, since no router has heard of the request."""
        if is_unsent(error):
            return None
        return self._overload if isinstance(error, Overloaded) else self._failover


class Attempts:
    """The tries of one request. Times are seconds of any one clock; `jitter` is a random number of 0..1."""

    def __init__(self, policy: RetryPolicy, *, deadline: float, addresses: int) -> None:
        self._policy, self._deadline, self._addresses = policy, deadline, addresses
        self._failed = 0
        self._unreached = 0

    def remaining(self, now: float) -> float:
        return self._deadline - now

    def delay(self, error: ShoalError, *, jitter: float) -> float | None:
        """Seconds to wait before the next try, or None: `error` is final."""
        self._failed += 1
        reached = not isinstance(error, CannotConnect)
        if (reached and error.retry_after is None) or self._failed >= self._policy.attempts:
            return None
        self._unreached = 0 if reached else self._unreached + 1
        if not reached and self._unreached % self._addresses != 0:
            return 0.0  # Another router has not been asked yet: no reason to wait for it.
        backoff = self._policy.first_delay * 2.0 ** (self._failed - 1)
        longest = min(self._policy.longest_delay, LONGEST_UNSENT_DELAY) if is_unsent(error) else self._policy.longest_delay
        wanted = max(error.retry_after or 0.0, min(backoff, longest))
        return wanted * (1.0 + 0.5 * jitter)  # Never earlier than told; spread, so that callers do not come back together.
