"""Looks for what `plan.Found` names: binaries on the PATH and in .cache, and what environment
variables point to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.cluster.plan import Found
from tests.k8s.manifests import FETCHED, ROOT

HELM_FETCHED: Final = ROOT / ".cache/helm"
CHART: Final = ROOT / "charts/shoal"


def find(environment: Mapping[str, str] = os.environ) -> Found:
    """Find the tools that `environment` names. Asking the Docker daemon takes a moment."""
    path = environment.get("PATH", "")
    assets = environment.get("KUBEBUILDER_ASSETS", "")
    docker = _program("docker", path)
    return Found(
        kubectl=_program("kubectl", os.pathsep.join([str(FETCHED), path])),
        etcd=_program("etcd", assets),
        api_server=_program("kube-apiserver", assets),
        crds=tuple(map(str, _files(environment.get("SHOAL_CRDS", "")))),
        docker=docker,
        docker_daemon=_daemon(docker),
        kind=_program("kind", path),
        keda_manifest=environment.get("KEDA_MANIFEST", ""),
        helm=_program("helm", os.pathsep.join([str(HELM_FETCHED), path])),
        chart=str(CHART) if (CHART / "Chart.yaml").exists() else "",
        values=tuple(sorted(path.stem for path in CHART.glob("values/*.yaml"))),
    )


def _program(name: str, path: str) -> str:
    return (shutil.which(name, path=path) or "") if name and path else ""


def _files(listed: str) -> list[Path]:
    """Return files and folders of a list that is separated as a PATH is. Raises FileNotFoundError
    for a listed path that does not exist.
    """
    found: list[Path] = []
    for one in filter(None, listed.split(os.pathsep)):
        path = Path(one)
        if not path.exists():
            raise FileNotFoundError(f"SHOAL_CRDS names {one}, which is not there")
        found += sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
    return found


def _daemon(docker: str) -> str:
    if not docker:
        return ""
    command = [docker, "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
