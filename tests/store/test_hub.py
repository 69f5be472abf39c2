"""Downloads from the hub to a directory: the fetched files, retries, and errors."""

from __future__ import annotations

import json
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants, snapshot_download

from libs.catalog.checkpoint import adapter
from libs.errors import ModelBroken, ModelNotFound, ModelUnreachable, NoCapacity
from libs.kinds.images.card import OPEN_CLIP, OPEN_CLIP_WEIGHTS
from libs.store import Copy, DownloadProgress
from libs.store.cache import RECORD
from libs.store.hub import Hub
from libs.store.objects import ObjectStore
from libs.store.select import CONFIGS
from tests.store.checkpoints import MODEL, WANTED, WEIGHT_BYTES, same, write_model
from tests.store.conftest import TRANSFER, MakeStore
from tests.store.fake_hub import COMMIT, FakeHub


def ignore(progress: DownloadProgress) -> None:
    return


def published(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root / "models")) for path in (root / "models").glob("*/*"))


def test_model_is_fetched_whole_and_once(
    hub: FakeHub, model: Path, root: Path, make_store: MakeStore
) -> None:
    seen: list[DownloadProgress] = []
    store = make_store()
    copy = store.get(MODEL, seen.append)
    assert copy.directory == root / "models" / MODEL
    assert same(copy.directory, model)
    sizes = {name: (model / name).stat().st_size for name in WANTED}
    # The list of modules is read once more, before it is clear what to fetch.
    assert dict(hub.sent) == {
        name: size * (2 if name == "modules.json" else 1) for name, size in sizes.items() if size
    }
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert seen[0] == DownloadProgress(0, sum(sizes.values()))
    assert seen[-1] == DownloadProgress(sum(sizes.values()), sum(sizes.values()))
    record = json.loads((copy.directory / RECORD).read_text())
    assert (record["origin"], record["revision"]) == (hub.endpoint, COMMIT)
    calls = len(hub.calls)
    assert store.get(MODEL, ignore).directory == copy.directory
    assert make_store().get(MODEL, ignore).directory == copy.directory
    assert len(hub.calls) == calls


def test_large_files_are_fetched_in_concurrent_ranges(hub: FakeHub, make_store: MakeStore) -> None:
    hub.free_bytes = 1
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(make_store().get, MODEL, ignore)
        for _ in range(TRANSFER.threads):
            assert hub.waiting.acquire(timeout=120), (
                "as many ranges as threads wait for the hub together"
            )
        hub.gate.set()
        fetch.result(120)


def test_revision_is_a_separate_model(hub: FakeHub, root: Path, make_store: MakeStore) -> None:
    store = make_store()
    store.get(f"{MODEL}@{COMMIT}", ignore)
    store.get(f"{MODEL}@main", ignore)
    assert published(root) == [f"{MODEL}@{COMMIT}", f"{MODEL}@main"]
    with pytest.raises(ModelNotFound, match="no such revision"):
        store.get(f"{MODEL}@v9", ignore)


def test_cut_connection_costs_one_range(hub: FakeHub, model: Path, make_store: MakeStore) -> None:
    hub.cut["model.safetensors"] = deque([1000, 0, 50])
    copy = make_store().get(MODEL, ignore)
    assert same(copy.directory, model)
    assert hub.sent["model.safetensors"] == (model / "model.safetensors").stat().st_size + 1050


def test_received_bytes_are_not_fetched_again_after_a_failure(
    hub: FakeHub, model: Path, root: Path, make_store: MakeStore
) -> None:
    size = (model / "model.safetensors").stat().st_size
    hub.cut["model.safetensors"] = deque([64 * 1024] * 5 + [0] * 100)
    with pytest.raises(NoCapacity, match="cannot be reached"):
        make_store().get(MODEL, ignore)
    assert published(root) == []
    hub.cut.clear()
    before = hub.sent["model.safetensors"]
    assert before >= 5 * 64 * 1024
    seen: list[DownloadProgress] = []
    assert same(make_store().get(MODEL, seen.append).directory, model)
    assert hub.sent["model.safetensors"] == size
    assert seen[0].done >= before


def test_new_commit_restarts_the_fetch(
    hub: FakeHub, model: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    hub.cut["model.safetensors"] = deque([64 * 1024] * 5 + [0] * 100)
    with pytest.raises(NoCapacity):
        make_store().get(MODEL, ignore)
    hub.cut.clear()
    hub.models[MODEL] = write_model(tmp_path / "changed", seed=1)
    assert same(make_store().get(MODEL, ignore).directory, tmp_path / "changed")


def test_flipped_bit_is_found_and_fetched_again(
    hub: FakeHub, model: Path, make_store: MakeStore
) -> None:
    hub.flip.update(["model.safetensors", "tokenizer.json"])
    assert same(make_store().get(MODEL, ignore).directory, model)


@pytest.mark.parametrize(
    ("name", "digest"), [("model.safetensors", "sha256"), ("tokenizer.json", "git")]
)
def test_file_that_never_fits_its_digest_is_refused(
    hub: FakeHub, root: Path, make_store: MakeStore, name: str, digest: str
) -> None:
    hub.flip[name] = 1000
    with pytest.raises(
        ModelBroken,
        match=rf"{name}: its {digest} digest is \w+, not \w+\. Two downloads gave the same bytes",
    ):
        make_store().get(MODEL, ignore)
    assert published(root) == []


def test_where_torch_checkpoints_are_refused_no_byte_of_one_moves(
    hub: FakeHub, model: Path, make_store: MakeStore
) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(
        ModelBroken,
        match=r"pytorch_model\.bin: .*SHOAL_TORCH_CHECKPOINTS=refuse.*shoal models convert",
    ):
        make_store(torch_checkpoints="refuse").get(MODEL, ignore)
    assert set(hub.sent) == {"modules.json"}


def test_where_torch_checkpoints_are_refused_a_module_s_is_too(
    hub: FakeHub, model: Path, make_store: MakeStore
) -> None:
    (model / "2_Dense" / "model.safetensors").rename(model / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelBroken, match=r"2_Dense/pytorch_model\.bin"):
        make_store(torch_checkpoints="refuse").get(MODEL, ignore)
    assert set(hub.sent) == {"modules.json"}


@pytest.mark.parametrize(
    ("file", "rest"), [("config.json", "modules.json"), ("model.safetensors", "pytorch_model.bin")]
)
def test_repository_without_a_model_is_named(
    hub: FakeHub, model: Path, make_store: MakeStore, file: str, rest: str
) -> None:
    for name in (file, rest, "2_Dense/model.safetensors", "onnx/model.onnx"):
        (model / name).unlink()
    with pytest.raises(ModelBroken, match=f"{file}: missing from {MODEL}"):
        make_store().get(MODEL, ignore)


def test_unknown_model_is_not_found(hub: FakeHub, root: Path, make_store: MakeStore) -> None:
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        make_store().get("org/nothing", ignore)
    assert published(root) == []


@pytest.mark.parametrize(
    "name", ["../x/y", "org/model/../..", "http://evil/x", "org", "org/a\n", "//x"]
)
def test_invalid_model_id_is_not_requested(hub: FakeHub, make_store: MakeStore, name: str) -> None:
    with pytest.raises(ModelNotFound, match="not a model id"):
        make_store().get(name, ignore)
    assert hub.calls == []


def test_missing_permission_names_the_remedy(
    hub: FakeHub, model: Path, make_store: MakeStore
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelBroken, match=r"401.*HF_TOKEN") as caught:
        make_store(token="hf_wrong").get(MODEL, ignore)
    assert "hf_wrong" not in str(caught.value)
    assert same(make_store(token="hf_secret").get(MODEL, ignore).directory, model)
    assert hub.tokens == {""}, "the host that the hub redirects to must not see the token"


def test_gated_model_names_the_remedy(hub: FakeHub, make_store: MakeStore) -> None:
    hub.is_gated = True
    with pytest.raises(
        ModelBroken, match=rf"gated: accept its terms at {hub.endpoint}/{MODEL} and .*HF_TOKEN"
    ):
        make_store().get(MODEL, ignore)
    assert not hub.sent


def test_busy_hub_is_asked_again(hub: FakeHub, model: Path, make_store: MakeStore) -> None:
    hub.statuses.extend([500, 503, 429])
    assert same(make_store().get(MODEL, ignore).directory, model)


def test_hub_that_stays_busy_lets_others_try(hub: FakeHub, make_store: MakeStore) -> None:
    hub.statuses.extend([503] * 4)
    with pytest.raises(NoCapacity, match="503") as caught:
        make_store().get(MODEL, ignore)
    assert (caught.value.retry_after or 0.0) > 0


def test_error_names_each_stores_answer_if_one_cannot_be_reached(
    tmp_path: Path, make_store: MakeStore
) -> None:
    """It is unknown whether the model exists, so it is neither missing nor a lack of capacity,
    which clients would wait for.
    """
    folder = ObjectStore("file:///models", fsspec.filesystem("file"), str(tmp_path / "models"))
    with pytest.raises(ModelUnreachable) as caught:
        make_store(folder, Hub(endpoint="http://127.0.0.1:1", cache=tmp_path / "hf")).get(
            MODEL, ignore
        )
    assert caught.value.retry_after is None
    for answered in (
        f"file:///models has no model {MODEL}",
        "http://127.0.0.1:1 cannot be reached",
    ):
        assert answered in caught.value.message


def test_threads_that_ask_together_share_one_download(hub: FakeHub, make_store: MakeStore) -> None:
    store = make_store()
    start = threading.Barrier(4)

    def ask() -> Copy:
        start.wait()
        return store.get(MODEL, ignore)

    with ThreadPoolExecutor(4) as pool:
        copies = [future.result(120) for future in [pool.submit(ask) for _ in range(4)]]
    assert len({copy.directory for copy in copies}) == 1
    assert WEIGHT_BYTES < hub.sent["model.safetensors"] < WEIGHT_BYTES + 1000


class TestCache:
    """The Hugging Face cache of this machine, filled by huggingface_hub itself."""

    @pytest.fixture
    def cached(self, hub: FakeHub, tmp_path: Path) -> Path:
        """A snapshot as huggingface_hub lays it out."""
        repository = tmp_path / "hf" / f"models--{MODEL.replace('/', '--')}"
        snapshot = write_model(repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        assert snapshot_download(MODEL, cache_dir=tmp_path / "hf", local_files_only=True) == str(
            snapshot
        )
        return snapshot

    def test_complete_model_is_not_fetched(
        self, hub: FakeHub, cached: Path, make_store: MakeStore
    ) -> None:
        assert make_store().get(MODEL, ignore).directory == cached
        assert set(hub.sent) == {"modules.json"}

    def test_incomplete_model_is_fetched(
        self, hub: FakeHub, cached: Path, root: Path, make_store: MakeStore
    ) -> None:
        (cached / "1_Pooling" / "config.json").unlink()
        assert make_store().get(MODEL, ignore).directory == root / "models" / MODEL

    def test_it_replaces_an_unreachable_hub(
        self, hub: FakeHub, cached: Path, make_store: MakeStore
    ) -> None:
        hub.statuses.append(503)
        assert make_store().get(MODEL, ignore).directory == cached

    def test_offline_it_is_all_there_is(
        self, hub: FakeHub, cached: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert make_store().get(MODEL, ignore).directory == cached
        assert make_store().get(f"{MODEL}@{COMMIT}", ignore).directory == cached
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
            make_store().get("org/other", ignore)
        assert hub.calls == []

    @pytest.mark.parametrize(
        ("config", "weights"),
        [(name, "model.safetensors") for name in CONFIGS if name not in ("modules.json", OPEN_CLIP)]
        + [(OPEN_CLIP, OPEN_CLIP_WEIGHTS), (adapter.FILE, adapter.WEIGHTS)],
    )  # fmt: skip
    def test_each_layout_in_it_is_seen(
        self, hub: FakeHub, cached: Path, make_store: MakeStore, config: str, weights: str
    ) -> None:
        for name in ("config.json", "modules.json", "pytorch_model.bin"):
            (cached / name).unlink()
        hub.statuses.extend([503] * 20)
        with pytest.raises(NoCapacity):  # it has no configuration of a model
            make_store().get(MODEL, ignore)
        (cached / config).write_text("{}")
        (cached / "model.safetensors").rename(cached / weights)
        assert make_store().get(MODEL, ignore).directory == cached
        (cached / weights).unlink()
        with pytest.raises(NoCapacity):
            make_store().get(MODEL, ignore)

    def test_offline_an_invalid_torch_file_is_refused(
        self, hub: FakeHub, cached: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        (cached / "model.safetensors").unlink()
        (cached / "modules.json").unlink()
        with pytest.raises(ModelBroken, match=r"pytorch_model\.bin: is neither a zip archive"):
            make_store().get(MODEL, ignore)
