"""`python -m tools.supply.lock [--check]`: write the images' lock files locks/<role>.txt, pins with
hashes.

pip resolves nothing: it looks up the pinned wheels of a role's closure, for Python 3.11 on Linux of
both architectures, and reports the index' sha256. An image runs
`pip install --no-deps --require-hashes -r locks/<role>.txt`. torch is not locked: an image first
installs the build for its accelerator, with its CUDA libraries, at the version of constraints.txt
from the index of that build. --check uses no index: it compares the locks with the closures' pins.
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
    pinned_version,
    read_pins,
)

LOCKS = ROOT / "locks"
SERVICES = ("edge", "router", "scheduler", "worker")
ARCHITECTURES = ("x86_64", "aarch64")
# The services' base image is Debian 12 with glibc 2.36.
GLIBC_MINORS = range(17, 37)
CHOSEN_BY_THE_IMAGE = frozenset({"torch"})
HEAD = """\
# Written by `make lock` from constraints.txt: wheels of CPython 3.11 on Linux, {architectures}.
# pip install --no-deps --require-hashes -r locks/{role}.txt{torch}
"""
TORCH = (
    "\n# after torch=={version} in the build for the image's accelerator, with the hashes of "
    "its index"
)


def wanted(
    role: str, installed: Mapping[str, Distribution], pins: Mapping[str, Requirement]
) -> list[Requirement]:
    """Return the sorted pins that an image of `role` installs.

    Raises SupplyError for a missing pin.
    """
    needed = closure([ROLES[role]], installed)
    names = sorted({*needed.installed, *needed.missing} - OURS - CHOSEN_BY_THE_IMAGE)
    if lacking := [name for name in names if name not in pins]:
        raise SupplyError(f"{role} needs {', '.join(lacking)}, which constraints.txt does not pin")
    return [pins[name] for name in names]


def wheels(pins: Iterable[Requirement], architecture: str) -> dict[str, str]:
    """Return the sha256 of each pin's wheel on Linux, by canonical name.

    Raises SupplyError if pip finds no wheel.
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
    """Render a lock file.

    Args:
        role: The image's role.
        pins: The pins to lock.
        hashes: By architecture, sha256 of each wheel by canonical name.
        torch: The version of torch; empty for roles without it.
    """
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
    """Return the differences between a lock and the pins, one line each."""
    locked = set(re.findall(r"^(?!#)(\S+==[^\\\n]*?) \\$", text, re.MULTILINE))
    asked = {str(pin) for pin in pins}
    return [f"locks/{role}.txt lacks {one}: make lock" for one in sorted(asked - locked)] + [
        f"locks/{role}.txt has {one}, which the role does not need: make lock"
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
            pinned_version(pins["torch"])
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
