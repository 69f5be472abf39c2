"""Validate workers' messages (protos/shoal/v1/worker.proto). Pure: the message in, InvalidInput
with the field's path out.

Workers are only half trusted: a faulty or compromised one must not harm the work of others. Every
router and scheduler reads heartbeats, so they are checked before they are published: names are
printable ASCII, numbers are finite, and texts are limited in size, with U+FFFD for control
characters, which could control an operator's terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import MutableSequence
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.pools import NAME, WORDS
from libs.errors import InvalidInput
from libs.text import without_controls
from services.router.admission.validation import report_limits as limits
from services.router.admission.validation.limits import Limit

_PLAIN: Final = re.compile(r"[!-~]+")
_POOL: Final = re.compile(NAME)
_LARGEST: Final = 1e18
_MAX_SIZE: Final = 1 << 31
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def check_pull(request: worker_pb2.PullRequest) -> None:
    """Check a worker's Pull. Raises InvalidInput."""
    _check_name(request.worker_id, "worker_id")
    _check_pool(request.pool, "pool")
    _check_optional(request.epoch, "epoch")
    if request.budget_tokens < 1:
        raise InvalidInput("budget_tokens must be at least 1", field="budget_tokens")
    if request.budget_jobs < 1:
        raise InvalidInput("budget_jobs must be in 1..256", field="budget_jobs")
    if math.isnan(request.wait_seconds) or request.wait_seconds < 0:
        raise InvalidInput("wait_seconds must be in 0..10", field="wait_seconds")
    if request.batch_id or request.asked_again:
        _check_name(request.batch_id, "batch_id")
    limits.MANY.check(len(request.lanes), "lanes")
    limits.EXCEPTED.check(len(request.except_tenants), "except_tenants")
    for index, tenant in enumerate(request.except_tenants):
        _check_optional(tenant, f"except_tenants[{index}]", limits.TENANT)
    for index, lane in enumerate(request.lanes):
        _check_lane(lane, f"lanes[{index}]")


def check_complete(request: worker_pb2.CompleteRequest) -> None:
    """Raise InvalidInput for an invalid call. The router that waits for the results checks their
    content.
    """
    _check_name(request.worker_id, "worker_id")
    _check_lane(request.lane, "lane")
    _check_name(request.batch_id, "batch_id")
    limits.MANY.check(len(request.jobs), "jobs")
    for index, job in enumerate(request.jobs):
        _check_name(job.job_id, f"jobs[{index}].job_id")


def check_connect(request: worker_pb2.ConnectRequest) -> None:
    """Check a worker's Connect. Raises InvalidInput."""
    _check_name(request.worker_id, "worker_id")
    _check_name(request.epoch, "epoch")


def check_deltas(request: worker_pb2.DeltasRequest) -> None:
    """Check the deltas that a worker streams. Raises InvalidInput."""
    _check_name(request.worker_id, "worker_id")
    limits.MANY.check(len(request.deltas), "deltas")
    for index, part in enumerate(request.deltas):
        for name in ("job_id", "router", "batch_id"):
            _check_name(getattr(part, name), f"deltas[{index}].{name}")
        limits.DELTA_TEXT.check(len(part.text), f"deltas[{index}].text")
        limits.CHUNKS_PART.check(len(part.chunks), f"deltas[{index}].chunks")


def check_heartbeat(request: worker_pb2.HeartbeatRequest) -> None:
    """Raise InvalidInput for an invalid heartbeat. Cuts long error texts, and replaces control
    characters.
    """
    _check_name(request.worker_id, "worker_id")
    _check_pool(request.pool, "pool")
    _check_optional(request.epoch, "epoch")
    request.device = _checked_text(request.device, "device", limits.WORDS)
    request.kernels = _checked_text(request.kernels, "kernels", limits.WORDS)
    _check_numbers(request, "")
    limits.MANY.check(len(request.models), "models")
    limits.MANY.check(len(request.on_disk), "on_disk")
    _check_optional(request.on_disk_tag, "on_disk_tag")
    limits.MANY.check(len(request.batches), "batches")
    for index, batch in enumerate(request.batches):
        _check_lane(batch.lane, f"batches[{index}].lane")
        _check_name(batch.batch_id, f"batches[{index}].batch_id")
    for index, model in enumerate(request.models):
        _check_model(model, f"models[{index}]")
    for index, model in enumerate(request.on_disk):
        _check_model(model, f"on_disk[{index}]")
        if model.state != models_pb2.MODEL_STATE_COLD:
            raise InvalidInput(
                f"on_disk[{index}].state must be COLD", field=f"on_disk[{index}].state"
            )


def shorten(failure: worker_pb2.Failure) -> None:
    """Cut long texts, replace control characters, and clamp the retry delay to 0..3600 s, in
    place.
    """
    most = limits.MESSAGE.most
    failure.reason = without_controls(failure.reason[: limits.REASON.most])
    failure.field = without_controls(failure.field[: limits.FIELD.most])
    message = failure.message if len(failure.message) <= most else f"{failure.message[: most - 1]}…"
    failure.message = without_controls(message, lines=True)
    wait = failure.retry_after_seconds
    # NaN becomes 0, too.
    failure.retry_after_seconds = min(wait, 3600.0) if wait > 0 else 0.0


def _check_model(model: worker_pb2.WorkerModel, path: str) -> None:
    _check_name(model.model, f"{path}.model")
    _check_numbers(model, f"{path}.")
    model.data_type = _checked_text(model.data_type, f"{path}.data_type", limits.WORDS)
    for name, adapters in (
        ("adapters", model.adapters),
        ("failed_adapters", model.failed_adapters),
    ):
        limits.MANY.check(len(adapters), f"{path}.{name}")
        for adapter in adapters:
            _check_name(adapter, f"{path}.{name}")
    if model.HasField("failure"):
        shorten(model.failure)
    for failure in model.failed_adapters.values():
        shorten(failure)
    if model.HasField("card"):
        _check_card(model.card, f"{path}.card")


def _check_card(card: models_pb2.ModelCard, path: str) -> None:
    _check_optional(card.model, f"{path}.model")
    _check_numbers(card, f"{path}.")
    if (
        card.tokens_per_byte < 0
        or max(card.max_tokens, card.dimensions, card.multi_vector_dimensions) >= _MAX_SIZE
    ):
        raise InvalidInput(f"{path} has impossible sizes", field=path)
    limits.KINDS.check(len(card.tasks), f"{path}.tasks")
    limits.KINDS.check(len(card.representations), f"{path}.representations")
    limits.KINDS.check(len(card.inputs), f"{path}.inputs")
    if any(value >= _MAX_SIZE for _, value in card.images.ListFields()):
        raise InvalidInput(f"{path}.images has impossible sizes", field=f"{path}.images")
    limits.POOLS.check(len(card.pools), f"{path}.pools")
    for name in card.pools:
        _check_pool(name, f"{path}.pools")
    # Our workers refuse models with control characters in names; cards of other workers are shown
    # with U+FFFD.
    card.revision = _checked_text(card.revision, f"{path}.revision", limits.WORDS)
    card.family = _checked_text(card.family, f"{path}.family", limits.WORDS)
    card.data_type = _checked_text(card.data_type, f"{path}.data_type", limits.WORDS)
    _check_names(card.labels, f"{path}.labels", limits.LABELS, limits.LABELS_TEXT)
    _check_names(card.prompts, f"{path}.prompts", limits.PROMPTS, limits.PROMPTS_TEXT)


def _check_names(names: MutableSequence[str], path: str, count: Limit, together: Limit) -> None:
    """Check the names' count and total length, and replace control characters, in place."""
    count.check(len(names), path)
    text = "".join(names)
    together.check(len(text), path)
    if not text.isprintable():
        names[:] = map(without_controls, names)


def _checked_text(text: str, path: str, limit: Limit) -> str:
    """Return the text with its control characters replaced. Raises InvalidInput if it is too
    long.
    """
    limit.check(len(text), path)
    return without_controls(text)


def _check_lane(lane: worker_pb2.Lane, path: str) -> None:
    _check_pool(lane.pool, f"{path}.pool")
    _check_name(lane.model, f"{path}.model")
    _check_optional(lane.adapter, f"{path}.adapter")


def _check_name(name: str, path: str, limit: Limit = limits.NAME) -> None:
    if not name:
        raise InvalidInput(f"{path} is required", field=path)
    if len(name) > limit.most or not _PLAIN.fullmatch(name):
        raise InvalidInput(
            f"{path} must be 1..{limit.most} printable ASCII characters without spaces", field=path
        )


def _check_optional(name: str, path: str, limit: Limit = limits.NAME) -> None:
    if name:
        _check_name(name, path, limit)


def _check_pool(name: str, path: str) -> None:
    if not name:
        raise InvalidInput(f"{path} is required", field=path)
    if not _POOL.fullmatch(name):
        raise InvalidInput(f"{path} must be {WORDS}", field=path)


def _check_numbers(message: Message, prefix: str) -> None:
    """Raise InvalidInput for a floating-point field that is not a number, or beyond 1e18."""
    for field, value in message.ListFields():
        if field.type in _FLOATS and not abs(value) <= _LARGEST:
            raise InvalidInput(
                f"{prefix}{field.name} is {value:g}, which is not a valid number",
                field=f"{prefix}{field.name}",
            )
