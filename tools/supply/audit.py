"""`python -m tools.supply.audit [--strict]`: has any pinned distribution a known vulnerability?

pip-audit asks a vulnerability service (PyPI's; PIP_AUDIT_VULNERABILITY_SERVICE and
PIP_AUDIT_OSV_URL choose another) about each pin of constraints.txt. Where the service cannot be
asked, or knows nothing of our packages as a mirror of the index may not, one line says so and the
status is 0, or 1 with --strict. A vulnerability fails, unless
tools/supply/accepted-vulnerabilities.toml has it.
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
    """`ids`: its id and its other names."""

    package: str
    version: str
    ids: tuple[str, ...]
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
    """One that passes up to and with the day `until`."""

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
    """The service gave no answer; the message says why."""


def read_accepted(path: Path = ACCEPTED) -> list[Accepted]:
    """Raises SupplyError for an entry without id, package, until and reason."""
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


def ask(pins: Iterable[Requirement]) -> tuple[list[Vulnerability], list[str]]:
    """What the service has on them, and the names of those that it does not know. Raises NotAudited
    without an answer.
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
    """As `ask`; the first pin goes alone, so that without a service nobody waits for it once a
    pin.
    """
    _, unknown = ask(pins[:1])
    if unknown:
        raise NotAudited(f"the vulnerability service does not know even {unknown[0]}")
    return ask(pins)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Has any pinned distribution a known vulnerability?"
    )
    parser.add_argument("--strict", action="store_true", help="fail where nobody can be asked")
    parser.add_argument(
        "--accepted", type=Path, default=ACCEPTED, help="what may pass, and until when"
    )
    given = parser.parse_args()
    pins = [pin for pin in read_pins().values() if pin.marker is None or pin.marker.evaluate()]
    # The first is asked for alone: pip is known wherever anything is.
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
                "or its time is over; remove it"
            )
    if unknown:
        print(f"not audited: the vulnerability service does not know {', '.join(unknown)}")
    if not wrong:
        print(f"{len(pins) - len(unknown)} pins have no known vulnerability, {len(found)} accepted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
