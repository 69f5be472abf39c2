"""The two Redis users of a mesh, with the least privileges that router and scheduler need (ACL of
Redis 6.2 or newer).

A script runs with the permissions of the user who calls it, so the commands within scripts are
listed here, too. Redis cannot limit which loaded script a user runs, but only routers may load one:
the scheduler's user can run the mesh's scripts, but no other Lua. A new command in a script of
`libs/aliases`, `libs/fleet` or `libs/queue` must be added here: `tests/queue/test_acl.py` compares
this list with the commands in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from libs.queue.keys import FLEET_KEYS, LAYOUT, STREAMED_CHANNEL, WAKEUP_CHANNEL

_BOTH: Final = (
    *("info", "ping", "select", "time"),
    *("asking", "cluster|slots"),  # only on a cluster
    "evalsha",
    *("subscribe", "unsubscribe", "publish"),
    *("del", "get", "pexpire", "set"),
    *("hdel", "hget", "hgetall", "hmget", "hset"),
    *("zadd", "zcard", "zrange", "zrangebyscore", "zrem", "zremrangebyscore", "zscore"),
)
_ROUTER: Final = (
    # Shard channels, on a cluster of Redis 7 or Valkey; Redis 6.2 does not know their commands.
    "@pubsub",
    "script|load",
    *("exists", "hexists", "hincrby", "hkeys", "hlen", "hsetnx"),
    *("blpop", "lpop", "rpush", "xadd"),
    "zcount",
)


@dataclass(frozen=True, slots=True)
class User:
    """A Redis ACL user."""

    name: str
    commands: tuple[str, ...]
    """Commands in lower case, subcommands as `command|subcommand`, categories as `@category`."""
    keys: tuple[str, ...]
    """Key patterns."""
    channels: tuple[str, ...] = (WAKEUP_CHANNEL, f"{WAKEUP_CHANNEL}:*")
    """Channel patterns."""

    def line(self, password: str | None) -> str:
        """Return this user's line of an ACL file; without its first word, the arguments of `ACL
        SETUSER`.

        It holds only the password's digest; without a password the user is disabled.
        """
        state = (
            ("off",) if password is None else ("on", f"#{sha256(password.encode()).hexdigest()}")
        )
        rules = (
            *state,
            "resetkeys",
            *(f"~{pattern}" for pattern in self.keys),
            "resetchannels",
            *(f"&{pattern}" for pattern in self.channels),
            "-@all",
            *(f"+{command}" for command in self.commands),
        )
        return " ".join(("user", self.name, *rules))


ROUTER: Final = User(
    "shoal-router",
    tuple(sorted(_BOTH + _ROUTER)),
    ("v1:*",),
    (WAKEUP_CHANNEL, f"{WAKEUP_CHANNEL}:*", f"{STREAMED_CHANNEL}:*"),
)
# It may read the lengths and counters of lanes, but neither the payloads of jobs nor which router
# waits for their answers. No pattern is read-only: Redis has those (%R) from 7 on.
SCHEDULER: Final = User(
    "shoal-scheduler",
    tuple(sorted(_BOTH)),
    (
        LAYOUT,
        *FLEET_KEYS,
        *("v1:{fleet}:claim:*", "v1:{fleet}:orders:*"),
        "v1:{*}:lanes",
        *(f"v1:{{*}}:lane:*:{part}" for part in ("i", "b", "meta")),
    ),
)


def acl_file(*, router: str | None, scheduler: str | None, admin: str | None) -> str:
    """Return the text of a file for Redis' `aclfile`, given passwords.

    An unauthenticated connection is the user `default`. It is disabled or, with `admin`, needs that
    password and may run all commands.
    """
    default = (
        "off -@all" if admin is None else f"on #{sha256(admin.encode()).hexdigest()} ~* &* +@all"
    )
    return f"user default {default}\n{ROUTER.line(router)}\n{SCHEDULER.line(scheduler)}\n"
