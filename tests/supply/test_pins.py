"""constraints.txt, pyproject.toml, locks/ and the installed packages agree, and each difference is
named.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.supply.made import write_distribution
from tools.distributions import (
    ROOT,
    SupplyError,
    closure,
    installed_distributions,
    pinned_version,
    read_pins,
)
from tools.supply import pins
from tools.supply.lock import lock_text, stale


def as_pins(*lines: str) -> dict[str, Requirement]:
    return {line.partition("==")[0]: Requirement(line) for line in lines}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which shoal-mesh[dev] needs `used`, which needs `below`; nothing is wrong
    with it.
    """
    monkeypatch.setattr(pins, "REFERENCES", ())
    monkeypatch.setattr(pins, "INSTALLERS", ())
    write_distribution(tmp_path, "shoal")
    write_distribution(
        tmp_path,
        "shoal-mesh",
        needs=["shoal", 'used>=1; extra == "dev"', 'elsewhere; sys_platform == "plan9"'],
    )
    write_distribution(tmp_path, "used", needs=["Below"])
    write_distribution(tmp_path, "below", "2.1+cpu")
    return tmp_path


def wrong(site: Path, named: dict[str, Requirement]) -> list[str]:
    return list(pins.check(named, installed_distributions([site]), {"used": "pyproject.toml"}))


def test_pins_that_match_the_installed_packages(site: Path) -> None:
    assert wrong(site, as_pins("used==1.0", "below==2.1")) == []


def test_undeclared_distribution_may_be_installed(site: Path) -> None:
    write_distribution(site, "debugger", needs=["used", "its-own"])
    write_distribution(site, "its-own")
    assert wrong(site, as_pins("used==1.0", "below==2.1")) == []


def test_servers_take_no_grpcio_that_costs_more() -> None:
    """A call takes 1.4 times the CPU from 1.75.1 on (grpc #43092)."""
    mesh = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (capped,) = (Requirement(line) for line in mesh if Requirement(line).name == "grpcio")
    assert [version in capped.specifier for version in ("1.75.0", "1.75.1", "1.85.1")] == [
        True,
        False,
        False,
    ]
    assert pinned_version(read_pins()["grpcio"]) in capped.specifier


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["used==1.0"], "below 2.1 is needed and not pinned"),
        (["used==1.0", "below==2.0"], "below 2.1 is installed, constraints.txt has 2.0"),
        (["used==1.0", "below==2.1", "left==1"], "left==1 is pinned and nothing needs it"),
        (["below==2.1"], "used of pyproject.toml has no pin"),
    ],
)
def test_difference_is_named(site: Path, named: list[str], said: str) -> None:
    assert any(line.startswith(said) for line in wrong(site, as_pins(*named)))


def test_pin_for_another_system_is_ignored(site: Path) -> None:
    assert wrong(site, as_pins("used==1.0", "below==2.1", 'left==1; sys_platform == "plan9"')) == []


def test_missing_dependency_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(site, "more", needs=["absent"])
    write_distribution(site, "gliner", needs=["more"])
    assert "absent" not in str(
        wrong(site, as_pins("used==1.0", "below==2.1", "more==1.0", "gliner==1.0"))
    )
    monkeypatch.setattr(pins, "REFERENCES", ("gliner",))
    assert wrong(site, as_pins("used==1.0", "below==2.1", "more==1.0", "gliner==1.0")) == [
        "absent is needed by more and not installed: pin it in constraints.txt"
    ]


def test_extras_are_followed_each_for_itself(tmp_path: Path) -> None:
    write_distribution(
        tmp_path,
        "whole",
        needs=["plain", 'one; extra == "a"', 'two; extra == "b"', 'whole[b]; extra == "all"'],
    )
    for name in ("plain", "one", "two"):
        write_distribution(tmp_path, name, needs=["whole"])
    installed = installed_distributions([tmp_path])
    assert set(closure(["whole"], installed).installed) == {"whole", "plain"}
    assert set(closure(["whole[a]"], installed).installed) == {"whole", "plain", "one"}
    assert set(closure(["whole[all]"], installed).installed) == {"whole", "plain", "two"}


@pytest.mark.parametrize(
    "line",
    ["numpy>=1", "numpy", "numpy==1.*", "numpy==1,<2", "numpy[x]==1", "-e .", "numpy==1\nNumPy==1"],
)
def test_line_that_is_not_a_pin_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "constraints.txt").write_text(f"# pins\n{line}\n")
    with pytest.raises(SupplyError, match=r"constraints\.txt:[23]: "):
        read_pins(tmp_path / "constraints.txt")


def test_every_dependency_that_we_name_has_a_pin() -> None:
    named = pins.named_dependencies()
    assert {"grpcio", "gcsfs", "torch"} <= named.keys() <= read_pins().keys()


def test_make_installs_the_pinned_torch() -> None:
    """The Makefile reads the version from constraints.txt: a second one could differ."""
    assert 'TORCH := $(shell grep "^torch==" constraints.txt)' in (ROOT / "Makefile").read_text()


def test_lock_names_each_hash_once_and_is_stale_when_pins_change() -> None:
    asked = [Requirement("a==1"), Requirement('b==2; sys_platform == "linux"')]
    text = lock_text("router", asked, [{"a": "11", "b": "22"}, {"a": "11", "b": "33"}], "")
    assert text.count("sha256:11") == 1
    assert [line.strip(" \\") for line in text.splitlines()[-3:]] == [
        str(asked[1]),
        "--hash=sha256:22",
        "--hash=sha256:33",
    ]
    assert stale("router", text, asked) == []
    assert stale("router", text, [asked[0], Requirement("c==3")]) == [
        "locks/router.txt lacks c==3: make lock",
        f"locks/router.txt has {asked[1]}, which the role does not need: make lock",
    ]
