"""Every length and every count that a worker may report has its limit, which an honest worker never
meets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import Fleet
from libs.versions import WIRE_VERSION
from services.router.admission.validation import limits, report_limits
from services.router.admission.validation.limits import MIB
from tests.router.parts import MODEL, card, refused, router, worker_stub
from tests.router.test_limits import comments, list_fields

ROOT = Path(__file__).parents[2]
BOUNDED_ELSEWHERE = {"CompletedJob.result", "HeartbeatRequest.subject"}
"""Fields that are bounded by the whole call, or set by the router."""


def test_security_page_table_matches_report_limits() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert limits.table(report_limits.ALL) in page, (
        "print it by python -m services.router.admission.validation.report_limits"
    )


def test_proto_comments_match_limits() -> None:
    said = comments()
    for limit in report_limits.ALL:
        for field in limit.fields:
            assert re.search(rf"(?<![\d,]){re.escape(limit.number)}(?!,?\d)", said[field]), (
                f"{field}: {limit.number}"
            )


def test_every_field_of_a_workers_request_that_may_be_long_has_a_limit() -> None:
    known = (*report_limits.ALL, *limits.ALL)
    limited = {field for limit in known for field in limit.fields} | BOUNDED_ELSEWHERE
    methods = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods
    requests: dict[str, Any] = {method.name: method.input_type for method in methods}
    requests |= {
        "Pull": worker_pb2.PullRequest.DESCRIPTOR,
        "Complete": worker_pb2.CompleteRequest.DESCRIPTOR,
        "Deltas": worker_pb2.DeltasRequest.DESCRIPTOR,
    }
    assert set(requests) == set(report_limits.METHODS)
    for request in requests.values():
        found = {
            field for field in list_fields(request, set()) if not re.search(r"Entry\.\w+$", field)
        }
        assert found <= limited


def heartbeat(**more: Any) -> worker_pb2.HeartbeatRequest:
    return worker_pb2.HeartbeatRequest(
        **{"wire_version": WIRE_VERSION, "worker_id": "w1", "epoch": "e", "pool": "cpu", **more}
    )


def heartbeat_with(**more: Any) -> worker_pb2.HeartbeatRequest:
    return heartbeat(models=[worker_pb2.WorkerModel(**{"model": MODEL, **more})])


def carded(**more: Any) -> worker_pb2.HeartbeatRequest:
    return heartbeat_with(card=models_pb2.ModelCard(**more))


def pull(**more: Any) -> worker_pb2.PullRequest:
    return worker_pb2.PullRequest(
        **{
            "wire_version": WIRE_VERSION,
            "worker_id": "w1",
            "epoch": "e",
            "pool": "cpu",
            "budget_tokens": 1,
            "budget_jobs": 1,
            **more,
        }
    )


def complete(**more: Any) -> worker_pb2.CompleteRequest:
    lane = worker_pb2.Lane(pool="cpu", model=MODEL)
    return worker_pb2.CompleteRequest(
        **{"worker_id": "w1", "lane": lane, "batch_id": "e-1", **more}
    )


LONG = "x" * 257
LANE = worker_pb2.Lane(pool="cpu", model=MODEL)
HELD = worker_pb2.HeldBatch(lane=LANE, batch_id="b")
NAMES = [f"n{number}" for number in range(10_001)]
BEYOND_LIMIT: dict[str, tuple[Callable[[], Any], str]] = {
    "a pull's process": (lambda: pull(epoch=LONG), "epoch"),
    "a pull's lease": (lambda: pull(batch_id=LONG), "batch_id"),
    "a tenant left out": (lambda: pull(except_tenants=["a", "t" * 129]), "except_tenants[1]"),
    "an odd tenant left out": (lambda: pull(except_tenants=["a\nb"]), "except_tenants[0]"),
    "tenants left out": (lambda: pull(except_tenants=NAMES[:17]), "except_tenants"),
    "lanes": (lambda: pull(lanes=[LANE] * 10_001), "lanes"),
    "a lane's adapter": (
        lambda: pull(lanes=[worker_pb2.Lane(pool="cpu", model=MODEL, adapter=LONG)]),
        "lanes[0].adapter",
    ),
    "a whole pull": (lambda: pull(lanes=[worker_pb2.Lane(adapter="x" * MIB)] * 9), ""),
    "whose answers": (lambda: complete(worker_id=LONG), "worker_id"),
    "answers": (lambda: complete(jobs=[worker_pb2.CompletedJob(job_id="j")] * 10_001), "jobs"),
    "an answer's job": (
        lambda: complete(jobs=[worker_pb2.CompletedJob(job_id=LONG)]),
        "jobs[0].job_id",
    ),
    "a heartbeat's process": (lambda: heartbeat(epoch=LONG), "epoch"),
    "a device": (lambda: heartbeat(device=LONG), "device"),
    "models": (lambda: heartbeat(models=[worker_pb2.WorkerModel(model=MODEL)] * 10_001), "models"),
    "leases": (lambda: heartbeat(batches=[HELD] * 10_001), "batches"),
    "a whole heartbeat": (lambda: heartbeat(device="x" * (64 * MIB)), ""),
    "adapters": (lambda: heartbeat_with(adapters=NAMES), "models[0].adapters"),
    "an adapter": (lambda: heartbeat_with(adapters=[LONG]), "models[0].adapters"),
    "failed adapters": (
        lambda: heartbeat_with(failed_adapters=dict.fromkeys(NAMES, worker_pb2.Failure())),
        "models[0].failed_adapters",
    ),
    "a failed adapter": (
        lambda: heartbeat_with(failed_adapters={LONG: worker_pb2.Failure()}),
        "models[0].failed_adapters",
    ),
    "a type of weights": (lambda: heartbeat_with(data_type=LONG), "models[0].data_type"),
    "a card's model": (lambda: carded(model=LONG), "models[0].card.model"),
    "a revision": (lambda: carded(revision=LONG), "models[0].card.revision"),
    "a family": (lambda: carded(family=LONG), "models[0].card.family"),
    "a card's type": (lambda: carded(data_type=LONG), "models[0].card.data_type"),
    "tasks": (lambda: carded(tasks=[models_pb2.TASK_ENCODE] * 65), "models[0].card.tasks"),
    "representations": (lambda: carded(representations=[1] * 65), "models[0].card.representations"),
    "pools": (lambda: carded(pools=["cpu"] * 257), "models[0].card.pools"),
    "labels": (lambda: carded(labels=NAMES), "models[0].card.labels"),
    "long labels": (lambda: carded(labels=["l" * 2048] * 257), "models[0].card.labels"),
    "prompts": (lambda: carded(prompts=NAMES[:1001]), "models[0].card.prompts"),
    "long prompts": (lambda: carded(prompts=["p" * 65_537]), "models[0].card.prompts"),
}


async def test_report_beyond_limit_is_refused_and_not_published(
    redis: Redis, redis_url: str
) -> None:
    async with router(redis_url) as client:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(client.address, options=options) as channel:
            stub = worker_stub(channel)
            calls: dict[type, Any] = {
                worker_pb2.HeartbeatRequest: stub.Heartbeat, worker_pb2.PullRequest: stub.Pull,
                worker_pb2.CompleteRequest: stub.Complete,
            }  # fmt: skip
            for name, (build, field) in BEYOND_LIMIT.items():
                request = build()
                refusal = await refused(calls[type(request)](request))
                assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), (
                    name
                )
                assert len(refusal.message) < 500, name
            connect = stub.Connect(
                worker_pb2.ConnectRequest(
                    wire_version=WIRE_VERSION, worker_id="w1", epoch="x" * (2 * MIB)
                )
            )
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await connect.read()
            assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await Fleet(redis).refresh()).workers == {}


async def test_honest_worker_may_be_large(redis: Redis, redis_url: str) -> None:
    """The most that libs/catalog reads from a checkpoint, names of the longest form, and a thousand
    models on disk.
    """
    large = card(labels=[f"label {number:04} {'x' * 40}" for number in range(10_000)])
    large.prompts.extend(f"prompt {number} {'p' * 30}" for number in range(1_000))
    large.pools.extend(["cpu", "p" * 63])
    name = f"{'o' * 128}/{'n' * 127}"
    usual = card(name, labels=[f"LABEL_{number}" for number in range(2_000)])
    usual.prompts.extend(f"task {number}" for number in range(30))
    models = [
        worker_pb2.WorkerModel(model=one.model, state=models_pb2.MODEL_STATE_RESIDENT, card=one)
        for one in (large, usual)
    ]
    models += [
        worker_pb2.WorkerModel(model=f"org/model-{number}", state=models_pb2.MODEL_STATE_COLD)
        for number in range(1_000)
    ]
    failure = worker_pb2.Failure(reason="NO_CAPACITY", message="m" * 5_000)
    models[0].adapters.extend(f"org/adapter-{number}" for number in range(1_000))
    models[0].failed_adapters[f"org/{'a' * 128}"].CopyFrom(failure)
    request = heartbeat(
        device="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", models=models
    )
    async with router(redis_url) as client, grpc.aio.insecure_channel(client.address) as channel:
        stub = worker_stub(channel)
        await stub.Heartbeat(request)
        lanes = [worker_pb2.Lane(pool="p" * 63, model=name, adapter=name) for _ in range(3_000)]
        await stub.Pull(pull(lanes=lanes, except_tenants=["t" * 128, ""]))
    known = await Fleet(redis).refresh()
    assert set(known.workers) == {"w1"}
    assert len(known.cards[MODEL].labels) == 10_000
    assert len(known.cards[name].prompts) == 30
