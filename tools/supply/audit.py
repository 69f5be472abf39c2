"""`python -m tools.supply.audit [--strict]`: check the pinned distributions for known
vulnerabilities.

pip-audit queries a vulnerability service for each pin of constraints.txt: PyPI's, or the one chosen
by PIP_AUDIT_VULNERABILITY_SERVICE and PIP_AUDIT_OSV_URL. If the service is unreachable or does not
know our packages (a mirror of the index may not), one line says so and the status is 0, or 1 with
--strict. A vulnerability is an error unless tools/supply/accepted-vulnerabilities.toml lists it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.distributions import ROOT, SupplyError, read_pins

ACCEPTED = ROOT / "tools/supply/accepted-vulnerabilities.toml"
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Vulnerability:
    package: str
    version: str
    ids: tuple[str, ...]
    """Its id and its aliases."""
    fixed_in: tuple[str, ...]
    description: str

    def line(self) -> str:
        fixed = ", ".join(self.fixed_in) or "no version"
        return (
            f"{self.package} {self.version}: {' '.join(self.ids)}, fixed in {fixed}: "
            f"{self.description[:200]}"
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """A vulnerability that is accepted up to and including the date `until`."""

    id: str
    package: str
    until: date
    reason: str

    def covers(self, found: Vulnerability, today: date) -> bool:
        return (
            self.id in found.ids
            and canonicalize_name(self.package) == canonicalize_name(found.package)
            and today <= self.until
        )


class NotAudited(Exception):
    """The service did not respond; the message says why."""


def read_accepted(path: Path = ACCEPTED) -> list[Accepted]:
    """Read the accepted vulnerabilities. Raises SupplyError for an invalid entry."""
    entries = tomllib.loads(path.read_text()).get("accepted", [])
    try:
        accepted = [Accepted(**entry) for entry in entries]
    except TypeError as error:
        raise SupplyError(
            f"{path}: each [[accepted]] has id, package, until and reason: {error}"
        ) from None
    for one in accepted:
        if type(one.until) is not date or not one.reason:
            raise SupplyError(
                f"{path}: {one.id}: until is a date such as 2026-12-31, and reason says why it "
                "may pass"
            )
    return accepted


def query(pins: Iterable[Requirement]) -> tuple[list[Vulnerability], list[str]]:
    """Return the vulnerabilities of pins, and the names of pins that the service does not know.

    Raises NotAudited if the service does not respond.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "pins.txt"
        file.write_text("".join(f"{pin}\n" for pin in pins))
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "-r",
            str(file),
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
        ]
        command += ["--format", "json", "--aliases", "on", "--desc", "on", "--timeout", "5"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotAudited(
                f"the vulnerability service took more than {TIMEOUT_SECONDS:.0f} s"
            ) from None
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise NotAudited(
            (done.stderr.strip() or f"pip-audit ended with status {done.returncode}").splitlines()[
                -1
            ]
        ) from None
    found = [
        Vulnerability(
            one["name"],
            one["version"],
            (said["id"], *said["aliases"]),
            tuple(said["fix_versions"]),
            said["description"],
        )
        for one in answers
        for said in one.get("vulns", ())
    ]
    return found, [one["name"] for one in answers if "skip_reason" in one]


def audit(pins: Sequence[Requirement]) -> tuple[list[Vulnerability], list[str]]:
    """Query all pins, the first one alone: an unreachable service then costs one timeout, not one
    per pin.
    """
    _, unknown = query(pins[:1])
    if unknown:
        raise NotAudited(f"the vulnerability service does not know even {unknown[0]}")
    return query(pins)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check the pinned distributions for known vulnerabilities."
    )
    parser.add_argument("--strict", action="store_true", help="fail if the service is unreachable")
    parser.add_argument(
        "--accepted",
        type=Path,
        default=ACCEPTED,
        help="accepted vulnerabilities, with their end dates",
    )
    given = parser.parse_args()
    pins = [pin for pin in read_pins().values() if pin.marker is None or pin.marker.evaluate()]
    # The first is queried alone: every service that knows anything knows pip.
    pins.sort(key=lambda pin: (pin.name != "pip", pin.name.lower()))
    try:
        accepted = read_accepted(given.accepted)
        found, unknown = audit(pins)
    except NotAudited as reason:
        print(f"not audited: {reason}")
        return 1 if given.strict else 0
    except SupplyError as error:
        print(error, file=sys.stderr)
        return 1
    today = date.today()
    wrong = [one for one in found if not any(entry.covers(one, today) for entry in accepted)]
    for one in wrong:
        print(one.line(), file=sys.stderr)
    for entry in accepted:
        if not any(entry.covers(one, today) for one in found):
            print(
                f"accepted {entry.id} of {entry.package} until {entry.until}: it is not found, "
                "or has expired; remove it"
            )
    if unknown:
        print(f"not audited: the vulnerability service does not know {', '.join(unknown)}")
    if not wrong:
        print(f"{len(pins) - len(unknown)} pins have no known vulnerability, {len(found)} accepted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
