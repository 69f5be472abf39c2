"""Build the images of docker/Dockerfile, start the overlay kind-cpu from them as pods, and
upgrade it under traffic: `make images-check`.

1. Edge, router, scheduler and worker-cpu are built, from the published Python image where its
   registry can be reached.
2. Each starts as its manifest says; its restrictions, read from the kernel, equal the manifest's;
   the probes and the image's HEALTHCHECK succeed; a program in it cannot write to its root file
   system.
3. A text is encoded by gRPC and by HTTP. Then, under traffic from a container of the same network:
   a second worker and a second router are added, the first worker is drained, and every pod is
   replaced by one of the image of another commit, `--from`. No request may be lost.

Needs root and Debian's buildah, podman, runc, mmdebstrap, netavark, aardvark-dns and iptables. It
does not cover images for CUDA, signatures, and a kubelet's probes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from services.local.settings import MINILM, packaged_minilm
from tests.images.engine import Engine, EngineError
from tests.images.pods import NETWORK, ContainerPod
from tests.k8s.manifests import ROOT, Object, component, containers, named, rendered
from tests.k8s.pods import Node

TARGETS: Final = ("edge", "router", "scheduler", "worker-cpu")
LIMITS: Final = {"router": 250, "edge": 250, "scheduler": 250}
"""MiB that an image may have beyond its base."""

MODEL: Final = "/models/all-MiniLM-L6-v2"
TRAFFIC_SECONDS: Final = 5.0
_COUNT: Final = """\
import importlib.metadata as metadata
venv = [
    one.metadata["Name"]
    for one in metadata.distributions()
    if "/venv/" in str(one.locate_file(""))
]
print(len(set(venv)))
"""


@dataclass
class Mesh:
    """The pods of kind-cpu, by workload."""

    engine: Engine
    node: Node
    redis_image: str
    version: str

    def pod(self, workload: Object) -> ContainerPod:
        """One more, started from the image of the present version, and ready."""
        name = workload["metadata"]["name"]
        image = (
            self.redis_image
            if component(workload) == "redis"
            else f"localhost/shoal-{_target(workload)}:{self.version}"
        )
        pod = ContainerPod(
            self.node, workload, f"shoal-check-{name}-{len(self.node.pods)}", self.engine, image
        )
        if name == "worker":
            # No hub can be reached from here, or need be: the model is mounted.
            more = {"SHOAL_MODELS": f"{MINILM}={MODEL}", "HF_HUB_OFFLINE": "1"}
            pod.start(more, [f"{packaged_minilm()}:{MODEL}:ro"])
        else:
            pod.start()
        pod.wait_ready()
        return pod


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.images", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    parser.add_argument(
        "--from",
        dest="earlier",
        default="HEAD~1",
        help="the commit whose images are upgraded (default: HEAD~1)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = parser.parse_args()
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory(prefix="shoal-images-") as name:
        try:
            results = check(Path(name), given.earlier, console)
        except (EngineError, AssertionError) as error:
            console.print(f"[red]failed[/]: {error}", highlight=False, soft_wrap=True)
            return 1
    if given.json:
        print(json.dumps(results, indent=1))
    faults: Sequence[object] = results["faults"]  # type: ignore[assignment]
    for fault in faults:
        console.print(f"[red]fault[/]: {fault}", highlight=False)
    console.print(
        "[red]images do not run as they must[/]"
        if faults
        else "images run as their manifests say; nothing was lost"
    )
    return 1 if faults else 0


def check(folder: Path, earlier: str, console: Console) -> dict[str, object]:
    """Run all steps and return their results; `faults` lists the failures.

    Raises EngineError or AssertionError if later steps are pointless: an image cannot be built, or
    a pod does not become ready.
    """
    faults: list[str] = []
    engine = Engine(folder)
    with console.status("base image"):
        base = engine.python_image()
    built = _build_all(engine, base, earlier, console)
    for row in built:
        limit = LIMITS.get(str(row["image"]))
        if limit is not None and float(str(row["beyond_base_mib"])) > limit:
            faults.append(
                f"shoal-{row['image']} has {row['beyond_base_mib']} MiB beyond its base; {limit} "
                "are allowed"
            )
    _print(console, "Images", built)
    objects = rendered("overlays/kind-cpu")
    (redis,) = containers(named(objects, "StatefulSet", "redis"))
    redis_image = engine.redis_image(redis["image"])
    for remark in engine.remarks:
        console.print(f"[yellow]stand-in[/]: {remark}", highlight=False, soft_wrap=True)
    with _network(engine), Node(folder / "node", objects) as node:
        mesh = Mesh(engine, node, redis_image, "before")
        pods: dict[str, ContainerPod] = {}
        for kind, name in (
            ("StatefulSet", "redis"),
            *(("Deployment", name) for name in ("router", "scheduler", "worker", "edge")),
        ):
            with console.status(f"{name}: starting"):
                pods[name] = mesh.pod(named(objects, kind, name))
        confined = _confinement(engine, pods, faults)
        _print(console, "As the manifests say", confined)
        steps, traffic = _roll(mesh, pods, faults)
        _print(console, "Under traffic", steps)
        console.print(f"traffic: {json.dumps(traffic)}", highlight=False, soft_wrap=True)
    return {
        "stand_ins": engine.remarks,
        "images": built,
        "pods": confined,
        "steps": steps,
        "traffic": traffic,
        "faults": faults,
    }


def _build_all(
    engine: Engine, base: str, earlier: str, console: Console
) -> list[dict[str, object]]:
    """Each target of this tree and of the earlier commit."""
    rows: list[dict[str, object]] = []
    base_size = int(engine.inspect(base, "image")["Size"])
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(
            ["git", "archive", earlier], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", name], input=archive, check=True)
        for target in TARGETS:
            with console.status(f"building {target}"):
                seconds = engine.build(target, f"localhost/shoal-{target}:after", base)
                engine.build(target, f"localhost/shoal-{target}:before", base, Path(name))
            size = int(engine.inspect(f"localhost/shoal-{target}:after", "image")["Size"])
            reported = engine.podman(
                "run",
                "--rm",
                "--entrypoint",
                "python",
                f"localhost/shoal-{target}:after",
                "-c",
                _COUNT,
            )
            rows.append(
                {
                    "image": target,
                    "seconds": round(seconds, 1),
                    "mib": size >> 20,
                    "beyond_base_mib": (size - base_size) >> 20,
                    "packages": int(reported.split()[-1]),
                }
            )
    return rows


def _confinement(
    engine: Engine, pods: dict[str, ContainerPod], faults: list[str]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, pod in pods.items():
        applied, asked = pod.applied(), pod.asked()
        differing = [what for what in asked if applied[what] != asked[what]]
        faults += [
            f"{name}: {what} is {applied[what]}, the manifest asks for {asked[what]}"
            for what in differing
        ]
        row: dict[str, object] = {"pod": name, **applied}
        if name != "redis":
            row["HEALTHCHECK"] = _healthcheck(engine, pod)
            row["writes to /app"] = _writes(engine, pod)
            faults += [f"{name}: its HEALTHCHECK says {row['HEALTHCHECK']}"] * (
                row["HEALTHCHECK"] != "healthy"
            )
            faults += [f"{name}: a program in it can write to /app"] * (
                row["writes to /app"] != "refused"
            )
        rows.append(row)
    return rows


def _healthcheck(engine: Engine, pod: ContainerPod) -> str:
    try:
        engine.podman("healthcheck", "run", pod.name)
    except EngineError as error:
        return str(error)[-300:]
    return "healthy"


def _writes(engine: Engine, pod: ContainerPod) -> str:
    try:
        engine.podman("exec", pod.name, "python", "-c", "open('/app/new', 'w')")
    except EngineError as error:
        return "refused" if "Read-only file system" in str(error) else str(error)[-300:]
    return "written"


def _roll(
    mesh: Mesh, pods: dict[str, ContainerPod], faults: list[str]
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Scale, drain and upgrade while a container sends requests. Returns the steps and the
    traffic's report.
    """
    steps: list[dict[str, object]] = []

    def step(what: str, begins: float, status: int | None = None) -> None:
        steps.append(
            {
                "step": what,
                "seconds": round(time.monotonic() - begins, 1),
                "exit status": "" if status is None else status,
            }
        )
        if status:
            faults.append(f"{what}: the pod ended with status {status}")

    with _traffic(mesh.engine) as traffic:
        time.sleep(TRAFFIC_SECONDS)
        for name in ("worker", "router"):
            began = time.monotonic()
            second = mesh.pod(pods[name].workload)
            step(f"a second {name} is ready", began)
            time.sleep(TRAFFIC_SECONDS)
            began = time.monotonic()
            step(f"the first {name} is drained", began, pods[name].stop())
            pods[name] = second
        mesh.version = "after"
        for name in ("scheduler", "router", "worker", "edge"):
            began = time.monotonic()
            newer = mesh.pod(pods[name].workload)
            status = pods[name].stop()
            pods[name] = newer
            step(f"{name} is replaced by the new image's", began, status)
        time.sleep(TRAFFIC_SECONDS)
        reported = traffic()
    if reported["failed"] or reported["wrong"]:
        faults.append(f"requests failed or were answered wrongly: {json.dumps(reported)}")
    if not (reported["grpc"] and reported["http"]):
        faults.append("no request was answered")
    return steps, reported


@contextmanager
def _traffic(engine: Engine) -> Iterator[Callable[[], dict[str, object]]]:
    """Yields what ends the traffic and returns its counts."""
    script = ROOT / "tests/images/traffic.py"
    words = [
        "podman",
        "run",
        "--rm",
        "--interactive",
        "--name",
        "shoal-check-traffic",
        "--network",
        NETWORK,
    ]
    words += [
        "--volume",
        f"{script}:/traffic.py:ro",
        "--entrypoint",
        "python",
        "localhost/shoal-router:after",
        "/traffic.py",
        MINILM,
    ]
    process = engine.start(words)
    assert process.stdout is not None
    assert process.stdin is not None
    stdin = process.stdin

    def end() -> dict[str, object]:
        stdin.close()
        reported: dict[str, object] = (
            json.loads(process.stdout.read()) if process.stdout is not None else {}
        )
        process.wait(60)
        return reported

    try:
        line = process.stdout.readline()
        assert line == "ready\n", f"the traffic's container said {line!r}"
        yield end
    finally:
        engine.podman("rm", "--force", "--time", "0", "--ignore", "shoal-check-traffic")
        process.wait(30)


@contextmanager
def _network(engine: Engine) -> Iterator[None]:
    with suppress(EngineError):  # Of a run that was killed.
        engine.podman("network", "rm", "--force", NETWORK)
    engine.podman("network", "create", NETWORK)
    try:
        yield
    finally:
        engine.podman("network", "rm", "--force", NETWORK)


def _target(workload: Object) -> str:
    name = workload["metadata"]["name"]
    return "worker-cpu" if name == "worker" else str(name)


def _print(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
