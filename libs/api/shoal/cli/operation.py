"""`shoal models`, `shoal status` and `shoal explain`: what an operator looks at and steers."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from shoal.cli.console import emit, note, show, size, table
from shoal.cli.options import Json, Reach, connected, take_parameters
from shoal.status import LaneStatus, Model, ModelPlace, ProcessStatus, Scheduler, WorkerStatus

ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="org/name, or org/name@revision.", show_default=False)]

models = typer.Typer(no_args_is_help=False, help="Show and steer models. Without a command: list them.")


@connected
def _list(mesh: Reach, as_json: Json = False) -> None:
    """List models: those that workers have on disk, hold, or failed to load."""
    found = mesh().models.list()
    if as_json:
        emit([asdict(model) for model in found])
    else:
        show(_models(found))


def _without_command(context: typer.Context, **values: object) -> None:
    if context.invoked_subcommand is None:
        _list(**values)
        return
    for name in values:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option} belongs after the command: shoal models {context.invoked_subcommand} {option} …")


# `shoal models` takes the options of `shoal models list`.
_context, _ = inspect.signature(_without_command, eval_str=True).parameters.values()
take_parameters(_without_command, [_context, *inspect.signature(_list).parameters.values()])
models.callback(invoke_without_command=True)(_without_command)
models.command("list")(_list)


@models.command("show")
@connected
def _show(mesh: Reach, model: ModelId, as_json: Json = False) -> None:
    """Show one model: what its files say, and where it is."""
    found = mesh().models.get(model)
    if as_json:
        emit(asdict(found))
    else:
        _describe(found)


@models.command("load")
@connected
def _load(
    mesh: Reach,
    model: ModelId,
    pool: Annotated[str, typer.Option(help="Workers to load it on; default the model's first pool, else the mesh's default.")] = "",
    as_json: Json = False,
) -> None:
    """Make a model resident on one more worker, and wait until it is (--timeout)."""
    _steered(mesh().models.load(model, pool=pool), as_json)


@models.command("evict")
@connected
def _evict(mesh: Reach, model: ModelId, as_json: Json = False) -> None:
    """Unload a model everywhere, after the batches in flight."""
    workers = mesh().models.evict(model)
    if as_json:
        emit({"model": model, "worker_ids": workers})
    else:
        note(f"{model}: unloading from {', '.join(workers)}" if workers else f"{model} is on no worker")


@models.command("pin")
@connected
def _pin(mesh: Reach, model: ModelId, as_json: Json = False) -> None:
    """Keep a model resident where it is."""
    _steered(mesh().models.pin(model), as_json)


@models.command("unpin")
@connected
def _unpin(mesh: Reach, model: ModelId, as_json: Json = False) -> None:
    """Let a model be evicted again."""
    _steered(mesh().models.pin(model, False), as_json)


@connected
def status(mesh: Reach, as_json: Json = False) -> None:
    """Show the mesh: workers, lanes and models."""
    client = mesh()
    serving, seen = client.healthy(), client.mesh()
    if as_json:
        emit({"address": client.address, "serving": serving} | asdict(seen))
        return
    state = ("serving", "bold green") if serving else ("not serving", "bold red")
    show(Text.assemble(f"router {seen.router_id} at {client.address}: ", state))
    show(_leader(seen.scheduler))
    show(_workers(seen.workers) if seen.workers else Text("no workers: requests wait until one comes", style="yellow"))
    if any(process.state != "running" or process.restarts for process in seen.processes):
        show(_processes(seen.processes))
    if seen.lanes:
        show(_lanes(seen.lanes))
    if seen.models:
        show(_models(seen.models))


@connected
def explain(mesh: Reach, model: ModelId, as_json: Json = False) -> None:
    """Say why a model is where it is, and what will happen next."""
    found = mesh().explain(model)
    if as_json:
        emit(asdict(found))
        return
    show(Text(found.summary))
    show(_leader(found.scheduler))
    if found.plan:
        show(Text(f"its plan: {found.plan}"))
    made = table("workers", "worker", "pool", "may serve it", "score", "why", right=("score",))
    for worker in sorted(found.workers, key=lambda worker: (not worker.eligible, -worker.score, worker.worker_id)):
        made.add_row(worker.worker_id, worker.pool, "yes" if worker.eligible else "no", f"{worker.score:.2f}", worker.reason)
    show(made if found.workers else Text("no workers", style="yellow"))


def _leader(scheduler: Scheduler) -> Text:
    if not scheduler.scheduler_id:
        return Text("no scheduler leads: workers claim models by themselves")
    return Text(f"scheduler {scheduler.scheduler_id} leads; its last plan was {scheduler.age_seconds:.1f} s ago")


def _steered(model: Model, as_json: bool) -> None:
    if as_json:
        emit(asdict(model))
    else:
        pinned = ", pinned" if any(place.pinned for place in model.places) else ""
        places = ", ".join(place.worker_id for place in model.places if place.state == "resident")
        note(f"{model.model}: {model.state}{pinned}" + (f" on {places}" if places else ""))


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    right = ("memory", "warm", "computed", "wasted", "last seen")
    made = table("workers", "worker", "pool", "device", "memory", "warm", "resident", *right[2:], right=right)
    for worker in workers:
        made.add_row(
            worker.worker_id + _leaving(worker),
            worker.pool,
            worker.device,
            f"{size(worker.used_bytes)} of {size(worker.memory_bytes)}",
            f"{size(worker.host_used_bytes)} of {size(worker.host_memory_bytes)}" if worker.host_memory_bytes else "",
            "\n".join(worker.resident),
            f"{worker.device_seconds:,.0f} s",
            _share(worker.wasted_seconds, worker.device_seconds),
            f"{worker.heartbeat_age_seconds:.1f} s",
        )
    return made


def _processes(processes: tuple[ProcessStatus, ...]) -> Table:
    """Those that ended at least once."""
    made = table("processes", "process", "state", "restarts", "how it last ended", right=("restarts",))
    for process in processes:
        if process.detail:
            style = {"running": "", "given up": "bold red"}.get(process.state, "yellow")
            made.add_row(process.name, Text(process.state, style=style), str(process.restarts), Text(process.detail))
    return made


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else ""


def _leaving(worker: WorkerStatus) -> str:
    if worker.preempted_in_seconds is not None:
        return f" (machine gone in {worker.preempted_in_seconds:.0f} s)"
    return " (draining)" if worker.draining else ""


def _lanes(lanes: tuple[LaneStatus, ...]) -> Table:
    numbers = ("queued", "tokens", "leased", "done", "expired", "cancelled", "dead")
    made = table("lanes", "pool", "model", "adapter", *numbers, right=numbers)
    for lane in lanes:
        counts = (
            lane.queued_jobs,
            lane.queued_tokens,
            lane.leased_tokens,
            lane.done_jobs,
            lane.expired_jobs,
            lane.cancelled_jobs,
            lane.dead_jobs,
        )
        made.add_row(lane.pool, lane.model, lane.adapter, *(f"{count:,}" for count in counts))
    return made


def _models(models: list[Model] | tuple[Model, ...]) -> Table:
    numbers = ("dimensions", "max tokens", "size", "queued tokens")
    made = table("models", "model", "state", "tasks", *numbers, "on", right=numbers)
    for model in models:
        card = model.card
        made.add_row(
            model.model,
            _state(model),
            ", ".join(card.tasks) if card else "",
            str(card.dimensions or card.multi_vector_dimensions or "") if card else "",
            f"{card.max_tokens:,}" if card else "",
            _size(model),
            f"{model.queued_tokens:,}",
            Text(model.last_error, style="red")
            if model.state == "failed"
            else ", ".join(place.worker_id for place in model.places if place.state in ("resident", "loading", "downloading")),
        )
    return made


def _size(model: Model) -> str:
    """As loaded; of one that is not, what its files say that it will take."""
    known = (model.card.bytes if model.card else 0) or max((place.bytes for place in model.places), default=0)
    return size(known) if known else ""


def _state(model: Model) -> str:
    is_measured = model.state == "downloading" and model.downloaded is not None
    return f"downloading {model.downloaded:.0%}".replace("%", " %") if is_measured else model.state


def _progress(place: ModelPlace) -> str:
    """Of a download, once its size is known."""
    return f"downloading {size(place.downloaded_bytes)} of {size(place.download_bytes)}" if place.download_bytes else ""


def _describe(model: Model) -> None:
    facts = Table(show_header=False, box=None, title=model.model, title_justify="left", title_style="bold")
    facts.add_row("state", _state(model))
    if model.card is not None:
        card = model.card
        for name, value in (
            ("revision", card.revision),
            ("family", card.family),
            ("tasks", ", ".join(card.tasks)),
            ("representations", ", ".join(card.representations)),
            ("dimensions", str(card.dimensions or card.multi_vector_dimensions or "")),
            ("max tokens", f"{card.max_tokens:,}"),
            ("size", _size(model) or "unknown until loaded"),
            ("number format", card.data_type),
            ("prompts", ", ".join(card.prompts)),
            ("pools", ", ".join(card.pools)),
            ("labels", ", ".join(card.labels)),
        ):
            if value:
                facts.add_row(name, value)
    facts.add_row("queued", f"{model.queued_tokens:,} tokens")
    if model.last_error:
        facts.add_row("last error", Text(model.last_error, style="red"))
    show(facts)
    if model.places:
        show(_places(model))


def _places(model: Model) -> Table:
    numbers = ("size", "in host memory", "load", "tokens/s")
    made = table("places", "worker", "state", *numbers, "adapters", "error", right=numbers)
    for place in model.places:
        made.add_row(
            place.worker_id + (" (pinned)" if place.pinned else ""),
            _progress(place) or place.state + (", leaving" if place.leaving else ""),
            size(place.bytes),
            size(place.host_bytes) if place.host_bytes else "",
            f"{place.load_seconds:.2f} s" if place.load_seconds else "",
            f"{place.tokens_per_second:,.0f}" if place.tokens_per_second else "",
            "\n".join(place.adapters),
            place.last_error,
        )
    return made
