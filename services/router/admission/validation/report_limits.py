"""The limits of workers' reports: the one list that `reports.py` enforces and that users read.

`python -m services.router.admission.validation.report_limits` prints the second table in
docs/security.md, and the comments of the fields in protos/ give the same numbers.
tests/router/test_report_limits.py compares them, and finds fields that have no limit here. Limits
of cards are those of `libs/catalog`, which workers keep: no checkpoint makes a worker send values
that are refused here.
"""

from __future__ import annotations

from typing import Final

from libs.catalog.card import MAX_LABEL_CHARACTERS, MAX_LABELS, MAX_PROMPT_CHARACTERS, MAX_PROMPTS
from libs.serving.calls.decode import MAX_REQUEST_BYTES
from services.router.admission.validation.limits import (
    BYTES,
    CHARACTERS,
    ENTRIES,
    MIB,
    Limit,
    table,
)

PULL: Final = Limit("a whole pull", ("PullRequest", "MultiplexedCall.pull"), 8 * MIB, BYTES)
"""10,000 lanes with names of maximum length take 6 MB."""
CONNECT: Final = Limit("a whole request to connect", ("ConnectRequest",), MIB, BYTES)
HEARTBEAT: Final = Limit("a whole heartbeat", ("HeartbeatRequest",), MAX_REQUEST_BYTES, BYTES)
"""Every router and scheduler reads it."""
MULTIPLEX: Final = Limit(
    "all calls of one message of a worker's stream", ("MultiplexRequest",), 72 * MIB, BYTES
)
COMPLETE: Final = Limit(
    "all answers of one call",
    ("CompleteRequest", "MultiplexedCall.complete"),
    MAX_REQUEST_BYTES,
    BYTES,
)
STREAMED: Final = Limit(
    "all deltas of one call",
    ("DeltasRequest", "MultiplexedCall.deltas"),
    4 * MIB,
    BYTES,
)

NAME: Final = Limit(
    "an id: of a worker, its process, a lease, a job, a model, an adapter, models on disk",
    (
        *(
            f"{name}.worker_id"
            for name in (
                "PullRequest",
                "ConnectRequest",
                "CompleteRequest",
                "HeartbeatRequest",
                "DeltasRequest",
            )
        ),
        *(f"{name}.epoch" for name in ("PullRequest", "ConnectRequest", "HeartbeatRequest")),
        *(f"{name}.batch_id" for name in ("PullRequest", "CompleteRequest", "HeldBatch")),
        *(
            "CompletedJob.job_id",
            "Lane.model",
            "Lane.adapter",
            "WorkerModel.model",
            "WorkerModel.adapters",
        ),
        *("WorkerModel.failed_adapters", "ModelCard.model", "HeartbeatRequest.on_disk_tag"),
        *("JobDelta.job_id", "JobDelta.router", "JobDelta.batch_id"),
    ),
    256,
    CHARACTERS,
)
POOL: Final = Limit(
    "a pool's name",
    ("PullRequest.pool", "HeartbeatRequest.pool", "Lane.pool", "ModelCard.pools"),
    63,
    CHARACTERS,
)
MANY: Final = Limit(
    "lanes, answers, models, leases; adapters of a model",
    (
        *(
            "PullRequest.lanes",
            "CompleteRequest.jobs",
            "HeartbeatRequest.models",
            "HeartbeatRequest.on_disk",
            "HeartbeatRequest.batches",
        ),
        *(
            "WorkerModel.adapters",
            "WorkerModel.failed_adapters",
            "DeltasRequest.deltas",
        ),
    ),
    10_000,
    ENTRIES,
)
DELTA_TEXT: Final = Limit(
    "a part of a text that is being generated", ("JobDelta.text",), 65_536, CHARACTERS
)
CHUNKS_PART: Final = Limit(
    "chunks that are sent before the answer of their job", ("JobDelta.chunks",), 2 * MIB, BYTES
)
EXCEPTED: Final = Limit(
    "tenants that a pull excludes", ("PullRequest.except_tenants",), 16, ENTRIES
)
TENANT: Final = Limit("a tenant", ("PullRequest.except_tenants",), 128, CHARACTERS)
WORDS: Final = Limit(
    "a device's name and kernels; a model's revision, family, data type",
    (
        *("HeartbeatRequest.device", "HeartbeatRequest.kernels", "WorkerModel.data_type"),
        *("ModelCard.revision", "ModelCard.family", "ModelCard.data_type"),
    ),
    256,
    CHARACTERS,
)
KINDS: Final = Limit(
    "tasks, representations, inputs of a model",
    ("ModelCard.tasks", "ModelCard.representations", "ModelCard.inputs"),
    64,
    ENTRIES,
)
"""Seven, three and two kinds exist; workers that are newer than a router may know more."""
POOLS: Final = Limit("pools of a model", ("ModelCard.pools",), 256, ENTRIES)
LABELS: Final = Limit("labels of a model", ("ModelCard.labels",), MAX_LABELS, ENTRIES)
LABELS_TEXT: Final = Limit(
    "labels of a model, together", ("ModelCard.labels",), MAX_LABEL_CHARACTERS, CHARACTERS
)
PROMPTS: Final = Limit("names of prompts of a model", ("ModelCard.prompts",), MAX_PROMPTS, ENTRIES)
PROMPTS_TEXT: Final = Limit(
    "names of prompts of a model, together",
    ("ModelCard.prompts",),
    MAX_PROMPT_CHARACTERS,
    CHARACTERS,
)
REASON: Final = Limit(
    "a failure's reason; longer ones are cut", ("Failure.reason",), 100, CHARACTERS
)
MESSAGE: Final = Limit(
    "a failure's message; longer ones are cut", ("Failure.message",), 1000, CHARACTERS
)
FIELD: Final = Limit("a failure's field; longer ones are cut", ("Failure.field",), 300, CHARACTERS)

ALL: Final = (
    PULL,
    CONNECT,
    HEARTBEAT,
    MULTIPLEX,
    COMPLETE,
    STREAMED,
    NAME,
    POOL,
    MANY,
    DELTA_TEXT,
    CHUNKS_PART,
    EXCEPTED,
    TENANT,
    WORDS,
    KINDS,
    POOLS,
    LABELS,
    LABELS_TEXT,
    PROMPTS,
    PROMPTS_TEXT,
    REASON,
    MESSAGE,
    FIELD,
)

METHODS: Final = {
    "Pull": PULL.most,
    "Connect": CONNECT.most,
    "Heartbeat": HEARTBEAT.most,
    "Multiplex": MULTIPLEX.most,
    "Complete": COMPLETE.most,
    "Deltas": STREAMED.most,
}
"""Maximum bytes of a request, by method of WorkerService and by call on its stream."""

if __name__ == "__main__":
    print(table(ALL), end="")
