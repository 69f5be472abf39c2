"""`python -m tools.supply.lock [--check]`: what the images install, with hashes: locks/<role>.txt
from the pins.

pip itself resolves nothing: it is asked where the pinned wheels of a role's closure lie, for Python
3.11 on Linux of both architectures, and gives their sha256 as the index does. An image installs
`pip install --no-deps --require-hashes -r locks/<role>.txt`. torch is left out: which build of it,
and which CUDA libraries with it, an image chooses by its accelerator, from an index of its own; it
installs torch at the version of constraints.txt first. --check asks no index: the locks name what
the closures need, at the pinned versions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.distributions import (
    OURS,
    ROLES,
    ROOT,
    SupplyError,
    closure,
    installed_distributions,
    read_pins,
    version_of,
)

LOCKS = ROOT / "locks"
SERVICES = ("edge", "router", "scheduler", "worker")
ARCHITECTURES = ("x86_64", "aarch64")
# glibc of Debian 12, whose Python images are the services' base, is 2.36.
GLIBC_MINORS = range(17, 37)
CHOSEN_BY_THE_IMAGE = frozenset({"torch"})
HEAD = """\
# Written by `make lock` from constraints.txt: wheels of CPython 3.11 on Linux, {architectures}.
# pip install --no-deps --require-hashes -r locks/{role}.txt{torch}
"""
TORCH = (
    "\n# after torch=={version} in the build for the image's accelerator, whose hashes its own "
    "index gives"
)


def wanted(
    role: str, installed: Mapping[str, Distribution], pins: Mapping[str, Requirement]
) -> list[Requirement]:
    """The pins that an image of `role` installs, in order. Raises SupplyError for one that is
    missing.
    """
    needed = closure([ROLES[role]], installed)
    names = sorted({*needed.installed, *needed.missing} - OURS - CHOSEN_BY_THE_IMAGE)
    if lacking := [name for name in names if name not in pins]:
        raise SupplyError(f"{role} needs {', '.join(lacking)}, which constraints.txt does not pin")
    return [pins[name] for name in names]


def wheels(pins: Iterable[Requirement], architecture: str) -> dict[str, str]:
    """sha256 of each pin's wheel on Linux of `architecture`, by canonical name. Raises SupplyError
    where pip finds none.
    """
    platforms = [f"manylinux_2_{minor}_{architecture}" for minor in reversed(GLIBC_MINORS)]
    platforms += [f"manylinux2014_{architecture}", f"linux_{architecture}"]
    with tempfile.TemporaryDirectory() as directory:
        report, file = f"{directory}/report.json", f"{directory}/pins.txt"
        with open(file, "w") as written:
            written.writelines(f"{pin.name}{pin.specifier}\n" for pin in pins)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--target", directory, "--report", report, "-r", file]
        command += [
            "--python-version",
            "3.11",
            "--implementation",
            "cp",
            "--abi",
            "cp311",
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        command += [part for platform in platforms for part in ("--platform", platform)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SupplyError(f"pip, for {architecture}: {done.stderr.strip().splitlines()[-1]}")
        with open(report) as read:
            found = json.load(read)["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for one in found
    }


def lock_text(
    role: str, pins: Iterable[Requirement], hashes: Iterable[Mapping[str, str]], torch: str
) -> str:
    """`torch`: its version, "" for roles without it."""
    lines = [
        HEAD.format(
            architectures=" and ".join(ARCHITECTURES),
            role=role,
            torch=TORCH.format(version=torch) if torch else "",
        )
    ]
    for pin in pins:
        digests = dict.fromkeys(each[canonicalize_name(pin.name)] for each in hashes)
        lines.append(
            " \\\n".join([str(pin), *(f"    --hash=sha256:{digest}" for digest in digests)]) + "\n"
        )
    return "".join(lines)


def stale(role: str, text: str, pins: Iterable[Requirement]) -> list[str]:
    """How the lock differs from the pins, a line each."""
    locked = set(re.findall(r"^(?!#)(\S+==[^\\\n]*?) \\$", text, re.MULTILINE))
    asked = {str(pin) for pin in pins}
    return [f"locks/{role}.txt lacks {one}: make lock" for one in sorted(asked - locked)] + [
        f"locks/{role}.txt has {one}, which is not asked for: make lock"
        for one in sorted(locked - asked)
    ]


def main() -> int:
    installed, pins = installed_distributions(), read_pins()
    try:
        roles = {role: wanted(role, installed, pins) for role in SERVICES}
        if "--check" in sys.argv[1:]:
            return _check(roles)
        everything = {canonicalize_name(pin.name): pin for each in roles.values() for pin in each}
        hashes = [wheels(everything.values(), architecture) for architecture in ARCHITECTURES]
    except SupplyError as error:
        print(error, file=sys.stderr)
        return 1
    LOCKS.mkdir(exist_ok=True)
    for role, each in roles.items():
        torch = (
            version_of(pins["torch"])
            if "torch" in closure([ROLES[role]], installed).installed
            else ""
        )
        (LOCKS / f"{role}.txt").write_text(lock_text(role, each, hashes, torch))
        print(f"locks/{role}.txt: {len(each)} distributions")
    return 0


def _check(roles: Mapping[str, Iterable[Requirement]]) -> int:
    files = {role: LOCKS / f"{role}.txt" for role in roles}
    wrong = [
        line
        for role, file in files.items()
        for line in stale(role, file.read_text() if file.exists() else "", roles[role])
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print("locks are current")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
