"""Network policies allow exactly the connections that the code uses: read from the policies and
compared with a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tests.k8s.charts import CHARTS, made
from tests.k8s.manifests import (
    EVERY,
    Object,
    component,
    containers,
    environment,
    named,
    objects_of_kind,
    port_number,
    rendered,
    selected,
    with_components,
    workloads,
)

Edge = tuple[str, str, int]
"""Who opens a connection, to whom, at which port."""

ANYWHERE = "0.0.0.0/0 but 169.254.0.0/16"
INTERNET = (
    (
        "0.0.0.0/0 but 10.0.0.0/8 but 100.64.0.0/10 but 169.254.0.0/16 but 172.16.0.0/12 but "
        "192.168.0.0/16"
    ),
    "::/0 but 64:ff9b::/96 but 64:ff9b:1::/48 but fc00::/7 but fe80::/10",
)
COLLECTOR = "observability/opentelemetry-collector"
SPEAK_DNS = ("router", "scheduler", "worker")

MESH: frozenset[Edge] = frozenset(
    {
        ("worker", "router", 50051),
        ("router", "redis", 6379),
        ("scheduler", "redis", 6379),
    }
)
"""Connections between our pods: allowed at both ends."""
IN: frozenset[Edge] = frozenset(
    {
        ("namespaces with shoal-clients=allowed", "router", 50051),
        ("keda/keda-operator", "scheduler", 50053),
        *(("monitoring/prometheus", name, 9464) for name in SPEAK_DNS),
    }
)
EDGE_TO_ROUTERS: frozenset[Edge] = frozenset({("edge", "router", 50051)})
EDGE_IN: frozenset[Edge] = frozenset(
    {
        ("namespaces with shoal-clients=allowed", "edge", 8080),
        ("monitoring/prometheus", "edge", 9464),
    }
)
"""Connections of `components/edge`, with `components/edge-network-policy`."""
OUT: frozenset[Edge] = frozenset(
    {
        *((name, "kube-system/kube-dns", 53) for name in SPEAK_DNS),
        *(("worker", block, 443) for block in INTERNET),
        ("worker", "169.254.169.254/32", 80),
        ("worker", "169.254.170.23/32", 80),
        ("worker", "169.254.169.252/32", 988),
    }
)
EDGE_TO_STORES: frozenset[Edge] = frozenset(
    ("edge", to, port) for who, to, port in OUT if who == "worker" and port != 53
)
TRACES: frozenset[Edge] = frozenset((name, COLLECTOR, 4317) for name in SPEAK_DNS)


def edges(objects: tuple[Object, ...]) -> tuple[set[Edge], set[Edge]]:
    """Return the connections that the policies allow as ingress, and those allowed as egress."""
    let_in: set[Edge] = set()
    let_out: set[Edge] = set()
    for policy in objects_of_kind(objects, "NetworkPolicy"):
        spec = policy["spec"]
        for workload in selected(objects, spec["podSelector"]):
            who = component(workload)
            for rule in spec.get("ingress", ()):
                ports = [port_number(workload, port["port"]) for port in rule["ports"]]
                let_in |= {
                    (peer, who, port)
                    for each in rule["from"]
                    for peer in peers(objects, each)
                    for port in ports
                }
            for rule in spec.get("egress", ()):
                ports = [port["port"] for port in rule["ports"]]
                let_out |= {
                    (who, peer, port)
                    for each in rule["to"]
                    for peer in peers(objects, each)
                    for port in ports
                }
    return let_in, let_out


def peers(objects: tuple[Object, ...], peer: dict[str, Any]) -> Iterator[str]:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        yield " but ".join([block["cidr"], *block.get("except", ())])
    elif "namespaceSelector" not in peer:
        found = [component(workload) for workload in selected(objects, peer["podSelector"])]
        assert found, "nobody is let through"
        yield from found
    elif "podSelector" not in peer:
        ((label, value),) = peer["namespaceSelector"]["matchLabels"].items()
        yield f"namespaces with {label}={value}"
    else:
        (space,) = peer["namespaceSelector"]["matchLabels"].values()
        (pod,) = peer["podSelector"]["matchLabels"].values()
        yield f"{space}/{pod}"


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ((), frozenset()),
        (("otel",), TRACES),
        (("tls", "keda", "keda-tls", "gpu-l4", "spot-gke", "otel"), TRACES),
    ],
)
def test_policies_allow_exactly_the_used_connections(
    names: tuple[str, ...], more: frozenset[Edge]
) -> None:
    let_in, let_out = edges(with_components("network-policy", *names))
    assert let_in == MESH | IN
    assert let_out == MESH | OUT | more


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ((), frozenset()),
        (("otel", "edge-otel"), TRACES | {("edge", COLLECTOR, 4317)}),
        (("edge-batches-claim",), frozenset()),
        (("edge-batches-bucket",), EDGE_TO_STORES),
    ],
)
def test_edge_is_reached_by_clients_and_reaches_routers(
    names: tuple[str, ...], more: frozenset[Edge]
) -> None:
    let_in, let_out = edges(
        with_components("network-policy", "edge", "edge-network-policy", *names)
    )
    assert let_in == MESH | IN | EDGE_TO_ROUTERS | EDGE_IN
    assert let_out == MESH | OUT | EDGE_TO_ROUTERS | {("edge", "kube-system/kube-dns", 53)} | more


def test_external_redis_is_reached() -> None:
    let_in, let_out = edges(with_components("network-policy", "external-redis"))
    outside = {(who, ANYWHERE, port) for who, to, port in MESH if to == "redis"}
    inside = {edge for edge in MESH if edge[1] != "redis"}
    assert let_in == inside | IN
    assert let_out == inside | OUT | outside


@pytest.mark.parametrize(
    ("name", "ports"), [("redis-sentinel", (6379, 26379)), ("redis-cluster", (6379,))]
)
def test_nodes_of_redis_are_reached_outside_and_in_their_namespace(
    name: str, ports: tuple[int, ...]
) -> None:
    let_in, let_out = edges(with_components("network-policy", "tls", name))
    where = (ANYWHERE, "namespaces with kubernetes.io/metadata.name=redis")
    inside = {edge for edge in MESH if edge[1] != "redis"}
    assert let_in == inside | IN
    outside = {
        (who, place, port) for who in ("router", "scheduler") for place in where for port in ports
    }
    assert let_out == inside | OUT | outside


@pytest.mark.parametrize("name", [*EVERY, *CHARTS])
def test_stores_are_reached_at_no_private_address(name: str) -> None:
    """The addresses of the API server, pods, nodes and metadata are excluded: each address below,
    by IP version, is within an exception.
    """
    private = (
        "10.0.0.1",
        "172.31.0.10",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "fd00::1",
        "fe80::1",
        "64:ff9b::a00:1",
    )
    for policy in objects_of_kind(made(name), "NetworkPolicy"):
        for rule in policy["spec"].get("egress", ()):
            blocks = [peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer]
            if {port["port"] for port in rule["ports"]} != {443}:
                continue
            for address in map(ip_address, private):
                open_to = [block for block in blocks if address in ip_network(block["cidr"])]
                assert all(
                    any(address in ip_network(one) for one in block["except"]) for block in open_to
                )


@pytest.mark.parametrize("name", [*EVERY, *CHARTS])
def test_other_connections_are_denied(name: str) -> None:
    """Or nothing is: a component must not isolate pods of a mesh that has no policies."""
    policies = objects_of_kind(made(name), "NetworkPolicy")
    if not policies:
        return
    deny = named(policies, "NetworkPolicy", "deny-all")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies:
        spec = policy["spec"]
        assert {kind.lower() for kind in spec["policyTypes"]} >= {"ingress", "egress"} & set(spec)
        for rule in [*spec.get("ingress", ()), *spec.get("egress", ())]:
            assert rule["ports"], "every port"
            assert rule.get("from") or rule.get("to"), "everybody"


def test_table_matches_the_ports_and_addresses_of_pods() -> None:
    """Each port of the manifests, except probes, is reached by an edge of the table, and each
    address in the settings is one.
    """
    objects = rendered("overlays/gke-l4-spot")
    reached = {(to, port) for _, to, port in MESH | IN | EDGE_IN}
    called: set[Edge] = set()
    for workload in workloads(objects):
        for container in containers(workload):
            listening = {
                (component(workload), port["containerPort"])
                for port in container["ports"]
                if port["name"] != "health"
            }
            assert listening <= reached
            reached -= listening
            variables = environment(objects, container)
            for key in ("SHOAL_ROUTERS", "SHOAL_REDIS_URL"):
                for host, port in re.findall(r"([\w-]+):(\d+)", variables.get(key, "")):
                    selector = {"matchLabels": named(objects, "Service", host)["spec"]["selector"]}
                    called |= {
                        (component(workload), component(one), int(port))
                        for one in selected(objects, selector)
                    }
    assert reached == set()
    assert called == MESH | EDGE_TO_ROUTERS
