"""Fixtures of the edge's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.edge import app, routers
from services.edge.ports import tei_grpc


@pytest.fixture(autouse=True)
def _probes_outlast_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start edges as ready. The scripted router shares the process with the edge, so that a pause
    of the process would be one of the router, which the edge then has for lost.
    """
    monkeypatch.setattr(routers, "PROBE_SECONDS", 60.0)
    monkeypatch.setattr(app, "START_SECONDS", 120.0)


@pytest.fixture
def messages_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the messages that TEI's gRPC API has read."""
    count, hold = 0, tei_grpc._Call.hold

    async def counting_hold(call: tei_grpc._Call, size: int) -> None:
        nonlocal count
        count += 1
        await hold(call, size)

    monkeypatch.setattr(tei_grpc._Call, "hold", counting_hold)
    return lambda: count
