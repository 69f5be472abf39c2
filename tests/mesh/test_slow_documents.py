"""Documents and images that occupy a worker for seconds do not block its other work: real
processes, and the order of the answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO

import psutil
import pytest
import shoal
from PIL import Image
from shoal.tasks import Document

from services.worker.jobs.pulling.preparing import SMALL_BYTES
from tests.parity.image_repositories import TEXTS, write_repository
from tests.support import pdfs
from tests.support.cluster import Cluster
from tests.support.peak import Peak
from tests.support.waiting import rounds

MODEL = "random/clip-slow"
ROUNDS = 3
TIMEOUT = 300.0
MEMORY_BYTES = 1600 << 20
"""Memory for the worker's models and decoded images: enough for one image of IMAGE_SIDE, but not
two.
"""
IMAGE_SIDE = 7000
DRAWING_SECONDS = 0.5
"""Processor time above that of starting a document process."""
PART_SECONDS = 1.0
"""Less processor time than any of the slow documents here takes."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run one router and one worker of one thread that has read a text and an image."""
    models = tmp_path_factory.mktemp("models")
    made = write_repository("clip", tmp_path_factory.mktemp("clip") / "made")
    (models / "random").mkdir()
    made.directory.rename(models / MODEL)
    environment = {"SHOAL_MEMORY_BYTES": str(MEMORY_BYTES)}
    with Cluster(
        tmp_path_factory.mktemp("slow"), models=str(models), environment=environment
    ) as running:
        encode(running, "light", TEXTS[0])
        yield running


def encode(mesh: Cluster, tenant: str, item: str | bytes | Document) -> None:
    with shoal.Client(mesh.address, tenant=tenant, timeout=TIMEOUT) as client:
        client.encode(MODEL, [item])


def processor_seconds(mesh: Cluster) -> dict[psutil.Process, float]:
    """Return the processor seconds of each document process of the worker."""
    found = {}
    for child in psutil.Process(mesh.processes["worker-0"].pid).children():
        with suppress(psutil.NoSuchProcess):
            found[child] = child.cpu_times().user
    return found


def drawers(
    mesh: Cluster, before: dict[psutil.Process, float], least: float, most: float = math.inf
) -> list[psutil.Process]:
    """Return the document processes that have used such processor seconds since `before`."""
    now = processor_seconds(mesh)
    return [one for one in now if least < now[one] - before.get(one, 0.0) < most]


@contextmanager
def drawing(
    mesh: Cluster, threads: ThreadPoolExecutor, *files: bytes
) -> Iterator[list[Future[None]]]:
    """Stop the process that draws the first of these documents of one tenant in the middle of it,
    because a busy machine may leave the test without a core for longer than the drawing takes.
    """
    for _ in rounds(10, "a document's process was stopped while it drew"):
        before = processor_seconds(mesh)
        sent = [threads.submit(encode, mesh, "hostile", Document(data, 1, 1)) for data in files]
        stopped: list[psutil.Process] = []
        while not stopped and not all(one.done() for one in sent):
            stopped = drawers(mesh, before, DRAWING_SECONDS)
            time.sleep(0.02)
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            if drawers(mesh, before, DRAWING_SECONDS, PART_SECONDS):
                yield sent
                return
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        for one in sent:  # the test was late, so none may be in progress: send them again
            with suppress(shoal.errors.InvalidInput):  # it may take more than its processor time
                one.result(TIMEOUT)


def test_texts_of_all_tenants_are_answered_before_a_slow_document(mesh: Cluster) -> None:
    """The hostile tenant's page computes for seconds, but its texts and large images do not wait
    for it.
    """
    photo = BytesIO()
    Image.new("RGB", (2400, 2400)).save(photo, "PNG")
    with ThreadPoolExecutor(4) as threads:
        with drawing(mesh, threads, pdfs.slow(side=1400)) as (document,):
            for _ in range(ROUNDS):
                texts = [
                    threads.submit(encode, mesh, tenant, TEXTS[0])
                    for tenant in ("hostile", "light", "other")
                ]
                for text in texts:
                    text.result(TIMEOUT)
            encode(mesh, "hostile", photo.getvalue())
            assert not document.done(), "the texts have waited for the document"
        assert document.exception(TIMEOUT) is None or isinstance(
            document.exception(), shoal.errors.InvalidInput
        )


def test_document_is_answered_before_slow_documents_of_another_tenant(mesh: Cluster) -> None:
    files = [pdfs.slow(operations, side=900) for operations in (70, 72, 74)]
    with ThreadPoolExecutor(4) as threads, drawing(mesh, threads, *files) as slow:
        encode(mesh, "light", Document(pdfs.document(["a page"]), 1, 1))
        assert sum(document.done() for document in slow) <= 1, (
            "the light tenant has waited for the hostile one's documents"
        )


def test_large_images_of_several_tenants_stay_within_the_memory_of_the_worker(
    mesh: Cluster,
) -> None:
    """Each is a file of 66 KB that needs 784 MB to decode; a light tenant's small image waits for
    none of them.
    """
    out = BytesIO()
    # Too large to be prepared together with other tenants' jobs.
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE)).save(
        out, "WEBP", lossless=True, icc_profile=bytes(SMALL_BYTES)
    )
    peak = Peak(mesh.processes["worker-0"].pid)
    with ThreadPoolExecutor(8) as threads:
        large: list[Future[None]] = [
            threads.submit(encode, mesh, f"tenant-{number}", out.getvalue()) for number in range(6)
        ]
        encode(mesh, "light", TEXTS[0])
        refused = [error for image in large if (error := image.exception(TIMEOUT)) is not None]
    assert all(isinstance(error, shoal.errors.NoCapacity) for error in refused), refused
    assert len(refused) < len(large), "one after another they are decoded"
    assert peak.grown <= MEMORY_BYTES, f"the worker grew by {peak.grown:,} bytes"
