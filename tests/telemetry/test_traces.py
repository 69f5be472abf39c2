"""One request is one connected trace, from the application to the forward pass, at a real OTLP
receiver; errors and retries too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from shoal import Client

from tests.edge.batches.parts import ENDED, line, start, wait_for
from tests.edge.parts import Http
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.router.parts import until
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until
from tests.telemetry.receiver import Receiver, Seen, receiving

MODEL = "random/embed"
ENCODE = "shoal.v1.InferenceService/Encode"
LANE = f"cpu/{MODEL}"


@dataclass(frozen=True)
class Traced:
    """A mesh with processes that all send their spans to `receiver`."""

    cluster: Cluster
    receiver: Receiver
    endpoint: str

    def ask(
        self, model: str = MODEL, count: int = 1, addresses: str = "", **environment: str
    ) -> tuple[str, str]:
        """Send a request from a separate process; return trace id and error reason."""
        command = [
            sys.executable,
            "-m",
            "tests.telemetry.application",
            addresses or self.cluster.address,
            model,
            str(count),
        ]
        variables = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_SERVICE_NAME": "application",
            **environment,
        }
        said = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=300, check=True
        ).stdout.split()
        return said[0], said[1] if len(said) > 1 else ""

    def spans(self, trace: str, is_whole: Callable[[Sequence[Seen]], bool]) -> list[Seen]:
        wait_until(
            lambda: is_whole(self.receiver.of_trace(trace)), 120.0, f"a whole trace of {trace}"
        )
        return self.receiver.of_trace(trace)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Run two routers, and two workers, each connected to another router; both have the model."""
    directory = tmp_path_factory.mktemp("traces")
    write_checkpoint(
        "bert", directory / "models" / MODEL, sentence=SentenceFiles(max_seq_length=128)
    )
    (directory / "mesh").mkdir()
    with receiving() as (receiver, endpoint):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        cluster = Cluster(
            directory / "mesh",
            models=str(directory / "models"),
            routers=2,
            workers=2,
            edges=1,
            environment=environment,
            each={"edge-0": {"SHOAL_BATCHES_URL": str(directory / "batches")}},
        )
        cluster.each["worker-1"] = {"SHOAL_ROUTERS": ",".join(reversed(cluster.addresses))}
        with cluster:
            _load_everywhere(cluster)
            yield Traced(cluster, receiver, endpoint)


def _load_everywhere(cluster: Cluster) -> None:
    with Client(cluster.address, timeout=60.0) as client:
        for _ in cluster.workers:
            client.models.load(MODEL)  # one more copy
        wait_until(
            lambda: all(MODEL in worker.resident for worker in client.mesh().workers),
            120.0,
            "both to have the model",
        )


def named(spans: Sequence[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


def only(spans: Sequence[Seen], name: str) -> Seen:
    found = named(spans, name)
    assert len(found) == 1, f"{name}: {len(found)} of {sorted(span.name for span in spans)}"
    return found[0]


def by_two_workers(spans: Sequence[Seen]) -> bool:
    """Return True if all jobs' spans have arrived, from two workers."""
    sent, done = named(spans, f"send {LANE}"), named(spans, f"process {LANE}")
    if not (sent and done) or len(done) != sent[0].attributes["messaging.batch.message_count"]:
        return False
    completed = named(spans, "shoal.v1.WorkerService/Complete")
    return len({span.instance for span in done}) == len({span.instance for span in completed}) == 2


def is_complete(spans: Sequence[Seen]) -> bool:
    """Return True if two workers did the jobs and all other spans have arrived too: each process
    sends its spans in batches.
    """
    ids = {span.id for span in spans}
    forwards = named(spans, "forward")
    return (
        by_two_workers(spans)
        and is_whole(spans)
        and all(span.parent in ids for span in spans if span.name != "search")
        and len(named(spans, f"wait {LANE}")) == len(named(spans, f"process {LANE}"))
        and sum(int(span.attributes["shoal.batch.sequences"]) for span in forwards) == 120
    )


def test_request_through_two_routers_and_two_workers_is_one_trace(mesh: Traced) -> None:
    asked: list[str] = []

    def complete() -> list[str]:
        return [trace for trace in asked if is_complete(mesh.receiver.of_trace(trace))]

    for _ in range(20):  # which worker is quicker is chance: a job for each, sooner or later
        trace, reason = mesh.ask(count=120, addresses=mesh.cluster.addresses[0])
        assert not reason
        asked.append(trace)
        with suppress(AssertionError):  # spans of a busy machine may arrive after the next request
            wait_until(lambda: bool(complete()), 3.0)
            break
    wait_until(lambda: bool(complete()), 120.0, "a complete trace of two workers")
    spans = mesh.receiver.of_trace(complete()[0])
    by_id = {span.id: span for span in spans}

    root = only(spans, "search")
    assert not root.parent
    client, server = (
        next(span for span in named(spans, ENCODE) if span.kind == kind)
        for kind in ("CLIENT", "SERVER")
    )
    assert (client.parent, client.service) == (root.id, "application")
    assert (server.parent, server.service) == (client.id, "shoal-router")
    assert client.attributes["rpc.system"] == server.attributes["rpc.system"] == "grpc"
    assert (server.attributes["rpc.service"], server.attributes["rpc.method"]) == (
        "shoal.v1.InferenceService",
        "Encode",
    )
    assert server.attributes["shoal.request_id"] == client.attributes["shoal.request_id"]
    assert (server.attributes["shoal.model"], server.attributes["shoal.outcome"]) == (MODEL, "OK")
    assert server.resource["deployment.environment.name"] == "test"
    assert (server.resource["service.namespace"], server.instance) == ("shoal", "router-0")

    send = only(spans, f"send {LANE}")
    assert (send.kind, send.parent) == ("PRODUCER", server.id)
    assert send.attributes["messaging.system"] == "redis"
    assert send.attributes["messaging.destination.name"] == LANE

    waits, jobs = named(spans, f"wait {LANE}"), named(spans, f"process {LANE}")
    assert len(waits) == len(jobs) >= 2
    assert {span.parent for span in (*waits, *jobs)} == {send.id}
    assert {(span.kind, span.service) for span in jobs} == {("CONSUMER", "shoal-worker")}
    assert {span.instance for span in jobs} == {"worker-0", "worker-1"}
    forwards = named(spans, "forward")
    assert {link for span in forwards for link in span.links} == {span.id for span in jobs}
    for job in jobs:
        assert job.attributes["messaging.operation.type"] == "process"
        children = {span.name for span in spans if span.parent == job.id}
        assert {"prepare", "finish"} <= children
        of_job = [span for span in forwards if job.id in span.links]
        assert of_job, "its batch is linked with it"
        assert all(span.parent == job.id or span.id in job.links for span in of_job), (
            "and it with its batch"
        )
        assert all(
            job.began - 0.005 <= span.began <= span.ended <= job.ended + 0.005 for span in of_job
        )
    assert all(by_id[span.parent] in jobs for span in forwards)
    assert sum(int(span.attributes["shoal.batch.sequences"]) for span in forwards) == 120

    completes = named(spans, "shoal.v1.WorkerService/Complete")
    assert {span.instance for span in completes} == {"router-0", "router-1"}
    assert all(by_id[span.parent] in jobs and span.kind == "SERVER" for span in completes)
    assert all(span.parent in by_id for span in spans if span is not root), (
        "nothing hangs in the air"
    )


def test_error_is_recorded_in_every_span_of_its_path(mesh: Traced) -> None:
    trace, reason = mesh.ask(model="no/such")
    assert reason in ("MODEL_NOT_FOUND", "DEADLINE_PASSED")
    spans = mesh.spans(
        trace, lambda spans: len(named(spans, ENCODE)) >= 2 and bool(named(spans, "search"))
    )
    for span in named(spans, ENCODE):
        assert span.is_error
        assert span.attributes["error.type"] == reason


def is_whole(spans: Sequence[Seen]) -> bool:
    """Return True if the spans of client, router and worker have arrived."""
    asked = {span.kind for span in named(spans, ENCODE)}
    return (
        asked >= {"CLIENT", "SERVER"}
        and bool(named(spans, f"process {LANE}"))
        and bool(named(spans, "search"))
    )


def test_failed_try_and_its_retry_are_in_one_trace(mesh: Traced) -> None:
    nobody = "127.0.0.1:9"
    for _ in range(20):  # a client begins at any of its addresses
        trace, reason = mesh.ask(addresses=f"{nobody},{mesh.cluster.address}")
        assert not reason
        spans = mesh.spans(trace, is_whole)
        client = next(span for span in named(spans, ENCODE) if span.kind == "CLIENT")
        if client.events:
            break
    assert not client.is_error
    assert [event["name"] for event in client.events] == ["try failed"]
    assert client.events[0]["server.address"] == nobody
    assert next(span for span in named(spans, ENCODE) if span.kind == "SERVER").parent == client.id


def test_unsampled_request_leaves_no_spans(mesh: Traced) -> None:
    trace, reason = mesh.ask(OTEL_TRACES_SAMPLER="always_off")
    assert not reason
    again, _ = mesh.ask()
    mesh.spans(again, lambda spans: bool(named(spans, f"process {LANE}")))
    assert not mesh.receiver.of_trace(trace)


async def test_batch_is_a_trace_that_is_linked_with_those_of_its_requests(mesh: Traced) -> None:
    http = Http(mesh.cluster.http_addresses[0])
    await until(lambda: is_ready(http), "the edge", 120.0)
    body = {"model": MODEL, "input": "a text"}
    content = line("good", "", body=body) + line("bad", "", body=body | {"dimensions": -1})
    batch = await wait_for(http, await start(http, content), ENDED)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}

    def find_run() -> list[Seen]:
        return [
            span
            for span in named(mesh.receiver.spans, "run batch")
            if span.attributes["shoal.batch.id"] == batch["id"]
        ]

    await until(lambda: bool(find_run()), "the span of the batch", 120.0)
    (run,) = find_run()
    assert not run.parent
    assert run.attributes["shoal.batch.status"] == "completed"
    assert (run.attributes["shoal.batch.completed"], run.attributes["shoal.batch.failed"]) == (1, 1)
    (created,) = named(mesh.receiver.spans, "POST /v1/batches")
    assert run.links == {created.id}
    chunk = only(mesh.receiver.of_trace(run.trace), "run chunk")
    assert (chunk.parent, chunk.attributes["shoal.batch.chunk"]) == (run.id, 0)

    def find_requests() -> list[Seen]:
        spans = named(mesh.receiver.spans, "POST /v1/embeddings")
        return [span for span in spans if chunk.id in span.links]

    await until(lambda: len(find_requests()) == 2, "the spans of the requests", 120.0)
    assert {span.id for span in find_requests()} == chunk.links
    assert len({run.trace, *(span.trace for span in find_requests())}) == 3
    assert sum("error.type" in span.attributes for span in find_requests()) == 1


async def is_ready(http: Http) -> bool:
    try:
        return (await http.get("/readyz")).status == 200
    except OSError:
        return False


def test_log_lines_carry_the_trace(mesh: Traced) -> None:
    trace, _ = mesh.ask(addresses=mesh.cluster.addresses[0])
    log = mesh.cluster.directory / "router-0.log"

    def lines() -> list[dict[str, object]]:
        found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("trace_id") == trace]

    wait_until(lambda: bool(lines()), 120.0, "a line of the trace")
    assert [line["message"] for line in lines()] == ["call"]


def test_without_an_endpoint_nothing_is_sent_and_requests_are_served(
    mesh: Traced, tmp_path: Path
) -> None:
    began = time.time()  # spans of earlier requests may still be on their way
    (tmp_path / "mesh").mkdir()
    models = mesh.cluster.directory.parent / "models"
    with (
        Cluster(tmp_path / "mesh", models=str(models)) as plain,
        Client(plain.address, timeout=60.0) as client,
    ):
        assert client.encode(MODEL, ["a text"]).dense is not None
    assert not [span for span in mesh.receiver.spans if span.began >= began]
