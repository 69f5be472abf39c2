"""The `shoal` command."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import inference, operation, plugins, top
from shoal.version import VERSION

HELP = "Shoal serves many small models from few accelerators: encode, score and extract."


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(name="shoal", no_args_is_help=True, pretty_exceptions_show_locals=False)
    app.callback(help=HELP)(_root)
    app.command("encode")(inference.encode)
    app.command("score")(inference.score)
    app.add_typer(inference.extract, name="extract")
    app.add_typer(operation.models, name="models")
    app.command("status")(operation.status)
    app.command("explain")(operation.explain)
    app.command("top")(top.top)
    plugins.add(app)
    return app


def main() -> None:
    """The entry point of `shoal` and `python -m shoal`."""
    build()(prog_name="shoal")


if __name__ == "__main__":
    main()
