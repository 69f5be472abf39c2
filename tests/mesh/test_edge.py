"""The edge before a whole mesh with the real model: in every dialect, its numbers equal those of
shoal.Client up to rounding. tests/edge shows that the formats themselves are exact.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import shoal
from numpy.typing import NDArray

from services.edge.app import running
from services.edge.settings import Settings
from services.local.settings import MINILM, free_port, packaged_minilm
from tests.edge.parts import Http
from tests.mesh.conftest import RANKED
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

TEXTS = texts(40, shortest=1, longest=60)
RANKER = f"random/{RANKED[0]}-rank"
CLASSIFIER = f"random/{RANKED[0]}-classes"
TAGGER = "random/bert-entities"
LATE = "random/bert-late"
ROUNDING = 1e-6
"""Largest difference of one number, at most 1 or so in size, between two requests: a request may be
computed in batches of other shapes than the last one, in which float32 sums round differently.
"""


@pytest.fixture
async def http(mesh: Cluster) -> AsyncIterator[Http]:
    settings = Settings(
        edge_id="edge", address="127.0.0.1:0", routers=tuple(mesh.addresses), deadline_seconds=120.0
    )
    async with running(settings) as address:
        yield Http(address)


@pytest.fixture
def wanted(client: shoal.Client) -> NDArray[np.float32]:
    dense = client.encode(MINILM, TEXTS).dense
    assert dense is not None
    return np.asarray(dense)


def distance(found: Any, wanted: Any) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max())


async def test_openai(http: Http, wanted: NDArray[np.float32]) -> None:
    reply = await http.post(
        "/v1/embeddings", {"model": MINILM, "input": TEXTS, "encoding_format": "base64"}
    )
    rows = [
        np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reply.json["data"]
    ]
    assert distance(rows, wanted) <= ROUNDING
    reply = await http.post("/v1/embeddings", {"model": MINILM, "input": TEXTS})
    assert distance([entry["embedding"] for entry in reply.json["data"]], wanted) <= ROUNDING
    assert reply.json["usage"]["prompt_tokens"] > len(TEXTS)
    cut = (
        await http.post(
            "/v1/embeddings", {"model": MINILM, "input": "a", "dimensions": 16, "normalize": True}
        )
    ).json
    assert abs(np.linalg.norm(cut["data"][0]["embedding"]) - 1) < 1e-6
    assert len(cut["data"][0]["embedding"]) == 16


async def test_openai_errors(http: Http) -> None:
    reply = await http.post("/v1/embeddings", {"model": MINILM, "input": ["a", ""]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input[1]")
    reply = await http.post("/v1/embeddings", {"model": MINILM, "input": []})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    reply = await http.post("/v1/embeddings", {"model": MINILM, "input": "a", "dimensions": 1000})
    assert (reply.status, reply.json["error"]["param"]) == (400, "dimensions")
    reply = await http.post(
        "/v1/embeddings", {"model": MINILM, "input": "word " * 1000, "truncate": "NONE"}
    )
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    reply = await http.post("/v1/embeddings", {"model": "nobody/has-this", "input": "a"})
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    reply = await http.post("/v1/embeddings", {"model": RANKER, "input": "a"})
    assert (reply.status, reply.json["error"]["code"]) == (400, "model_not_supported")
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        reply = await http.post(path, {"model": MINILM, **body})
        found = reply.json["error"]
        assert (reply.status, found["param"], found["code"]) == (
            400,
            "model",
            "model_not_supported",
        ), f"{path}: the model is at fault, not the text"


async def test_models(http: Http) -> None:
    await http.post("/v1/embeddings", {"model": MINILM, "input": "a"})
    listed = (await http.get("/v1/models")).json
    assert "models" not in listed
    (entry,) = (entry for entry in listed["data"] if entry["id"] == MINILM)
    model = packaged_minilm()
    assert model is not None
    written = max(path.stat().st_mtime for path in model.iterdir() if path.is_file())
    assert entry["created"] == int(written)
    one = (await http.get(f"/v1/models/{MINILM.replace('/', '%2F')}")).json
    assert (one["dims"], one["max_sequence_length"], one["state"]) == (
        {"dense": 384},
        256,
        "loaded",
    )


async def test_sie(http: Http, client: shoal.Client, wanted: NDArray[np.float32]) -> None:
    items = [{"text": text} for text in TEXTS]
    reply = await http.post(f"/v1/encode/{MINILM}", {"items": items})
    assert distance([item["dense"]["values"] for item in reply.json["items"]], wanted) <= ROUNDING
    content = msgspec.msgpack.encode({"items": items})
    reply = await http.post(
        f"/v1/encode/{MINILM}",
        content,
        content_type="application/msgpack",
        accept="application/msgpack",
    )
    found = [
        np.frombuffer(item["dense"]["values"][b"data"], "<f4")
        for item in msgspec.msgpack.decode(reply.body)["items"]
    ]
    assert distance(found, wanted) <= ROUNDING
    late = client.encode(LATE, TEXTS[:3], role="document").multi_vector
    reply = await http.post(f"/v1/encode/{LATE}", {"items": items[:3]})
    assert late is not None
    for item, rows in zip(reply.json["items"], late, strict=True):
        assert distance(item["multivector"]["values"], rows) <= ROUNDING
    many = {"items": [{"text": "word " * 50}] * 10_000, "params": {"output_types": ["multivector"]}}
    reply = await http.post(f"/v1/encode/{LATE}", many)
    message = reply.json["detail"]["message"]
    assert reply.status == 400
    assert "items at a time, or request fewer dimensions or a smaller data type" in message
    reply = await http.post(f"/v1/score/{RANKER}", {"query": {"text": "q"}, "items": items})
    scored = client.score(RANKER, "q", TEXTS)
    by_item = {entry["item_id"]: entry["score"] for entry in reply.json["scores"]}
    assert (
        distance([by_item[f"item-{index}"] for index in range(len(TEXTS))], scored.scores)
        <= ROUNDING
    )
    reply = await http.post(f"/v1/extract/{CLASSIFIER}", {"items": items[:2]})
    assert {entry["label"] for entry in reply.json["items"][0]["classifications"]} == {
        "contradiction",
        "neutral",
        "entailment",
    }


async def test_rerank(http: Http, client: shoal.Client) -> None:
    for model in (RANKER, MINILM):
        reply = await http.post(
            "/v2/rerank", {"model": model, "query": "q", "documents": TEXTS, "top_n": 5}
        )
        scored = client.score(model, "q", TEXTS, scale="probability", top_n=5)
        assert [result["index"] for result in reply.json["results"]] == scored.ranking.tolist()
        found = [result["relevance_score"] for result in reply.json["results"]]
        assert distance(found, scored.scores[scored.ranking]) <= ROUNDING
    reply = await http.post(
        "/v1/rerank",
        {"model": LATE, "query": "what", "documents": TEXTS, "top_k": None, "truncation": True},
    )
    assert reply.status == 200, reply.body
    assert [entry["index"] for entry in reply.json["data"]] == client.score(
        LATE, "what", TEXTS
    ).ranking.tolist()


async def test_tei(http: Http, client: shoal.Client, wanted: NDArray[np.float32]) -> None:
    reply = await http.post(f"/tei/{MINILM}/embed", {"inputs": TEXTS})
    assert distance(reply.json, wanted) <= ROUNDING
    assert int(reply.headers["x-compute-tokens"]) > len(TEXTS)
    assert distance((await http.post(f"/tei/{MINILM}", {"inputs": TEXTS})).json, wanted) <= ROUNDING
    found = (
        await http.post(
            f"/tei/{MINILM}/similarity",
            {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[:3]}},
        )
    ).json
    assert distance(found, wanted[:3] @ wanted[0]) <= ROUNDING
    ranks = (
        await http.post(f"/tei/{RANKER}/rerank", {"query": "q", "texts": TEXTS, "raw_scores": True})
    ).json
    logits = client.score(RANKER, "q", TEXTS, scale="logit")
    assert [rank["index"] for rank in ranks] == logits.ranking.tolist()
    assert distance([rank["score"] for rank in ranks], logits.scores[logits.ranking]) <= ROUNDING
    labels = (await http.post(f"/tei/{CLASSIFIER}/predict", {"inputs": "a"})).json
    assert abs(sum(label["score"] for label in labels) - 1) < 1e-5
    assert labels[0]["score"] == max(label["score"] for label in labels)
    assert (await http.get(f"/tei/{MINILM}/info")).json["max_input_length"] == 256
    reply = await http.post(f"/tei/{MINILM}/embed", {"inputs": ["a", ""]})
    assert (reply.status, reply.json["error_type"]) == (400, "Empty")
    reply = await http.post(f"/tei/{RANKER}/embed", {"inputs": "a"})
    assert (reply.status, reply.json["error_type"]) == (424, "Backend")


async def test_cohere(http: Http, client: shoal.Client, wanted: NDArray[np.float32]) -> None:
    kinds = ["float", "int8", "ubinary"]
    reply = await http.post(
        "/v2/embed", {"model": MINILM, "texts": TEXTS, "embedding_types": kinds}
    )
    found = reply.json["embeddings"]
    assert distance(found["float"], wanted) <= ROUNDING
    int8 = client.encode(MINILM, TEXTS, data_type="int8").dense
    certain = np.abs(wanted) > ROUNDING
    for kind in ("int8", "ubinary"):
        alone = (
            await http.post(
                "/v2/embed", {"model": MINILM, "texts": TEXTS, "embedding_types": [kind]}
            )
        ).json["embeddings"]
        assert list(alone) == [kind]
        for rows in (found[kind], alone[kind]):
            if kind == "int8":
                assert distance(rows, int8) <= 1, "one step, where rounding decides"
            else:
                signs = np.unpackbits(np.array(rows, np.uint8), axis=1)
                assert np.array_equal(signs[certain], (wanted > 0)[certain])
    first = (
        await http.post(
            "/v1/embed", {"model": MINILM, "texts": TEXTS, "input_type": "search_document"}
        )
    ).json
    assert distance(first["embeddings"], wanted) <= ROUNDING
    own = (await http.post("/v1/classify", {"model": CLASSIFIER, "inputs": TEXTS})).json[
        "classifications"
    ]
    for one, labels in zip(own, client.classify(CLASSIFIER, TEXTS), strict=True):
        assert {
            name: label["confidence"] for name, label in one["labels"].items()
        } == pytest.approx(scored_labels(labels), abs=ROUNDING)
        assert (one["prediction"], one["classification_type"]) == (
            labels.labels[0].label,
            "single-label",
        )
    shown = [{"text": TEXTS[0], "label": "first"}, {"text": TEXTS[1], "label": "second"}]
    nearest = (
        await http.post("/v1/classify", {"model": MINILM, "inputs": TEXTS[:2], "examples": shown})
    ).json
    assert [one["prediction"] for one in nearest["classifications"]] == ["first", "second"]
    # This is a natural language inference classifier, so it accepts any labels.
    given = (
        await http.post(
            "/v1/classify", {"model": CLASSIFIER, "inputs": TEXTS[:2], "examples": shown}
        )
    ).json
    labels = client.classify(CLASSIFIER, TEXTS[:2], ["first", "second"], multi_label=False)[0]
    assert given["classifications"][0]["labels"]["first"]["confidence"] == pytest.approx(
        scored_labels(labels)["first"], abs=ROUNDING
    )
    reply = await http.post("/v2/embed", {"model": MINILM, "texts": ["a", ""]})
    assert (reply.status, reply.json) == (400, {"message": "texts[1] is empty"})
    reply = await http.post("/v2/embed", {"model": RANKER, "texts": ["a"]})
    assert reply.status == 400


def scored_labels(result: shoal.Extraction) -> dict[str, float]:
    return {one.label: one.score for one in result.labels}


async def test_huggingface(http: Http, client: shoal.Client, wanted: NDArray[np.float32]) -> None:
    assert (
        distance(
            (
                await http.post(f"/models/{MINILM}/pipeline/feature-extraction", {"inputs": TEXTS})
            ).json,
            wanted,
        )
        <= ROUNDING
    )
    found = (await http.post(f"/models/{CLASSIFIER}", {"inputs": TEXTS[:3], "parameters": {}})).json
    for one, labels in zip(found, client.classify(CLASSIFIER, TEXTS[:3]), strict=True):
        assert {label["label"]: label["score"] for label in one} == pytest.approx(
            scored_labels(labels), abs=ROUNDING
        )
    parameters = {
        "candidate_labels": ["fish", "wood"],
        "hypothesis_template": "About {}.",
        "multi_label": True,
    }
    found = (
        await http.post(f"/models/{CLASSIFIER}", {"inputs": TEXTS[0], "parameters": parameters})
    ).json
    labels = client.classify(
        CLASSIFIER, TEXTS[:1], ["fish", "wood"], hypothesis="About {}.", multi_label=True
    )[0]
    assert {label["label"]: label["score"] for label in found} == pytest.approx(
        scored_labels(labels), abs=ROUNDING
    )
    for strategy in ("simple", "none"):
        parameters = {"aggregation_strategy": strategy}
        found = (
            await http.post(f"/models/{TAGGER}", {"inputs": TEXTS, "parameters": parameters})
        ).json
        name = "entity" if strategy == "none" else "entity_group"
        for one, result in zip(
            found, client.entities(TAGGER, TEXTS, aggregation=strategy), strict=True
        ):
            assert [
                (token[name], token["start"], token["end"], token["word"]) for token in one
            ] == [
                (entity.label, entity.start, entity.end, entity.text) for entity in result.entities
            ]
    assert isinstance((await http.post(f"/tei/{TAGGER}", {"inputs": TEXTS[0]})).json, list)
    reply = await http.post(
        f"/models/{CLASSIFIER}", {"inputs": "a", "parameters": {"candidate_labels": [""]}}
    )
    assert (reply.status, reply.json["error"]) == (400, "parameters.candidate_labels[0] is empty")
    reply = await http.post(f"/models/{TAGGER}/pipeline/text-classification", {"inputs": "a"})
    assert (reply.status, reply.json["error_type"]) == (424, "Backend")


async def test_ollama(http: Http, wanted: NDArray[np.float32]) -> None:
    reply = await http.post("/api/embed", {"model": f"{MINILM}:latest", "input": TEXTS})
    assert distance(reply.json["embeddings"], wanted) <= ROUNDING
    reply = await http.post("/api/embeddings", {"model": MINILM, "prompt": TEXTS[0]})
    assert distance(reply.json["embedding"], wanted[0]) <= ROUNDING
    assert MINILM in [model["name"] for model in (await http.get("/api/tags")).json["models"]]
    assert MINILM in [model["name"] for model in (await http.get("/api/ps")).json["models"]]
    assert (await http.post("/api/show", {"model": MINILM})).json["model_info"][
        "bert.embedding_length"
    ] == 384
    reply = await http.post(
        "/api/embed", {"model": MINILM, "input": "word " * 1000, "truncate": False}
    )
    assert (reply.status, list(reply.json)) == (400, ["error"])


async def test_jina(http: Http, client: shoal.Client) -> None:
    late = client.encode(LATE, TEXTS[:3], role="query").multi_vector
    reply = await http.post(
        "/v1/multi-vector", {"model": LATE, "input": TEXTS[:3], "input_type": "query"}
    )
    for entry, rows in zip(reply.json["data"], late, strict=True):
        assert distance(entry["embeddings"], rows) <= ROUNDING
    reply = await http.post(
        "/v1/embeddings", {"model": MINILM, "input": "a", "return_multivector": True}
    )
    assert (reply.status, reply.json["error"]["param"]) == (400, "return_multivector")
    reply = await http.post("/v1/multi-vector", {"model": LATE, "input": "a", "dimensions": 8})
    assert (reply.status, reply.json["error"]["param"]) == (400, "dimensions")
    reply = await http.post(
        "/v1/classify", {"model": MINILM, "input": TEXTS, "labels": ["fish", "wood"]}
    )
    for one, labels in zip(
        reply.json["data"], client.classify(MINILM, TEXTS, ["fish", "wood"]), strict=True
    ):
        assert (one["prediction"], one["score"]) == (
            labels.labels[0].label,
            pytest.approx(labels.labels[0].score, abs=ROUNDING),
        )
    reply = await http.post("/v1/classify", {"model": MINILM, "input": ["a"]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "labels")


def test_process_drains(tmp_path: Path, mesh: Cluster) -> None:
    """A request in flight at SIGTERM is answered, and the exit status is 0."""
    port = free_port()
    environment = os.environ | {
        "SHOAL_ROUTERS": mesh.address,
        "SHOAL_HTTP_ADDRESS": f"127.0.0.1:{port}",
        "SHOAL_DEADLINE_SECONDS": "300",
        "SHOAL_GRACE_SECONDS": "300",
    }
    with (tmp_path / "log").open("wb") as log, ThreadPoolExecutor() as pool:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.edge"], env=environment, stderr=log
        )
        curl = [
            "curl",
            "-s",
            "--retry-connrefused",
            "--retry",
            "100",
            "--retry-delay",
            "0",
            "--max-time",
            "300",
        ]
        url = f"http://127.0.0.1:{port}"
        subprocess.run([*curl, f"{url}/readyz"], check=True, capture_output=True)
        body = msgspec.json.encode({"model": MINILM, "input": ["word " * 150] * 64}).decode()
        mesh.signal(mesh.workers, signal.SIGSTOP)  # the call cannot be answered before SIGTERM
        try:
            answer = pool.submit(
                subprocess.run,
                [*curl, f"{url}/v1/embeddings", "-d", body],
                check=True,
                capture_output=True,
            )
            with shoal.Client(mesh.address) as client:
                wait_until(
                    lambda: any(
                        lane.queued_tokens or lane.leased_tokens for lane in client.mesh().lanes
                    ),
                    60,
                    "the call to be in flight",
                )
            process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: "draining" in (tmp_path / "log").read_text(), 60, "the edge to drain"
            )
        finally:
            mesh.resume(mesh.workers)
        assert len(msgspec.json.decode(answer.result().stdout)["data"]) == 64
        assert process.wait(120) == 0
