"""Ids of vectors in a worker: of loaded, resumed and changed models, adapters and jobs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from shoal.v1 import worker_pb2

from libs.errors import EmbeddingIdMismatch
from libs.models import EncodeWork
from libs.store.digests import FilesDigest, ListedFiles
from services.worker.memory import files
from services.worker.memory.files import ModelFiles
from services.worker.memory.resident import LoadedAdapter, Resident
from tests.worker.fakes import HANG_SECONDS, FakeLanes, FakeModel, encode_job, routers, until
from tests.worker.residing import Checkpoints, failed, residency, unloaded
from tests.worker.residing import loaded as load
from tests.worker.running import MODEL, worker

WORK = EncodeWork(["a"])
OTHER = "0123456789abcdef"


def write_weights(store: Checkpoints, value: float) -> None:
    path = store.root / "org/a" / "model.safetensors"
    save_file({"w": np.full(25, value, np.float32)}, path)


def embedding_id(resident: Resident | None) -> str:
    assert resident is not None
    return resident.embedding_id(WORK, "")


async def test_id_is_that_of_the_files_that_were_loaded(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store) as r:
        await load(r, "org/a")
        first = embedding_id(r.serving("org/a"))
        write_weights(store, 1.0)
        assert embedding_id(r.serving("org/a")) == first
        await unloaded(r, "org/a")
        await load(r, "org/a")
        changed = embedding_id(r.serving("org/a"))
        assert changed.partition(".")[0] != first.partition(".")[0]
        write_weights(store, 0.0)
        await unloaded(r, "org/a")
        await load(r, "org/a")
        assert embedding_id(r.serving("org/a")) == first


async def test_warm_model_keeps_the_id_of_its_weights(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await load(r, "org/a")
        first = embedding_id(r.serving("org/a"))
        write_weights(store, 1.0)
        await unloaded(r, "org/a")
        await load(r, "org/a")
        assert store.loads == ["org/a"]
        assert embedding_id(r.serving("org/a")) == first


async def test_files_that_change_during_a_load_fail_it(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")

    def replaced(name: str, size: int) -> FakeModel:
        write_weights(store, 1.0)
        return FakeModel(name, size)

    def extended(name: str, size: int) -> FakeModel:
        (store.root / "org/a" / "tokenizer.json").write_text("{}")
        return FakeModel(name, size)

    for number, make in enumerate((replaced, extended)):
        store.make = make
        async with residency(store) as r:
            r.load("org/a")
            assert "the files of org/a changed while it was loaded" in await failed(r, "org/a")
            assert len(store.loads) == number + 1
    store.make = FakeModel
    async with residency(store) as r:
        await load(r, "org/a")
        assert embedding_id(r.serving("org/a"))


async def test_files_are_listed_before_the_model_is_read(tmp_path: Path) -> None:
    """The hashing thread may start after a file was read and replaced."""
    store = Checkpoints(tmp_path, "org/a")
    started = threading.Event()

    def replaced(name: str, size: int) -> FakeModel:
        write_weights(store, 1.0)
        started.set()
        return FakeModel(name, size)

    store.make = replaced
    async with residency(store) as r:
        hash_files = ModelFiles.hash_files

        def late(listed: Sequence[ListedFiles], stop: threading.Event) -> FilesDigest:
            started.wait(HANG_SECONDS)
            return hash_files(r._loader._files, listed, stop)

        r._loader._files.hash_files = late  # type: ignore[method-assign]
        r.load("org/a")
        assert "changed while it was loaded" in await failed(r, "org/a")


async def test_load_with_files_that_cannot_be_hashed_succeeds_without_an_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store) as r:
        await load(r, "org/a")
        assert embedding_id(r.serving("org/a"))
        await unloaded(r, "org/a")

        def broken(*_: object) -> FilesDigest:
            raise OSError(errno.EIO, "Input/output error")

        r._loader._files.hash_files = broken  # type: ignore[method-assign, assignment]
        await load(r, "org/a")
        resident = r.serving("org/a")
        assert resident is not None
        assert resident.identity is None
        assert "cannot be hashed, so its vectors have no id" in caplog.text
        with pytest.raises(EmbeddingIdMismatch, match="could not hash the model's files"):
            resident.embedding_id(WORK, OTHER)


async def test_slow_hashing_does_not_fail_a_load(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    release = threading.Event()
    async with residency(store) as r:
        hash_files = r._loader._files.hash_files

        def read(name: str, size: int) -> FakeModel:
            r._loader._load_seconds = 0.05  # of the wait for the digest, after the load
            return FakeModel(name, size)

        def slow(listed: Sequence[ListedFiles], stop: threading.Event) -> FilesDigest:
            release.wait(HANG_SECONDS)
            return hash_files(listed, stop)

        store.make = read
        r._loader._files.hash_files = slow  # type: ignore[method-assign]
        await load(r, "org/a")
        resident = r.serving("org/a")
        assert resident is not None
        assert resident.embedding_id(WORK, "") == ""
        release.set()


async def test_models_without_vectors_are_not_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, "org/a")
    card = replace(FakeModel("org/a").card, tasks=("score",))
    monkeypatch.setattr(files, "read_card", lambda *_: card)
    async with residency(store) as r:
        await load(r, "org/a")
        assert not r._loader._files._digests._known
        resident = r.serving("org/a")
        assert resident is not None
        assert resident.identity is None


async def test_failed_load_raises_its_own_error_and_stops_hashing(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.errors["org/a"] = RuntimeError("broken")
    stopped: list[threading.Event] = []
    async with residency(store) as r:
        hash_files = r._loader._files.hash_files

        def recorded(listed: Sequence[ListedFiles], stop: threading.Event) -> FilesDigest:
            stopped.append(stop)
            return hash_files(listed, stop)

        r._loader._files.hash_files = recorded  # type: ignore[method-assign]
        r.load("org/a")
        assert "broken" in await failed(r, "org/a")
        await until(lambda: bool(stopped), "the hashing thread to begin")
        assert [stop.is_set() for stop in stopped] == [True]


def test_model_without_hashed_files_has_no_id() -> None:
    resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)
    with pytest.raises(EmbeddingIdMismatch, match="could not hash the model's files"):
        resident.embedding_id(WORK, OTHER)
    assert resident.embedding_id(WORK, "") == ""


async def test_two_adapters_and_the_plain_model_have_three_ids(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a")) as r:
        await load(r, "org/a")
        resident = r.serving("org/a")
        assert resident is not None
        for name, files in (("org/b", "1" * 64), ("org/c", "2" * 64), ("org/same", "2" * 64)):
            resident.adapters.entries[name] = LoadedAdapter(0, 0.0, 0.0, lambda: None, files=files)
        names = ("", "org/b", "org/c", "org/same")
        ids = [resident.embedding_id(EncodeWork(["a"], adapter=name), "") for name in names]
        assert len(set(ids)) == 3
        assert ids[2] == ids[3]
        with pytest.raises(EmbeddingIdMismatch, match="that of the adapter 'org/b'"):
            resident.embedding_id(WORK, ids[1])


def expecting(name: str, expected: str) -> worker_pb2.Job:
    job = encode_job(name, "hello")
    job.encode.expect_embedding_id = expected
    return job


async def test_jobs_that_require_another_id_fail_without_a_forward(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("plain", "hello"))
        await until(lambda: "plain" in lanes.answers)
        found = lanes.answer_of("plain").encode.embedding_id
        assert found.endswith(".float32")
        jobs = {"full": found, "digits": found.partition(".")[0], "other": OTHER}
        for name, expected in jobs.items():
            lanes.put(MODEL, expecting(name, expected))
        await until(lambda: len(lanes.answers) == 4)
        assert lanes.answer_of("full").encode.embedding_id == found
        assert lanes.answer_of("digits").encode.embedding_id == found
        failure = lanes.answer_of("other").failure
        assert (failure.reason, failure.field) == ("EMBEDDING_ID_MISMATCH", "expect_embedding_id")
        assert found in failure.message
        assert OTHER in failure.message
