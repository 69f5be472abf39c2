"""Work that outlives its call ends with a log line, or unheard where its loop ends first."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import pytest

from libs.errors import NoCapacity
from services.router.state.background import Background


async def _fail(error: Exception) -> None:
    raise error


async def test_errors_end_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()
    with caplog.at_level(logging.INFO):
        background.spawn(_fail(NoCapacity("redis is unavailable")))
        background.spawn(_fail(ValueError("a bug")))
        await background.finished()
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("INFO", "background work given up"),
        ("ERROR", "background work failed"),
    ]


def test_work_that_is_cancelled_before_it_begins_leaves_no_warning() -> None:
    async def run() -> None:
        Background().spawn(_fail(NoCapacity("redis is unavailable")))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    gc.collect()  # the warnings of earlier tests' objects
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert not found
