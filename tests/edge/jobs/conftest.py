"""Fixtures of the tests of submitted jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.edge.jobs import jobs
from services.edge.jobs.runner import JobRunner
from tests.edge.jobs.parts import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return an empty root of jobs."""
    (tmp_path / "data").mkdir()
    return Files(tmp_path / "data", tmp_path / "files")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[JobRunner]:
    """Return the runners of all jobs, in the order in which they start."""
    found: list[JobRunner] = []

    class Recorded(JobRunner):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            found.append(self)

    monkeypatch.setattr(jobs, "JobRunner", Recorded)
    return found
