"""The way without containers: a real API server, every overlay and the chart applied, kind-cpu run
and scaled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from services.local.settings import MINILM, packaged_minilm
from tests.cluster import definitions, objects
from tests.cluster.api_server import ApiServer, Refused
from tests.cluster.drive import drive, scaled_object, wrong
from tests.cluster.kubelet import FakeKubelet, Scale
from tests.cluster.plan import Found, Step, too_old
from tests.cluster.progress import Done, Progress
from tests.k8s.manifests import Object, containers, environment, named

WORKER = "worker"


def check(found: Found, steps: Sequence[Step], folder: Path, progress: Progress) -> bool:
    """Run the steps and return True if all succeeded. After a failed one the next ones are tried,
    unless the server is gone.
    """
    mine = {step.name: step for step in steps if step.way == "envtest"}
    with ExitStack() as stack:
        try:
            with progress.step(mine.pop("start")) as done:
                server = stack.enter_context(ApiServer(found, folder / "server"))
                done.said = server.version()
                if too_old(done.said):
                    raise Refused(f"k8s/ is for Kubernetes 1.30 or newer, this is {done.said}")
            with progress.step(mine.pop("definitions")) as done:
                done.said = _define(server, found)
        except Exception:
            return False
        tried = [_tried(found, server, step, folder, progress) for step in mine.values()]
        return all(tried)


def _tried(found: Found, server: ApiServer, step: Step, folder: Path, progress: Progress) -> bool:
    try:
        with progress.step(step) as done:
            if step.name == "scale":
                _scale(server, folder, done)
            else:
                _apply(server, _rendered(found, step.name.removeprefix("apply ")), done)
    except Exception:  # it was said
        return False
    return True


def _rendered(found: Found, name: str) -> Sequence[Object]:
    which, _, values = name.partition(" ")
    return (
        objects.chart(found.helm, found.chart, values)
        if which == "chart"
        else objects.overlay(name)
    )


def _define(server: ApiServer, found: Found) -> str:
    """All custom resources that k8s/ has; stand-ins where no definition was given."""
    given = definitions.given(found.crds)
    lacking = definitions.lacking(given)
    objects.define(server, [*given, *map(definitions.stand_in, lacking)])
    kinds = ", ".join(kind.split()[1] for kind in lacking)
    return f"{len(given)} given" + (
        f"; without a schema, so not validated: {kinds}" if lacking else ""
    )


def _apply(server: ApiServer, made: Sequence[Object], done: Done) -> None:
    with applied(server, made) as count:
        done.said = f"{count} objects, {objects.admit(server, made)} kinds of pods admitted"


@contextmanager
def applied(server: ApiServer, made: Sequence[Object]) -> Iterator[int]:
    """Apply objects, yield their number, and remove them, so that later steps do not meet them. The
    first error is raised.
    """
    try:
        yield objects.apply(server.kubectl, made)
    except Exception:
        server.still_runs()
        with suppress(Refused):
            objects.remove(server.kubectl, made)
        raise
    objects.remove(server.kubectl, made)


def _scale(server: ApiServer, folder: Path, done: Done) -> None:
    """Scale kind-cpu by KEDA's ScaledObject, 0 → 1 → 2 → 0: pods as the API server requests
    them.
    """
    (folder / "overlay").mkdir()
    with applied(server, objects.scaled_overlay(folder / "overlay")):
        scale = Scale(server, WORKER)
        scale.scale(0)
        # With a model on its disk, because no hub may be in reach.
        variables = {"SHOAL_MODELS": f"{MINILM}={packaged_minilm()}", "HF_HUB_OFFLINE": "1"}
        with FakeKubelet(server, folder / "node", WORKER, variables) as kubelet:
            (container,) = containers(named(kubelet.node.objects, "Deployment", WORKER))
            reported = environment(kubelet.node.objects, container)
            (custom,) = server.objects("scaledobjects")
            story = asyncio.run(drive(kubelet, scale, scaled_object(custom, reported)))
        if said := [
            *wrong(story),
            *(f"a worker ended with {status}" for status in kubelet.statuses if status),
        ]:
            raise AssertionError("; ".join(said))
        done.said = str(story)
