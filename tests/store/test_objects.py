"""Models below a URL, through fsspec's own file systems; S3 against moto's server."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from safetensors.numpy import save_file

from libs.errors import ModelBroken, ModelNotFound, ModelUnreachable, NoCapacity
from libs.store import DownloadProgress, ModelStore, open_store
from libs.store.cache import Cache
from libs.store.objects import ObjectStore
from tests.store.checkpoints import MODEL, same, write_model
from tests.store.conftest import TRANSFER


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder laid out as a store is, with the model and a revision of it."""
    write_model(tmp_path / "bucket" / MODEL)
    write_model(tmp_path / "bucket" / f"{MODEL}@v2", seed=2)
    return tmp_path / "bucket"


@pytest.fixture
def memory(bucket: Path) -> Iterator[MemoryFileSystem]:
    files = MemoryFileSystem()
    files.put(str(bucket), "/bucket", recursive=True)
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_folder(bucket: Path, tmp_path: Path) -> None:
    store = open_store((f"file://{bucket}",), tmp_path / "store", 0)
    assert same(store.get(MODEL, ignore).directory, bucket / MODEL)
    assert same(store.get(f"{MODEL}@v2", ignore).directory, bucket / f"{MODEL}@v2")
    with pytest.raises(ModelNotFound):
        store.get("org/other", ignore)


@pytest.mark.parametrize("folder", ["locks", "incoming"])
def test_disk_that_takes_nothing_says_nothing_of_the_model(
    bucket: Path, tmp_path: Path, folder: str
) -> None:
    store = open_store((f"file://{bucket}",), tmp_path / "store", 0)
    in_the_way = tmp_path / "store" / folder / MODEL.partition("/")[0]
    in_the_way.write_text("")
    with pytest.raises(NoCapacity, match="cannot be written"):
        store.get(MODEL, ignore)
    in_the_way.unlink()
    assert same(store.get(MODEL, ignore).directory, bucket / MODEL)


def test_adapter_is_fetched_as_models_are_and_a_model_is_none(bucket: Path, tmp_path: Path) -> None:
    adapter = bucket / "org/adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"a": np.zeros(4, np.float32)}, adapter / "adapter_model.safetensors")
    store = open_store((f"file://{bucket}",), tmp_path / "store", 0)
    found = store.get("org/adapter", ignore, is_adapter=True).directory
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (found / name).read_bytes() == (adapter / name).read_bytes()
    with pytest.raises(ModelNotFound, match="is not an adapter") as raised:
        store.get(MODEL, ignore, is_adapter=True)
    assert raised.value.field == "adapter"


def test_object_store(memory: MemoryFileSystem, bucket: Path, tmp_path: Path) -> None:
    store = ModelStore(
        [ObjectStore("memory://bucket", memory, "/bucket")],
        Cache(tmp_path / "store"),
        1 << 40,
        TRANSFER,
    )
    assert same(store.get(MODEL, ignore).directory, bucket / MODEL)
    with pytest.raises(ModelNotFound):
        store.get("org/other", ignore)


def test_first_store_that_has_it_counts(
    memory: MemoryFileSystem, bucket: Path, tmp_path: Path
) -> None:
    empty = ObjectStore("memory://empty", memory, "/empty")
    full = ObjectStore("memory://bucket", memory, "/bucket")
    store = ModelStore([empty, full], Cache(tmp_path / "store"), 1 << 40, TRANSFER)
    assert same(store.get(MODEL, ignore).directory, bucket / MODEL)
    store = ModelStore([empty], Cache(tmp_path / "other"), 1 << 40, TRANSFER)
    with pytest.raises(ModelNotFound, match="memory://empty"):
        store.get(MODEL, ignore)


def test_truncated_file_is_named(bucket: Path, tmp_path: Path) -> None:
    weights = bucket / MODEL / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    store = open_store((f"file://{bucket}",), tmp_path / "store", 0)
    with pytest.raises(
        ModelBroken,
        match=r"model\.safetensors: not a safetensors file: "
        r".*truncated: tensor 'w' ends at byte \d+",
    ):
        store.get(MODEL, ignore)


class FakeTrouble(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """A store out of reach, or closed to us."""

    cachable = False
    error: Exception = OSError("no route")

    def find(self, path: str, **options: object) -> dict[str, object]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError("no route"), ModelUnreachable, "cannot be reached"),
        (TimeoutError(), ModelUnreachable, "cannot be reached"),
        (ZeroDivisionError(), ModelUnreachable, "ZeroDivisionError"),
        (PermissionError("403"), ModelBroken, "credentials"),
    ],
)
def test_errors_are_distinguished(
    tmp_path: Path, error: Exception, kind: type[Exception], said: str
) -> None:
    files = FakeTrouble()
    files.error = error
    source = ObjectStore("memory://bucket", files, "/bucket", trouble=(ZeroDivisionError,))
    with pytest.raises(kind, match=said):
        ModelStore([source], Cache(tmp_path), 1 << 40, TRANSFER).get(MODEL, ignore)


def test_files_named_out_of_the_model_are_left_alone(
    memory: MemoryFileSystem, tmp_path: Path
) -> None:
    memory.pipe_file(f"/bucket/{MODEL}/../escaped.json", b"{}")
    memory.pipe_file(f"/bucket/{MODEL}/.hidden.json", b"{}")
    store = ModelStore(
        [ObjectStore("memory://bucket", memory, "/bucket")],
        Cache(tmp_path / "store"),
        1 << 40,
        TRANSFER,
    )
    directory = store.get(MODEL, ignore).directory
    assert not list(tmp_path.rglob("escaped.json"))
    assert not (directory / ".hidden.json").exists()


class TestS3:
    """Against moto's server, through s3fs."""

    @pytest.fixture
    def s3(
        self, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[fsspec.AbstractFileSystem]:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem(use_listings_cache=False)
        files.mkdir("models")
        files.put(str(bucket), "models/team", recursive=True)
        yield files
        # moto keeps its buckets outside its servers.
        urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        ).close()
        server.stop()

    def test_bucket(self, s3: fsspec.AbstractFileSystem, bucket: Path, tmp_path: Path) -> None:
        store = open_store(("s3://models/team",), tmp_path / "store", 0)
        assert same(store.get(MODEL, ignore).directory, bucket / MODEL)
        with pytest.raises(ModelNotFound):
            store.get("org/other", ignore)

    def test_its_digest_is_checked(self, s3: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
        remote = ObjectStore("s3://models/team", s3, "models/team").find(MODEL)
        digests = {file.path: file.digest for file in remote.files}
        assert digests["model.safetensors"].startswith("md5:")

    def test_etag_of_an_encrypted_object_is_not_a_digest(
        self, s3: fsspec.AbstractFileSystem, bucket: Path, tmp_path: Path
    ) -> None:
        content = (bucket / MODEL / "model.safetensors").read_bytes()
        s3.call_s3(
            "put_object",
            Bucket="models",
            Key=f"team/{MODEL}/model.safetensors",
            Body=content,
            ServerSideEncryption="aws:kms",
        )
        remote = ObjectStore("s3://models/team", s3, "models/team").find(MODEL)
        assert {file.path: file.digest for file in remote.files}["model.safetensors"] == ""

    def test_missing_bucket(self, s3: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
        store = open_store(("s3://nowhere/team",), tmp_path / "store", 0)
        with pytest.raises(ModelNotFound):
            store.get(MODEL, ignore)
