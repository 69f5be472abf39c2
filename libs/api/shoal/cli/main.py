"""The `shoal` command."""

from __future__ import annotations

from typing import Annotated

import typer

import shoal.cli.quiet  # noqa: F401  # before any other import of grpc
from shoal.cli import help, plugins
from shoal.cli.bulk import commands as bulk
from shoal.cli.evaluation import commands as evaluation
from shoal.cli.failures import checked_stdout
from shoal.cli.inference import commands as inference
from shoal.cli.inference import tokens
from shoal.cli.migration import aliases
from shoal.cli.migration import commands as migration
from shoal.cli.operation import commands as operation
from shoal.cli.top import command as top
from shoal.version import VERSION

INFERENCE = "Inference"
OPERATION = "Operation"
_ALIASES = {"embed": "The same as `encode`.", "rerank": "The same as `score`."}
HELP = "Shoal serves many small models from few accelerators: encode, score and extract."


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="shoal",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
        context_settings=dict(help.CONTEXT),
    )
    app.callback(help=HELP)(_root)
    for name in ("encode", "embed"):
        app.command(name, rich_help_panel=INFERENCE, short_help=_ALIASES.get(name))(
            inference.encode
        )
    for name in ("score", "rerank"):
        app.command(name, rich_help_panel=INFERENCE, short_help=_ALIASES.get(name))(inference.score)
    app.add_typer(inference.extract, name="extract", rich_help_panel=INFERENCE)
    app.add_typer(bulk.job, name="job", rich_help_panel=INFERENCE)
    app.command("tokenize", rich_help_panel=INFERENCE)(tokens.tokenize)
    app.command("eval", rich_help_panel=INFERENCE)(evaluation.evaluate)
    app.add_typer(operation.models, name="models", rich_help_panel=OPERATION)
    app.add_typer(aliases.alias, name="alias", rich_help_panel=OPERATION)
    app.add_typer(migration.migrate, name="migrate", rich_help_panel=OPERATION)
    app.command("status", rich_help_panel=OPERATION)(operation.status)
    app.command("explain", rich_help_panel=OPERATION)(operation.explain)
    app.command("top", rich_help_panel=OPERATION)(top.top)
    plugins.add(app)
    help.correct(app)
    return app


def main() -> None:
    """Run `shoal` and `python -m shoal`."""
    with checked_stdout():
        build()(prog_name="shoal")


if __name__ == "__main__":
    main()
