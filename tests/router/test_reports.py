"""Reports of workers are checked before they are published: garbage is refused with the field's
path, or cut to size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from redis.asyncio import Redis
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2, worker_pb2

from libs.errors import InternalError, InvalidInput
from libs.fleet import Fleet
from services.router.admission.validation import reports
from services.router.lanes import codec
from tests.api.hostile import CONTROLS, WORDS
from tests.router.parts import MODEL, FakeWorker, card, router, vector, worker_stub

LANE = worker_pb2.Lane(pool="cpu", model=MODEL)


def heartbeat(**model: object) -> worker_pb2.HeartbeatRequest:
    entry = worker_pb2.WorkerModel(**{"model": MODEL, **model})  # type: ignore[arg-type]
    return worker_pb2.HeartbeatRequest(worker_id="w1", pool="cpu", models=[entry])


CASES: dict[str, tuple[Callable[..., None], Message, str]] = {
    "no name": (reports.check_heartbeat, worker_pb2.HeartbeatRequest(pool="cpu"), "worker_id"),
    "a name with a space": (reports.check_heartbeat,
    worker_pb2.HeartbeatRequest(worker_id="a b", pool="cpu"), "worker_id"),
    "a pool of no form": (reports.check_heartbeat,
    worker_pb2.HeartbeatRequest(worker_id="w", pool="a/b"), "pool"),
    "no number": (reports.check_heartbeat, heartbeat(tokens_per_second=math.nan),
    "models[0].tokens_per_second"),
    "too large": (reports.check_heartbeat, heartbeat(activation_bytes_per_token=math.inf),
    "models[0].activation_bytes_per_token"),
    "a model with a space": (reports.check_heartbeat, heartbeat(model="org/name x"),
    "models[0].model"),
    "a rate that is none": (
        reports.check_heartbeat, heartbeat(card=models_pb2.ModelCard(tokens_per_byte=math.nan)),
        "models[0].card.tokens_per_byte"
    ),
    "a negative rate": (reports.check_heartbeat,
    heartbeat(card=models_pb2.ModelCard(tokens_per_byte=-1.0)), "models[0].card"),
    "a lease without a lane": (
        reports.check_heartbeat,
        worker_pb2.HeartbeatRequest(worker_id="w", pool="cpu",
        batches=[worker_pb2.HeldBatch(batch_id="b")]),
        "batches[0].lane.pool",
    ),
    "a pull that leaves very many out": (
        reports.check_pull,
        worker_pb2.PullRequest(worker_id="w", pool="cpu", budget_tokens=1, budget_jobs=1,
        except_tenants=map(str, range(17))),
        "except_tenants",
    ),
    "a pull for nothing": (reports.check_pull,
    worker_pb2.PullRequest(worker_id="w", pool="cpu", budget_tokens=1), "budget_jobs"),
    "a pull of a nameless lane": (
        reports.check_pull,
        worker_pb2.PullRequest(worker_id="w", pool="cpu", budget_tokens=1, budget_jobs=1,
        lanes=[worker_pb2.Lane(pool="cpu")]),
        "lanes[0].model",
    ),
    "an answer to nothing": (
        reports.check_complete,
        worker_pb2.CompleteRequest(worker_id="w", lane=LANE, batch_id="b",
        jobs=[worker_pb2.CompletedJob()]),
        "jobs[0].job_id",
    ),
    "an answer of nobody": (reports.check_complete,
    worker_pb2.CompleteRequest(lane=LANE, batch_id="b"), "worker_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_invalid_reports_are_refused_naming_field(name: str) -> None:
    check, request, field = CASES[name]
    with pytest.raises(InvalidInput) as caught:
        check(request)
    assert caught.value.field == field


def test_failure_texts_are_cut_to_status_size() -> None:
    failure = worker_pb2.Failure(
        reason="R" * 1000, message="m" * 100_000, field="f" * 1000, retry_after_seconds=math.inf
    )
    request = heartbeat(failure=failure, failed_adapters={"org/adapter": failure})
    reports.check_heartbeat(request)
    for reported in (request.models[0].failure, request.models[0].failed_adapters["org/adapter"]):
        assert (
            len(reported.reason),
            len(reported.message),
            len(reported.field),
            reported.retry_after_seconds,
        ) == (
            100,
            1000,
            300,
            3600,
        )
    failure.retry_after_seconds = math.nan
    assert codec.from_failure(failure).retry_after is None


def whole_heartbeat() -> worker_pb2.HeartbeatRequest:
    """Return a heartbeat with a value in each text field."""
    failure = worker_pb2.Failure(reason="R", message="m", field="f")
    known = models_pb2.ModelCard(
        model=MODEL,
        revision="r",
        family="bert",
        labels=["a"],
        data_type="float32",
        prompts=["query"],
        pools=["cpu"],
    )
    model = worker_pb2.WorkerModel(
        model=MODEL,
        card=known,
        failure=failure,
        adapters=["org/a"],
        failed_adapters={"org/adapter": failure},
        data_type="float32",
    )
    lane = worker_pb2.Lane(pool="cpu", model=MODEL, adapter="org/a")
    held = worker_pb2.HeldBatch(lane=lane, batch_id="b")
    return worker_pb2.HeartbeatRequest(
        worker_id="w", epoch="e", pool="cpu", device="NVIDIA L4", models=[model], batches=[held]
    )


def places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every text of a message and of those in it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            yield message, field
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            parts = (
                value.values()
                if hasattr(value, "values")
                else value
                if field.is_repeated
                else [value]
            )
            for part in parts:
                yield from places(part)


@pytest.mark.parametrize("number", range(len(list(places(whole_heartbeat())))))
def test_no_text_of_a_heartbeat_brings_control_characters_into_the_mesh(number: int) -> None:
    request = whole_heartbeat()
    message, field = list(places(request))[number]
    if field.is_repeated:
        getattr(message, field.name).append(WORDS)
    else:
        setattr(message, field.name, WORDS)
    names = {"worker_id", "epoch", "pool", "batch_id", "model", "adapter", "adapters", "pools"}
    if field.name in names:
        with pytest.raises(InvalidInput, match=field.name):
            reports.check_heartbeat(request)
        return
    reports.check_heartbeat(request)
    reported = "".join(getattr(message, field.name))
    assert not set(reported) & set(CONTROLS)
    assert "]0;owned" in reported


async def test_faulty_worker_does_not_harm_others(redis: Redis, redis_url: str) -> None:
    """Its heartbeats never reach the registry, and its answers end only jobs with ids that it
    knows.
    """
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        async with grpc.aio.insecure_channel(client.address) as channel:
            stub = worker_stub(channel)
            for number in range(3):
                bad = heartbeat(state=models_pb2.MODEL_STATE_RESIDENT, tokens_per_second=math.nan)
                bad.worker_id = f"bad{number}"
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Heartbeat(bad)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            answers = [
                worker_pb2.CompletedJob(job_id=f"no-such-{number}", result=b"\xff\xff")
                for number in range(100)
            ]
            accepted = await stub.Complete(
                worker_pb2.CompleteRequest(
                    worker_id="bad", lane=LANE, batch_id="none", jobs=answers
                )
            )
            assert accepted.accepted == 0
        assert (await client.encode("a text")).dense.data == vector("a text")
        assert set((await Fleet(redis).refresh()).workers) == {"w1"}


# Answers


def tensor(**changes: object) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(**{"data_type": 1, "shape": [1, 2], "data": bytes(8), **changes})  # type: ignore[arg-type]


def encoded(**forms: object) -> worker_pb2.JobResult:
    return worker_pb2.JobResult(encode=pb.EncodeResponse(**forms))  # type: ignore[arg-type]


BROKEN: dict[str, worker_pb2.JobResult] = {
    "no shape": encoded(dense=tensor(shape=[])),
    "one axis": encoded(dense=tensor(shape=[2])),
    "negative": encoded(dense=tensor(shape=[-1, -2])),
    "other bytes": encoded(dense=tensor(data=bytes(7))),
    "unknown type": encoded(dense=tensor(data_type=99)),
    "scales of other rows": encoded(dense=tensor(scale=bytes(8))),
    "offsets that fall": encoded(
        multi_vector=tensor_pb2.Ragged(values=tensor(), offsets=[0, 2, 1])
    ),
    "no offsets": encoded(multi_vector=tensor_pb2.Ragged(values=tensor())),
    "a column too far": encoded(
        sparse=tensor_pb2.SparseMatrix(
            columns=2, offsets=[0, 1], indices=b"\2\0\0\0", values=tensor(shape=[1], data=bytes(4))
        )
    ),
    "scores of two axes": worker_pb2.JobResult(score=pb.ScoreResponse(scores=tensor())),
    "nothing": worker_pb2.JobResult(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_answers_that_do_not_fit_together_are_the_workers_fault(name: str) -> None:
    with pytest.raises(InternalError):
        codec.job_result(BROKEN[name].SerializeToString())


def test_malformed_answers_are_internal_errors() -> None:
    with pytest.raises(InternalError, match="not a JobResult"):
        codec.job_result(b"\xff\xff")


def test_tokens_of_many_parts_stay_countable() -> None:
    parts: list[codec.Response] = [
        pb.ExtractResponse(usage=pb.Usage(input_tokens=(1 << 64) - 1)) for _ in range(2)
    ]
    assert codec.merge_extract(parts).usage.input_tokens == (1 << 64) - 1
