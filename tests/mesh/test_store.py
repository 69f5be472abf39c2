"""A model that only a store has, requested through the whole mesh."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import shoal
from sentence_transformers import SentenceTransformer
from shoal import errors
from shoal.cli import main
from typer.testing import CliRunner

from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.store.fake_hub import FakeHub, serving
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

FAR, PICKLE, NEAR = "far/model", "far/pickle", "random/bert-embed"
TEXTS = ["A model that no folder has", "is downloaded from the hub."]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        "bert", tmp_path_factory.mktemp("original") / "model", sentence=SentenceFiles(), seed=3
    )


@pytest.fixture(scope="module")
def hub(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """Run a hub that blocks weights until its gate is opened."""
    pickle = tmp_path_factory.mktemp("pickle")
    (pickle / "config.json").write_text("{}")
    (pickle / "pytorch_model.bin").write_bytes(b"pickle")
    with serving(FakeHub(models={FAR: original, PICKLE: pickle}, free_bytes=0)) as running:
        yield running


@pytest.fixture(scope="module")
def far(
    hub: FakeHub, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Run one worker with a folder and the hub."""
    directory = tmp_path_factory.mktemp("far")
    environment = {
        "SHOAL_STORES": "hf",
        "SHOAL_STORE_DIR": str(directory / "store"),
        "SHOAL_TORCH_CHECKPOINTS": "refuse",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    with Cluster(directory, models=str(checkpoints), environment=environment) as cluster:
        yield cluster


def test_model_of_the_hub_is_fetched_shown_and_served(
    far: Cluster, hub: FakeHub, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shoal.Client(far.address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.encode, FAR, TEXTS, timeout=300)
        assert hub.waiting.acquire(timeout=60)
        wait_until(
            lambda: FAR in [model.model for model in client.models.list() if model.downloaded],
            60,
            "progress to be seen",
        )
        seen = client.models.get(FAR)
        assert (seen.state, seen.places[0].state) == ("downloading", "downloading")
        assert seen.downloaded is not None
        assert 0 < seen.downloaded < 1
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("shoal.cli.options.REACH_SECONDS", 60.0)

        def is_shown() -> bool:
            downloaded = client.models.get(FAR).downloaded  # small files may still arrive
            shown = CliRunner().invoke(main.build(), ["models", "--address", far.address]).stdout
            return downloaded is not None and f"downloading {downloaded * 100:.0f} %" in shown

        wait_until(is_shown, 60, "the progress to be shown")
        # Other models are loaded and served during the download.
        assert client.encode(NEAR, TEXTS).dense is not None
        assert not answer.done()
        hub.gate.set()
        found = answer.result(300).dense
        wait_until(lambda: client.models.get(FAR).state == "resident", 60, "the worker's report")
    expected = SentenceTransformer(str(original), device="cpu").encode(TEXTS)
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert hub.calls.count(f"/api/models/{FAR}") == 1
    # The hub only receives requested names, and no log has a URL that opens a file.
    assert [
        call
        for call in hub.calls
        if not call.startswith(("/api/models/far/", "/far/", "/cdn/far/"))
    ] == []
    assert "/cdn/" not in (far.directory / "worker-0.log").read_text()


def test_worker_that_refuses_torch_checkpoints_fetches_none(far: Cluster, hub: FakeHub) -> None:
    advice = r"pytorch_model\.bin: .*shoal models convert"
    with shoal.Client(far.address) as client, pytest.raises(errors.ModelBroken, match=advice):
        client.encode(PICKLE, TEXTS, timeout=120)
    assert "pytorch_model.bin" not in hub.sent


def test_unknown_model_is_not_found(far: Cluster) -> None:
    with (
        shoal.Client(far.address) as client,
        pytest.raises(errors.ModelNotFound, match="has no model far/nothing"),
    ):
        client.encode("far/nothing", TEXTS, timeout=120)


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ("jinaai/jina-embeddings-v4", "use jinaai/jina-embeddings-v5-text-small"),
        ("jinaai/jina-embeddings-v5-omni-small", "use jinaai/jina-embeddings-v5-text-small"),
        ("jinaai/jina-reranker-v3", "Use jinaai/jina-reranker-m0"),
    ],
)
def test_published_model_that_is_not_served_is_refused_with_an_alternative(
    far: Cluster, hub: FakeHub, model: str, other: str
) -> None:
    calls = len(hub.calls)
    with (
        shoal.Client(far.address) as client,
        pytest.raises(errors.ModelBroken, match=f"{model} is not served: .*{other}"),
    ):
        client.encode(model, TEXTS, timeout=120)
    assert len(hub.calls) == calls


def test_path_is_not_a_model_id(far: Cluster, hub: FakeHub) -> None:
    calls = len(hub.calls)
    with (
        shoal.Client(far.address) as client,
        pytest.raises((errors.InvalidInput, errors.ModelNotFound)),
    ):
        client.encode("../far/model", TEXTS, timeout=120)
    assert len(hub.calls) == calls


def test_unreachable_model_is_refused_with_the_reason_after_each_worker_tried(
    checkpoints: Path, tmp_path: Path
) -> None:
    """The error says that the hub is unreachable, not that a deadline passed."""
    environment = {
        "SHOAL_STORES": "hf",
        "SHOAL_STORE_DIR": str(tmp_path / "store"),
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    with (
        Cluster(tmp_path, models=str(checkpoints), workers=2, environment=environment) as cluster,
        shoal.Client(cluster.address) as client,
    ):
        client.encode(NEAR, TEXTS)
        for model, adapter in (("far/nowhere", ""), (NEAR, "far/adapter")):
            with pytest.raises(errors.ModelUnreachable, match="cannot be reached") as caught:
                client.encode(model, TEXTS, adapter=adapter, timeout=120)
            for searched in (
                str(checkpoints),
                str(tmp_path / "store"),
                "http://127.0.0.1:1",
                "SHOAL_STORES",
                "--model",
            ):
                assert searched in caught.value.message
            assert caught.value.retry_after is None
            assert caught.value.field == ("adapter" if adapter else "model")
