"""Decide when a failed request is sent again. Pure: the time and random numbers are arguments.

Three limits apply together: which errors are retried at all (those with a RetryInfo, or that
reached no router), how often and how long one request is tried (attempts, its deadline), and how
many retries the whole client sends (budgets), so that retries do not add to the load of an
overloaded mesh. An attempt that found no connection cost the mesh nothing, so the next one takes
nothing from a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.errors import CannotConnect, Overloaded, ShoalError

MAX_UNSENT_DELAY: Final = 1.0
"""The longest delay in seconds while no router is connected; requests continue soon after one is
back.
"""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of the retries of one request.

    Delays double from `first_delay` to `longest_delay` seconds (1 s while no router is connected)
    and are never shorter than the mesh's RetryInfo.

    Attributes:
        attempts: Maximum number of attempts, including the first.
    """

    attempts: int = 40
    first_delay: float = 0.05
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_delay < 0 or self.longest_delay < self.first_delay:
            raise ValueError(
                "a retry policy must have attempts >= 1 and 0 <= first_delay <= longest_delay, "
                f"not {self}"
            )


def is_unsent(error: ShoalError) -> bool:
    """Return True if no connection existed on which the request could be sent."""
    return isinstance(error, CannotConnect) and not error.was_sent


class RetryBudget:
    """A token bucket shared by all requests of a client: a retry takes a token, time and successful
    requests add tokens.

    A full bucket lets every request in flight fail over at once when a router dies; after that,
    retries are at most `per_second`, plus a fifth of the requests that succeed (the shape of
    Finagle's retry budget). An empty bucket delays retries instead of failing them: the request's
    own deadline bounds the wait. Threads may share one: a lost update costs one token.
    """

    def __init__(
        self, *, capacity: float = 100.0, per_second: float = 10.0, per_success: float = 0.2
    ) -> None:
        self._capacity, self._per_second, self._per_success = capacity, per_second, per_success
        self._tokens = capacity
        self._filled_at = 0.0

    def succeeded(self) -> None:
        self._tokens = min(self._capacity, self._tokens + self._per_success)

    def wait(self, now: float) -> float:
        """Seconds until a retry may be sent."""
        self._tokens = min(
            self._capacity, self._tokens + max(0.0, now - self._filled_at) * self._per_second
        )
        self._filled_at = now
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        """Take a token, also from an empty bucket: later retries then wait until that one has been
        added, too.
        """
        self._tokens -= 1.0


class RetryBudgets:
    """The budget for failing over to another router, and a small one for requests that the mesh
    refused because of overload.

    Retries at an overloaded router prolong the overload. So of the requests of a client that sends
    ten a second or more, over a long overload, at most a sixth is sent twice (tokens: 0.5 / s, 0.1
    for each success, and 5 at first), whatever RetryInfo says.
    """

    def __init__(self) -> None:
        self._failover = RetryBudget()
        self._overload = RetryBudget(capacity=5.0, per_second=0.5, per_success=0.1)

    def succeeded(self) -> None:
        self._failover.succeeded()
        self._overload.succeeded()

    def budget_for(self, error: ShoalError) -> RetryBudget | None:
        """Return the budget for a retry after `error`; None: a retry needs no token, since no
        router has received the request.
        """
        if is_unsent(error):
            return None
        return self._overload if isinstance(error, Overloaded) else self._failover


class Attempts:
    """The tries of one request. Times are seconds of one monotonic clock; `jitter` is a random
    number in 0..1.
    """

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
            return 0.0  # The next router has not been tried yet: no reason to wait.
        backoff = self._policy.first_delay * 2.0 ** (self._failed - 1)
        longest = (
            min(self._policy.longest_delay, MAX_UNSENT_DELAY)
            if is_unsent(error)
            else self._policy.longest_delay
        )
        delay = max(error.retry_after or 0.0, min(backoff, longest))
        return delay * (
            1.0 + 0.5 * jitter
        )  # Never below RetryInfo; spread, so that callers do not retry all at once.
