"""The two Redis users of a mesh: what router and scheduler do there, and nothing else (ACL of Redis 6.2 or newer).

Scripts run with the rights of who calls them, so the commands within are here, too. `tests/queue/test_acl.py` holds this to what is
really used: a new command in a script of `libs/queue` or `libs/fleet` must be named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from libs.queue.keys import BELL, LAYOUT

_BOTH: Final = (
    *("info", "ping", "select", "time"),
    *("evalsha", "script|load"),
    *("subscribe", "unsubscribe", "publish"),
    *("del", "get", "pexpire", "set"),
    *("hdel", "hget", "hgetall", "hmget", "hset"),
    *("zadd", "zcard", "zrange", "zremrangebyscore"),
)
_ROUTER: Final = (
    *("exists", "hexists", "hincrby", "hkeys", "hlen"),
    *("blpop", "lpop", "rpush", "xadd"),
    *("zcount", "zrangebyscore", "zrem", "zscore"),
)


@dataclass(frozen=True, slots=True)
class User:
    """Of Redis. `commands` in small letters, subcommands as `command|subcommand`; `keys` as patterns."""

    name: str
    commands: tuple[str, ...]
    keys: tuple[str, ...]

    def line(self, password: str | None) -> str:
        """A line of an ACL file, or what follows `ACL SETUSER` but for the first word. Only the password's digest is in it; without
        one the user is off."""
        state = ("off",) if password is None else ("on", f"#{sha256(password.encode()).hexdigest()}")
        rules = (
            *state,
            "resetkeys",
            *(f"~{pattern}" for pattern in self.keys),
            "resetchannels",
            f"&{BELL}",
            "-@all",
            *(f"+{command}" for command in self.commands),
        )
        return " ".join(("user", self.name, *rules))


ROUTER: Final = User("shoal-router", tuple(sorted(_BOTH + _ROUTER)), ("v1:*",))
# Of lanes it sees how long they are and what they count, not the payloads, and not who is to be answered.
SCHEDULER: Final = User(
    "shoal-scheduler",
    tuple(sorted(_BOTH)),
    (LAYOUT, "v1:{fleet}:*", "v1:{*}:lanes", *(f"v1:{{*}}:lane:*:{part}" for part in ("i", "b", "meta"))),
)


def acl_file(*, router: str | None, scheduler: str | None, admin: str | None) -> str:
    """A file for Redis' `aclfile`, given passwords. Whoever does not authenticate is the user `default`, who is off, or (with
    `admin`) needs that password and may do everything."""
    default = "off -@all" if admin is None else f"on #{sha256(admin.encode()).hexdigest()} ~* &* +@all"
    return f"user default {default}\n{ROUTER.line(router)}\n{SCHEDULER.line(scheduler)}\n"
