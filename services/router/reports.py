"""Do workers keep their contract (protos/shoal/v1/worker.proto)? Pure: the message in, InvalidInput with the field's path out.

Workers are only half trusted: one with a fault of its own, or that somebody has taken over, must not harm what others do. What a
heartbeat says is read by every router and scheduler, so it is checked before it is told to anybody: names are plain, numbers are
numbers, and texts are of a size that travels, with U+FFFD for what would steer the terminal of an operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sized
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.pools import NAME, WORDS
from libs.errors import InvalidInput
from libs.text import without_controls

MOST: Final = 10_000
"""Lanes of a pull, models and leases of a heartbeat, answers of one Complete."""
MOST_EXCEPTED: Final = 16
MOST_LABELS: Final = 10_000
MOST_TEXT: Final = 1000
"""Characters of an error's text; a longer one is cut."""

_PLAIN: Final = re.compile(r"[!-~]{1,256}")
_POOL: Final = re.compile(NAME)
_LARGEST: Final = 1e18
_MOST_TOKENS: Final = 1 << 31
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def check_pull(request: worker_pb2.PullRequest) -> None:
    """Raises InvalidInput."""
    _check_name(request.worker_id, "worker_id")
    _check_pool(request.pool, "pool")
    if request.budget_tokens < 1:
        raise InvalidInput("budget_tokens must be at least 1", field="budget_tokens")
    if request.budget_jobs < 1:
        raise InvalidInput("budget_jobs must be in 1..256", field="budget_jobs")
    if math.isnan(request.wait_seconds) or request.wait_seconds < 0:
        raise InvalidInput("wait_seconds must be in 0..10", field="wait_seconds")
    if request.batch_id or request.asked_again:
        _check_name(request.batch_id, "batch_id")
    _check_count(request.lanes, "lanes")
    if len(request.except_tenants) > MOST_EXCEPTED:
        message = f"except_tenants has {len(request.except_tenants):,} entries; at most {MOST_EXCEPTED} are allowed"
        raise InvalidInput(message, field="except_tenants")
    for index, lane in enumerate(request.lanes):
        _check_lane(lane, f"lanes[{index}]")


def check_complete(request: worker_pb2.CompleteRequest) -> None:
    """Raises InvalidInput. What the results hold is checked by the router that waits for them."""
    _check_lane(request.lane, "lane")
    _check_name(request.batch_id, "batch_id")
    _check_count(request.jobs, "jobs")
    for index, job in enumerate(request.jobs):
        _check_name(job.job_id, f"jobs[{index}].job_id")


def check_connect(request: worker_pb2.ConnectRequest) -> None:
    """Raises InvalidInput."""
    _check_name(request.worker_id, "worker_id")
    _check_name(request.epoch, "epoch")


def check_heartbeat(request: worker_pb2.HeartbeatRequest) -> None:
    """Raises InvalidInput. Cuts texts of errors that are too long, and replaces control characters."""
    _check_name(request.worker_id, "worker_id")
    _check_pool(request.pool, "pool")
    _check_optional(request.epoch, "epoch")
    request.device = without_controls(request.device)
    _check_numbers(request, "")
    _check_count(request.models, "models")
    _check_count(request.batches, "batches")
    for index, batch in enumerate(request.batches):
        _check_lane(batch.lane, f"batches[{index}].lane")
        _check_name(batch.batch_id, f"batches[{index}].batch_id")
    for index, model in enumerate(request.models):
        _check_model(model, f"models[{index}]")


def shorten(failure: worker_pb2.Failure) -> None:
    """Cuts what is too long to travel, replaces control characters, and makes the time to wait a number, in place."""
    failure.reason, failure.field = without_controls(failure.reason[:100]), without_controls(failure.field[:300])
    message = failure.message if len(failure.message) <= MOST_TEXT else f"{failure.message[: MOST_TEXT - 1]}…"
    failure.message = without_controls(message, lines=True)
    wait = failure.retry_after_seconds
    failure.retry_after_seconds = min(wait, 3600.0) if wait > 0 else 0.0  # 0 for what is no number, too


def _check_model(model: worker_pb2.WorkerModel, path: str) -> None:
    _check_name(model.model, f"{path}.model")
    _check_numbers(model, f"{path}.")
    _check_count(model.adapters, f"{path}.adapters")
    _check_count(model.failed_adapters, f"{path}.failed_adapters")
    for adapter in (*model.adapters, *model.failed_adapters):
        _check_name(adapter, f"{path}.adapters")
    if model.HasField("failure"):
        shorten(model.failure)
    for failure in model.failed_adapters.values():
        shorten(failure)
    if model.HasField("card"):
        _check_card(model.card, f"{path}.card")


def _check_card(card: models_pb2.ModelCard, path: str) -> None:
    _check_optional(card.model, f"{path}.model")
    _check_numbers(card, f"{path}.")
    if len(card.labels) > MOST_LABELS:
        message = f"{path}.labels has {len(card.labels):,} entries; at most {MOST_LABELS:,} are allowed"
        raise InvalidInput(message, field=f"{path}.labels")
    if card.tokens_per_byte < 0 or max(card.max_tokens, card.dimensions, card.multi_vector_dimensions) >= _MOST_TOKENS:
        raise InvalidInput(f"{path} has sizes that no model has", field=path)
    for name in card.pools:
        _check_pool(name, f"{path}.pools")
    # Models with such names are refused by workers of ours; others' cards are shown with what stands for them.
    card.revision, card.family, card.data_type = map(without_controls, (card.revision, card.family, card.data_type))
    for names in (card.labels, card.prompts):
        if not "".join(names).isprintable():
            names[:] = map(without_controls, names)


def _check_lane(lane: worker_pb2.Lane, path: str) -> None:
    _check_pool(lane.pool, f"{path}.pool")
    _check_name(lane.model, f"{path}.model")
    _check_optional(lane.adapter, f"{path}.adapter")


def _check_name(name: str, path: str) -> None:
    if not name:
        raise InvalidInput(f"{path} is required", field=path)
    if not _PLAIN.fullmatch(name):
        raise InvalidInput(f"{path} must be 1..256 printable ASCII characters without spaces", field=path)


def _check_optional(name: str, path: str) -> None:
    if name:
        _check_name(name, path)


def _check_pool(name: str, path: str) -> None:
    if not name:
        raise InvalidInput(f"{path} is required", field=path)
    if not _POOL.fullmatch(name):
        raise InvalidInput(f"{path} must be {WORDS}", field=path)


def _check_count(found: Sized, path: str) -> None:
    count = len(found)
    if count > MOST:
        raise InvalidInput(f"{path} has {count:,} entries; at most {MOST:,} are allowed", field=path)


def _check_numbers(message: Message, prefix: str) -> None:
    """Every floating-point field is a number that can be counted with."""
    for field, value in message.ListFields():
        if field.type in _FLOATS and not abs(value) <= _LARGEST:
            raise InvalidInput(f"{prefix}{field.name} is {value:g}, which is no measure", field=f"{prefix}{field.name}")
