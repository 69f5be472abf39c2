"""Build the heartbeat entry of each model, by the model's state.

Not on the request path: `residency.py` tracks the models, `heartbeat.py` sends the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.card import Card
from libs.errors import ShoalError
from services.worker.memory.files import OnDisk
from services.worker.memory.host import Warm
from services.worker.memory.loading import Loading
from services.worker.memory.space import ResidentModel
from services.worker.mesh import codec
from services.worker.scheduling.meter import Meter

DATA_TYPES: Final = {1: "int8", 2: "bfloat16", 4: "float32"}
"""Data types by the number of bytes of a weight."""


def on_disk(models: Mapping[str, OnDisk]) -> list[worker_pb2.WorkerModel]:
    """Report the models on disk, by name."""
    return [
        worker_pb2.WorkerModel(
            model=name,
            state=models_pb2.MODEL_STATE_COLD,
            bytes=found.bytes,
            card=None if found.card is None else codec.to_card(found.card),
        )
        for name, found in sorted(models.items())
    ]


def failed(model: str, error: ShoalError) -> worker_pb2.WorkerModel:
    return worker_pb2.WorkerModel(
        model=model, state=models_pb2.MODEL_STATE_FAILED, failure=codec.encode_failure(error)
    )


def loading(loading: Loading) -> worker_pb2.WorkerModel:
    """Report a model that is being downloaded, or loaded onto the device."""
    progress = loading.progress
    if progress is None:
        return worker_pb2.WorkerModel(
            model=loading.model, state=models_pb2.MODEL_STATE_LOADING, bytes=loading.bytes
        )
    return worker_pb2.WorkerModel(
        model=loading.model,
        state=models_pb2.MODEL_STATE_DOWNLOADING,
        downloaded_bytes=progress.done,
        download_bytes=progress.total,
    )


def warm(
    one: Warm, card: Card | None, meter: Meter, activation_bytes_per_token: float, now: float
) -> worker_pb2.WorkerModel:
    return worker_pb2.WorkerModel(
        model=one.name,
        state=models_pb2.MODEL_STATE_WARM,
        bytes=one.size.bytes,
        load_seconds=one.load_seconds,
        tokens_per_second=meter.tokens_per_second,
        measured_batch_tokens=meter.batch_tokens,
        idle_seconds=now - one.last_used,
        card=None if card is None else codec.to_card(card, tokens_per_byte=meter.tokens_per_byte),
        host_bytes=one.parked.host_bytes,
        activation_bytes_per_token=activation_bytes_per_token,
    )


def resident(entry: ResidentModel, item_bytes: int, now: float) -> worker_pb2.WorkerModel:
    """Report a resident model. `item_bytes` is the bytes of a weight (a key of DATA_TYPES), from
    which the data type is derived if the card has none. `now` is in seconds of the worker's
    monotonic clock.
    """
    one = entry.resident
    meter, size = one.meter, one.model.bytes
    own = one.model.card.dtype
    data_type = DATA_TYPES[item_bytes] if own == "auto" else own
    return worker_pb2.WorkerModel(
        model=one.name,
        state=models_pb2.MODEL_STATE_RESIDENT,
        bytes=size,
        load_seconds=one.load_seconds,
        tokens_per_second=meter.tokens_per_second,
        measured_batch_tokens=meter.batch_tokens,
        idle_seconds=0.0 if one.held_jobs else now - one.last_used,
        pinned=one.pinned,
        card=codec.to_card(
            one.model.card,
            stored_bytes=size,
            data_type=data_type,
            tokens_per_byte=meter.tokens_per_byte,
        ),
        host_bytes=0 if entry.host is None else entry.host.size.bytes,
        activation_bytes_per_token=one.activation_bytes_per_token,
        adapters=one.adapters.names(),
        failed_adapters={
            name: codec.encode_failure(error) for name, error in one.adapters.failures(now).items()
        },
        leaving=one.leaving,
        held_jobs=one.held_jobs,
        resident_seconds=now - one.loaded_at,
    )
