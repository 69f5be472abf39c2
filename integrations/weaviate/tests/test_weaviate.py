"""shoal-weaviate against the numbers of `shoal.Client`, and what Weaviate's client sends of them to
a server.

No package index has a Weaviate server: `FakeWeaviate` records requests and finds nothing.
"""

from __future__ import annotations

import json
import pickle
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
import pytest
import shoal
import weaviate
from shoal_weaviate import ShoalExtractor, ShoalReranker, ShoalVectorizer
from weaviate.collections.classes.internal import MetadataReturn, Object
from weaviate.proto.v1.v6300.v1 import base_pb2, batch_pb2, search_get_pb2, weaviate_pb2_grpc

FORMS = ("dense", "multi_vector")


class FakeWeaviate(weaviate_pb2_grpc.WeaviateServicer):
    """Remembers the objects and searches that it is sent."""

    def __init__(self) -> None:
        self.objects: list[batch_pb2.BatchObject] = []
        self.searches: list[search_get_pb2.SearchRequest] = []
        self.created: list[dict[str, Any]] = []

    def BatchObjects(self, request: Any, context: Any) -> Any:
        self.objects += request.objects
        return batch_pb2.BatchObjectsReply(took=0.0)

    def Search(self, request: Any, context: Any) -> Any:
        self.searches.append(request)
        return search_get_pb2.SearchReply(took=0.0)


def handler(fake: FakeWeaviate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond({"version": "1.36.0", "modules": {}} if self.path == "/v1/meta" else {})

        def do_POST(self) -> None:
            fake.created.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.respond(fake.created[-1])

        def respond(self, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def fake() -> FakeWeaviate:
    return FakeWeaviate()


@pytest.fixture
def ports(fake: FakeWeaviate) -> Iterator[tuple[int, int]]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(2))
    weaviate_pb2_grpc.add_WeaviateServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield http.server_port, port
    server.stop(None)
    http.shutdown()
    http.server_close()


def sent(objects: Any, name: str) -> list[np.ndarray]:
    """Decode the vectors with this name: float32; a multi-vector is [tokens, dimensions]."""
    found = []
    for one in objects:
        (vector,) = [vector for vector in one.vectors if vector.name == name]
        if vector.type == base_pb2.Vectors.VECTOR_TYPE_MULTI_FP32:
            width = int.from_bytes(vector.vector_bytes[:2], "little")
            found.append(np.frombuffer(vector.vector_bytes[2:], "<f4").reshape(-1, width))
        else:
            found.append(np.frombuffer(vector.vector_bytes, "<f4"))
    return found


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_dense_vectors(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    vectorizer = ShoalVectorizer(models[kind], names={"dense": "text"})
    documents = client.encode(models[kind], texts, role="document").dense.tolist()
    query = client.encode(models[kind], texts[0], role="query").dense[0].tolist()
    assert [one["text"] for one in vectorizer.vectors(texts)] == documents
    assert await vectorizer.avectors(texts) == vectorizer.vectors(texts)
    assert (
        vectorizer.near(texts[0])
        == await vectorizer.anear(texts[0])
        == {"near_vector": query, "target_vector": "text"}
    )
    assert (query != documents[0]) is (kind == "prompted")
    assert vectorizer.objects([]) == []


async def test_client_sends_named_vectors(
    fake: FakeWeaviate,
    ports: tuple[int, int],
    models: dict[str, str],
    client: shoal.Client,
    texts: list[str],
) -> None:
    vectorizer = ShoalVectorizer(models["hybrid"], forms=FORMS)
    rows = [{"text": text, "number": number} for number, text in enumerate(texts)]
    with weaviate.connect_to_local(
        "127.0.0.1", ports[0], ports[1], skip_init_checks=True
    ) as connected:
        collection = connected.collections.create("Texts", vector_config=vectorizer.vector_config())
        collection.data.insert_many(vectorizer.objects(rows))
        for form in FORMS:
            collection.query.near_vector(**vectorizer.near("fish", form), limit=3)
    config = fake.created[0]["vectorConfig"]
    assert config["dense"]["vectorizer"] == config["multi_vector"]["vectorizer"] == {"none": {}}
    assert config["multi_vector"]["vectorIndexConfig"]["multivector"]["enabled"]
    wanted = client.encode(models["hybrid"], texts, role="document", representations=FORMS)
    assert [one.properties.non_ref_properties["text"] for one in fake.objects] == texts
    np.testing.assert_array_equal(np.stack(sent(fake.objects, "dense")), wanted.dense)
    for ours, theirs in zip(sent(fake.objects, "multi_vector"), wanted.multi_vector, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    query = client.encode(models["hybrid"], "fish", role="query", representations=FORMS)
    assert [list(search.near_vector.targets.target_vectors) for search in fake.searches] == [
        ["dense"],
        ["multi_vector"],
    ]
    assert query.dense[0].tobytes() in fake.searches[0].near_vector.SerializeToString()
    assert query.multi_vector[0].tobytes() in fake.searches[1].near_vector.SerializeToString()
    assert await vectorizer.aobjects(rows) == vectorizer.objects(rows)


def objects(texts: list[str]) -> list[Object[Any, Any]]:
    return [
        Object(
            uuid=uuid.uuid4(), metadata=MetadataReturn(distance=0.5),
            properties={"text": text, "number": number},
            references=None, vector={}, collection="Texts",
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_reranked_objects(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    reranker, given = ShoalReranker(models[kind]), objects(texts)
    found = reranker.rerank("fish", given, top_n=3)
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert [one.properties["number"] for one in found] == wanted.ranking.tolist()
    assert [one.metadata.rerank_score for one in found] == wanted.scores[wanted.ranking].tolist()
    assert await reranker.arerank("fish", given, top_n=3) == found
    assert all(one.metadata.rerank_score is None for one in given)
    assert found[0].metadata.distance == 0.5
    assert reranker.rerank("fish", []) == []


async def test_extraction(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    extractor = ShoalExtractor(models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    rows = [{"text": text} for text in texts]
    found = extractor.properties(rows)
    assert [[one["start"] for one in row["entities"]] for row in found] == [
        [e.start for e in one.entities] for one in wanted
    ]
    assert await extractor.aproperties(rows) == found
    assert rows == [{"text": text} for text in texts]


def test_pickle_has_no_token(token: str, models: dict[str, str]) -> None:
    vectorizer = ShoalVectorizer(models["dense"], token=token)
    assert token.encode() not in pickle.dumps(vectorizer)
    assert pickle.loads(pickle.dumps(vectorizer)).vectors(["fish"]) == vectorizer.vectors(["fish"])


def test_forms_that_weaviate_has_not() -> None:
    with pytest.raises(ValueError, match="Weaviate stores no others"):
        ShoalVectorizer("org/model", forms=["sparse"])  # type: ignore[list-item]
