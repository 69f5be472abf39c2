"""`python -m tools.supply.sbom [FOLDER]`: write a CycloneDX 1.6 bill of materials of each role's
runtime closure, FOLDER/sbom-<role>.json.

cyclonedx-py describes the whole environment; packages that a role does not need are removed, and
the result is validated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from tools.distributions import OURS, ROLES, ROOT, SupplyError, closure, installed_distributions


def environment_bill(python: str = sys.executable) -> dict[str, Any]:
    """Describe all packages of the interpreter `python` as CycloneDX. This takes about a minute."""
    options = ["--spec-version", "1.6", "--output-reproducible", "--no-validate"]
    command = [sys.executable, "-m", "cyclonedx_py", "environment", python, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SupplyError(
            f"cyclonedx-py ended with status {done.returncode}: {done.stderr.strip()}"
        )
    bill: dict[str, Any] = json.loads(done.stdout)
    return bill


def role_bill(bill: dict[str, Any], role: str, needed: Set[str]) -> dict[str, Any]:
    """Reduce a bill to the distributions in `needed`, below a component for the image.

    Raises SupplyError if one is missing.
    """
    kept = [
        _without_folder(one)
        for one in bill["components"]
        if canonicalize_name(one["name"]) in needed
    ]
    if lacking := needed - {canonicalize_name(one["name"]) for one in kept}:
        raise SupplyError(f"the bill of {role} lacks {', '.join(sorted(lacking))}")
    refs = {one["bom-ref"] for one in kept}
    roots = [one["bom-ref"] for one in kept if canonicalize_name(one["name"]) in OURS]
    edges = [
        {**one, "dependsOn": [to for to in one.get("dependsOn", ()) if to in refs]}
        for one in bill["dependencies"]
        if one["ref"] in refs
    ]
    name = f"shoal-{role}" if role != "client" else "shoal"
    image = {
        "type": "container" if role != "client" else "library",
        "bom-ref": f"image:{name}",
        "name": name,
    }
    return {
        **bill,
        "components": kept,
        "dependencies": [{"ref": image["bom-ref"], "dependsOn": roots}, *edges],
        "metadata": {**bill.get("metadata", {}), "component": image},
    }


def _without_folder(component: dict[str, Any]) -> dict[str, Any]:
    """Remove the local folder from which one of our packages was installed."""
    if canonicalize_name(component["name"]) not in OURS:
        return component
    return {key: value for key, value in component.items() if key != "externalReferences"}


def validate(bill: dict[str, Any]) -> None:
    """Raise SupplyError if the bill is not valid CycloneDX 1.6."""
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)):
        raise SupplyError(
            f"the bill of {bill['metadata']['component']['name']} is not valid: {error}"
        )


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    folder.mkdir(parents=True, exist_ok=True)
    installed = installed_distributions()
    try:
        bill = environment_bill()
        for role, requirement in ROLES.items():
            made = role_bill(bill, role, set(closure([requirement], installed).installed))
            validate(made)
            file = folder / f"sbom-{role}.json"
            file.write_text(json.dumps(made, indent=2) + "\n")
            print(f"{file}: {len(made['components'])} components")
    except SupplyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
