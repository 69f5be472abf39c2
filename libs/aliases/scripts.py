"""The atomic Redis operations of the aliases. Times are from Redis' clock, so routers' clocks do
not matter.
"""

from __future__ import annotations

from libs.queue.scripts import CLOCK, Reply, Rest, script


@script("aliases", prologues=[CLOCK])
async def set_alias(*, name: str, value: bytes, expected: int, most: int) -> Reply: ...


@script("aliases", "readers", prologues=[CLOCK])
async def read_aliases(*, router_id: str, known: int) -> Reply: ...


@script("aliases")
async def restore_aliases(*, revision: int, values: Rest) -> Reply: ...
