"""Ids of vectors through whole meshes: stability, changes, and refused requests."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shoal
from safetensors.numpy import load_file, save_file
from shoal import errors

from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster

BASE, SAME = "org/base", "org/same"
ADAPTERS = ("adapters/0", "adapters/1")
TEXTS = ["a boat", "many small boats in one harbour"]
SIZE = 64
OTHER = "0123456789abcdef"


def write_shelf(shelf: Path) -> Path:
    write_checkpoint("bert", shelf / BASE, sentence=SentenceFiles(prompts={"query": "find: "}))
    return shelf


def perturb_weights(directory: Path) -> None:
    """Change one number of the weights, and no header."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[name][5, 0] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shelf with a model, a copy of it next to other files, and two adapters."""
    shelf = write_shelf(tmp_path_factory.mktemp("shelf"))
    shutil.copytree(shelf / BASE, shelf / SAME)
    (shelf / SAME / "README.md").write_text("the same model")
    (shelf / SAME / "training.log.bin").write_bytes(b"no weights")
    for seed, name in enumerate(ADAPTERS):
        write_random_adapter("bert", shelf / name, seed=seed, r=4, target_modules=["query"])
    return shelf


@pytest.fixture(scope="module")
def cluster(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("mesh")
    with Cluster(directory, models=str(shelf), workers=2, edges=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(cluster.address) as connected:
        yield connected


def read_embedding_id(client: shoal.Client, model: str = BASE, **options: Any) -> str:
    return client.encode(model, TEXTS, timeout=120, **options).embedding_id


@pytest.fixture(scope="module")
def plain(client: shoal.Client) -> str:
    return read_embedding_id(client)


def test_id_names_the_number_format(plain: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}\.float32", plain)


def test_every_worker_gives_the_same_id_also_after_a_restart(
    cluster: Cluster, client: shoal.Client, plain: str
) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: read_embedding_id(client), range(32))) == {plain}
    for name in cluster.workers:
        cluster.kill(name)
        cluster.start(name)
        assert read_embedding_id(client) == plain


def test_directory_with_the_same_files_gives_the_same_id(client: shoal.Client, plain: str) -> None:
    assert read_embedding_id(client, SAME) == plain


def test_options_that_change_no_number_keep_the_id(client: shoal.Client, plain: str) -> None:
    assert read_embedding_id(client, role="document") == plain
    assert read_embedding_id(client, dimensions=SIZE) == plain
    assert read_embedding_id(client, normalize=True) == plain
    assert read_embedding_id(client, truncation="none") == plain
    assert read_embedding_id(client, data_type="float16") == plain
    assert read_embedding_id(client, chunking=shoal.Chunking()) == plain
    assert read_embedding_id(client, role="query") == read_embedding_id(
        client, instruction="find: "
    )


def test_options_that_change_numbers_change_the_id(client: shoal.Client, plain: str) -> None:
    options: list[dict[str, Any]] = [
        {"role": "query"},
        {"instruction": "Text: "},
        {"dimensions": 32},
        {"normalize": False},
        {"truncation": "start"},
        {"chunking": shoal.Chunking(late=True)},
        *({"adapter": name} for name in ADAPTERS),
    ]
    ids = [read_embedding_id(client, **each) for each in options]
    assert len({plain, *ids}) == len(options) + 1
    assert [read_embedding_id(client, **each) for each in options] == ids


def test_required_id_is_given_in_streams_and_long_lists_too(
    client: shoal.Client, plain: str
) -> None:
    short = client.encode(BASE, TEXTS, expect_embedding_id=plain)
    digits = client.encode(BASE, TEXTS, expect_embedding_id=plain.partition(".")[0])
    long = client.encode(BASE, TEXTS * 10_000, expect_embedding_id=plain, timeout=300)
    np.testing.assert_allclose(short.dense, digits.dense, atol=1e-6)  # of separate batches
    assert {short.embedding_id, digits.embedding_id, long.embedding_id} == {plain}
    assert len(long.dense) == 20_000


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"role": "query"}, "the expected id is that of role 'query'"),
        ({"dimensions": 32}, "the expected id is that of 32 dimensions"),
        ({"normalize": False}, "the expected id is that of vectors that are not normalized"),
        # The worker that answers may not have loaded the adapter.
        ({"adapter": ADAPTERS[0]}, f"that of the adapter '{ADAPTERS[0]}'|the files of org/base"),
    ],
)
def test_mismatch_names_both_ids_and_the_difference(
    client: shoal.Client, plain: str, options: dict[str, Any], difference: str
) -> None:
    expected = read_embedding_id(client, **options)
    with pytest.raises(errors.EmbeddingIdMismatch) as raised:
        client.encode(BASE, TEXTS, expect_embedding_id=expected)
    assert raised.value.code == "FAILED_PRECONDITION"
    assert raised.value.field == "expect_embedding_id"
    assert f"expect_embedding_id is {expected}" in raised.value.message
    assert f"have the id {plain}" in raised.value.message
    assert re.search(difference, raised.value.message)


def test_mismatch_in_a_long_list_returns_nothing(client: shoal.Client) -> None:
    with pytest.raises(errors.EmbeddingIdMismatch, match="several options changed"):
        client.encode(BASE, TEXTS * 10_000, expect_embedding_id=OTHER, timeout=300)


def test_other_number_format_is_named(client: shoal.Client, plain: str) -> None:
    digits = plain.partition(".")[0]
    with pytest.raises(errors.EmbeddingIdMismatch, match=f"{digits} alone accepts every format"):
        client.encode(BASE, TEXTS, expect_embedding_id=f"{digits}.bfloat16-1")


def test_invalid_expectation_is_refused(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput, match="16 digits before its point") as raised:
        client.encode(BASE, TEXTS, expect_embedding_id="latest")
    assert raised.value.field == "expect_embedding_id"


def post(
    cluster: Cluster, path: str, body: object, **headers: str
) -> tuple[int, dict[str, str], Any]:
    request = urllib.request.Request(
        f"http://{cluster.http_addresses[0]}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"}
        | {name.replace("_", "-"): value for name, value in headers.items()},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, dict(reply.headers), json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": BASE, "input": TEXTS}),
        ("/v2/embed", {"model": BASE, "texts": TEXTS}),
        ("/api/embed", {"model": BASE, "input": TEXTS}),
        (f"/models/{BASE}", {"inputs": TEXTS}),
        (f"/v1/encode/{BASE}", {"items": [{"text": text} for text in TEXTS]}),
    ],
)
def test_edge_passes_ids_on(cluster: Cluster, plain: str, path: str, body: object) -> None:
    status, headers, answer = post(cluster, path, body, x_shoal_expect_embedding_id=plain)
    assert (status, headers["x-shoal-embedding-id"]) == (200, plain)
    if path.startswith("/v1/encode"):
        assert answer["embedding_id"] == plain
    status, headers, answer = post(cluster, path, body, x_shoal_expect_embedding_id=OTHER)
    assert status == 412
    assert OTHER in json.dumps(answer)
    assert plain in json.dumps(answer)
    status, _, answer = post(cluster, path, body, x_shoal_expect_embedding_id="latest")
    assert status in (400, 422)
    assert "16 digits before its point" in json.dumps(answer)


def test_changed_weights_change_the_id_and_are_refused(tmp_path: Path) -> None:
    shelf = write_shelf(tmp_path / "shelf")
    directory = tmp_path / "mesh"
    directory.mkdir()
    with Cluster(directory, models=str(shelf)) as cluster, shoal.Client(cluster.address) as client:
        before = client.encode(BASE, TEXTS, timeout=60)
        perturb_weights(shelf / BASE)
        assert read_embedding_id(client) == before.embedding_id  # the loaded model is the old one
        cluster.kill("worker-0")
        cluster.start("worker-0")
        after = client.encode(BASE, TEXTS, timeout=120)
        assert after.revision == before.revision
        assert after.embedding_id != before.embedding_id
        with pytest.raises(errors.EmbeddingIdMismatch, match=before.embedding_id):
            client.encode(BASE, TEXTS, expect_embedding_id=before.embedding_id)


CARDS_THAT_CHANGE_NUMBERS = (
    "detect: {pooling: cls}",
    "detect: {normalize: false}",
    "max_tokens: 32",
    'prompts: {default: "Text: "}\ndefault_prompt: default',
)
CARD_THAT_DESCRIBES = "pinned: true\nmemory_bytes: 10000000"


def test_only_cards_that_change_numbers_change_the_id(
    shelf: Path, plain: str, tmp_path: Path
) -> None:
    """One mesh serves the same files under a name for each card."""
    catalog, cards = tmp_path / "catalog", (*CARDS_THAT_CHANGE_NUMBERS, CARD_THAT_DESCRIBES)
    catalog.mkdir()
    names = [f"org/card-{number}" for number in range(len(cards))]
    for number, (name, card) in enumerate(zip(names, cards, strict=True)):
        (catalog / f"{number}.yaml").write_text(f"model: {name}\n{card}\n")
    with (
        Cluster(
            tmp_path,
            models=":".join(f"{name}={shelf / BASE}" for name in names),
            environment={"SHOAL_CATALOG": str(catalog)},
        ) as cluster,
        shoal.Client(cluster.address) as client,
    ):
        *changed, described = (read_embedding_id(client, name) for name in names)
    assert len({plain, *changed}) == len(changed) + 1
    assert described == plain


Outcome = str | errors.ShoalError


def encode_on_both_workers(
    client: shoal.Client, is_of_both: Callable[[Outcome], bool]
) -> list[Outcome]:
    """Return the ids or errors of large requests, which are split among all workers that have the
    model. At least one outcome is of both workers.
    """

    def outcome() -> Outcome:
        texts = ["many small boats in one harbour " * 8] * 2_000
        try:
            return client.encode(BASE, texts, timeout=300).embedding_id
        except errors.ShoalError as error:
            return error

    found, end = [outcome()], time.monotonic() + 300
    while not any(map(is_of_both, found)):
        assert time.monotonic() < end, f"no request was split among both workers: {found}"
        found.append(outcome())
    return [*found, *(outcome() for _ in range(7))]


def test_vectors_of_different_files_are_not_mixed(tmp_path: Path) -> None:
    shelves = [write_shelf(tmp_path / "old"), write_shelf(tmp_path / "new")]
    perturb_weights(shelves[1] / BASE)
    each = {f"worker-{index}": {"SHOAL_MODELS": str(one)} for index, one in enumerate(shelves)}
    directory = tmp_path / "mesh"
    directory.mkdir()
    with (
        Cluster(directory, models=str(shelves[0]), workers=2, each=each) as cluster,
        shoal.Client(cluster.address) as client,
    ):
        found = encode_on_both_workers(client, lambda one: isinstance(one, errors.ShoalError))
    refused = [one for one in found if isinstance(one, errors.ShoalError)]
    assert all(isinstance(one, errors.EmbeddingIdMismatch | errors.ModelChanged) for one in refused)
    for one in found:
        assert isinstance(one, errors.ShoalError) or re.fullmatch(r"[0-9a-f]{16}\.float32", one)


def test_vectors_of_several_number_formats_have_the_digits_alone(
    shelf: Path, plain: str, tmp_path: Path
) -> None:
    directory = tmp_path / "mesh"
    directory.mkdir()
    each = {"worker-1": {"SHOAL_DTYPE": "bfloat16"}}
    with (
        Cluster(directory, models=str(shelf), workers=2, each=each) as cluster,
        shoal.Client(cluster.address) as client,
    ):
        digits = plain.partition(".")[0]
        found = encode_on_both_workers(client, lambda one: one == digits)
    assert set(found) <= {digits, plain, f"{digits}.bfloat16-1"}
