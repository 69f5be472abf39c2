"""The aliases of the mesh: names that requests use for models, in one Redis hash that every router
reads once a second.

A change is one write with a new revision, so routers see all of it or nothing. Each router records
the revision that it uses, and `wait_until_used` returns when all routers use a change. A router
that has not read the aliases for MAX_ALIASES_AGE_SECONDS must read them before it resolves one, so
no router uses an older revision after that time, even if it was suspended or cut off from Redis.

Unlike all else in Redis, nothing reports aliases again. A router that finds older ones than
it knows writes its own back, because Redis may lose its data. A router that knows none gives the
others RESTORE_SECONDS for that before it trusts an empty hash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from redis.asyncio import Redis
from shoal.v1 import aliases_pb2

from libs.aliases import scripts
from libs.errors import AliasChanged, InvalidInput, NoCapacity
from libs.queue.connection.client import translated

MAX_ALIASES_AGE_SECONDS: Final = 5.0
MAX_ALIASES: Final = 1000
RESTORE_SECONDS: Final = 2.5
"""Two refreshes of all routers, and a margin."""
_WAIT_MARGIN_SECONDS: Final = 0.5
_READERS_POLL_SECONDS: Final = 0.05
_FAILURE_SECONDS: Final = 1.0
"""Time after a failed read during which calls that need one fail at once."""
_ANY_REVISION: Final = -1

_ALIASES, _READERS = "v1:{fleet}:aliases", "v1:{fleet}:alias_readers"


@dataclass(frozen=True, slots=True)
class AliasTable:
    """All aliases by name, at one revision."""

    aliases: Mapping[str, aliases_pb2.Alias]
    revision: int


class AliasStore:
    """One router's view of the aliases, and its changes to them. Raises NoCapacity while Redis is
    away.
    """

    def __init__(self, redis: Redis, router_id: str) -> None:
        self._redis = redis
        self._router_id = router_id
        # The state: the latest aliases, and when the read of them began, in monotonic seconds.
        self.table = AliasTable({}, 0)
        self._read_at = float("-inf")
        # Until then, in monotonic seconds, other routers may still restore lost aliases.
        self._settled_at = float("-inf")
        # The shared read of stale aliases, and when and why the last one failed.
        self._read: asyncio.Task[None] | None = None
        self._failed_at = float("-inf")
        self._failure = ""

    @property
    def is_stale(self) -> bool:
        """Return whether the aliases must be read before a name is resolved."""
        return time.monotonic() - self._read_at > MAX_ALIASES_AGE_SECONDS

    @property
    def is_settling(self) -> bool:
        """Return whether other routers may know aliases that Redis lost."""
        return self.table.revision == 0 and time.monotonic() < self._settled_at

    async def refresh_if_stale(self) -> None:
        """Read the aliases if they are too old to resolve a name. Concurrent calls share one read,
        and fail at once with NoCapacity shortly after one failed.
        """
        while self.is_stale:  # A read that took too long is stale again.
            if time.monotonic() - self._failed_at < _FAILURE_SECONDS:
                raise NoCapacity(self._failure, retry_after=_FAILURE_SECONDS)
            if self._read is None:
                self._read = asyncio.create_task(self._shared_refresh())
            await asyncio.shield(self._read)  # A caller that is cancelled leaves it to the others.

    async def _shared_refresh(self) -> None:
        try:
            await self.refresh()
        except NoCapacity as error:
            self._failed_at, self._failure = time.monotonic(), error.message
        finally:
            self._read = None

    async def refresh(self) -> None:
        """Read the aliases, and record the revision that this router uses from now on."""
        while True:
            begun, known = time.monotonic(), self.table.revision
            revision, empty_ms, *found = await scripts.read_aliases(
                self._redis, (_ALIASES, _READERS), router_id=self._router_id, known=known
            )
            if revision < known:
                await self._restore()
            self._settled_at = begun + RESTORE_SECONDS - empty_ms / 1000
            if not found:
                self._read_at = max(self._read_at, begun)
                return
            if revision > self.table.revision:  # Another refresh may have read newer ones.
                self.table = AliasTable(_parsed(found[0]), revision)

    async def set(self, alias: aliases_pb2.Alias, expect_revision: int | None = None) -> int:
        """Create or replace an alias, and return its revision. Raises AliasChanged unless it has
        the revision `expect_revision` (0: unless it does not exist), InvalidInput at MAX_ALIASES.
        """
        return await self._write(alias.name, _without_revision(alias), expect_revision)

    async def remove(self, name: str, expect_revision: int | None = None) -> int:
        """Remove an alias, and return the revision of the change; 0 if it did not exist.
        Raises AliasChanged.
        """
        return await self._write(name, b"", expect_revision)

    async def _write(self, name: str, value: bytes, expect_revision: int | None) -> int:
        await self.refresh()  # Restores what Redis lost before it counts as changed.
        while self.is_settling:
            await asyncio.sleep(_READERS_POLL_SECONDS)
            await self.refresh()
        revision = cast(
            int,
            await scripts.set_alias(
                self._redis,
                (_ALIASES,),
                name=name,
                value=value,
                expected=_ANY_REVISION if expect_revision is None else expect_revision,
                most=MAX_ALIASES,
            ),
        )
        if revision == 0:
            raise AliasChanged(
                f"the alias {name} does not have revision {expect_revision}: read it again, then "
                "repeat the change",
                field="expect_revision",
            )
        if revision == -2:
            raise InvalidInput(
                f"the mesh has {MAX_ALIASES} aliases, its maximum: remove one first",
                field="alias.name",
            )
        await self.refresh()
        return max(revision, 0)

    async def wait_until_used(self, revision: int) -> None:
        """Return when no router uses an older revision: when all have recorded this one, or at the
        latest when those that have not must read the aliases before they use them.
        """
        while True:
            with translated():
                async with self._redis.pipeline(transaction=False) as pipeline:
                    pipeline.time()
                    pipeline.hgetall(_READERS)
                    (seconds, microseconds), readers = await pipeline.execute()
            now_ms = seconds * 1000 + microseconds // 1000
            oldest_ms = now_ms - int((MAX_ALIASES_AGE_SECONDS + _WAIT_MARGIN_SECONDS) * 1000)
            states = [tuple(map(int, state.split())) for state in readers.values()]
            if not any(at_ms > oldest_ms and used < revision for at_ms, used in states):
                return
            await asyncio.sleep(_READERS_POLL_SECONDS)

    async def forget_router(self, router_id: str) -> None:
        """Remove the record of a router that is gone."""
        with translated():
            await self._redis.hdel(_READERS, router_id)

    async def _restore(self) -> None:
        table = self.table
        values = [
            part
            for name, alias in table.aliases.items()
            for part in (name, b"%d " % alias.revision + _without_revision(alias))
        ]
        await scripts.restore_aliases(
            self._redis, (_ALIASES,), revision=table.revision, values=values
        )


def _parsed(fields: list[bytes]) -> dict[str, aliases_pb2.Alias]:
    found = {}
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        if name.startswith(b":"):  # The revision; no alias begins so.
            continue
        revision, _, message = value.partition(b" ")
        alias = aliases_pb2.Alias.FromString(message)
        alias.revision = int(revision)
        found[name.decode()] = alias
    return dict(sorted(found.items()))


def _without_revision(alias: aliases_pb2.Alias) -> bytes:
    plain = aliases_pb2.Alias()
    plain.CopyFrom(alias)
    plain.ClearField("revision")
    return plain.SerializeToString()
