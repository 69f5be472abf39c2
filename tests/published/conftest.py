"""Published weights are run by `--published` alone; without it their file is not collected."""

from __future__ import annotations

from pathlib import Path

import pytest

HUB_TESTS = "test_published.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        True if collection_path.name == HUB_TESTS and not config.getoption("--published") else None
    )
