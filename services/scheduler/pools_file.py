"""pools.yaml, read again when it changes, so that no scheduler restarts for it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from libs.catalog.pools import Pools, read_pools
from libs.serving.watched import Watched


class PoolsFile:
    """`pools` as the file said when it was last read without fault. Without a file: `fixed`, for ever."""

    def __init__(self, fixed: Pools | None = None, watched: Watched[Pools] | None = None) -> None:
        self._fixed = fixed or Pools()
        self._watched = watched

    @staticmethod
    def of(path: Path) -> PoolsFile:
        """Raises InvalidInput: a scheduler does not start with a file that is wrong."""
        return PoolsFile(watched=Watched([path], partial(read_pools, path)))

    @property
    def pools(self) -> Pools:
        return self._fixed if self._watched is None else self._watched.content

    async def look(self) -> None:
        """Reads the file again if it has changed. A wrong one leaves what was known, and is a warning, once."""
        if self._watched is not None:
            await asyncio.to_thread(self._watched.look)
