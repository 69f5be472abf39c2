"""Several processes of one node, and one that is killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libs.store import DownloadProgress
from libs.store.cache import Cache, Listing
from tests.store.checkpoints import MODEL, same
from tests.store.conftest import TRANSFER, MakeStore
from tests.store.fake_hub import FakeHub
from tests.support.waiting import wait_until


@contextmanager
def fetching(hub: FakeHub, root: Path, threads: int) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to ask; it begins with `go`."""
    command = [
        sys.executable,
        "-m",
        "tests.store.fetching",
        str(root),
        str(root / "hf"),
        MODEL,
        str(threads),
    ]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_with_four_threads_download_once(
    hub: FakeHub, model: Path, root: Path
) -> None:
    hub.free_bytes = 1
    with fetching(hub, root, 4) as first, fetching(hub, root, 4) as second:
        go(first)
        go(second)
        assert hub.waiting.acquire(timeout=120)
        hub.gate.set()
        found = [json.loads(process.communicate(timeout=120)[0]) for process in (first, second)]
    assert found == [[str(root / "models" / MODEL)] * 4] * 2
    assert same(root / "models" / MODEL, model)
    assert hub.sent["model.safetensors"] == (model / "model.safetensors").stat().st_size
    assert hub.calls.count(f"/api/models/{MODEL}") == 1


def test_who_waits_for_another_process_sees_its_progress(
    hub: FakeHub, root: Path, make_store: MakeStore
) -> None:
    hub.free_bytes = 2 * TRANSFER.range_bytes
    seen: list[DownloadProgress] = []
    with fetching(hub, root, 1) as other:
        go(other)
        assert hub.waiting.acquire(timeout=120)
        calls = len(hub.calls)

        def report(progress: DownloadProgress) -> None:
            seen.append(progress)
            if progress.done >= hub.free_bytes:
                hub.gate.set()

        make_store().get(MODEL, report)
        assert other.wait(120) == 0
    assert any(0 < progress.done < progress.total for progress in seen)
    assert f"/api/models/{MODEL}" not in hub.calls[calls:]


def test_killed_download_leaves_nothing_to_see_and_is_resumed(
    hub: FakeHub, model: Path, root: Path, make_store: MakeStore
) -> None:
    hub.free_bytes = 6 * TRANSFER.range_bytes
    with fetching(hub, root, 1) as killed:
        go(killed)
        wait_until(
            lambda: (Cache(root).progress(MODEL) or DownloadProgress(0, 0)).done >= hub.free_bytes,
            120,
            "six ranges to arrive",
        )
        killed.kill()
        killed.wait()
    assert list((root / "models").glob("*/*")) == []
    arrived = Cache(root).progress(MODEL)
    assert arrived is not None
    hub.sent = Counter()
    hub.gate.set()
    seen: list[DownloadProgress] = []
    copy = make_store().get(MODEL, seen.append)
    assert same(copy.directory, model)
    assert seen[0] == arrived
    assert (
        sum(hub.sent.values()) - (model / "modules.json").stat().st_size
        == arrived.total - arrived.done
    )
    assert list((root / "incoming").glob("*/*")) == []


def test_listing_cut_short_by_a_crash_is_none(tmp_path: Path) -> None:
    Listing("here", "r1", ()).write(tmp_path / "listing.json")
    assert Listing.read(tmp_path / "listing.json") == Listing("here", "r1", ())
    (tmp_path / "listing.json").write_text('{"origin": "here", "revi')
    assert Listing.read(tmp_path / "listing.json") is None
