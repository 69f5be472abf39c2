"""`shoal models`, `shoal status` and `shoal explain`: the commands of an operator."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.console import emit, note, show
from shoal.cli.model_names import ModelId
from shoal.cli.operation.tables import (
    lanes_table,
    leader_line,
    models_table,
    placement_table,
    processes_table,
    show_model,
    workers_table,
)
from shoal.cli.options import Json, OpenClient, connected, set_parameters
from shoal.status import Model

models = typer.Typer(
    no_args_is_help=False, help="Inspect and control models. Without a command: list them."
)


@connected
def _list(open_client: OpenClient, as_json: Json = False) -> None:
    """List models that workers have on disk or in memory, or failed to load."""
    found = open_client().models.list()
    if as_json:
        emit([asdict(model) for model in found])
    else:
        show(models_table(found))


def _without_command(context: typer.Context, **values: object) -> None:
    if context.invoked_subcommand is None:
        _list(**values)
        return
    for name in values:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(
                f"{option} belongs after the command: shoal models "
                f"{context.invoked_subcommand} "
                f"{option} …"
            )


# `shoal models` takes the options of `shoal models list`.
_context, _ = inspect.signature(_without_command, eval_str=True).parameters.values()
set_parameters(_without_command, [_context, *inspect.signature(_list).parameters.values()])
models.callback(invoke_without_command=True)(_without_command)
models.command("list")(_list)


@models.command("show")
@connected
def _show(open_client: OpenClient, model: ModelId, as_json: Json = False) -> None:
    """Show one model: its card, and the workers that have it."""
    found = open_client().models.get(model)
    if as_json:
        emit(asdict(found))
    else:
        show_model(found)


@models.command("load")
@connected
def _load(
    open_client: OpenClient,
    model: ModelId,
    pool: Annotated[
        str,
        typer.Option(
            help="Pool of the worker; default the model's first pool, otherwise the mesh's default."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Load a model on one more worker, and wait until it is resident (--timeout)."""
    _report_state(open_client().models.load(model, pool=pool), as_json)


@models.command("evict")
@connected
def _evict(open_client: OpenClient, model: ModelId, as_json: Json = False) -> None:
    """Unload a model everywhere, after the batches in flight."""
    workers = open_client().models.evict(model)
    if as_json:
        emit({"model": model, "worker_ids": workers})
    else:
        note(
            f"{model}: unloading from {', '.join(workers)}"
            if workers
            else f"{model} is on no worker"
        )


@models.command("pin")
@connected
def _pin(open_client: OpenClient, model: ModelId, as_json: Json = False) -> None:
    """Keep a model resident on the workers that hold it."""
    found = open_client().models.pin(model)
    _report_state(found, as_json)
    if not any(place.pinned for place in found.places):
        note(f"no worker has it in memory, so nothing is pinned: `shoal models load {model}` first")


@models.command("unpin")
@connected
def _unpin(open_client: OpenClient, model: ModelId, as_json: Json = False) -> None:
    """Allow the eviction of a pinned model again."""
    _report_state(open_client().models.pin(model, False), as_json)


@connected
def status(open_client: OpenClient, as_json: Json = False) -> None:
    """Show the mesh: workers, lanes and models."""
    client = open_client()
    serving, mesh = client.healthy(), client.mesh()
    if as_json:
        emit({"address": client.address, "serving": serving} | asdict(mesh))
        return
    state = ("serving", "bold green") if serving else ("not serving", "bold red")
    show(Text.assemble(f"router {mesh.router_id} at {client.address}: ", state))
    show(leader_line(mesh.scheduler))
    show(
        workers_table(mesh.workers)
        if mesh.workers
        else Text("no workers: requests wait until one starts", style="yellow")
    )
    if any(process.state != "running" or process.restarts for process in mesh.processes):
        show(processes_table(mesh.processes))
    if mesh.lanes:
        show(lanes_table(mesh.lanes))
    if mesh.models:
        show(models_table(mesh.models))


@connected
def explain(open_client: OpenClient, model: ModelId, as_json: Json = False) -> None:
    """Explain the placement of a model: why workers have it or not, and the scheduler's plan."""
    found = open_client().explain(model)
    if as_json:
        emit(asdict(found))
        return
    show(Text(found.summary))
    show(leader_line(found.scheduler))
    if found.plan:
        show(Text(f"its plan: {found.plan}"))
    show(placement_table(found) if found.workers else Text("no workers", style="yellow"))


def _report_state(model: Model, as_json: bool) -> None:
    if as_json:
        emit(asdict(model))
    else:
        pinned = ", pinned" if any(place.pinned for place in model.places) else ""
        places = ", ".join(place.worker_id for place in model.places if place.state == "resident")
        note(f"{model.model}: {model.state}{pinned}" + (f" on {places}" if places else ""))
