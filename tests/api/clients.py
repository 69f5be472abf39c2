"""Both clients behind one face, so that every behaviour is tested of both."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import shoal


class AnyClient(Protocol):
    async def do(self, verb: str, *args: Any, **options: Any) -> Any:
        """Calls a verb by its dotted name."""

    async def close(self) -> None: ...


def _verb(client: object, name: str) -> Any:
    for part in name.split("."):
        client = getattr(client, part)
    return client


class BlockingSide:
    """`shoal.Client`, called from a thread as blocking code is."""

    def __init__(self, client: shoal.Client) -> None:
        self._client = client

    async def do(self, verb: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(_verb(self._client, verb), *args, **options)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)


class AsyncSide:
    """`shoal.AsyncClient`."""

    def __init__(self, client: shoal.AsyncClient) -> None:
        self._client = client

    async def do(self, verb: str, *args: Any, **options: Any) -> Any:
        return await _verb(self._client, verb)(*args, **options)

    async def close(self) -> None:
        await self._client.close()
