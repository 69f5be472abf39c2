"""Requests of a hostile tenant by kind of work, each as large as the contract allows."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image
from shoal.v1 import inference_pb2 as pb

from benchmarks.common.texts import MINILM_ID
from tests.fuzz.products import GENERATION, RELATIONS, STRUCTURES
from tests.fuzz.tiny_kinds import FORMS, LABELS, PAIRS
from tests.support import pdfs

IMAGES: Final = "tiny/images"
MIB: Final = 1 << 20
# The maximum of the contract (docs/security.md): all items with the parts repeated for each make a
# worker read 256 MiB, and an answer may repeat 4 MiB of labels.
INSTRUCTION, HYPOTHESIS, LABEL, QUERY, TEXT = 16_384, 1_024, 1_024, 131_072, 4 * MIB
MANY: Final = 2_000
MANY_TIMES_QUERY: Final = 1_900
"""Documents, each of which is read with the largest query."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One request.

    Args:
        name: the product or kind that it stands for.
        method: a method of InferenceService, or a path of HTTP.
        body: the request as it is sent.
        legal: whether every field is within its limits, so that it must be served or run out of its
            time.
        is_read: whether the answer is read; else the connection is held open, unread, until the
            attack's time is over.
    """

    name: str
    method: str
    body: bytes
    legal: bool = True
    is_read: bool = True


def warm_up() -> Sequence[Attack]:
    """Return a small request to each model."""
    item, labels = pb.Item(text="a text"), ["a"]
    image = pb.Item(image=pb.Image(data=_image(32)))
    return [
        _attack("", pb.EncodeRequest(model=MINILM_ID, items=[item])),
        _attack("", pb.EncodeRequest(model=FORMS, items=[item])),
        _attack("", pb.ScoreRequest(model=PAIRS, query=item, documents=[item])),
        _attack(
            "",
            pb.ExtractRequest(model=LABELS, items=[item], entities=pb.EntitiesTask(labels=labels)),
        ),
        _relations(1, 2, 1),
        _structures(1, 1),
        _generation(1, 2),
        _attack("", pb.EncodeRequest(model=IMAGES, items=[image])),
    ]


def texts() -> Sequence[Attack]:
    """Return of each product of text fields one request at its limit and one far beyond it."""
    words, rows = "shoal of fish ", [pb.Item(text=f"text {number}") for number in range(MANY)]
    labels = [f"{number} {'l' * LABEL}"[:LABEL] for number in range(256)]
    long = [pb.Item(text=_exactly(words, MIB)) for _ in range(16)]

    def encode(items: list[pb.Item], instruction: str = "") -> pb.EncodeRequest:
        return pb.EncodeRequest(model=MINILM_ID, items=items, instruction=instruction)

    def score(model: str, documents: list[pb.Item], query: str) -> pb.ScoreRequest:
        return pb.ScoreRequest(
            model=model,
            query=pb.Item(text=query),
            documents=documents,
            truncation=pb.TRUNCATION_END,
        )

    def classify(hypothesis: str, names: list[str]) -> pb.ExtractRequest:
        return pb.ExtractRequest(
            model=MINILM_ID,
            items=rows[:15],
            classify=pb.ClassifyTask(labels=names, hypothesis=hypothesis),
        )

    def entities(items: list[pb.Item], names: list[str]) -> pb.ExtractRequest:
        return pb.ExtractRequest(model=LABELS, items=items, entities=pb.EntitiesTask(labels=names))

    return [
        _attack("instruction x items", encode(rows, _exactly(words, INSTRUCTION))),
        _attack("instruction x items", encode(rows, _exactly(words, 2 * MIB)), legal=False),
        _attack("hypothesis x labels", classify("{}" + _exactly(words, HYPOTHESIS - 2), labels)),
        _attack(
            "hypothesis x labels",
            classify("{}" + "h" * (4 * MIB), ["a", *labels[:255]]),
            legal=False,
        ),
        _attack("long texts", encode(long)),
        _attack("texts that grow", encode([pb.Item(text="\ufdfa" * (TEXT // 3))])),
        _attack("one text too long", encode([pb.Item(text="w" * (2 * TEXT))]), legal=False),
        # The small model reads one word of any length as one token, and few tokens.
        _attack("query x documents", score(PAIRS, rows[:MANY_TIMES_QUERY], "q" * QUERY)),
        _attack("query x documents", score(PAIRS, rows, _exactly(words, 4 * MIB)), legal=False),
        _attack("query of vectors", score(MINILM_ID, rows, _exactly(words, QUERY))),
        _attack("labels x items", entities(rows[:15], labels)),
        _attack("labels x items", entities(rows, ["l" * MIB, *map(str, range(24))]), legal=False),
    ]


def relations() -> Sequence[Attack]:
    """Return requests with answers of entities × entities × labels for each item; labels and text
    have at most the 256 tokens that the small model reads.
    """
    return [_relations(200, 120, 18), _relations(20, 60, 30), _relations(1, 128, 18)]


def structures() -> Sequence[Attack]:
    """Return requests with as many structures and fields as the small model reads, on long
    texts.
    """
    return [_structures(200, 24), _structures(20, 26)]


def documents() -> Sequence[Attack]:
    """Return PDF files that take the processor time which a page may take, and one of ordinary
    pages.
    """
    files = [pdfs.slow(operations) for operations in (96, 98, 100)]
    plain = pdfs.document([f"page {number}" for number in range(16)])
    return [
        _attack("documents", pb.EncodeRequest(model=IMAGES, items=[_page(data)]))
        for data in (*files, plain)
    ]


def images() -> Sequence[Attack]:
    """Return images of a few kilobytes on the wire, alone and several at once. Decoding one takes
    three fifths of the worker's memory for models and images (16 bytes a pixel of 512 MiB).
    """
    large = _image(4_500)
    return [
        _attack(
            "images",
            pb.EncodeRequest(model=IMAGES, items=[pb.Item(image=pb.Image(data=large))] * n),
        )
        for n in (1, 2, 8)
    ]


def generation() -> Sequence[Attack]:
    """Return requests for the longest texts of many items."""
    return [_generation(31, 4_096), _generation(200, 256)]


def slow_readers() -> Sequence[Attack]:
    """Return streams with large unread answers: EncodeStream over gRPC, server-sent events and JSON
    over HTTP.
    """
    rows = [pb.Item(text=f"text {number} " * 20) for number in range(MANY)]
    forms = [pb.REPRESENTATION_DENSE, pb.REPRESENTATION_SPARSE, pb.REPRESENTATION_MULTI_VECTOR]
    request = pb.EncodeRequest(model=FORMS, items=rows, representations=forms)
    chat = (
        b'{"model":"%b","stream":true,"max_tokens":4096,"messages":[{"role":"user","content":"a '
        b'text"}]}'
    ) % GENERATION.encode()
    vectors = b'{"model":"%b","input":[%b]}' % (MINILM_ID.encode(), b",".join([b'"a text"'] * MANY))
    return [
        Attack("streams of vectors", "EncodeStream", request.SerializeToString(), is_read=False),
        Attack("server-sent events", "/v1/chat/completions", chat, is_read=False),
        Attack("vectors as JSON", "/v1/embeddings", vectors, is_read=False),
    ]


KINDS: Final[Mapping[str, Callable[[], Sequence[Attack]]]] = {
    "texts": texts,
    "relations": relations,
    "structures": structures,
    "documents": documents,
    "images": images,
    "generation": generation,
    "slow-readers": slow_readers,
}


def _attack(name: str, request: Any, *, legal: bool = True) -> Attack:
    methods = {"EncodeRequest": "Encode", "ScoreRequest": "Score", "ExtractRequest": "Extract"}
    return Attack(name, methods[type(request).__name__], request.SerializeToString(), legal)


def _relations(items: int, entities: int, labels: int) -> Attack:
    text = "a " * max(entities, 60)
    given = [pb.Entity(start=2 * place, end=2 * place + 1, label="a") for place in range(entities)]
    task = pb.RelationsTask(
        labels=[f"relation {number}" for number in range(labels)], threshold=0.0
    )
    request = pb.ExtractRequest(
        model=RELATIONS, items=[pb.Item(text=text, entities=given)] * items, relations=task
    )
    return _attack("relations", request)


def _structures(items: int, fields: int) -> Attack:
    each = [pb.SchemaField(name=f"field {number}") for number in range(fields)]
    found = [
        pb.SchemaStructure(name=f"structure {number}", fields=each[number::16])
        for number in range(min(16, fields))
    ]
    task = pb.StructureTask(structures=found, threshold=0.0)
    return _attack(
        "structures",
        pb.ExtractRequest(
            model=STRUCTURES, items=[pb.Item(text="a text " * 300)] * items, structure=task
        ),
    )


def _generation(items: int, tokens: int) -> Attack:
    task = pb.TextTask(max_tokens=tokens)
    return _attack(
        "generation",
        pb.ExtractRequest(model=GENERATION, items=[pb.Item(text="a text")] * items, text=task),
    )


def _page(data: bytes) -> pb.Item:
    return pb.Item(parts=[pb.Part(document=pb.Document(data=data, first_page=1, last_page=1))])


def _image(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


def _exactly(words: str, size: int) -> str:
    return (words * (size // len(words) + 1))[:size]
