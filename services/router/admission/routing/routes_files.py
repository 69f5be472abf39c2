"""Read the files behind `routes.py`, pools.yaml and the catalog's cards, and read them again when
they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from libs.catalog.cards import read_catalog
from libs.catalog.overrides import Catalog
from libs.catalog.pools import Pools, check_cards, read_pools
from libs.serving.watched import Watched
from services.router.admission.routing.routes import Routes


def watch_routes(pools: Path | None, folders: Sequence[Path], default_pool: str) -> Watched[Routes]:
    """Watch the routing files. Raises InvalidInput: a router does not start with invalid files."""
    paths = [*([] if pools is None else [pools]), *folders]
    return Watched(paths, partial(_read, pools, folders, default_pool))


def _read(pools: Path | None, folders: Sequence[Path], default_pool: str) -> Routes:
    known = Pools() if pools is None else read_pools(pools)
    catalog = read_catalog(folders) if folders else Catalog()  # the shipped cards name no pools
    check_cards(known, catalog)
    return Routes(known, catalog, default_pool)
