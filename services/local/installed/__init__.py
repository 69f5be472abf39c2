"""The package `shoal_mesh`, all that the wheel shoal-mesh makes importable.

It has the commands that the wheel adds to `shoal`, and those that are called `shoal-edge`,
`shoal-router`, `shoal-scheduler` and `shoal-worker`.

`libs` and `services` lie inside it (`setup.py`), outside every import path: these commands put them
first on the path of their process.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
CODE: Final = HERE / "_code" if (HERE / "_code").is_dir() else HERE.parents[2]
"""The folder that holds `libs` and `services`: of the wheel, or the checkout of an editable
installation.
"""
# Commands and readers of `shoal`: the module of each, and the extra that installs its requirements.
COMMANDS: Final = {
    "up": ("services.local.command:up", "local"),
    "certs": ("services.local.trust.command:certs", "local"),
    "redis_acl": ("services.local.trust.command:redis_acl", "local"),
    "check": ("services.worker.check.command:check", "worker"),
    "convert": ("services.worker.check.convert:convert", "worker"),
    "simulate": ("services.scheduler.simulate.command:app", "scheduler"),
    "profile": ("services.local.profile.command:profile", "local"),
    "read_text_layer": ("libs.documents.layer:read_text_layer", "worker"),
}


def edge() -> None:
    """`shoal-edge` is `python -m services.edge` of a checkout."""
    _run("edge")


def router() -> None:
    """`shoal-router` is `python -m services.router` of a checkout."""
    _run("router")


def scheduler() -> None:
    """`shoal-scheduler` is `python -m services.scheduler` of a checkout."""
    _run("scheduler")


def worker() -> None:
    """`shoal-worker` is `python -m services.worker` of a checkout."""
    _run("worker")


def __getattr__(name: str) -> object:
    """Return a command of COMMANDS, which is imported when it is run. Raises ImportError in one
    line where something is not installed.
    """
    if name not in COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, extra = COMMANDS[name]
    module, _, attribute = place.partition(":")
    _enter()
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ImportError(_advice(error, extra)) from None


def _run(role: str) -> None:
    _enter()
    try:
        runpy.run_module(f"services.{role}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        sys.exit(f"shoal-{role}: {_advice(error, role)}")


def _enter() -> None:
    if str(CODE) not in sys.path:
        sys.path.insert(0, str(CODE))


def _advice(error: ModuleNotFoundError, extra: str) -> str:
    return f"{error.name} is not installed: pip install 'shoal-mesh[{extra}]'"
