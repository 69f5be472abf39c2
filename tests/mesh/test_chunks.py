"""Texts chunked by a whole mesh: through gRPC, the client and HTTP."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import AsyncIterator
from typing import Literal

import numpy as np
import pytest
import shoal
from shoal import Chunking, Document, Span
from shoal.errors import InvalidInput, TaskNotSupported
from shoal.tasks import Item

from services.edge.app import running
from services.edge.settings import Settings
from services.local.settings import MINILM
from tests.edge.parts import Http
from tests.mesh.test_families import relative_error
from tests.support import offices, pdfs
from tests.support.cluster import Cluster
from tests.support.texts import texts

LONG = " ".join(texts(60, shortest=5, longest=30, seed=4))
HARD = (
    "日本語の文。次の文です。 😀👩\u200d👩\u200d👧 emoji! "
    "e\u0301te\u0301 naïve.\r\nNew line.\r\n\r\n"
    "\u05e9\u05dc\u05d5\u05dd. The end."
)
TEXTS = [LONG, "One sentence.", HARD]
SPARSE_TOO = "random/bge-m3"
LATE_INTERACTION = "random/bert-late"


@pytest.fixture
async def http(mesh: Cluster) -> AsyncIterator[Http]:
    settings = Settings(
        edge_id="edge", address="127.0.0.1:0", routers=tuple(mesh.addresses), deadline_seconds=120.0
    )
    async with running(settings) as address:
        yield Http(address)


@pytest.mark.parametrize("method", ["sentences", "tokens", "markdown"])
def test_chunks_equal_separate_items(
    client: shoal.Client, method: Literal["sentences", "tokens", "markdown"]
) -> None:
    result = client.encode(MINILM, TEXTS, chunking=Chunking(method, max_tokens=40, overlap=10))
    chunks = [chunk for own in result.chunks for chunk in own]
    assert [chunk.row for chunk in chunks] == list(range(len(result.dense)))
    assert len(result.chunks[0]) > 10
    assert [chunk.text for chunk in result.chunks[1]] == ["One sentence."]
    assert all(
        chunk.text == text[chunk.start : chunk.end]
        for text, own in zip(TEXTS, result.chunks, strict=True)
        for chunk in own
    )
    alone = client.encode(MINILM, [chunk.text for chunk in chunks])
    assert relative_error(np.asarray(result.dense), np.asarray(alone.dense)) <= 1e-5
    assert (
        sum(chunk.tokens for chunk in chunks)
        == result.usage.input_tokens
        == alone.usage.input_tokens
    )


def test_late_chunks_depend_only_on_their_text(client: shoal.Client) -> None:
    late = client.encode(MINILM, TEXTS, chunking=Chunking(max_tokens=40, late=True))
    plain = client.encode(MINILM, TEXTS, chunking=Chunking(max_tokens=40))
    assert [chunk.text for own in late.chunks for chunk in own] == [
        chunk.text for own in plain.chunks for chunk in own
    ]
    cosines = (np.asarray(late.dense) * np.asarray(plain.dense)).sum(1)
    assert 0.3 < cosines.mean() < 0.99
    rows = slice(late.chunks[2][0].row, None)
    alone = client.encode(MINILM, [HARD], chunking=Chunking(max_tokens=40, late=True))
    assert relative_error(np.asarray(late.dense)[rows], np.asarray(alone.dense)) <= 1e-5


def test_spans_and_contexts(client: shoal.Client) -> None:
    spans: list[list[Span | tuple[int, int]]] = [
        [(0, 3), Span(4, 12, "Here: ")],
        [Span(0, 13)],
        [(0, 12), (11, 14)],
    ]
    asked = Chunking("spans", spans=spans, contexts=["Title. ", "", ""])
    result = client.encode(MINILM, TEXTS, chunking=asked)
    assert [[(chunk.start, chunk.end) for chunk in own] for own in result.chunks] == [
        [(0, 3), (4, 12)],
        [(0, 13)],
        [(0, 12), (11, 14)],
    ]
    wanted = [
        f"Title. {LONG[:3]}",
        f"Title. Here: {LONG[4:12]}",
        "One sentence.",
        HARD[:12],
        HARD[11:14],
    ]
    assert (
        relative_error(np.asarray(result.dense), np.asarray(client.encode(MINILM, wanted).dense))
        <= 1e-5
    )


def test_chunks_have_all_representations_of_the_model(client: shoal.Client) -> None:
    result = client.encode(
        LATE_INTERACTION, TEXTS, role="document", chunking=Chunking(max_tokens=15)
    )
    pieces = [chunk.text for own in result.chunks for chunk in own]
    alone = client.encode(LATE_INTERACTION, pieces, role="document").multi_vector
    assert relative_error(np.asarray(result.multi_vector.values), np.asarray(alone.values)) <= 1e-5
    assert len(result.multi_vector) == len(pieces)
    # Within the model's length, late chunks have the token vectors of the whole text.
    whole = client.encode(LATE_INTERACTION, ["One sentence. Two."], role="document").multi_vector
    asked = Chunking("spans", late=True, spans=[[(0, 4), (4, 14), (14, 18)]])
    late = client.encode(LATE_INTERACTION, ["One sentence. Two."], role="document", chunking=asked)
    assert len(late.multi_vector) > 1
    assert relative_error(np.asarray(late.multi_vector.values), np.asarray(whole.values)) <= 1e-5


def test_many_texts_are_streamed_as_jobs(client: shoal.Client) -> None:
    many = [LONG[index : index + 900] for index in range(0, len(LONG) - 900, 150)]
    result = client.encode(MINILM, many, chunking=Chunking("tokens", max_tokens=8))
    assert len(result.chunks) == len(many)
    assert result.chunks.offsets[-1] == len(result.dense)
    last = client.encode(MINILM, many[-1:], chunking=Chunking("tokens", max_tokens=8))
    assert np.array_equal(
        np.asarray(last.chunks.starts), np.asarray(result.chunks.starts)[-len(last.dense) :]
    )
    assert (
        relative_error(
            np.asarray(last.dense, np.float32),
            np.asarray(result.dense, np.float32)[-len(last.dense) :],
        )
        <= 1e-5
    )


def test_documents_are_divided_like_their_text(client: shoal.Client) -> None:
    """A PDF and a DOCX file among texts; their text is that of Extract's pages, joined."""
    lines = textwrap.wrap(" ".join(re.findall(r"[A-Za-z]+\.?", LONG)), 36)
    wrapped = ["\n".join(lines[:15]), "", "\n".join(lines[15:30]), "\n".join(lines[30:40])]
    pdf, word = pdfs.document(wrapped), offices.word()
    for late in (False, True):
        chunking = Chunking("tokens", max_tokens=60, late=late)
        items: list[Item] = ["One sentence.", Document(pdf, 1, 9), Document(word)]
        result = client.encode(MINILM, items, chunking=chunking)
        text = "\n\n".join(page for page in wrapped if page)
        alone = client.encode(MINILM, ["One sentence.", text], chunking=chunking)
        for own, wanted in zip(result.chunks, alone.chunks, strict=False):
            assert [(one.start, one.end, one.text) for one in own] == [
                (one.start, one.end, one.text) for one in wanted
            ]
        rows = len(alone.dense)
        assert relative_error(np.asarray(result.dense)[:rows], np.asarray(alone.dense)) <= 1e-5
        assert [chunk.page for chunk in result.chunks[0]] == [0]
        found = [chunk.page for chunk in result.chunks[1]]
        assert (found[0], found[-1], 2 in found, found == sorted(found)) == (1, 4, False, True)
        assert result.chunks[2][0].text.startswith("# Annual report")
        assert result.chunks[2][0].page == 1
    for data, first in ((pdfs.document(["", ""]), 0), (offices.hostile()["zip bomb"][0], 0)):
        with pytest.raises(InvalidInput) as caught:
            client.encode(
                MINILM, ["One sentence.", Document(data, first)], chunking=Chunking("tokens")
            )
        assert caught.value.field == "items[1].parts[0].document"


def test_skipped_items_have_no_chunks(client: shoal.Client) -> None:
    result = client.encode(
        MINILM, ["", *TEXTS], chunking=Chunking(max_tokens=40), on_invalid="skip"
    )
    assert [skipped.index for skipped in result.skipped] == [0]
    assert [len(own) > 0 for own in result.chunks] == [False, True, True, True]
    assert result.chunks[2][0].text == "One sentence."
    assert len(client.encode(MINILM, [], chunking=Chunking()).chunks) == 0


def test_refusals_name_the_field(client: shoal.Client) -> None:
    for asked, field in (
        (Chunking(max_tokens=40, overlap=21), "chunking.overlap"),
        (Chunking(max_tokens=4000), "chunking.max_tokens"),
        (Chunking("spans"), "items[0].spans"),
        (Chunking("spans", spans=[[(0, 3)], [(0, 3)], [(5, 1000)]]), "items[2].spans[0]"),
        (Chunking(late=True, contexts=["a", "", ""]), "items[0].context"),
    ):
        with pytest.raises(InvalidInput) as caught:
            client.encode(MINILM, TEXTS, chunking=asked)
        assert caught.value.field == field
    with pytest.raises(TaskNotSupported) as refusal:
        client.encode("random/model2vec-embed", TEXTS, chunking=Chunking(late=True))
    assert refusal.value.field == "chunking.late"


async def test_http(http: Http, client: shoal.Client) -> None:
    body = {
        "items": [{"text": LONG, "id": "a"}, {"text": HARD}],
        "params": {"chunking": {"max_tokens": 40, "late": True, "return_text": True}},
    }
    reply = await http.post(f"/v1/encode/{MINILM}", body)
    wanted = client.encode(
        MINILM, [LONG, HARD], role="document", chunking=Chunking(max_tokens=40, late=True)
    )
    assert reply.json["items"][0]["id"] == "a"
    for item, own in zip(reply.json["items"], wanted.chunks, strict=True):
        assert [chunk["text"] for chunk in item["chunks"]] == [chunk.text for chunk in own]
        assert [(chunk["start"], chunk["end"], chunk["tokens"]) for chunk in item["chunks"]] == [
            (one.start, one.end, one.tokens) for one in own
        ]
        rows = np.array([chunk["dense"]["values"] for chunk in item["chunks"]])
        assert np.abs(rows - np.asarray(wanted.dense)[[one.row for one in own]]).max() <= 1e-6
    spans = {
        "items": [{"text": LONG, "spans": [{"start": 0, "end": 3}], "context": "Title: "}],
        "params": {"chunking": {"method": "spans"}},
    }
    reply = await http.post(f"/v1/encode/{MINILM}", spans)
    assert [chunk["end"] for chunk in reply.json["items"][0]["chunks"]] == [3]
    sentences = [
        chunk.text
        for chunk in client.encode(MINILM, [LONG], chunking=Chunking(max_tokens=60)).chunks[0]
    ]
    jina = await http.post(
        "/v1/embeddings", {"model": MINILM, "input": sentences, "late_chunking": True}
    )
    joined = " ".join(sentences)
    ends = np.cumsum([len(sentence) + 1 for sentence in sentences]) - 1
    places = [
        (int(end) - len(sentence), int(end)) for sentence, end in zip(sentences, ends, strict=True)
    ]
    late = client.encode(MINILM, [joined], chunking=Chunking("spans", late=True, spans=[places]))
    rows = np.array([entry["embedding"] for entry in jina.json["data"]])
    assert np.abs(rows - np.asarray(late.dense)).max() <= 1e-6
    document = base64.b64encode(pdfs.document(["one page", "two"])).decode()
    body = {
        "items": [{"document": document}],
        "params": {"chunking": {"max_tokens": 2, "return_text": True}},
    }
    reply = await http.post(f"/v1/encode/{MINILM}", body)
    assert [(one["text"], one["page"]) for one in reply.json["items"][0]["chunks"]] == [
        ("one page", 1),
        ("two", 2),
    ]
    large = base64.b64encode(b"# Titles\n\n" * 980_000).decode()
    body = {"items": [{"document": large}], "params": {"chunking": {}}}
    reply = await http.post(f"/v1/encode/{MINILM}", body)
    assert reply.status == 400
    assert "items[0].document" in reply.json["detail"]["message"]
    assert "9,800,000 bytes; at most 8,388,608" in reply.json["detail"]["message"]
    reply = await http.post(
        f"/v1/encode/{MINILM}",
        {"items": [{"text": "a"}], "params": {"chunking": {"max_tokens": 9, "overlap": 8}}},
    )
    assert reply.status == 400
    assert "params.chunking.overlap" in reply.json["detail"]["message"]
