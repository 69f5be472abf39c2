"""Settings of the worker's tests."""

from __future__ import annotations

import pytest

from services.worker import app
from services.worker.machine import notice
from services.worker.memory import graphs
from services.worker.mesh import link
from tests.worker.fakes import HANG_SECONDS


@pytest.fixture(autouse=True)
def _peers_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not give up calls of the worker after seconds: in a test its peers share the event loop
    and the cores with it, and a busy machine may not run them for that long.
    """
    monkeypatch.setattr(app, "_HAND_BACK_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(app, "_GOODBYE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(graphs, "_GRANT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(notice, "_TIMEOUT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "COMPLETE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "PULL_MARGIN_SECONDS", HANG_SECONDS)
