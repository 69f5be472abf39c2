"""`python -m tools.k8s.crd_schemas`: generate the JSON schemas of our custom resources in
tests/k8s/schemas/.

No package index has the operators' CRDs, but the npm packages @kubernetes-models/* (MIT) are
TypeScript generated from the operators' Go types. This script converts their declarations to JSON
schemas: keys, types, required keys and allowed words. Checks of an operator's webhook are not in
them. The script needs `npm`; `make test` does not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.distributions import ROOT, SupplyError

PACKAGES = (
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    # Kubernetes' types, to which the other packages refer.
    "@kubernetes-models/apimachinery@3.0.2",
    "kubernetes-models@5.1.0",
)
KINDS = (
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("keda.sh/v1alpha1", "TriggerAuthentication"),
    ("cert-manager.io/v1", "Certificate"),
    ("cert-manager.io/v1", "Issuer"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("gateway.networking.k8s.io/v1", "Gateway"),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"),
)
OUT = ROOT / "tests/k8s/schemas"
# Fields that we do not write, or that would be most of the file.
LEFT_OUT = {"status", "acme", "vault", "venafi"}

_EXPORTED = re.compile(r"^export type \{ (\w+) as (\w+),", re.MULTILINE)
_INTERFACE = re.compile(
    r"^export interface (\w+)(?: extends ([\w, ]+))? \{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
_ALIAS = re.compile(r"^export type (I\w+) = (.*?);$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r'^    "([^"]+)"(\?)?: (.*?);$(?=\n    "|\n?\Z)', re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"/\*\*.*?\*/\s*", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|[\w$]+|\S')
_PRIMITIVES: Mapping[str, dict[str, object]] = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "any": {},
    "unknown": {},
    "object": {"type": "object"},
}


class Types:
    """All declarations of the packages, by the names under which they are exported."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._interfaces: dict[str, tuple[tuple[str, ...], str]] = {}
        self._aliases: dict[str, str] = {}
        self.by_kind: dict[tuple[str, str], str] = {}
        for text in texts:
            self._take(_COMMENT.sub("", text))

    def _take(self, text: str) -> None:
        exported = dict(_EXPORTED.findall(text))
        for name, parents, body in _INTERFACE.findall(text):
            full = exported.get(name, name)
            self._interfaces[full] = (
                tuple(one for one in re.split(r",\s*", parents) if one and one != "TypeMeta"),
                body,
            )
            says = dict(re.findall(r'^    "(apiVersion|kind)": "([^"]+)";$', body, re.MULTILINE))
            if len(says) == 2:
                self.by_kind[says["apiVersion"], says["kind"]] = full
        for name, value in _ALIAS.findall(text):
            self._aliases[exported.get(name, name)] = value

    def schemas(self, wanted: list[str]) -> dict[str, object]:
        """Return the schemas of the wanted types and of all types to which they refer."""
        made: dict[str, object] = {}
        while wanted:
            name = wanted.pop()
            if name in made:
                continue
            made[name] = self._schema(name)
            wanted += re.findall(r"#/\$defs/(\w+)", json.dumps(made[name]))
        return dict(sorted(made.items()))

    def _schema(self, name: str) -> dict[str, object]:
        if name in self._aliases:
            return _json_schema(self._aliases[name])
        if name not in self._interfaces:
            raise SupplyError(f"no package declares {name}")
        fields = {
            key: (_json_schema(value), not optional)
            for key, optional, value in self._fields(name)
            if key not in LEFT_OUT
        }
        return {
            "type": "object",
            "properties": {key: schema for key, (schema, _) in fields.items()},
            "required": [key for key, (_, needed) in fields.items() if needed],
            "additionalProperties": False,
        }

    def _fields(self, name: str) -> Iterator[tuple[str, str, str]]:
        parents, body = self._interfaces[name]
        for parent in parents:
            yield from self._fields(parent)
        yield from _FIELD.findall(body)


def _json_schema(text: str) -> dict[str, object]:
    """Convert a TypeScript type to a JSON schema."""
    tokens = _TOKEN.findall(text)
    schema = _union(tokens)
    if tokens:
        raise SupplyError(f"{text!r} is an unknown type")
    return schema


def _union(tokens: list[str]) -> dict[str, object]:
    if tokens[0] == "|":
        tokens.pop(0)
    choices = [_single(tokens)]
    while tokens and tokens[0] == "|":
        tokens.pop(0)
        choices.append(_single(tokens))
    words = [choice["const"] for choice in choices if "const" in choice]
    if len(words) == len(choices):
        return {"enum": words}
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _single(tokens: list[str]) -> dict[str, object]:
    first = tokens.pop(0)
    if first.startswith('"'):
        return {"const": first[1:-1]}
    if first.isdigit():
        return {"const": int(first)}
    if first in _PRIMITIVES:
        return dict(_PRIMITIVES[first])
    if first == "Array":
        _expect(tokens, "<")
        items = _union(tokens)
        _expect(tokens, ">")
        return {"type": "array", "items": items}
    if first == "{":
        if tokens[0] == "}":
            tokens.pop(0)
            return {"type": "object"}
        for part in ("[", "key", ":", "string", "]", ":"):
            _expect(tokens, part)
        values = _union(tokens)
        _expect(tokens, ";")
        _expect(tokens, "}")
        return {"type": "object", "additionalProperties": values}
    if not re.fullmatch(r"I\w+", first):
        raise SupplyError(f"{first!r} begins an unknown type")
    return {"$ref": f"#/$defs/{first}"}


def _expect(tokens: list[str], wanted: str) -> None:
    if (found := tokens.pop(0)) != wanted:
        raise SupplyError(f"expected {wanted!r}, found {found!r}")


def fetched(directory: Path) -> Iterator[Path]:
    """Fetch and unpack the packages in a folder."""
    for number, package in enumerate(PACKAGES):
        folder = directory / str(number)
        folder.mkdir()
        subprocess.run(
            ["npm", "pack", "--silent", package],  # noqa: S607
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        yield folder / "package"


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        folders = list(fetched(Path(directory)))
        types = Types(
            path.read_text() for folder in folders for path in sorted(folder.rglob("*.d.ts"))
        )
        licence = (folders[0] / "LICENSE").read_text()
    try:
        names = {f"{version} {kind}": types.by_kind[version, kind] for version, kind in KINDS}
        made = {
            "$comment": f"Made by tools/k8s/crd_schemas.py from {', '.join(PACKAGES)}",
            "kinds": names,
            "$defs": types.schemas(list(names.values())),
        }
    except (KeyError, SupplyError) as error:
        print(f"the packages have changed: {error}", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "custom.json").write_text(json.dumps(made, indent=1) + "\n")
    (OUT / "LICENSE").write_text(licence)
    print(f"{OUT / 'custom.json'}: {len(names)} kinds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
