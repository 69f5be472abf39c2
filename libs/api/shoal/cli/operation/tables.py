"""The tables of the operation commands."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from shoal.cli.console import facts, show, size, table
from shoal.status import (
    LaneStatus,
    Model,
    ModelPlace,
    Placement,
    ProcessStatus,
    Scheduler,
    WorkerStatus,
)


def leader_line(scheduler: Scheduler) -> Text:
    if not scheduler.scheduler_id:
        return Text("no scheduler leads: workers claim models themselves")
    return Text(
        f"scheduler {scheduler.scheduler_id} leads; its last plan was "
        f"{scheduler.age_seconds:.1f} s ago"
    )


def placement_table(placement: Placement) -> Table:
    """Eligible workers first, by score."""
    made = table("workers", "worker", "pool", "eligible", "score", "reason", right=("score",))
    for worker in sorted(
        placement.workers, key=lambda worker: (not worker.eligible, -worker.score, worker.worker_id)
    ):
        made.add_row(
            worker.worker_id,
            worker.pool,
            "yes" if worker.eligible else "no",
            f"{worker.score:.2f}",
            worker.reason,
        )
    return made


def workers_table(workers: tuple[WorkerStatus, ...]) -> Table:
    right = ("memory", "warm", "computed", "wasted", "last seen")
    made = table(
        "workers", "worker", "pool", "device", "memory", "warm", "resident", *right[2:], right=right
    )
    for worker in workers:
        made.add_row(
            worker.worker_id + _departure(worker),
            worker.pool,
            _device(worker),
            f"{size(worker.used_bytes)} of {size(worker.memory_bytes)}",
            f"{size(worker.host_used_bytes)} of {size(worker.host_memory_bytes)}"
            if worker.host_memory_bytes
            else "",
            "\n".join(worker.resident),
            f"{worker.device_seconds:,.0f} s",
            _share(worker.wasted_seconds, worker.device_seconds),
            f"{worker.heartbeat_age_seconds:.1f} s",
        )
    return made


def processes_table(processes: tuple[ProcessStatus, ...]) -> Table:
    """Only processes that have ended at least once."""
    made = table(
        "processes", "process", "state", "restarts", "how it last ended", right=("restarts",)
    )
    for process in processes:
        if process.detail:
            style = {"running": "", "given up": "bold red"}.get(process.state, "yellow")
            made.add_row(
                process.name,
                Text(process.state, style=style),
                str(process.restarts),
                Text(process.detail),
            )
    return made


def _device(worker: WorkerStatus) -> str:
    """Return the device with the instruction set of its native kernels; a worker without native
    kernels is slower, so that is shown, too.
    """
    if not worker.kernels:
        return worker.device
    return (
        f"{worker.device}, "
        f"{worker.kernels if not worker.kernels.startswith('none') else 'no native kernels'}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else ""


def _departure(worker: WorkerStatus) -> str:
    if worker.preempted_in_seconds is not None:
        return f" (machine preempted in {worker.preempted_in_seconds:.0f} s)"
    return " (draining)" if worker.draining else ""


def lanes_table(lanes: tuple[LaneStatus, ...]) -> Table:
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


def models_table(models: list[Model] | tuple[Model, ...]) -> Table:
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
            model_size(model),
            f"{model.queued_tokens:,}",
            Text(model.last_error, style="red")
            if model.state == "failed"
            else ", ".join(
                place.worker_id
                for place in model.places
                if place.state in ("resident", "loading", "downloading")
            ),
        )
    return made


def model_size(model: Model) -> str:
    """Return the size of the loaded model, or before that the estimate from its files; empty if
    unknown.
    """
    known = (model.card.bytes if model.card else 0) or max(
        (place.bytes for place in model.places), default=0
    )
    return size(known) if known else ""


def _state(model: Model) -> str:
    has_progress = model.state == "downloading" and model.downloaded is not None
    return f"downloading {model.downloaded:.0%}".replace("%", " %") if has_progress else model.state


def _progress(place: ModelPlace) -> str:
    """Return the progress of a download; empty if its size is not known."""
    return (
        f"downloading {size(place.downloaded_bytes)} of {size(place.download_bytes)}"
        if place.download_bytes
        else ""
    )


def show_model(model: Model) -> None:
    found = facts(model.model)
    found.add_row("state", _state(model))
    if model.card is not None:
        card = model.card
        for name, value in (
            ("revision", card.revision),
            ("family", card.family),
            ("tasks", ", ".join(card.tasks)),
            ("representations", ", ".join(card.representations)),
            ("dimensions", str(card.dimensions or card.multi_vector_dimensions or "")),
            ("max tokens", f"{card.max_tokens:,}"),
            ("size", model_size(model) or "unknown until loaded"),
            ("number format", card.data_type),
            ("prompts", ", ".join(card.prompts)),
            ("pools", ", ".join(card.pools)),
            ("labels", ", ".join(card.labels)),
        ):
            if value:
                found.add_row(name, value)
    found.add_row("queued", f"{model.queued_tokens:,} tokens")
    if model.last_error:
        found.add_row("last error", Text(model.last_error, style="red"))
    show(found)
    if model.places:
        show(_places_table(model))


def _places_table(model: Model) -> Table:
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
