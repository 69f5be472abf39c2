"""The file of tenants, and its effect on a router."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import InvalidInput
from libs.queue.rates import RateLimit, rates_key
from services.router.admission.tenants import Tenant, Tenants, parse_tenants, watch_tenants
from tests.router.parts import Client, FakeWorker, Refusal, card, encode_request, router, until

FILE = """\
default: {requests_per_second: 100, burst_seconds: 2}
tenants:
  search:
    weight: 4
    requests_per_second: 0
    queued_tokens: 5000
  crawler: {tokens_per_second: 1.5}
"""


def test_named_tenants_override_defaults() -> None:
    tenants = parse_tenants(FILE, "t.yaml")
    assert tenants.tenant("anybody") == Tenant(rate=RateLimit(100.0, 0.0, 2.0))
    assert tenants.tenant("search") == Tenant(4.0, RateLimit(0.0, 0.0, 2.0), 5000)
    assert tenants.tenant("crawler") == Tenant(1.0, RateLimit(100.0, 1.5, 2.0))
    assert Tenants().tenant("anybody") == Tenant()
    assert not Tenants().tenant("anybody").rate.is_limited


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "t.yaml:1: the file is empty"),
        ("- a", "t.yaml:1: the file must be keys with values, not a list"),
        ("tenant:\n  a: {}", "t.yaml:1: the file has no key 'tenant': did you mean 'tenants'?"),
        (
            "tenants:\n  a: {weigth: 1}",
            "t.yaml:2: `tenants.a` has no key 'weigth': did you mean 'weight'?",
        ),
        (
            "tenants:\n  a: {weight: 0}",
            "t.yaml:2: `tenants.a.weight` is 0, which is not a number in 0.001..1000",
        ),
        (
            "tenants:\n  a:\n    requests_per_second: -1",
            "t.yaml:3: `tenants.a.requests_per_second` is -1",
        ),
        (
            "tenants:\n  a: {requests_per_second: .inf}",
            "t.yaml:2: `tenants.a.requests_per_second` is .inf",
        ),
        (
            "default: {burst_seconds: 0}",
            "t.yaml:1: `default.burst_seconds` is 0, which is not a number in 0.001..3600",
        ),
        (
            "default: {queued_tokens: 1.5}",
            "t.yaml:1: `default.queued_tokens` must be a whole number",
        ),
        (
            "tenants:\n  a: {}\n  a: {}",
            "t.yaml:3: `tenants` has the key 'a' twice, first in line 2",
        ),
        (
            "tenants:\n  'a b': {}",
            "t.yaml:2: `tenants` is 'a b', which is not 1..128 printable ASCII",
        ),
        ("tenants: {a: {weight: 1}", "t.yaml:1: is not YAML"),
    ],
)
def test_invalid_tenants_file_names_file_and_line(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_tenants(text, "t.yaml")
    assert refusal.value.message.startswith(words)


async def test_changed_file_is_reloaded_and_broken_one_is_ignored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {a: {weight: 2}}\n")
    known = watch_tenants(path)
    for text, weight in (
        ("tenants: {a: {weight: 33}}\n", 33.0),
        ("tenants: {a: {weight:", 33.0),
        ("default: {weight: 7}\n", 7.0),
    ):
        replace(path, text)
        known.refresh()
        assert known.content.tenant("a").weight == weight
    path.unlink()
    known.refresh()
    assert known.content.tenant("a").weight == 7.0


def replace(path: Path, text: str) -> None:
    """Replace the file as Kubernetes does: another file takes its place."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


async def ask(
    client: Client, tenant: str, text: str = "a text", timeout: float = 60.0
) -> Refusal | None:
    """The refusal, or None: it was answered."""
    try:
        await client.inference.Encode(
            encode_request(text), timeout=timeout, metadata=(("x-shoal-tenant", tenant),)
        )
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    return None


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    return path


async def test_over_the_rate_both_routers_refuse_with_the_time_to_wait(
    redis_url: str, tmp_path: Path
) -> None:
    file = written(
        tmp_path, "tenants: {crawler: {requests_per_second: 0.00125, burst_seconds: 3200}}\n"
    )
    async with (
        router(redis_url, "a", tenants=file) as one,
        router(redis_url, "b", tenants=file) as two,
        FakeWorker(one.address, models=[card()]).working(),
    ):
        outcomes = [await ask(client, "crawler") for client in (one, two, one, two, one, two)]
        assert outcomes[:4] == [None] * 4
        for refusal in outcomes[4:]:
            assert refusal is not None
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "RATE_LIMITED",
            )
            assert refusal.retry_seconds == pytest.approx(800.0, abs=120.0)
        assert await ask(one, "somebody") is None


async def test_tokens_that_are_not_generated_are_refunded_once(
    redis_url: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "tenants: {writer: {tokens_per_second: 0.5, burst_seconds: 3600}}\n")
    writes = card(tasks=[models_pb2.TASK_TEXT])
    request = pb.ExtractRequest(
        model=writes.model, items=[pb.Item(text="a")], text=pb.TextTask(max_tokens=1000)
    )

    def generated(job: worker_pb2.Job) -> worker_pb2.JobResult:
        usage = pb.Usage(input_tokens=1, output_tokens=100)
        answer = pb.ExtractResponse(results=[pb.Extraction(text="b")], usage=usage)
        return worker_pb2.JobResult(extract=answer)

    begin = time.time()
    async with router(redis_url, tenants=file) as client, Redis.from_url(redis_url) as redis:
        worker = FakeWorker(client.address, models=[writes])
        worker.answer = generated

        async def debt() -> float:
            """Return when the tenant's tokens are paid, in seconds from the test's begin."""
            return float(await redis.hget(rates_key("writer"), "tokens") or 0) - begin

        async def is_refunded() -> bool:
            return await debt() < 1000

        async with worker.working():
            for _ in range(2):
                await client.inference.Extract(
                    request, timeout=60, metadata=(("x-shoal-tenant", "writer"),)
                )
                # The charge was more than 1,000 tokens, 2,000 s.
                await until(is_refunded, "the refund")
        # Two answers of 100 tokens, and a few tokens of the texts.
        assert 400 <= await debt() <= 440 + time.time() - begin


async def test_job_has_tenant_and_weight(redis_url: str, tmp_path: Path) -> None:
    file = written(tmp_path, "tenants: {search: {weight: 4}}\n")
    async with (
        router(redis_url, tenants=file) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        assert [await ask(client, "search"), await ask(client, "other")] == [None, None]
        assert [(job.tenant, job.weight) for job in worker.jobs] == [
            ("search", 4.0),
            ("other", 1.0),
        ]


async def test_tenants_queued_work_is_bounded_and_another_is_served(
    redis_url: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "tenants: {crawler: {queued_tokens: 60}}\n")
    async with (
        router(redis_url, tenants=file) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        worker.hold()
        asked = [
            asyncio.create_task(ask(client, "crawler", f"{number} " + "word " * 15))
            for number in range(6)
        ]
        other = asyncio.create_task(ask(client, "other"))

        await until(
            lambda: sum(task.done() for task in asked) >= 3,
            "the work above the quota to be refused",
        )
        worker.resume()
        outcomes = [await task for task in asked]
        assert await other is None
    refusals = [outcome for outcome in outcomes if outcome is not None]
    assert 0 < len(refusals) < len(outcomes)
    assert {(refusal.reason, refusal.retry_seconds > 0) for refusal in refusals} == {
        ("QUEUE_FULL", True)
    }


LONG = "word " * 200_000
"""1 MB, of which the model takes 512 tokens."""


async def test_truncated_text_counts_for_rates(redis_url: str, tmp_path: Path) -> None:
    file = written(tmp_path, "tenants: {crawler: {tokens_per_second: 10, burst_seconds: 200}}\n")
    async with (
        router(redis_url, tenants=file) as client,
        FakeWorker(client.address, models=[card()]).working(),
    ):
        await client.sees("w1")
        assert await ask(client, "crawler", LONG) is None
        refusal = await ask(client, "crawler", LONG)
        assert refusal is not None
        assert refusal.reason == "RATE_LIMITED"


async def test_truncated_text_counts_for_quotas(redis_url: str, tmp_path: Path) -> None:
    file = written(tmp_path, "tenants: {crawler: {queued_tokens: 2000}}\n")
    async with (
        router(redis_url, tenants=file) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.sees("w1")
        worker.hold()
        first = asyncio.create_task(ask(client, "crawler", LONG))
        await until(lambda: worker.jobs, "the first to arrive")
        refusal = await ask(client, "crawler", LONG)
        assert refusal is not None
        assert refusal.reason == "QUEUE_FULL"
        worker.resume()
        assert await first is None


@pytest.mark.parametrize("measured", [0.0046, 60.0])
async def test_other_tenants_texts_change_prices_little(
    redis_url: str, tmp_path: Path, measured: float
) -> None:
    """Six texts of 1 MB, or thousands of a letter, once changed the price of all tenants' texts
    without bound.
    """
    file = written(tmp_path, "tenants: {crawler: {tokens_per_second: 1, burst_seconds: 3600}}\n")
    moved = card()
    moved.tokens_per_byte, moved.max_tokens = measured, 8192
    async with (
        router(redis_url, tenants=file) as client,
        FakeWorker(client.address, models=[moved]).working(),
    ):
        await client.sees("w1")
        outcomes = [
            await ask(client, "crawler", "word " * 600) for _ in range(30)
        ]  # 3,000 letters: 800 tokens
        assert 1 <= outcomes.count(None) <= 22
