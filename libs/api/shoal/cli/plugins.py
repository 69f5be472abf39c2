"""Commands of other distributions: entry points of the group `shoal.commands`, such as `shoal up`
of the services.

One with a dot in its name is added to a group: `models.check` is `shoal models check`. An entry
point names a `typer.Typer` or a function with typer's annotations. It is imported only when its
command runs: `shoal up` may import torch, and `shoal status` must not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from shoal.cli import help
from shoal.cli.console import print_error
from shoal.cli.model_names import complete_local_model

GROUP = "shoal.commands"
OURS, OTHERS = "Run a mesh", "From other distributions"
_KNOWN = {
    "up": "Start a whole mesh on this machine: Redis, router, scheduler and workers.",
    "certs": "Create or renew a development authority and certificates for all parts of a mesh.",
    "redis-acl": "Print the Redis ACL users of router and scheduler, with the least privileges.",
    "profile": "Profile a model's forward pass and a request.",
    "simulate": "Replay requests with eviction policies and fleets, and compare their costs.",
    "models.check": "Explain how a model's files are interpreted, and test it on this machine.",
    "models.convert": "Convert a model's torch, GGUF or ONNX weights to safetensors.",
}
# All arguments after the name are passed to the command, --help included.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}
_Arguments = Annotated[list[str] | None, typer.Argument(autocompletion=complete_local_model)]


def add(app: typer.Typer) -> None:
    """Add a command for each entry point, and for each known command that is not installed one
    that says how to install it.
    """
    taken = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    found = {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in taken}
    for name in sorted(_KNOWN | found):
        summary = _KNOWN.get(name, "") or f"From {found[name].value.partition(':')[0]}."
        place, own_name = _place(app, name)
        panel = None if place is not app else OURS if name in _KNOWN else OTHERS
        place.command(own_name, help=summary, context_settings=_PASSED_ON, rich_help_panel=panel)(
            _run(name.replace(".", " "), found.get(name))
        )


def _place(app: typer.Typer, name: str) -> tuple[typer.Typer, str]:
    """Return the group of a command and its name there. The group is copied first, because other
    applications share it.
    """
    group, _, own_name = name.rpartition(".")
    for info in app.registered_groups:
        if info.name == group and info.typer_instance is not None:
            info.typer_instance = copy(info.typer_instance)
            info.typer_instance.registered_commands = [*info.typer_instance.registered_commands]
            return info.typer_instance, own_name
    return app, name


def _run(name: str, entry: EntryPoint | None) -> Callable[..., None]:
    def run(context: typer.Context, arguments: _Arguments = None) -> None:
        if entry is None:
            raise _missing(name)
        try:
            command = entry.load()
        except ImportError as error:
            print_error(f"`shoal {name}` cannot start: {error}", [], "")
            raise typer.Exit(1) from None
        if not isinstance(command, typer.Typer):
            function, command = (
                command,
                typer.Typer(add_completion=False, pretty_exceptions_show_locals=False),
            )
            command.command()(function)
        program = f"{context.find_root().info_name} {name}"
        command(args=arguments or [], prog_name=program, **help.CONTEXT)

    return run


def _missing(name: str) -> typer.Exit:
    print_error(
        f"`shoal {name}` is part of Shoal's services, which are not installed in this environment",
        [],
        (
            "pip install 'shoal-mesh[local]' installs them (docs/quickstart.md, From wheels); to "
            "call a mesh on another machine, none is needed: --address host:port"
        ),
    )
    return typer.Exit(1)
