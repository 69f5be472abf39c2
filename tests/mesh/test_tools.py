"""The mesh without Shoal's stubs: reflection, a generic gRPC client, health of each service."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.local.settings import MINILM
from tests.support.cluster import Cluster

SERVICES = (
    "shoal.v1.InferenceService",
    "shoal.v1.ModelService",
    "shoal.v1.MeshService",
    "shoal.v1.WorkerService",
)
BUF = Path(sys.executable).with_name("buf")


def test_reflection_lists_the_services(mesh: Cluster) -> None:
    with grpc.insecure_channel(mesh.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
    assert set(SERVICES) | {"grpc.health.v1.Health"} <= {
        service.name for service in answer.list_services_response.service
    }


def test_buf_curl_encodes_by_reflection(mesh: Cluster) -> None:
    """The client only knows the address, as grpcurl does."""
    method = f"http://{mesh.address}/shoal.v1.InferenceService/Encode"
    run = subprocess.run(
        [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", "@-", method],
        input=json.dumps({"model": MINILM, "items": [{"text": "Hello, mesh"}]}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["dense"]["shape"] == ["1", "384"]
    vector = np.frombuffer(base64.b64decode(answer["dense"]["data"]), dtype="<f4")
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health_answers_for_each_service(service: str, mesh: Cluster) -> None:
    with grpc.insecure_channel(mesh.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=60
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_does_not_know_other_services(mesh: Cluster) -> None:
    with grpc.insecure_channel(mesh.address) as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="shoal.v1.NoService"), timeout=60
        )
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
