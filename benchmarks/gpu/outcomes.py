"""A plugin for pytest: appends a line of JSON for each test that is through to the file that
SHOAL_GPU_OUTCOMES names.
"""

from __future__ import annotations

import json
import os
from typing import Final

import pytest

FILE: Final = "SHOAL_GPU_OUTCOMES"
WORDS: Final = 2000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record setup, call and teardown of each test; the processes of pytest-xdist leave this to the
    first one.
    """
    path = os.environ.get(FILE)
    if (
        not path
        or "PYTEST_XDIST_WORKER" in os.environ
        or not (report.when == "call" or report.outcome != "passed")
    ):
        return
    words = report.longreprtext
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        words = str(report.longrepr[2]).removeprefix("Skipped: ")
    reported = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "words": words[-WORDS:],
    }
    with open(path, "a") as file:
        file.write(json.dumps(reported) + "\n")
