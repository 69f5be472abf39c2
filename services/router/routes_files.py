"""The files behind `routes.py`: pools.yaml and the catalog's cards, read again when they change; no router restarts for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from libs.catalog.cards import read_catalog
from libs.catalog.overrides import Catalog
from libs.catalog.pools import Pools, check_cards, read_pools
from libs.serving.watched import Watched
from services.router.routes import Routes


class RoutesFiles:
    """`routes` as the files said when they were last read without fault. Without files: `fixed`, for ever."""

    def __init__(self, fixed: Routes | None = None, watched: Watched[Routes] | None = None) -> None:
        self._fixed = fixed or Routes()
        self._watched = watched

    @staticmethod
    def of(pools: Path | None, folders: Sequence[Path], default_pool: str) -> RoutesFiles:
        """Raises InvalidInput: a router does not start with files that are wrong."""
        paths = [*([] if pools is None else [pools]), *folders]
        if not paths:
            return RoutesFiles(Routes(default_pool=default_pool))
        return RoutesFiles(watched=Watched(paths, partial(_read, pools, folders, default_pool)))

    @property
    def routes(self) -> Routes:
        return self._fixed if self._watched is None else self._watched.content

    async def look(self) -> None:
        """Reads the files again if they have changed. Wrong ones leave what was known, and are a warning, once."""
        if self._watched is not None:
            await asyncio.to_thread(self._watched.look)


def _read(pools: Path | None, folders: Sequence[Path], default_pool: str) -> Routes:
    known = Pools() if pools is None else read_pools(pools)
    catalog = read_catalog(folders) if folders else Catalog()  # the shipped cards name no pools
    check_cards(known, catalog)
    return Routes(known, catalog, default_pool)
