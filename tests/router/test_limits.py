"""Limits of requests agree with the protos and docs/security.md, and a request's cost for a router
is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from shoal.v1 import aliases_pb2, inference_pb2_grpc, mesh_pb2, models_pb2
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput, TaskNotSupported
from services.router.admission import pricing, splitting
from services.router.admission.validation import limits, report_limits
from services.router.admission.validation.requests import (
    check_encode,
    check_extract,
    check_score,
)
from services.router.admission.validation.sizes import Sizes
from services.router.lanes import codec
from services.router.lanes.codec import JobHeader
from tests.router.parts import MODEL, FakeWorker, card, changed, encode_request, refused, router
from tests.support.cluster import Cluster
from tests.support.peak import Peak

ROOT = Path(__file__).parents[2]
CLASSIFIES = card(tasks=[models_pb2.TASK_ENCODE, models_pb2.TASK_CLASSIFY])
LISTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def test_security_page_table_matches_limits() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert limits.table() in page, (
        "print it by python -m services.router.admission.validation.limits"
    )


def comments() -> dict[str, str]:
    """Return the comment of each field and message of the protos, by `Message.field` and
    `Message`.
    """
    found: dict[str, str] = {}
    for name in ("inference", "multiplex", "models", "mesh", "worker", "aliases"):
        message, above = "", list[str]()
        for line in (ROOT / f"protos/shoal/v1/{name}.proto").read_text().splitlines():
            if match := re.match(r"\s*// ?(.*)", line):
                above.append(match[1])
                continue
            if match := re.match(r"message (\w+)", line):
                message = match[1]
                found[message] = " ".join(above)
            elif match := re.match(r"\s+(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+", line):
                found[f"{message}.{match[1]}"] = " ".join(above)
            above = []
    return found


def test_proto_comments_match_limits() -> None:
    said = comments()
    for limit in limits.ALL:
        for field in limit.fields:
            assert re.search(rf"(?<![\d,]){re.escape(limit.number)}(?!,?\d)", said[field]), (
                f"{field}: {limit.number}"
            )


def list_fields(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Every field that may be long, of a message and of those within it."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        if field.is_repeated or field.type in LISTS:
            yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from list_fields(field.message_type, seen)


def test_every_field_of_a_clients_request_that_may_be_long_has_a_limit() -> None:
    known = (*limits.ALL, *report_limits.ALL)
    limited = {field for limit in known for field in limit.fields}
    for file in (module.DESCRIPTOR for module in (pb, models_pb2, mesh_pb2, aliases_pb2)):
        for service in file.services_by_name.values():
            for method in service.methods:
                assert set(list_fields(method.input_type, set())) <= limited


def test_refusal_names_allowed_number_of_items() -> None:
    request = pb.ScoreRequest(
        model="a/b", query=pb.Item(text="q" * 131_072), documents=[pb.Item(text="d" * 1000)] * 4000
    )
    with pytest.raises(InvalidInput, match="send at most ") as refusal:
        check_score(request, None)
    found = re.search(r"at most ([\d,]+) items", refusal.value.message)
    assert found is not None
    allowed = int(found[1].replace(",", ""))
    del request.documents[allowed:]
    sizes = check_score(request, None)
    assert 0.99 * limits.READ.most < sum(sizes.read) <= limits.READ.most


def test_labels_that_an_answer_would_repeat_into_hundreds_of_megabytes_are_refused() -> None:
    task = pb.ClassifyTask(labels=[f"{number:03}{'x' * 997}" for number in range(256)])
    items = [pb.Item(text="a")] * 900
    with pytest.raises(InvalidInput, match="send at most 16 items at a time") as caught:
        check_extract(pb.ExtractRequest(model=MODEL, items=items, classify=task), CLASSIFIES)
    assert caught.value.field == "items"
    check_extract(pb.ExtractRequest(model=MODEL, items=items[:16], classify=task), CLASSIFIES)


@pytest.mark.parametrize(("named", "own"), [(256, 0), (0, 1_000)])
def test_very_many_short_labels_are_as_many_scores(named: int, own: int) -> None:
    """Named in the request, or the model's own."""
    card = models_pb2.ModelCard(
        tasks=[models_pb2.TASK_CLASSIFY], labels=[f"{number:04}" for number in range(own)]
    )
    task = pb.ClassifyTask(labels=[f"{number:04}" for number in range(named)])
    allowed = limits.ANSWERED.most // ((named or own) * 20)

    def check(items: int) -> None:
        check_extract(
            pb.ExtractRequest(model=MODEL, items=[pb.Item(text="a")] * items, classify=task), card
        )

    with pytest.raises(InvalidInput, match=f"send at most {allowed:,} items at a time"):
        check(allowed + 1)
    check(allowed)


def test_hypothesis_has_few_places_for_the_label_and_each_counts() -> None:
    def asked(places: int) -> pb.ExtractRequest:
        task = pb.ClassifyTask(labels=["x" * 1000], hypothesis="{} " * places)
        return pb.ExtractRequest(model=MODEL, items=[pb.Item(text="a")], classify=task)

    assert check_extract(asked(8), CLASSIFIES).per_job_bytes == 8 * 1000 + 24
    with pytest.raises(InvalidInput, match="9 places; at most 8"):
        check_extract(asked(9), CLASSIFIES)


def test_labels_count_as_often_as_they_are_read() -> None:
    task = pb.ClassifyTask(labels=["東京", "b"], hypothesis="it is {}")
    request = pb.ExtractRequest(model="a/b", items=[pb.Item(text="abc")] * 3, classify=task)
    names = 6 + 1 + 2 * 8
    embeds = models_pb2.ModelCard(tasks=[models_pb2.TASK_ENCODE, models_pb2.TASK_CLASSIFY])
    zero_shot = models_pb2.ModelCard(tasks=[models_pb2.TASK_CLASSIFY])
    infers = models_pb2.ModelCard(
        tasks=[models_pb2.TASK_CLASSIFY], labels=["contradiction", "entailment"], open_labels=True
    )
    read_once, before_each, in_pairs = (
        check_extract(request, one) for one in (embeds, zero_shot, infers)
    )
    assert (
        read_once.per_job_bytes,
        read_once.per_sequence_bytes,
        read_once.sequences_per_item,
    ) == (names, 0, 1)
    assert (
        before_each.per_job_bytes,
        before_each.per_sequence_bytes,
        before_each.sequences_per_item,
    ) == (0, names, 1)
    assert (in_pairs.per_job_bytes, in_pairs.per_sequence_bytes, in_pairs.sequences_per_item) == (
        0,
        (names + 1) // 2,
        2,
    )
    request.classify.ClearField("labels")
    assert check_extract(request, infers).sequences_per_item == 1, (
        "its own classes need one forward"
    )


def test_generation_by_an_embedding_model_is_refused_in_the_words_of_commands() -> None:
    request = pb.ExtractRequest(model=MODEL, items=[pb.Item(text="abc")], text=pb.TextTask())
    with pytest.raises(TaskNotSupported, match=r"no task text \(generation and OCR\); it has: enc"):
        check_extract(request, card())


def test_text_before_each_item_counts_for_each() -> None:
    turns = [
        pb.Turn(role=pb.Turn.ROLE_USER, text="東京"),
        pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="a" * 994),
    ]
    task = pb.TextTask(instruction="b" * 1000, turns=turns, json_schema="{}", max_tokens=8)
    request = pb.ExtractRequest(model=MODEL, items=[pb.Item(text="abc")] * 3, text=task)
    sizes = check_extract(request, card(tasks=[models_pb2.TASK_TEXT]))
    assert (sizes.per_sequence_bytes, sizes.per_job_bytes, sizes.read) == (2000, 2, [5 + 2000] * 3)
    known = models_pb2.ModelCard(tokens_per_byte=0.25)
    assert pricing.price(sizes, known, pb.TRUNCATION_END) == ([503 + 8] * 3, 0)
    task.turns[1].text = "a" * 65_000
    request = pb.ExtractRequest(model=MODEL, items=[pb.Item(text="abc")] * 5000, text=task)
    with pytest.raises(InvalidInput, match="send at most 4,"):
        check_extract(request, None)


def test_truncated_bytes_and_sequences_raise_price() -> None:
    known = models_pb2.ModelCard(tokens_per_byte=0.25, max_tokens=512)
    (short, long, longest), _ = pricing.price(
        Sizes([2000, 10_000, 4 << 20]), known, pb.TRUNCATION_END
    )
    assert (short, long) == (502, 519)
    assert 4000 < longest < 5000
    assert pricing.price(Sizes([2000], sequences_per_item=3), known, pb.TRUNCATION_END)[0] == [
        3 * 502
    ]


@pytest.mark.parametrize(
    ("measured", "counted"), [(0.0, 0.3), (0.0046, 1 / 16), (0.5, 0.5), (40.0, 1.0)]
)
def test_measured_rates_are_clamped(measured: float, counted: float) -> None:
    known = models_pb2.ModelCard(tokens_per_byte=measured)
    assert pricing.price(Sizes([1600]), known, pb.TRUNCATION_END)[0] == [
        int(counted * 1600) + pricing.SPECIAL_TOKENS
    ]


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 1 << 22)), min_size=1, max_size=600),
    st.integers(1, 250),
)
def test_jobs_are_small_in_bytes_too_as_far_as_their_number_allows(
    items: list[tuple[int, int]], most: int
) -> None:
    costs, read = [cost for cost, _ in items], [size for _, size in items]
    parts = splitting.parts(costs, read, 4096, most=most)
    assert [
        index for part in parts for index in range(part.first, part.first + part.count)
    ] == list(range(len(items)))
    assert len(parts) <= most
    wanted = 2 * sum(max(cost / 4096, size / splitting.JOB_BYTES) + 1 for cost, size in items)
    for part in parts:
        if wanted < most:
            assert (
                part.count == 1
                or sum(read[part.first : part.first + part.count]) <= splitting.JOB_BYTES
            )


def payloads(request: pb.EncodeRequest) -> list[bytes]:
    """Make the jobs as the router does."""
    sizes = check_encode(request, None)
    costs, repeated = pricing.price(sizes, None, pb.TRUNCATION_END)
    shared = codec.without_items(request).ByteSize()
    most = splitting.max_jobs(request.ByteSize(), shared)
    parts = splitting.parts(costs, sizes.read, 1024, repeated, most)
    stamp = JobHeader("r" * 36, 2**41, 2**41, "tenant", 1.0, "t" * 55)
    return codec.job_payloads(
        request, parts, [f"{'0' * 32}-{part.first}-{part.count}" for part in parts], stamp
    )


@given(st.integers(0, 16_384), st.lists(st.integers(1, 3000), min_size=1, max_size=300))
def test_jobs_take_at_most_twice_the_bytes_of_their_request(
    instruction: int, lengths: list[int]
) -> None:
    request = changed(
        encode_request(*("x" * length for length in lengths)), instruction="i" * instruction
    )
    jobs = payloads(request)
    assert sum(map(len, jobs)) <= 2 * request.ByteSize() + splitting.COPIED_BYTES
    assert len(jobs) > 1 or sum(lengths) < 20_000


async def test_long_instruction_is_not_copied_into_hundreds_of_jobs(
    redis_url: str, redis: Redis
) -> None:
    request = changed(encode_request(*["text"] * 2000), instruction="i" * 16_384)
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.sees("w1")
        await client.inference.Encode(request)
        assert (
            sum(job.ByteSize() for job in worker.jobs)
            <= 2 * request.ByteSize() + splitting.COPIED_BYTES
        )
        assert sum(len(job.encode.items) for job in worker.jobs) == 2000
        assert len(worker.jobs) > 1, "other jobs may be leased in between"


async def test_requested_name_is_not_repeated_in_errors(redis_url: str) -> None:
    long = "a/" + "b" * 300
    async with router(redis_url) as client:
        calls = (
            client.models.GetModel(models_pb2.GetModelRequest(model=long)),
            client.mesh.ExplainPlacement(mesh_pb2.ExplainPlacementRequest(model=long)),
        )
        for call in calls:
            refusal = await refused(call)
            assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")


def zero_shot_request(size: int, labels: int) -> pb.ExtractRequest:
    task = pb.ClassifyTask(
        labels=[f"label {number}" for number in range(labels)], hypothesis="{}" + "h" * size
    )
    return pb.ExtractRequest(model=MODEL, items=[pb.Item(text="a text")], classify=task)


def test_hostile_request_costs_few_times_its_size(tmp_path: Path) -> None:
    """Peaks of the process: with requests beyond limits (a hypothesis of 4 MB for 256 labels took
    4.2 GB), then with about the most that is let in."""
    beyond: dict[str, codec.Request] = {
        "Extract": zero_shot_request(4_000_000, 256),
        "Encode": changed(encode_request(*["x" * 100] * 2000), instruction="i" * 2_000_000),
        "Score": pb.ScoreRequest(
            model=MODEL, query=pb.Item(text="q" * 4_000_000), documents=[pb.Item(text="d")] * 10_000
        ),
    }
    within: dict[str, codec.Request] = {
        "Extract": zero_shot_request(1022, 256),
        "Encode": changed(encode_request(*["x" * 100] * 3500), instruction="i" * 16_384),
        "Score": pb.ScoreRequest(
            model=MODEL, query=pb.Item(text="q" * 131_072), documents=[pb.Item(text="d")] * 400
        ),
    }
    with (
        Cluster(tmp_path, models="", workers=0) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        router_process, redis_process = (
            Peak(cluster.processes[name].pid) for name in ("router-0", "redis")
        )
        for requests, code, seconds in (
            (beyond, grpc.StatusCode.INVALID_ARGUMENT, 120.0),
            (within, grpc.StatusCode.DEADLINE_EXCEEDED, 2.0),
        ):
            for verb, request in requests.items():
                request.model = (
                    f"tests/{verb}"  # a separate lane: abandoned jobs leave a lane a little later
                )
                with pytest.raises(grpc.RpcError) as error:
                    getattr(stub, verb)(request, timeout=seconds)
                assert error.value.code() == code, f"{verb}: {error.value.details()}"
        print(
            f"router {router_process.grown / 1e6:.1f} MB, Redis {redis_process.grown / 1e6:.1f} MB"
        )
        assert router_process.grown < 64e6
        assert redis_process.grown < 16e6


def test_requests_in_flight_take_no_more_than_they_are_counted_as(tmp_path: Path) -> None:
    """Measure the router's peak memory at its limit, with the smallest items and with the longest
    query.
    """
    limit = 96 << 20
    few: list[codec.Request] = [encode_request(*["a"] * 10_000) for _ in range(120)]
    large: list[codec.Request] = [
        pb.ScoreRequest(
            query=pb.Item(text="東" * 131_072), documents=[pb.Item(text="d" * 4000)] * 100
        )
        for _ in range(40)
    ]
    room = {"SHOAL_IN_FLIGHT_BYTES": str(limit), "SHOAL_MAX_QUEUED_TOKENS": "4000000000"}
    rounds = (("Encode", few), ("Score", large))
    with (
        Cluster(tmp_path, models="", workers=0, environment=room, routers=2) as cluster,
        ExitStack() as channels,
    ):
        # A router each, so that both sorts of requests wait for their deadlines at once.
        going = []
        for (verb, requests), name, address in zip(
            rounds, cluster.routers, cluster.addresses, strict=True
        ):
            channel = channels.enter_context(grpc.insecure_channel(address))
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            peak, calls = Peak(cluster.processes[name].pid), []
            for number, request in enumerate(requests):
                request.model = f"tests/{verb}-{number % 20}"
                metadata = (("x-shoal-tenant", f"t{number}"),)
                calls.append(getattr(stub, verb).future(request, timeout=15.0, metadata=metadata))
            going.append((verb, peak, calls))
        for verb, peak, calls in going:
            codes = {call.code() for call in calls}
            assert codes == {
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            }, verb
            print(f"{verb}: {peak.grown / 1e6:.1f} MB")
            assert peak.grown < 1.5 * limit, verb


def test_pooling_is_for_multi_vectors_and_within_its_range() -> None:
    both = card(tasks=[models_pb2.TASK_ENCODE])
    both.representations.extend([pb.REPRESENTATION_DENSE, pb.REPRESENTATION_MULTI_VECTOR])
    request = pb.EncodeRequest(model=MODEL, items=[pb.Item(text="a")], pooling_factor=64)
    check_encode(request, None)
    with pytest.raises(InvalidInput, match="only multi-vectors"):
        check_encode(request, both)
    request.representations.append(pb.REPRESENTATION_MULTI_VECTOR)
    check_encode(request, both)
    request.pooling_factor = 65
    with pytest.raises(InvalidInput) as caught:
        check_encode(request, both)
    assert caught.value.field == "pooling_factor"
