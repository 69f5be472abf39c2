"""Shoal in a dozen tests, to be read from top to bottom. Each shows one thing that users rely on,
and none depends on an earlier one.

The mesh is small but whole: Redis, a router, a scheduler, an HTTP edge and two workers, each in its
own process. MiniLM has its published weights; the other models are random and tiny.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import shoal
from numpy.typing import NDArray
from shoal import errors

from services.local.settings import MINILM, packaged_minilm
from services.scheduler.externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

CAT, KITTEN, INVOICE = "a cat sleeps", "a kitten is asleep", "the invoice is due in March"
RANKER, TAGGER, NEW = "demo/ranker", "demo/tagger", "demo/new"
LARGE = ("demo/large-1", "demo/large-2", "demo/large-3")
MEMORY_BYTES = 512 << 20
"""Memory for models of each worker."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shelf, directory = tmp_path_factory.mktemp("shelf"), tmp_path_factory.mktemp("mesh")
    minilm = packaged_minilm()
    assert minilm is not None, "make test installs the package with its weights"
    write_checkpoint("bert", shelf / RANKER, head="sequence_classification")
    labels = ("O", "B-PERSON", "I-PERSON")
    write_checkpoint("bert", shelf / TAGGER, head="token_classification", labels=labels)
    write_checkpoint("bert", shelf / LARGE[0], sentence=SentenceFiles())
    # A card in the catalog may say that a model needs more memory than its files show.
    catalog = directory / "catalog"
    catalog.mkdir()
    for number, model in enumerate(LARGE):
        card = f"model: {model}\nmemory_bytes: {MEMORY_BYTES * 2 // 3}\n"
        (catalog / f"{number}.yaml").write_text(card)
    copies = [f"{model}={shelf / LARGE[0]}" for model in LARGE[1:]]
    with Cluster(
        directory,
        models=":".join([str(shelf), f"{MINILM}={minilm}", f"{NEW}={minilm}", *copies]),
        workers=2,
        schedulers=1,
        edges=1,
        environment={"SHOAL_MEMORY_BYTES": str(MEMORY_BYTES), "SHOAL_CATALOG": str(catalog)},
    ) as cluster:
        yield cluster


@pytest.fixture
def client(mesh: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(mesh.address, timeout=180) as connected:
        yield connected


def vectors(result: shoal.EncodeResult) -> NDArray[np.float32]:
    """Return the dense vectors [items, dimensions]."""
    assert result.dense is not None
    return np.asarray(result.dense, np.float32)


def test_model_is_a_name_in_a_request(client: shoal.Client) -> None:
    """No model is deployed. The first request that names one loads it on a worker."""
    assert client.models.get(NEW).state == "cold"
    assert vectors(client.encode(NEW, [CAT, INVOICE])).shape == (2, 384)
    wait_until(lambda: client.models.get(NEW).state == "resident", 60, "the worker's report")


def test_encode_gives_vectors_with_meaning(client: shoal.Client) -> None:
    cat, kitten, invoice = vectors(client.encode(MINILM, [CAT, KITTEN, INVOICE]))
    assert cat @ kitten > 0.5 > cat @ invoice


def test_vector_does_not_depend_on_the_batch(client: shoal.Client) -> None:
    """Batches are packed without padding, and texts do not influence each other."""
    alone = vectors(client.encode(MINILM, [CAT]))[0]
    others = texts(40, shortest=1, longest=60)
    among = vectors(client.encode(MINILM, [*others, CAT, *others]))[len(others)]
    np.testing.assert_allclose(among, alone, rtol=0, atol=2e-6)


def test_score_ranks_documents(client: shoal.Client) -> None:
    """A reranker reads the query with each document; an embedding model compares vectors."""
    ranked = client.score(MINILM, "a pet at rest", [INVOICE, CAT])
    assert list(ranked.ranking) == [1, 0]
    scores = client.score(RANKER, "a pet at rest", [INVOICE, CAT]).scores
    swapped = client.score(RANKER, "a pet at rest", [CAT, INVOICE]).scores
    np.testing.assert_allclose(swapped[::-1], scores, rtol=0, atol=1e-5)


def test_extract_finds_spans_of_the_text(client: shoal.Client) -> None:
    """Offsets are in Unicode characters of the text as it was sent."""
    text = "👩‍🚀 Zoë met Søren in Århus"
    (found,) = client.extract(TAGGER, [text], shoal.Entities(threshold=0.0))
    assert found.entities
    assert [text[one.start : one.end] for one in found.entities] == [
        one.text for one in found.entities
    ]


def test_error_names_the_item_and_the_others_may_be_answered(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        client.encode(MINILM, [CAT, "", KITTEN])
    assert refused.value.field == "items[1].text"
    result = client.encode(MINILM, [CAT, "", KITTEN], on_invalid="skip")
    assert [one.index for one in result.skipped] == [1]
    assert vectors(result)[0] @ vectors(result)[2] > 0.5


def test_unknown_model_is_refused_with_the_searched_folders(client: shoal.Client) -> None:
    with pytest.raises(errors.ModelNotFound, match="demo/unknown"):
        client.encode("demo/unknown", [CAT])


def test_long_text_becomes_chunks_with_vectors(client: shoal.Client) -> None:
    text = " ".join(f"Sentence number {number} of a long report." for number in range(60))
    result = client.encode(MINILM, [text], chunking=shoal.Chunking(max_tokens=64))
    (chunks,) = result.chunks
    assert len(chunks) > 5
    assert len(vectors(result)) == len(chunks)
    assert all(text[chunk.start : chunk.end].startswith("Sentence") for chunk in chunks)


def test_vectors_have_the_embedding_id_of_their_recipe(client: shoal.Client) -> None:
    """An index that keeps the id can never mix vectors of two models."""
    identity = client.encode(MINILM, [CAT]).embedding_id
    assert client.encode(MINILM, [KITTEN], expect_embedding_id=identity).embedding_id == identity
    with pytest.raises(errors.EmbeddingIdMismatch):
        client.encode(LARGE[0], [CAT], expect_embedding_id=identity)


def test_http_clients_reach_the_same_models(mesh: Cluster, client: shoal.Client) -> None:
    """The edge speaks the wires of OpenAI and others; here without any library."""
    body = json.dumps({"model": MINILM, "input": [CAT]}).encode()
    request = urllib.request.Request(
        f"http://{mesh.http_addresses[0]}/v1/embeddings", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=180) as response:
        (row,) = json.load(response)["data"]
    expected = vectors(client.encode(MINILM, [CAT]))[0]
    np.testing.assert_allclose(row["embedding"], expected, rtol=0, atol=1e-6)


def test_models_are_evicted_instead_of_crashing(client: shoal.Client) -> None:
    """Each worker has memory for one of these models, and two workers serve three of them."""
    expected = vectors(client.encode(LARGE[0], [CAT]))
    for model in (*LARGE, *LARGE):
        np.testing.assert_allclose(vectors(client.encode(model, [CAT])), expected, atol=1e-5)
    resident = [one.model for one in client.models.list() if one.state == "resident"]
    assert len({*LARGE} & {*resident}) <= 2


def test_queue_depth_scales_workers(mesh: Cluster, client: shoal.Client) -> None:
    """KEDA asks the scheduler how many workers a pool needs."""
    client.encode(MINILM, [CAT])
    pool = externalscaler_pb2.ScaledObjectRef(
        name="workers", namespace="shoal", scalerMetadata={"pool": "cpu"}
    )
    with grpc.insecure_channel(mesh.scheduler_addresses[0]) as channel:
        scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        assert scaler.IsActive(pool, timeout=60).result
        wanted = scaler.GetMetrics(
            externalscaler_pb2.GetMetricsRequest(
                scaledObjectRef=pool, metricName="desired-workers"
            ),
            timeout=60,
        )
    assert wanted.metricValues[0].metricValueFloat >= 1


def test_killed_worker_loses_no_request(mesh: Cluster, client: shoal.Client) -> None:
    """Its leases return to the queue, and another worker answers. Each request has one answer."""
    expected = vectors(client.encode(MINILM, [CAT]))
    asked = texts(64, shortest=5, longest=60, seed=7)
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(client.encode, MINILM, [text]) for text in asked]
        answers[0].result()
        mesh.kill("worker-0")
        rows = [vectors(answer.result())[0] for answer in answers]
    again = vectors(client.encode(MINILM, asked))
    np.testing.assert_allclose(np.stack(rows), again, rtol=0, atol=2e-6)
    np.testing.assert_allclose(vectors(client.encode(MINILM, [CAT])), expected, atol=2e-6)
