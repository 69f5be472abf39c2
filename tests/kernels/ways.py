"""The implementation that a test uses on a CPU: the native library or torch's operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.kernels.native import library


def use_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything by torch's operators."""
    monkeypatch.setattr(library, "choice", lambda: "none: for this test")


def use_native(monkeypatch: pytest.MonkeyPatch, path: Path, instructions: str) -> None:
    """Use one of the library's instruction sets; skip if the CPU lacks it."""
    if instructions not in library.instruction_sets(path):
        pytest.skip(f"this CPU has no {instructions}")
    chosen = library.load(path, instructions)
    monkeypatch.setattr(library, "choice", lambda: chosen)
