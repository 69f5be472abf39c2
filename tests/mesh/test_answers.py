"""A tenant requests very large answers: the memory of each process is bounded, and other tenants
are answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc
import pytest
import shoal
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc

from tests.fuzz.tiny_kinds import FORMS, write_kinds
from tests.parity.glirel_models import make_reference
from tests.support.cluster import Cluster
from tests.support.peak import Peak
from tests.support.waiting import wait_until

pytestmark = pytest.mark.alone

RELATIONS: Final = "random/glirel"
ENTITIES, LABELS, ITEMS = 120, 60, 200
ATTACK_SECONDS: Final = 300.0
CALL_SECONDS: Final = 120.0
MEMORY_BYTES, MEMORY_PER_BYTE = 64 << 20, 16
"""Limits of every process: maximum growth for a request, and per byte of the request."""
DELAY_SHARE: Final = 0.25
"""Maximum delay as a share of the attack's duration. Another tenant waited 42.6 of 68.3 s before
answers were bounded, and 0.2 of 16 s since.
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = tmp_path_factory.mktemp("models")
    write_kinds(models)
    made = make_reference(tmp_path_factory.mktemp("glirel"), {"max_len": 400}, positions=1024)
    (models / "random").mkdir()
    made.directory.rename(models / RELATIONS)
    with Cluster(tmp_path_factory.mktemp("answers"), models=str(models)) as running:
        yield running


def related(items: int, entities: int = ENTITIES, labels: int = LABELS) -> pb.ExtractRequest:
    """Make a request in which each word is an entity, and every pair of entities has every
    relation.
    """
    found = [pb.Entity(start=2 * place, end=2 * place + 1, label="e") for place in range(entities)]
    item = pb.Item(text="a " * entities, entities=found)
    task = pb.RelationsTask(labels=[f"r{number}" for number in range(labels)], threshold=0.0)
    return pb.ExtractRequest(model=RELATIONS, items=[item] * items, relations=task)


@dataclass
class Light:
    """The other tenant, with sequential requests. `slowest` is the longest wait, `answered` the
    count.
    """

    stub: inference_pb2_grpc.InferenceServiceStub
    slowest: float = 0.0
    answered: int = 0

    def ask(self) -> None:
        begin = time.monotonic()
        request = pb.EncodeRequest(model=FORMS, items=[pb.Item(text="small boats")])
        self.stub.Encode(request, timeout=CALL_SECONDS, metadata=(("x-shoal-tenant", "light"),))
        self.slowest = max(self.slowest, time.monotonic() - begin)
        self.answered += 1


def test_large_relations_answer_uses_bounded_memory_without_delaying_others(
    cluster: Cluster,
) -> None:
    unlimited = [("grpc.max_receive_message_length", -1)]
    with (
        grpc.insecure_channel(cluster.address, unlimited) as hostile,
        grpc.insecure_channel(cluster.address) as channel,
        # A client repeats small calls that the router cuts off while large ones arrive.
        shoal.Client(cluster.address) as mesh,
    ):
        attacker, light = (
            inference_pb2_grpc.InferenceServiceStub(hostile),
            Light(inference_pb2_grpc.InferenceServiceStub(channel)),
        )

        def enqueued() -> int:
            return sum(lane.enqueued_jobs for lane in mesh.mesh().lanes if lane.model == RELATIONS)

        attacker.Extract(related(1, 3, 2), timeout=CALL_SECONDS)
        light.ask()
        light = Light(light.stub)
        before, request = enqueued(), related(ITEMS)
        pids = cluster.pids("router-0", "worker-0", "redis")
        peaks = {name: Peak(pid) for name, pid in pids.items()}
        call = attacker.Extract.future(
            request, timeout=ATTACK_SECONDS, metadata=(("x-shoal-tenant", "hostile"),)
        )
        wait_until(lambda: enqueued() > before, 60, "the attack is in its lane")
        begin = time.monotonic()
        while not call.done():
            light.ask()
        answer, size = call.result(), request.ByteSize()
        took = time.monotonic() - begin
        grown = {name: f"{peak.grown / 1e6:.0f} MB" for name, peak in peaks.items()}
        print(f"request {size:,} bytes, answer {answer.ByteSize():,} in {took:.1f} s; {grown}")
        print(f"light: {light.answered} answers, slowest {light.slowest:.2f} s")
        for name, peak in peaks.items():
            assert peak.grown < MEMORY_BYTES + MEMORY_PER_BYTE * size, name
        assert answer.ByteSize() <= (4 << 20) + size
        assert all(result.truncated and result.relations for result in answer.results)
        assert light.answered >= 3, "others are answered while it is"
        assert light.slowest < DELAY_SHARE * took


def test_label_answer_at_its_limit_uses_bounded_memory(cluster: Cluster) -> None:
    labels = [f"{number:03}" for number in range(256)]
    items = (4 << 20) // sum(16 + len(label) for label in labels)
    request = pb.ExtractRequest(
        model=FORMS, items=[pb.Item(text="boats")] * items, classify=pb.ClassifyTask(labels=labels)
    )
    with grpc.insecure_channel(cluster.address) as channel:  # a client with gRPC's default limit
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Extract(
            pb.ExtractRequest(model=FORMS, items=request.items[:1], classify=request.classify),
            timeout=CALL_SECONDS,
        )
        pids = cluster.pids("router-0", "worker-0", "redis")
        peaks = {name: Peak(pid) for name, pid in pids.items()}
        answer, size = stub.Extract(request, timeout=CALL_SECONDS), request.ByteSize()
    print(
        f"request {size:,} bytes, answer {answer.ByteSize():,}; "
        f"{ {name: peak.grown >> 20 for name, peak in peaks.items()} } MiB"
    )
    assert {len(result.labels) for result in answer.results} == {256}
    for name, peak in peaks.items():
        assert peak.grown < MEMORY_BYTES + MEMORY_PER_BYTE * size, name
