"""The atomic Redis operations of the aliases. Times are from Redis' clock, so routers' clocks do
not matter.
"""

from __future__ import annotations

from libs.queue.scripts import Reply, Rest, script


@script("aliases", prologue="aliases")
async def set_alias(*, name: str, value: bytes, expected: int, most: int) -> Reply: ...


@script("aliases", "readers", prologue="aliases")
async def read_aliases(*, router_id: str, known: int) -> Reply: ...


@script("aliases")
async def restore_aliases(*, revision: int, values: Rest) -> Reply: ...
