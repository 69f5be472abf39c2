"""Ids of vectors in a worker: of loaded, resumed and changed models, adapters and jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from shoal.v1 import worker_pb2

from libs.errors import EmbeddingIdMismatch, NoCapacity
from libs.models import EncodeWork
from services.worker.memory.resident import LoadedAdapter, Resident
from tests.worker.fakes import FakeLanes, FakeModel, encode_job, routers, until
from tests.worker.residing import Checkpoints, residency, unloaded
from tests.worker.residing import loaded as load
from tests.worker.running import MODEL, worker

WORK = EncodeWork(["a"])
OTHER = "0123456789abcdef"


def write_weights(store: Checkpoints, value: float) -> None:
    path = store.root / "org/a" / "model.safetensors"
    save_file({"w": np.full(25, value, np.float32)}, path)


def id_of(resident: Resident | None) -> str:
    assert resident is not None
    return resident.embedding_id(WORK, "")


async def test_id_is_that_of_the_files_that_were_loaded(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store) as r:
        await load(r, "org/a")
        first = id_of(r.serving("org/a"))
        write_weights(store, 1.0)
        assert id_of(r.serving("org/a")) == first
        await unloaded(r, "org/a")
        await load(r, "org/a")
        changed = id_of(r.serving("org/a"))
        assert changed.partition(".")[0] != first.partition(".")[0]
        write_weights(store, 0.0)
        await unloaded(r, "org/a")
        await load(r, "org/a")
        assert id_of(r.serving("org/a")) == first


async def test_warm_model_keeps_the_id_of_its_weights(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await load(r, "org/a")
        first = id_of(r.serving("org/a"))
        write_weights(store, 1.0)
        await unloaded(r, "org/a")
        await load(r, "org/a")
        assert store.loads == ["org/a"]
        assert id_of(r.serving("org/a")) == first


async def test_files_that_change_during_a_load_fail_it(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")

    def change(name: str, size: int) -> FakeModel:
        while not hashed:
            hashed.extend(loader._files._digests._known.values())
        write_weights(store, 1.0)
        return FakeModel(name, size)

    hashed: list[str] = []
    store.make = change
    async with residency(store) as r:
        loader = r._loader
        copy = loader._files.find("org/a")
        with pytest.raises(NoCapacity, match="the files of org/a changed while it was loaded"):
            loader._read_files(copy, "org/a")
        store.make = FakeModel
        await load(r, "org/a")
        assert id_of(r.serving("org/a"))


async def test_failed_load_raises_its_own_error(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.errors["org/a"] = RuntimeError("broken")
    async with residency(store) as r:
        with pytest.raises(RuntimeError, match="broken"):
            r._loader._read_files(r._loader._files.find("org/a"), "org/a")


def test_model_without_hashed_files_has_no_id() -> None:
    resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)
    with pytest.raises(EmbeddingIdMismatch, match="too old to report one"):
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
