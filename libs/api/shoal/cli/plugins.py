"""Commands of other distributions: entry points of the group `shoal.commands`, such as `shoal up` of the services.

An entry point names a `typer.Typer` or a function with typer's annotations. It is loaded when its command runs and not before: that
of `shoal up` may import torch, and `shoal status` must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer

from shoal.cli.console import complain

GROUP = "shoal.commands"
_KNOWN = {"up": "Start a whole mesh on this machine: Redis, router and workers."}
# Everything after the name is the command's own, --help included.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add(app: typer.Typer) -> None:
    """Adds a command for each entry point, and one that gives advice for each well-known command that is not installed."""
    taken = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    found = {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in taken}
    for name in sorted(_KNOWN | found):
        words = _KNOWN.get(name, "") or f"From {found[name].value.partition(':')[0]}."
        app.command(name, help=words, context_settings=_PASSED_ON)(_run(name, found.get(name)))


def _run(name: str, entry: EntryPoint | None) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        if entry is None:
            raise _missing(name)
        command = entry.load()
        if not isinstance(command, typer.Typer):
            function, command = command, typer.Typer(add_completion=False)
            command.command()(function)
        command(args=context.args, prog_name=f"{context.find_root().info_name} {name}")

    return run


def _missing(name: str) -> typer.Exit:
    complain(
        f"`shoal {name}` is part of Shoal's services, which are not installed in this environment",
        [],
        "install them from the repository (see the quickstart in its README), or talk to a running mesh with --address host:port",
    )
    return typer.Exit(1)
