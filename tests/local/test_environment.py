"""The environment variables that the children of `shoal up` receive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.local.mesh import running
from services.local.settings import Settings
from services.local.supervision.environment import child_environment

SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS")
OTHERS = (
    "SHOAL_TOKEN",
    "SHOAL_REDIS_URL",
    "SHOAL_TLS_KEY",
    "SHOAL_JWKS",
    "GITHUB_TOKEN",
    "DATABASE_URL",
    "CCACHE_SECRET",
)
ENVIRON = dict.fromkeys(
    (
        *SECRETS,
        *OTHERS,
        "PATH",
        "HOME",
        "SHOAL_LOG_LEVEL",
        "OTEL_SERVICE_NAME",
        "CUDA_VISIBLE_DEVICES",
    ),
    "x",
)


@pytest.mark.parametrize("role", ["redis", "router", "scheduler", "worker"])
def test_each_kind_receives_the_variables_it_needs(role: str) -> None:
    names = child_environment(role, ENVIRON).keys()
    assert {"PATH", "HOME"} <= names
    assert not {*OTHERS} & names
    assert {*SECRETS, "CUDA_VISIBLE_DEVICES"} & names == (
        {*SECRETS, "CUDA_VISIBLE_DEVICES"} if role == "worker" else set()
    )
    assert ("SHOAL_LOG_LEVEL" in names) == ("OTEL_SERVICE_NAME" in names) == (role != "redis")


def environ_bytes(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_only_workers_are_given_the_hub_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("GITHUB_TOKEN", "hf_secret")
    async with running(Settings(port=0, has_scheduler=True)) as mesh:
        environments = {name: environ_bytes(pid) for name, pid in mesh.supervisor.pids.items()}
    assert environments.keys() == {"redis", "router", "scheduler", "worker-0"}
    assert [
        name for name, reported in environments.items() if b"HF_TOKEN=hf_secret" in reported
    ] == ["worker-0"]
    assert not [name for name, reported in environments.items() if b"GITHUB_TOKEN" in reported]
    assert os.environ["HF_TOKEN"] == "hf_secret"
