"""Checks that a piece of code makes no forbidden calls to a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise RuntimeError for each call within this context that waits for the CUDA device.

    The mode belongs to the process, so it is reset however the context ends. torch warns once a
    process that the mode is a prototype; as an error (pytest's `filterwarnings`) that warning would
    leave the mode set for every later test.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
