"""Bills of materials: exactly the packages of a role, valid, and without this machine's folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.supply.made import write_distribution
from tools.distributions import SupplyError
from tools.supply import sbom


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Describe a small environment: describing this one takes half a minute."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    write_distribution(site, "shoal-mesh", needs=["Used", "below"])
    write_distribution(
        site, "Used", "2.0", needs=["below", "aside"], says=["License-Expression: MIT"]
    )
    write_distribution(site, "below", says=["License: BSD"])
    write_distribution(site, "aside")
    from_folder = {"url": (Path(__file__).parent).as_uri(), "dir_info": {"editable": True}}
    (site / "shoal_mesh-1.0.dist-info/direct_url.json").write_text(json.dumps(from_folder))
    return sbom.environment_bill(str(folder / "bin/python"))


def test_bill_has_exactly_the_packages_of_its_role(bill: dict[str, Any]) -> None:
    assert {"aside", "Used"} <= {one["name"] for one in bill["components"]}
    assert "file://" in json.dumps(bill)
    before = json.dumps(bill)
    made = sbom.role_bill(bill, "router", {"shoal-mesh", "used", "below"})
    assert json.dumps(bill) == before, "the next role is taken from it, too"
    assert {(one["name"], one["version"]) for one in made["components"]} == {
        ("shoal-mesh", "1.0"),
        ("Used", "2.0"),
        ("below", "1.0"),
    }
    assert "file://" not in json.dumps(made)
    names = {one["bom-ref"]: one["name"] for one in made["components"]} | {
        "image:shoal-router": "shoal-router"
    }
    edges = {
        names[one["ref"]]: {names[to] for to in one["dependsOn"]} for one in made["dependencies"]
    }
    assert edges["shoal-router"] == {"shoal-mesh"}
    assert edges["shoal-mesh"] == {"Used", "below"}
    assert edges["Used"] == {"below"}


def test_bill_is_valid_and_a_broken_one_is_not(bill: dict[str, Any]) -> None:
    made = sbom.role_bill(bill, "router", {"shoal-mesh", "used", "below"})
    sbom.validate(made)
    with pytest.raises(SupplyError, match="the bill of shoal-router is not valid"):
        sbom.validate(made | {"components": [{"type": "library"}]})


def test_missing_component_is_named(bill: dict[str, Any]) -> None:
    with pytest.raises(SupplyError, match="the bill of router lacks absent"):
        sbom.role_bill(bill, "router", {"absent", "below"})
