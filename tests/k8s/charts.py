"""The output of `helm template` for charts/shoal, in a form that can be compared with Kustomize's
output for k8s/.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import yaml

from tests.k8s.manifests import NAMESPACE, ROOT, Object, rendered

Values = dict[str, Any]

ON: Final[Values] = {"enabled": True}
CHART: Final = ROOT / "charts/shoal"
FETCHED: Final = ROOT / ".cache/helm"
"""The folder into which `make k8s-tools` puts helm."""
AS_KUSTOMIZE: Final[Mapping[str, Any]] = {
    "namespace": {"create": True},
    "redis": {"auth": {"generate": False}},
}
"""Values that the chart and k8s/ otherwise leave to their users: `helm install` needs the namespace
before it makes anything, and Kustomize cannot generate passwords."""
LABELS: Final = frozenset(
    {
        "app.kubernetes.io/part-of",
        "app.kubernetes.io/managed-by",
        "app.kubernetes.io/version",
        "app.kubernetes.io/instance",
        "helm.sh/chart",
    }
)
"""Labels of objects (not of pods, nor in selectors) that are not compared: nothing selects by
them.
"""
CHARTS: Final = ("charts/values", "charts/everything", "charts/external-redis")
"""Renderings of the chart that no overlay has: its own values, and those of ci/."""
HASHED: Final = re.compile(
    r"((?:edge|router|scheduler|worker)-env(?:-[a-z0-9-]+?)?"
    r"|redis(?:-users|-router|-scheduler)?)-[a-z0-9]{10}"
)
"""Names of ConfigMaps and Secrets to which Kustomize gives a hash of their content, so that a
change replaces pods.
"""
CHECKSUM: Final = "checksum/config"
"""The annotation of pods by which the chart does that."""
KEYS: Final[Mapping[str, str]] = {"volumes": "name", "volumeMounts": "mountPath"}
"""Lists without a meaningful order, by the key of their items. `env` is not one: variables refer
to those before them.
"""


def merged(*all_values: Mapping[str, Any]) -> Values:
    """Merge values as Helm does: mappings by key, anything else as a whole."""
    found: Values = {}
    for values in all_values:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def chart(*all_values: Mapping[str, Any], file: str = "") -> tuple[Object, ...]:
    """The chart with these values, comparable with k8s/."""
    return template(merged(AS_KUSTOMIZE, *all_values), *([file] if file else []))


def helm(*words: str, values: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run helm. Notes about followed links in the chart are removed from its output."""
    found = shutil.which("helm", path=os.pathsep.join([str(FETCHED), os.environ.get("PATH", "")]))
    assert found is not None, "helm is missing, so charts/ cannot be tested: make k8s-tools"
    command = [found, *words, *(f"--values={file}" for file in values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    done.stderr = "".join(
        line for line in done.stderr.splitlines(True) if "found symbolic link in path" not in line
    )
    return done


def made(name: str) -> tuple[Object, ...]:
    """One of EVERY or of CHARTS."""
    kind, _, which = name.partition("/")
    if kind != "charts":
        return rendered(name)
    return template(
        {"namespace": {"create": True}}, *([] if which == "values" else [f"ci/{which}.yaml"])
    )


def template(
    values: Mapping[str, Any], *files: str, namespace: str = NAMESPACE
) -> tuple[Object, ...]:
    """The chart with these values over those of `files` (of charts/shoal, e.g.
    values/kind-cpu.yaml).
    """
    return _templated(json.dumps(values), files, namespace)


def refusal(values: Mapping[str, Any]) -> str:
    """Return helm's error for invalid values. Raises AssertionError if it accepts them."""
    done = _run(json.dumps(values), (), NAMESPACE)
    assert done.returncode != 0, "it was taken"
    return done.stderr


@cache
def _templated(values: str, files: tuple[str, ...], namespace: str) -> tuple[Object, ...]:
    done = _run(values, files, namespace)
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None)


def _run(values: str, files: Sequence[str], namespace: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory:
        last = Path(directory, "values.yaml")
        last.write_text(values)
        paths = [*(CHART / file for file in files), last]
        return helm("template", "shoal", str(CHART), "--namespace", namespace, values=paths)


def comparable(objects: Sequence[Object]) -> dict[str, Object]:
    """Objects by kind and name, without what Helm and Kustomize write differently by their nature:
    see LABELS, HASHED, CHECKSUM, KEYS and `_content`. Raises AssertionError if one is there
    twice."""
    found: dict[str, Object] = {}
    for one in objects:
        plain: Object = _alike(json.loads(json.dumps(one)))
        _drop_labels(plain["metadata"])
        _drop_checksum(plain)
        if plain["kind"] in ("ConfigMap", "Secret"):
            plain["data"] = {
                key: _content(plain["kind"], key, text)
                for key, text in (plain.get("data") or {}).items()
            }
        key = f"{plain['kind']} {plain['metadata']['name']}"
        assert key not in found, f"{key} is there twice"
        found[key] = plain
    return found


def _alike(value: Any) -> Any:
    """Without hashes in names, and with lists in one order where it means nothing."""
    if isinstance(value, dict):
        found = {key: _alike(one) for key, one in value.items()}
        return found | {
            name: sorted(found[name], key=itemgetter(key))
            for name, key in KEYS.items()
            if name in found
        }
    if isinstance(value, list):
        return [_alike(one) for one in value]
    hashed = HASHED.fullmatch(value) if isinstance(value, str) else None
    return hashed[1] if hashed else value


def _drop_labels(metadata: Object) -> None:
    kept = {key: value for key, value in metadata.pop("labels", {}).items() if key not in LABELS}
    if kept:
        metadata["labels"] = kept


def _drop_checksum(plain: Object) -> None:
    metadata = plain.get("spec", {}).get("template", {}).get("metadata", {})
    if set(metadata.get("annotations", ())) == {CHECKSUM}:
        del metadata["annotations"]


def _content(kind: str, key: str, text: str) -> Any:
    """Return a file's content as its readers parse it: comments, the order of YAML's keys, line
    ends and base64 make no difference.
    """
    plain = base64.b64decode(text).decode() if kind == "Secret" else text
    if key.endswith((".yaml", ".json")):
        return list(_ordered(yaml.load(plain, yaml.CSafeLoader)))
    return plain.strip()


def _ordered(value: Any) -> Iterator[Any]:
    """Yield the values that keep their order: the first pool is the default one."""
    yield value
    if isinstance(value, dict) and "pools" in value:
        yield list(value["pools"])


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Each place in which two values differ, with both."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if key not in ours or key not in theirs:
                yield f"{path}.{key}: only in {'the chart' if key in ours else 'k8s/'}"
            else:
                yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{place}]")
    elif ours != theirs or type(ours) is not type(theirs):
        yield f"{path}: {ours!r} in the chart, {theirs!r} in k8s/"


def unlike(ours: Sequence[Object], theirs: Sequence[Object]) -> list[str]:
    """All differences of two renderings."""
    return list(differences(comparable(ours), comparable(theirs)))
