"""Every pod of every overlay has few rights, probes, bounds and an orderly end, and every name
refers to an object.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from libs.catalog.pools import read_pools
from libs.serving import LIVENESS
from services.edge.app import HEALTH_NAME as EDGE_HEALTH_NAME
from services.edge.settings import Settings as EdgeSettings
from services.local.trust.certificates import Party
from services.router.settings import Settings as RouterSettings
from services.scheduler.app import READINESS
from services.scheduler.settings import Settings as SchedulerSettings
from services.worker.app import HEALTH_NAME
from services.worker.settings import Settings as WorkerSettings
from tests.k8s.charts import CHARTS, made
from tests.k8s.manifests import (
    CLUSTER_WIDE,
    EVERY,
    OVERLAYS,
    ROOT,
    Object,
    component,
    containers,
    environment,
    matches,
    mounted,
    named,
    objects_of_kind,
    port_number,
    rendered,
    selected,
    template,
    title,
    with_components,
    workloads,
)

SAFE_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "claimTemplate"}
"""Kinds of volumes that we use, of those that the `restricted` standard allows."""
GRACE_SECONDS = {
    "edge": EdgeSettings.from_env({}).grace_seconds,
    "router": RouterSettings.from_env({}).grace_seconds,
    "scheduler": SchedulerSettings.from_env({}).grace_seconds,
    "worker": WorkerSettings.from_env({}).grace_seconds,
    "redis": 0.0,
}
TO_SPARE_SECONDS = 5.0
HEALTH_NAMES: dict[str, dict[str, str | None]] = {
    "edge": {
        "startupProbe": LIVENESS,
        "livenessProbe": LIVENESS,
        "readinessProbe": EDGE_HEALTH_NAME,
    },
    "router": {
        "startupProbe": LIVENESS,
        "livenessProbe": LIVENESS,
        "readinessProbe": "shoal.v1.InferenceService",
    },
    "scheduler": {"startupProbe": LIVENESS, "livenessProbe": LIVENESS, "readinessProbe": READINESS},
    "worker": dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe"), HEALTH_NAME),
    "redis": dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe")),
}
"""None: that it can be connected to. What becomes NOT_SERVING while Redis is away must not get a
process killed.
"""
SUPPLIED = {"redis-users", "redis-router", "redis-scheduler", "tokens", "jwks"}
"""Secrets that are not in git: docs/kubernetes.md."""
OPEN_SERVICES = {f"shoal.v1.{name}Service" for name in ("Inference", "Model", "Mesh")} | {
    "grpc.health.v1.Health"
}
"""Methods that clients and administrators call."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(params=[*EVERY, *CHARTS])
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return made(request.param)


@pytest.fixture(params=["base", *(f"overlays/{name}" for name in OVERLAYS), *CHARTS])
def deployable(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    """Return complete renderings; components on the base alone may lack parts of an overlay."""
    return made(request.param)


def pods(objects: tuple[Object, ...]) -> Iterator[tuple[Object, Object]]:
    """Workloads and their containers."""
    for workload in workloads(objects):
        for container in containers(workload):
            yield workload, container


def test_pods_have_no_rights_that_they_do_not_need(objects: tuple[Object, ...]) -> None:
    (namespace,) = objects_of_kind(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(objects):
        spec = template(workload)["spec"]
        assert {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items() <= spec["securityContext"].items()
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, (
            "variables of Services' names may be settings' names"
        )
        account = named(objects, "ServiceAccount", spec["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
        for container in containers(workload):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context
            assert all("hostPort" not in port for port in container.get("ports", ()))
        kinds = {key for _, volume in mounted(workload) for key in volume if key != "name"}
        assert kinds <= SAFE_VOLUMES
        assert "/tmp" in dict(mounted(workload))
    accounts = [template(workload)["spec"]["serviceAccountName"] for workload in workloads(objects)]
    assert len(accounts) == len(set(accounts)), "each has its own"


def test_probes_use_served_ports_and_services(objects: tuple[Object, ...]) -> None:
    for workload, container in pods(objects):
        for kind, name in HEALTH_NAMES[component(workload)].items():
            probe = container[kind]
            if "exec" in probe:
                assert (component(workload), kind) == ("redis", "livenessProbe"), (
                    "see test_rotation.py"
                )
            elif name is None:
                assert port_number(workload, probe["tcpSocket"]["port"]) in (50052, 6379)
            else:
                assert probe["grpc"] == {"port": port_number(workload, "health"), "service": name}


def test_resources_are_bounded(objects: tuple[Object, ...]) -> None:
    for _, container in pods(objects):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests["memory"] == limits["memory"]
        assert requests["cpu"]
        assert "cpu" not in limits, "a limit of CPU makes latency, not room"
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
    for workload in workloads(objects):
        for _, volume in mounted(workload):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


def test_worker_on_a_gpu_has_one_and_the_image_for_it(objects: tuple[Object, ...]) -> None:
    for workload, container in pods(objects):
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert (environment(objects, container).get("SHOAL_DEVICE") == "cuda") == has_gpu
        assert (
            re.search(r"worker-cuda[:@]", container["image"]) is not None
            if has_gpu
            else "cuda" not in container["image"]
        )
        keys = [one["key"] for one in template(workload)["spec"].get("tolerations", ())]
        assert ("nvidia.com/gpu" in keys) == has_gpu


def test_images_have_a_tag_or_a_digest(objects: tuple[Object, ...]) -> None:
    for workload, container in pods(objects):
        image = re.fullmatch(
            r"(?P<name>[\w./-]+?)(:(?P<tag>[\w.-]+))?(@sha256:(?P<digest>[0-9a-f]{64}))?",
            container["image"],
        )
        assert image is not None
        assert image["tag"] or image["digest"]
        assert image["tag"] != "latest"
        if component(workload) == "redis":
            assert image["name"] == "docker.io/valkey/valkey", (
                "Redis 7.2 is at its end, and later ones have another licence"
            )
            assert re.fullmatch(r"8\.\d+\.\d+-\w+", image["tag"]), (
                "a version of its own, on a Debian: probes and shell are its"
            )
        elif not image["digest"]:
            assert image["tag"] == VERSION


@pytest.mark.parametrize(
    "key",
    ["slowlog-log-slower-than", "commandlog-request-larger-than", "commandlog-reply-larger-than"],
)
def test_redis_does_not_log_commands_of_clients(key: str) -> None:
    """Valkey 8.1 keeps the beginnings of commands above 1 MiB unless its log is turned off."""
    (conf,) = (
        one["data"]["redis.conf"]
        for one in objects_of_kind(rendered("base"), "ConfigMap")
        if "redis.conf" in one.get("data", {})
    )
    assert [line for line in conf.splitlines() if line.startswith(key)] == [f"{key} -1"]


def test_pods_end_before_they_are_killed(objects: tuple[Object, ...]) -> None:
    for workload, container in pods(objects):
        given = environment(objects, container).get("SHOAL_GRACE_SECONDS")
        grace = float(given or GRACE_SECONDS[component(workload)])
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert (
            template(workload)["spec"]["terminationGracePeriodSeconds"]
            >= pause + grace + TO_SPARE_SECONDS
        )
        assert (pause > 0) == (component(workload) in ("edge", "router", "scheduler")), (
            "those to whom others connect"
        )


def test_selectors_select(objects: tuple[Object, ...]) -> None:
    for one in objects_of_kind(objects, "Service"):
        (workload,) = selected(objects, {"matchLabels": one["spec"]["selector"]})
        for port in one["spec"]["ports"]:
            assert port_number(workload, port["targetPort"]) == port["port"]
    for one in objects_of_kind(objects, "PodDisruptionBudget"):
        (workload,) = selected(objects, one["spec"]["selector"])
        assert workload["spec"].get("replicas", 2) >= one["spec"]["maxUnavailable"], (
            "a node could never be drained"
        )
    for one in objects_of_kind(objects, "NetworkPolicy"):
        assert selected(objects, one["spec"]["podSelector"])
    for one in objects_of_kind(objects, "PodMonitor"):
        for workload in selected(objects, one["spec"]["selector"]):
            assert component(workload) == one["metadata"]["name"], (
                "jobs are called shoal/<component>"
            )
            assert [
                port_number(workload, end["port"]) for end in one["spec"]["podMetricsEndpoints"]
            ] == [9464]
    for one in objects_of_kind(objects, "Deployment", "StatefulSet"):
        labels = template(one)["metadata"]["labels"]
        assert matches(one["spec"]["selector"], labels)
        for spread in template(one)["spec"].get("topologySpreadConstraints", ()):
            assert matches(spread["labelSelector"], labels)


def test_who_scales_has_the_say(objects: tuple[Object, ...]) -> None:
    for one in objects_of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        workload = named(objects, target.get("kind", "Deployment"), target["name"])
        assert "replicas" not in workload["spec"], "applying again would scale back"
    has_edge = "edge" in {component(workload) for workload in workloads(objects)}
    assert len(objects_of_kind(objects, "PodDisruptionBudget")) == 2 + has_edge


def test_everything_named_is_there_and_everything_there_is_named(
    objects: tuple[Object, ...],
) -> None:
    secrets = SUPPLIED | {one["metadata"]["name"] for one in objects_of_kind(objects, "Secret")}
    secrets |= {one["spec"]["secretName"] for one in objects_of_kind(objects, "Certificate")}
    used: set[tuple[str, str]] = set()
    for workload, container in pods(objects):
        used |= {
            ("ConfigMap", source["configMapRef"]["name"]) for source in container.get("envFrom", ())
        }
        paths = [
            value
            for value in environment(objects, container).values()
            if isinstance(value, str) and value.startswith("/")
        ]
        paths += container.get("args", [])
        for path, volume in mounted(workload):
            if "configMap" in volume:
                name = volume["configMap"]["name"]
                used.add(("ConfigMap", name))
                for key in named(objects, "ConfigMap", name).get("data", {}):
                    is_card = name == "catalog" and key.endswith(".yaml")
                    assert f"{path}/{key}" in paths or (is_card and path in paths), (
                        f"nobody reads {key} of {name}"
                    )
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
                assert volume["secret"]["defaultMode"] == 0o440
            if "persistentVolumeClaim" in volume:
                used.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        roots = tuple(dict(mounted(workload)))
        assert [
            path for path in paths if path.startswith("/") and not path.startswith(roots)
        ] == [], "not mounted"
        assert template(workload)["spec"]["priorityClassName"] in {
            one["metadata"]["name"] for one in objects_of_kind(objects, "PriorityClass")
        }
    for kind, name in used:
        named(objects, kind, name)
    for one in objects_of_kind(objects, "ConfigMap", "PersistentVolumeClaim"):
        is_for_grafana = "grafana_dashboard" in one["metadata"].get("labels", {})
        assert (one["kind"], one["metadata"]["name"]) in used or is_for_grafana, (
            f"nobody uses {title(one)}"
        )
    for one in objects_of_kind(objects, "TriggerAuthentication"):
        assert {target["name"] for target in one["spec"]["secretTargetRef"]} <= secrets


def test_files_that_are_read_again_are_mounted_as_folders_under_fixed_names(
    objects: tuple[Object, ...],
) -> None:
    for name in ("catalog", "pools", "tenants"):
        named(objects, "ConfigMap", name)


@pytest.mark.parametrize("rendering", EVERY)
def test_settings_have_names_of_their_content(rendering: str) -> None:
    """Kustomize adds content hashes; test_chart.py covers the chart's equivalent."""
    objects = rendered(rendering)
    for name in ("router-env", "scheduler-env", "worker-env"):
        with pytest.raises(ValueError, match="not enough values"):
            named(objects, "ConfigMap", name)  # a change of these replaces pods


def addresses(objects: tuple[Object, ...]) -> Iterator[tuple[str, str, int]]:
    """Who names which host and port: settings and ScaledObjects."""
    for workload, container in pods(objects):
        for key, value in environment(objects, container).items():
            if isinstance(value, str) and key in ("SHOAL_ROUTERS", "SHOAL_REDIS_URL"):
                for host, port in re.findall(r"([\w.-]+):(\d+)", value):
                    yield title(workload), host, int(port)
    for one in objects_of_kind(objects, "ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            host, _, port = trigger["metadata"]["scalerAddress"].partition(":")
            yield title(one), host, int(port)


def test_addresses_are_those_of_services(objects: tuple[Object, ...]) -> None:
    found = list(addresses(objects))
    assert len(found) >= 3
    for who, host, port in found:
        if host == "redis.example":
            assert not objects_of_kind(objects, "StatefulSet"), "the overlay's own to say"
            continue
        name, _, domain = host.partition(".")
        assert domain in ("", "shoal.svc.cluster.local")
        assert domain or not who.startswith("ScaledObject"), "KEDA lives in another namespace"
        assert port in [one["port"] for one in named(objects, "Service", name)["spec"]["ports"]]


def test_open_services_are_marked_and_with_tls_none_is_open(objects: tuple[Object, ...]) -> None:
    has_tls = bool(objects_of_kind(objects, "Certificate"))
    for workload, container in pods(objects):
        variables = environment(objects, container)
        if component(workload) == "redis":
            assert ("--tls-port" in container["args"]) == has_tls
            continue
        assert ("SHOAL_TLS_CERT" in variables) == has_tls
        if component(workload) == "worker":
            assert ("SHOAL_TLS_CA" in variables) == has_tls
            continue
        assert variables.get("SHOAL_ALLOW_INSECURE") == (None if has_tls else "1")
        if component(workload) == "edge":  # its callers have tokens, which routers check
            assert ("SHOAL_ROUTERS_CA" in variables) == has_tls
            continue
        assert ("SHOAL_TLS_CLIENT_CA" in variables) == has_tls
        assert not has_tls or variables["SHOAL_REDIS_URL"].startswith(
            ("rediss://", "rediss+sentinel://", "rediss+cluster://")
        )
    for service in objects_of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            is_plain = port["name"] == "grpc" and not has_tls
            assert has_tls or service["spec"].get("type", "ClusterIP") == "ClusterIP", (
                "open to whoever reaches the network"
            )
            assert port.get("appProtocol") == ("kubernetes.io/h2c" if is_plain else None)
    for scaled in objects_of_kind(objects, "ScaledObject"):
        assert (
            "authenticationRef" in scaled["spec"]["triggers"][0]
        ) == has_tls or not objects_of_kind(objects, "TriggerAuthentication")


def test_certificates_name_their_holders_as_servers_read_it() -> None:
    objects = with_components("tls", "keda", "keda-tls")
    leaves = {
        one["metadata"]["name"]: one["spec"]
        for one in objects_of_kind(objects, "Certificate")
        if not one["spec"].get("isCA")
    }
    assert set(leaves) == {"router", "scheduler", "worker", "scaler", "redis"}
    for role, spec in leaves.items():
        assert spec["uris"] == [Party.parse(role).uri("shoal")]
        assert "client auth" in spec["usages"]
        services = {
            one["metadata"]["name"]
            for one in objects_of_kind(objects, "Service")
            if one["metadata"]["name"].startswith(role)
        }
        hosts = {
            f"{name}{domain}"
            for name in services
            for domain in ("", ".shoal", ".shoal.svc", ".shoal.svc.cluster.local")
        }
        assert set(spec.get("dnsNames", ())) - {"localhost"} == hosts
        assert ("server auth" in spec["usages"]) == bool(hosts)
        assert named(objects, "Issuer", spec["issuerRef"]["name"])
    for workload in workloads(objects):
        names = [
            volume["secret"]["secretName"] for _, volume in mounted(workload) if "secret" in volume
        ]
        assert f"{component(workload)}-tls" in names


def test_way_in_is_the_routers_port_in_private_networks_and_policies_let_it_in() -> None:
    objects = with_components("network-policy", "tls", "load-balancer")
    spec = named(objects, "Service", "router-external")["spec"]
    private = {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}
    assert (spec["type"], spec["externalTrafficPolicy"], set(spec["loadBalancerSourceRanges"])) == (
        "LoadBalancer",
        "Local",
        private,
    )
    *_, rule = named(objects, "NetworkPolicy", "router")["spec"]["ingress"]
    assert {each["ipBlock"]["cidr"] for each in rule["from"]} == private
    (router,) = selected(objects, {"matchLabels": spec["selector"]})
    assert [port_number(router, port["port"]) for port in rule["ports"]] == [
        port["port"] for port in spec["ports"]
    ]
    assert not objects_of_kind(with_components("tls", "load-balancer"), "NetworkPolicy"), (
        "a mesh without policies has none by this"
    )


def test_gateway_leads_to_routers_that_it_checks_and_its_own_certificate_is_nobodys() -> None:
    objects = with_components("tls", "tokens", "gateway")
    issued = {
        one["spec"]["secretName"]: one["spec"] for one in objects_of_kind(objects, "Certificate")
    }
    gateway = named(objects, "Gateway", "shoal")["spec"]
    (listener,) = gateway["listeners"]
    (route,) = objects_of_kind(objects, "GRPCRoute")
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["sectionName"]) == ("shoal", listener["name"])
    (rule,) = route["spec"]["rules"]
    assert {each["method"]["service"] for each in rule["matches"]} == OPEN_SERVICES, (
        "workers and KEDA are in the cluster"
    )
    (backend,) = rule["backendRefs"]
    service = named(objects, "Service", backend["name"])
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    validation = named(objects, "BackendTLSPolicy", "router")["spec"]["validation"]
    assert validation["hostname"] in issued[validation["caCertificateRefs"][0]["name"]]["dnsNames"]
    (shown,) = listener["tls"]["certificateRefs"]
    assert "server auth" in issued[shown["name"]]["usages"]
    own = issued[gateway["tls"]["backend"]["clientCertificateRef"]["name"]]
    assert "client auth" in own["usages"]
    assert "uris" not in own, "a call without a token would be the gateway's"


def test_gateway_leads_to_an_edge_that_it_checks_and_gives_it_the_time_that_it_takes() -> None:
    objects = with_components("tls", "tokens", "edge", "edge-tls", "edge-gateway")
    issued = {
        one["spec"]["secretName"]: one["spec"] for one in objects_of_kind(objects, "Certificate")
    }
    (listener,) = named(objects, "Gateway", "edge")["spec"]["listeners"]
    route = named(objects, "HTTPRoute", "edge")["spec"]
    (parent,) = route["parentRefs"]
    assert (parent["name"], parent["sectionName"]) == ("edge", listener["name"])
    assert listener["allowedRoutes"]["kinds"] == [{"kind": "HTTPRoute"}]
    assert route["hostnames"] == [listener["hostname"]]
    (shown,) = listener["tls"]["certificateRefs"]
    assert issued[shown["name"]]["dnsNames"] == route["hostnames"]
    (rule,) = route["rules"]
    assert "retry" not in rule, "clients of HTTP repeat by themselves"
    assert rule["timeouts"] == {"request": f"{EdgeSettings.from_env({}).max_deadline_seconds:.0f}s"}
    (backend,) = rule["backendRefs"]
    service = named(objects, "Service", backend["name"])
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    policy = named(objects, "BackendTLSPolicy", "edge")["spec"]
    assert [target["name"] for target in policy["targetRefs"]] == [backend["name"]]
    assert (
        policy["validation"]["hostname"]
        in issued[policy["validation"]["caCertificateRefs"][0]["name"]]["dnsNames"]
    )


def test_only_routers_have_credentials_of_callers() -> None:
    objects = with_components("tls", "tokens", "jwks")
    for workload, container in pods(objects):
        reported = {
            key
            for key in environment(objects, container)
            if key in ("SHOAL_TOKENS", "SHOAL_JWKS", "SHOAL_JWT_ISSUER", "SHOAL_JWT_AUDIENCE")
        }
        assert len(reported) == (4 if component(workload) == "router" else 0)
        if component(workload) == "router":
            assert environment(objects, container)["SHOAL_TLS_CLIENT_CA"], (
                "workers show certificates as before"
            )


def test_pools_are_those_of_the_workers_and_as_large(
    deployable: tuple[Object, ...], tmp_path: Any
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(named(deployable, "ConfigMap", "pools")["data"]["pools.yaml"])
    pools = read_pools(file)
    workers = [
        (one, container) for one, container in pods(deployable) if component(one) == "worker"
    ]
    served = {environment(deployable, container)["SHOAL_POOL"] for _, container in workers}
    assert set(pools.by_name) == served
    for workload, container in workers:
        variables = environment(deployable, container)
        pool = pools.spec(variables["SHOAL_POOL"])
        assert pool.device == variables["SHOAL_DEVICE"]
        assert pool.spot == (variables.get("SHOAL_SPOT", "none") != "none")
        for scaled in objects_of_kind(deployable, "ScaledObject"):
            if scaled["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]:
                assert scaled["spec"]["maxReplicaCount"] == pool.max_workers
                assert scaled["spec"]["cooldownPeriod"] >= (
                    pool.keep_warm_seconds or pool.cold_start_seconds + pool.node_seconds
                )
                assert scaled["spec"]["triggers"][0]["metadata"]["poolFromEnv"] == "SHOAL_POOL"


def test_stores_are_smaller_than_their_volumes(objects: tuple[Object, ...]) -> None:
    sizes = {"Gi": 2**30, "Ti": 2**40}
    for workload, container in pods(objects):
        if component(workload) != "worker":
            continue
        stored = int(environment(objects, container)["SHOAL_STORE_BYTES"])
        volume = dict(mounted(workload))["/var/cache/shoal"]
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"]
        else:
            claim = named(
                objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
            )
            size = claim["spec"]["resources"]["requests"]["storage"]
        assert 0 <= stored <= int(size[:-2]) * sizes[size[-2:]] * 0.9
        assert stored or "emptyDir" not in volume, (
            "90 % of the node's disk is more than the volume may have"
        )


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.startswith("eks-")])
def test_each_claim_on_eks_names_a_class_that_is_there(name: str) -> None:
    """EKS makes no class the default: a claim that names none stays Pending, and Redis with it. GKE
    and kind have a default.
    """
    objects = rendered(f"overlays/{name}")
    classes = {one["metadata"]["name"] for one in objects_of_kind(objects, "StorageClass")}
    claims = objects_of_kind(objects, "PersistentVolumeClaim")
    claims += [
        claim
        for workload in workloads(objects)
        for claim in workload["spec"].get("volumeClaimTemplates", ())
    ]
    assert "data" in [claim["metadata"]["name"] for claim in claims], "of Redis"
    for claim in claims:
        chosen = claim["spec"].get("storageClassName")
        volume = claim["spec"].get("volumeName")
        if chosen == "":
            assert volume in [
                one["metadata"]["name"] for one in objects_of_kind(objects, "PersistentVolume")
            ]
        else:
            assert chosen in classes
    for one in objects_of_kind(objects, "StorageClass"):
        assert one["provisioner"] == "ebs.csi.aws.com"
        assert one["parameters"]["encrypted"] == "true", "queued jobs contain texts of clients"
        assert one["volumeBindingMode"] == "WaitForFirstConsumer", (
            "the disk would be in another zone than its pod"
        )


def test_only_our_objects_are_cluster_wide(objects: tuple[Object, ...]) -> None:
    for one in objects:
        if one["kind"] in CLUSTER_WIDE:
            assert one["metadata"]["name"].startswith("shoal")
