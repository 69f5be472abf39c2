"""Routers that died are forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from libs.errors import NoCapacity
from services.router.state.membership import Membership


class Recorder:
    """The fleet, aliases and lanes of a membership. The answers to dead routers cannot be dropped,
    because a master is away.
    """

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def router_heartbeat(self, router_id: str) -> list[str]:
        return ["a", "b"]

    async def forget_router(self, router_id: str) -> None:
        self.forgotten.append(router_id)

    async def drop_replies(self, router_id: str) -> None:
        raise NoCapacity("away")


async def test_dead_routers_are_forgotten_though_their_answers_cannot_be_dropped() -> None:
    parts: Any = Recorder()
    with pytest.raises(NoCapacity):
        await Membership(parts, parts, parts, "c").send_heartbeat()
    assert parts.forgotten == ["a", "b"]
