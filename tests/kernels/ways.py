"""Which implementation attention takes in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.kernels import native
from libs.kernels.native import attention, library


def use_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by torch's operators."""
    monkeypatch.setattr(native, "attend", lambda *arguments: None)


def use_native(monkeypatch: pytest.MonkeyPatch, path: Path, instructions: str) -> None:
    """Attention by one of the library's instruction sets; skips where the CPU does not have it."""
    if instructions not in library.instruction_sets(path):
        pytest.skip(f"this CPU has no {instructions}")
    chosen = library.load(path, instructions)
    monkeypatch.setattr(attention, "native", lambda: chosen)
