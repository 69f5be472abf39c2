"""Hostile requests do not permanently grow an edge, a router, a worker or Redis."""

from __future__ import annotations

import gzip
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc

from tests.fuzz.tiny_kinds import FORMS, write_kinds
from tests.support.cluster import Cluster
from tests.support.peak import Peak, resident_bytes
from tests.support.waiting import wait_until

SHARE = 0.1
"""Maximum remaining growth of a process, as a share of its memory before."""
REDIS_BYTES = 8 << 20
"""Maximum remaining growth of Redis. It uses 5 MB when empty, and a tenth of that is less than one
of its buffers.
"""
SECONDS = 180.0
NAMES = ("edge-0", "router-0", "worker-0", "redis")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = tmp_path_factory.mktemp("models")
    write_kinds(models)
    with Cluster(tmp_path_factory.mktemp("returned"), models=str(models), edges=1) as running:
        wait_until(
            lambda: post(running, b'{"model": "%s", "input": "a"}' % FORMS.encode()) == 200,
            180,
            "the edge to answer",
        )
        yield running


def post(cluster: Cluster, body: bytes, encoding: str = "identity") -> int:
    """Send a body to `/v1/embeddings`. Return the status; 0 if the edge closed the connection or
    does not listen.
    """
    host, _, port = cluster.http_addresses[0].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    try:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        connection.request("POST", "/v1/embeddings", body, headers)
        return connection.getresponse().status
    except (ConnectionError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def labels(items: int) -> pb.ExtractRequest:
    """Make a request with 256 labels per answer: 4 MiB of labels for 862 items."""
    task = pb.ClassifyTask(labels=[f"{number:03}" for number in range(256)])
    return pb.ExtractRequest(model=FORMS, items=[pb.Item(text="boats")] * items, classify=task)


def attack(cluster: Cluster, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Send bodies with many objects, a body that inflates, many texts, and a request with the
    largest answer.
    """
    many = b'{"model": "%s", "input": [%s"a"]}' % (FORMS.encode(), b'"a",' * 1_000_000)
    with ThreadPoolExecutor(4) as threads:
        statuses = [threads.submit(post, cluster, many) for _ in range(4)]
        statuses += [
            threads.submit(post, cluster, gzip.compress(many * 4), "gzip") for _ in range(4)
        ]
        assert not {status.result() for status in statuses} & {200, 500}
    stub.Extract(labels(800), timeout=120)
    stub.Encode(
        pb.EncodeRequest(model=FORMS, items=[pb.Item(text="a" * 300)] * 10_000), timeout=120
    )


def test_memory_returns_after_hostile_requests(cluster: Cluster) -> None:
    with grpc.insecure_channel(
        cluster.address, [("grpc.max_receive_message_length", -1)]
    ) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(3):
            stub.Extract(labels(10), timeout=60)
            stub.Encode(
                pb.EncodeRequest(model=FORMS, items=[pb.Item(text="a" * 300)] * 100), timeout=60
            )
        pids = cluster.pids(*NAMES)
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        peaks = {name: Peak(pid) for name, pid in pids.items()}
        attack(cluster, stub)
        grown = {name: peak.grown >> 20 for name, peak in peaks.items()}
        ended = time.monotonic()

        def has_returned() -> bool:
            kept = {name: resident_bytes(pid) - before[name] for name, pid in pids.items()}
            return all(
                size <= (REDIS_BYTES if name.startswith("redis") else SHARE * before[name])
                for name, size in kept.items()
            )

        try:
            wait_until(has_returned, SECONDS, "memory to return")
        finally:
            kept = {name: (resident_bytes(pid) - before[name]) >> 20 for name, pid in pids.items()}
            print(
                f"before {before}; grown by {grown} MiB; kept {kept} MiB after "
                f"{time.monotonic() - ended:.0f} s"
            )
