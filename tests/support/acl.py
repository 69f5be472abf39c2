"""The mesh's Redis users on a test's redis-server."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from libs.queue import connect
from libs.queue.connection.acl import User

PASSWORD = "a password of the tests"


async def add_user(admin: Redis, user: User) -> None:
    """Add a user as `shoal redis-acl` writes it to its file, unless it exists."""
    await admin.execute_command("ACL", "SETUSER", *user.line(PASSWORD).split()[1:])


def connect_as(user: User, url: str) -> Redis:
    """A client of the server at a unix:// `url`, for the user."""
    return connect(
        f"{url.replace('unix://', f'unix://{user.name}@')}?password={PASSWORD.replace(' ', '%20')}"
    )


async def refusals(admin: Redis) -> list[str]:
    """Return and reset the server's refusals: user, reason and command, key or channel."""
    entries: list[Any] = await admin.execute_command("ACL", "LOG", 128)
    await admin.execute_command("ACL", "LOG", "RESET")
    reported = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in entries]
    return [
        " ".join(one[part].decode() for part in (b"username", b"reason", b"object"))
        for one in reported
    ]
