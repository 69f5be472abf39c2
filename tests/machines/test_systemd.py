"""The units in systemd/: systemd takes them, and the services take their settings."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from libs.errors import InvalidInput
from tests.k8s.manifests import ROOT, component, rendered, template, workloads
from tests.k8s.test_settings import SETTINGS, declared

FOLDER: Final = ROOT / "systemd"
ROLES: Final = ("edge", "router", "scheduler", "worker")


def read_unit(role: str) -> Mapping[str, list[str]]:
    """Return the values of a service's unit by key, those of its sections together."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / f"shoal-{role}.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_there_is_a_unit_for_each_service() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        "shoal.target",
        *(f"shoal-{role}.service" for role in ROLES),
    }


@pytest.mark.parametrize("role", ROLES)
def test_units_start_the_command_that_the_wheel_installs(role: str) -> None:
    (command,) = read_unit(role)["ExecStart"]
    assert command == f"/opt/shoal/bin/shoal-{role}"
    assert f'shoal-{role} = "shoal_mesh:{role}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_services_take_the_settings_of_their_unit(role: str) -> None:
    variables = dict(one.split("=", 1) for one in read_unit(role)["Environment"])
    assert set(variables) <= declared(role)
    assert SETTINGS[role].from_env(variables).metrics_address
    with pytest.raises(InvalidInput):
        SETTINGS[role].from_env(variables | {"SHOAL_GRACE_SECONDS": "never"})


def test_units_of_one_machine_share_no_address() -> None:
    given = [
        value for role in ROLES for value in read_unit(role)["Environment"] if "_ADDRESS=" in value
    ]
    addresses = [value.partition("=")[2] for value in given]
    assert len(addresses) == len(set(addresses)) == 11
    assert all(address.startswith("127.0.0.1:") for address in addresses), (
        "beyond this machine a mesh needs TLS"
    )


def test_units_give_the_grace_of_pods() -> None:
    objects = [*rendered("base"), *rendered("components/edge")]
    seconds = {
        component(one): template(one)["spec"]["terminationGracePeriodSeconds"]
        for one in workloads(objects)
    }
    assert {role: read_unit(role)["TimeoutStopSec"] for role in ROLES} == {
        role: [str(seconds[role])] for role in ROLES
    }


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for role in ROLES:
        (programs / f"shoal-{role}").write_text("#!/bin/sh\n")
        (programs / f"shoal-{role}").chmod(0o755)
    for path in FOLDER.iterdir():
        # systemd-analyze wants each program and user to exist here.
        text = (
            path.read_text()
            .replace("/opt/shoal/bin", str(programs))
            .replace("User=shoal", "User=root")
        )
        (tmp_path / path.name).write_text(text)
    units = sorted(str(path) for path in tmp_path.glob("shoal*"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "shoal" in line]
    assert (done.returncode, said) == (0, []), done.stderr
