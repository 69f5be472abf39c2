"""Variables in manifests are those that the services read, and those they read are set or have a
default that is good here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from libs.queue.connection.acl import acl_file
from libs.setting import list_variables
from services.edge.settings import Settings as EdgeSettings
from services.router.admission.tenants import parse_tenants
from services.router.settings import Settings as RouterSettings
from services.scheduler.settings import Settings as SchedulerSettings
from services.worker.settings import Settings as WorkerSettings
from tests.k8s.charts import CHARTS, made
from tests.k8s.manifests import (
    EVERY,
    K8S,
    OVERLAYS,
    Object,
    component,
    containers,
    environment,
    named,
    rendered,
    workloads,
)
from tests.k8s.pods import Node

T = TypeVar("T")
SETTINGS: Mapping[str, type[Any]] = {
    "edge": EdgeSettings,
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
OTHERS = ("OTEL_", "PYTHON", "HF_", "POD_", "TRITON_")
"""Prefixes of variables that are read by libraries, or referenced by other variables."""

_BOTH = frozenset(
    {
        "SHOAL_GRACE_SECONDS",
        "SHOAL_LEASE_MS",
        "SHOAL_TRUST_DOMAIN",
    }
)
GOOD_DEFAULTS: Mapping[str, frozenset[str]] = {
    "edge": frozenset(
        {
            "SHOAL_BATCHES_EXPIRY_SECONDS",
            "SHOAL_BATCHES_FILE_BYTES",
            "SHOAL_BATCHES_IN_FLIGHT",
            "SHOAL_BATCHES_LINES",
            "SHOAL_BATCHES_TENANT_BATCHES",
            "SHOAL_BATCHES_TENANT_BYTES",
            "SHOAL_BATCHES_TENANT_REQUESTS",
            "SHOAL_CL100K",
            "SHOAL_CONSOLE",  # off beyond loopback
            "SHOAL_CONSOLE_ADDRESS",
            "SHOAL_CONSOLE_HOSTS",
            "SHOAL_CONSOLE_ORIGINS",
            "SHOAL_DEADLINE_SECONDS",
            "SHOAL_EDGE_ID",
            "SHOAL_GRACE_SECONDS",
            "SHOAL_HTTP_BODY_BYTES",
            "SHOAL_HTTP_BODY_PAUSE_SECONDS",
            "SHOAL_HTTP_BODY_SECONDS",
            "SHOAL_HTTP_COMPRESSION",
            "SHOAL_HTTP_CONNECTIONS",
            "SHOAL_HTTP_HEADER_SECONDS",
            "SHOAL_HTTP_HOSTS",
            "SHOAL_HTTP_IDLE_SECONDS",
            "SHOAL_HTTP_ORIGINS",
            "SHOAL_JOBS_INPUT_BYTES",
            "SHOAL_JOBS_IN_FLIGHT",
            "SHOAL_JOBS_PRICES",
            "SHOAL_JOBS_PROCESS_BYTES",
            "SHOAL_JOBS_TENANT_JOBS",
            "SHOAL_JOBS_TENANT_OUTPUT_BYTES",
            "SHOAL_LONGEST_DEADLINE_SECONDS",
            "SHOAL_ROUTERS_NAME",
            "SHOAL_ROUTERS_TLS",
            "SHOAL_TEI_GRPC_ADDRESSES",
            "SHOAL_TEI_HTTP_ADDRESSES",
            "SHOAL_TLS_CLIENT_CA",  # tokens say who calls
            "SHOAL_TRUST_DOMAIN",
        }
    ),
    "router": _BOTH
    | {
        "SHOAL_CLAIM_AFTER_SECONDS",
        "SHOAL_CONNECTION_SECONDS",
        "SHOAL_DEADLINE_SECONDS",
        "SHOAL_DEFAULT_POOL",  # pools.yaml says it
        "SHOAL_MAX_ATTEMPTS",
        "SHOAL_MAX_QUEUED_SECONDS",
        "SHOAL_MAX_QUEUED_TOKENS",
        "SHOAL_POOL",
        "SHOAL_PROCESSES",  # of `shoal up`; pods are looked after by the kubelet
        "SHOAL_ROUTER_ID",  # the pod's name, and random digits for each start
    },
    "scheduler": _BOTH
    | {
        "SHOAL_EVICTION",
        "SHOAL_JWKS",  # KEDA, the only caller, shows a certificate
        "SHOAL_JWT_AUDIENCE",
        "SHOAL_JWT_ISSUER",
        "SHOAL_SCHEDULER_ID",
        "SHOAL_TOKENS",
    },
    "worker": frozenset(
        {
            "SHOAL_ADAPTERS",
            "SHOAL_BATCH_ITEMS",
            "SHOAL_BATCH_SECONDS",
            "SHOAL_BATCH_TOKENS",
            "SHOAL_CUDA_GRAPHS",
            "SHOAL_CUDA_IN_FLIGHT",
            "SHOAL_DTYPE",
            "SHOAL_EVICTION",
            "SHOAL_GRACE_SECONDS",
            "SHOAL_HEARTBEAT_SECONDS",
            "SHOAL_HOST_BYTES",
            "SHOAL_IMAGE_CACHE_BYTES",
            "SHOAL_LOAD_SECONDS",
            "SHOAL_MAX_AGE_SECONDS",
            "SHOAL_MEMORY_BYTES",  # by the container's limit
            "SHOAL_MODELS",
            "SHOAL_PULL_WAIT_SECONDS",
            "SHOAL_TLS",
            "SHOAL_TLS_NAME",
            "SHOAL_TOKEN",
            "SHOAL_TOKEN_FILE",
            "SHOAL_TOKEN_WITHOUT_TLS",
            "SHOAL_TORCH_CHECKPOINTS",
            "SHOAL_WORKER_ID",
        }
    ),
}


class Asked(dict[str, str]):
    """An environment that records the names that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def asked(service: str) -> set[str]:
    environ = Asked()
    SETTINGS[service].from_env(environ)
    return {name for name in environ.names if name.startswith("SHOAL_")}


def declared(service: str) -> set[str]:
    return {setting.variable for setting in list_variables(SETTINGS[service])}


def variable_names(objects: tuple[Object, ...], service: str) -> set[str]:
    return {
        name
        for workload in workloads(objects)
        if component(workload) == service
        for container in containers(workload)
        for name in environment(objects, container)
    }


@pytest.mark.parametrize("service", SETTINGS)
def test_service_reads_the_variables_that_it_declares(service: str) -> None:
    assert asked(service) == declared(service)


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_one_that_the_service_reads(service: str) -> None:
    known = declared(service)
    assert len(known) > 10
    for name in (*EVERY, *CHARTS):
        unknown = {
            one for one in variable_names(made(name), service) - known if not one.startswith(OTHERS)
        }
        assert unknown == set(), f"in {name}"


@pytest.mark.parametrize("name", ["base", *(f"overlays/{name}" for name in OVERLAYS), *CHARTS])
def test_workers_keep_compiled_kernels_with_their_models(name: str) -> None:
    """Triton reads the variable; without it each pod compiles again."""
    objects = made(name)
    found = [
        environment(objects, container)
        for workload in workloads(objects)
        if component(workload) == "worker"
        for container in containers(workload)
    ]
    assert found
    for variables in found:
        assert variables["TRITON_CACHE_DIR"] == f"{variables['SHOAL_STORE_DIR']}/triton"


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_that_a_service_reads_is_set_somewhere_or_good_as_it_is(
    service: str,
) -> None:
    somewhere = {
        one
        for name in EVERY
        for one in variable_names(rendered(name), service)
        if not one.startswith(OTHERS)
    }
    assert declared(service) == somewhere | GOOD_DEFAULTS[service]
    assert somewhere & GOOD_DEFAULTS[service] == set()


@pytest.mark.parametrize(
    "name",
    [
        "base",
        "components/tls",
        "components/tokens",
        "components/edge",
        "components/edge-tls",
        "components/edge-batches-claim",
        "components/edge-batches-bucket",
        "components/edge-jobs",
        "components/jwks",
        "components/external-redis",
        "components/redis-sentinel",
        "components/redis-cluster",
        *(f"overlays/{name}" for name in OVERLAYS),
        *CHARTS,
    ],
)
def test_services_take_the_settings_of_their_pods(name: str, tmp_path: Path) -> None:
    """The services' own reading of them, with the volumes' files in folders of this machine."""
    objects = made(name)
    node = Node(tmp_path, objects)
    for workload in workloads(objects):
        if component(workload) == "redis":
            continue
        variables = node.pod(workload).environment()
        settings = SETTINGS[component(workload)].from_env(variables)
        assert settings.metrics_address
        assert (
            settings.health_address
            if component(workload) == "worker"
            else settings.security.health_address
        )


def test_tenants_and_users_are_as_the_code_writes_and_reads_them() -> None:
    objects = rendered("overlays/kind-cpu")
    assert (
        parse_tenants(
            named(objects, "ConfigMap", "tenants")["data"]["tenants.yaml"], "tenants.yaml"
        ).by_name
        == {}
    )
    users = (K8S / "overlays/kind-cpu/users.acl").read_text()
    assert users == acl_file(
        router="development-router", scheduler="development-scheduler", admin=None
    ), "run shoal redis-acl again"
