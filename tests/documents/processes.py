"""The processes that read documents, among the children of this one."""

from __future__ import annotations

from contextlib import suppress

import psutil


def reading_processes() -> list[psutil.Process]:
    """Return the processes that run now; one that ends in the meantime is left out."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "child.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, or is only kept until its parent has read its status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
