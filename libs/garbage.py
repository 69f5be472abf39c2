"""What the collector of cycles need not read again and again."""

from __future__ import annotations

import gc


def freeze() -> None:
    """What is there now stays: modules, classes and functions, which live as long as the process.

    To be called once everything is imported. A full collection reads every object with all threads stopped; for what our imports
    leave alone that takes tens of milliseconds (docs/decisions.md).
    """
    gc.collect()
    gc.freeze()
