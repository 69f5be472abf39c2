"""`shoal alias`: lists, sets and removes aliases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.console import emit, note, show, table
from shoal.cli.failures import InputError
from shoal.cli.model_names import ModelId
from shoal.cli.options import Json, OpenClient, connected
from shoal.status import Alias

AliasName = Annotated[
    str, typer.Argument(metavar="ALIAS", help="A name without a slash.", show_default=False)
]

alias = typer.Typer(
    no_args_is_help=True,
    help="Manage aliases: names that requests use for models, changed for all routers at once.",
)


@alias.command("list")
@connected
def _list(open_client: OpenClient, as_json: Json = False) -> None:
    """List the aliases of the mesh with their models."""
    print_aliases(open_client().aliases.list(), as_json=as_json)


@alias.command("set")
@connected
def _set(
    open_client: OpenClient,
    alias: AliasName,
    model: ModelId,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also move an alias that stands for another model, or is being changed."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Point an alias at a model. The model answers requests that are sent afterwards."""
    client = open_client()
    before = next((one for one in client.aliases.list() if one.name == alias), None)
    if before is not None and before.model != model and not force:
        raise InputError(
            f"{alias} stands for {before.model}; its vectors cannot be compared with those of "
            f"{model}: use shoal migrate start {alias} --to {model} for a model with an index, or "
            "--force for any other"
        )
    if before is not None and before.other_model and not force:
        raise InputError(
            f"{alias} is being changed between {model} and {before.other_model}: use shoal migrate "
            f"finish {alias} to keep {model}, or --force to forget {before.other_model}"
        )
    revision = before.revision if before is not None else 0
    found = client.aliases.set(alias, model, expect_revision=None if force else revision)
    if as_json:
        emit(asdict(found))
    else:
        note(f"{found.name} -> {found.model}")


@alias.command("remove")
@connected
def _remove(open_client: OpenClient, alias: AliasName) -> None:
    """Remove an alias. Later requests that name it are refused."""
    client = open_client()
    # `get` refuses an unknown name. `remove` cannot, because it also returns False if the client
    # repeats a removal after it lost the answer.
    client.aliases.get(alias)
    client.aliases.remove(alias)
    note(f"{alias} is removed")


def print_aliases(found: Sequence[Alias], *, as_json: bool) -> None:
    """Print aliases to stdout."""
    if as_json:
        emit([asdict(one) for one in found])
        return
    if not found:
        show(Text("no aliases: shoal alias set ALIAS MODEL sets one"))
        return
    made = table("", "alias", "model", "next model", "previous model")
    for one in found:
        made.add_row(one.name, one.model, one.next_model, one.previous_model)
    show(made)
