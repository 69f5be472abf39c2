"""The native library for tests of kernels, built where this machine has a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.kernels.native import build


@pytest.fixture(scope="session", name="library")
def built_library() -> Path:
    """The library of this checkout's sources; skips where it cannot be built."""
    try:
        return build.build()
    except build.CannotBuild as error:
        if "fails" in str(error):
            raise
        pytest.skip(str(error))
