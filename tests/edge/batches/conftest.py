"""Fixtures of the tests of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.edge.batches import lines as lines_of_batches
from services.edge.batches import manager
from services.edge.batches.runner import BatchRunner
from services.edge.batches.settings import BatchSettings


@pytest.fixture
def folder(tmp_path: Path) -> BatchSettings:
    """Return settings with a storage on the disk."""
    return BatchSettings(url=str(tmp_path / "files"))


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the number of requests that have results, which is more than the router received."""
    count, real = 0, lines_of_batches.result_line

    def result_line(*arguments: Any) -> bytes:
        nonlocal count
        count += 1
        return real(*arguments)

    monkeypatch.setattr(lines_of_batches, "result_line", result_line)
    return lambda: count


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[BatchRunner]:
    """Return the runners of all batches, in the order in which they start."""
    found: list[BatchRunner] = []

    class Recorded(BatchRunner):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            found.append(self)

    monkeypatch.setattr(manager, "BatchRunner", Recorded)
    return found
