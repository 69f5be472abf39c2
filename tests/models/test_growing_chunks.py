"""Chunks that are computed while later ones are read: they are prepared early, and their vectors
are those of the whole job.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from libs.documents.joined_text import JoinedText, PagedText
from libs.models import EncodeWork, PackedModel, load_model
from libs.models.interface.model import ComputesChunks
from libs.models.interface.results import EncodeResult
from libs.models.interface.sequences import Output
from libs.models.interface.work import Chunking, ChunkMethod, Representation
from libs.models.text.processing.chunking import dividing
from libs.models.text.processing.chunking.dividing import MAX_CHUNKS
from libs.models.text.processing.chunking.growing import embedding_notes
from tests.mesh.conftest import write_late_interaction
from tests.parity.test_hybrid import write_m3
from tests.support.texts import texts

TEXTS = [" ".join(texts(20, shortest=5, longest=20, seed=seed)) for seed in (1, 2)]
MAX_PART_BYTES = 1 << 30


def nothing() -> None:
    """Never cancelled."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory = write_m3(tmp_path_factory.mktemp("m3"))
    return load_model(directory, "org/m3", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def late_interaction(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory = tmp_path_factory.mktemp("late")
    write_late_interaction(directory, tmp_path_factory.mktemp("base"))
    return load_model(directory, "org/late", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "chunking",
    [
        Chunking(max_tokens=10, return_text=True),
        Chunking("tokens", max_tokens=12, overlap=2, return_text=True),
        Chunking(max_tokens=10, late=True, return_text=True),
        Chunking("markdown", max_tokens=90, overlap=20, late=True, return_text=True),
        Chunking("tokens", max_tokens=30, overlap=6, late=True, return_text=True),
    ],
    ids=str,
)
def test_first_chunks_are_prepared_before_the_last_pages_are_read(
    chunking: Chunking, embedder: PackedModel
) -> None:
    """The vectors of each part's chunks are those of the answer."""
    read: list[int] = []

    def add_pages(found: JoinedText) -> Iterator[None]:
        for number in range(1, 51):
            read.append(number)
            found.add(number, TEXTS[number % 2])
            yield

    assert isinstance(embedder, ComputesChunks)
    work = EncodeWork(["", "text"], chunking=chunking, documents={0: PagedText(add_pages)})
    text = "\n\n".join(TEXTS[number % 2] for number in range(1, 51))
    whole = embedder.prepare(EncodeWork([text, "text"], chunking=chunking))
    outputs = embedder.forward_all(whole)
    wanted = rows(cast(EncodeResult, embedder.finish(whole, outputs)))
    ids, counts, found = [one.ids.tolist() for one in whole.sequences], [0], list[object]()
    for prepared in embedder.prepare_parts(work, nothing):
        assert len(read) < 25 or counts[-1], "the first part precedes the last pages"
        counts.append(len(prepared.sequences))
        assert [one.ids.tolist() for one in prepared.sequences] == ids[: counts[-1]]
        known = dict(enumerate(outputs[: counts[-1]]))
        part = embedder.finish_rows(prepared, known, len(found), MAX_PART_BYTES)
        found += [] if part is None else rows(part)
        assert found == wanted[: len(found)]
        assert found, "chunks of the first part are complete"
        last = prepared
    assert len(counts) > 3
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    assert len(read) == 50
    assert last.fields == whole.fields
    assert len(found) == len(wanted) - 1, "the last chunk is left to the answer"


PAGES = [
    f"# Part {number}\n\n{text}"
    for number, text in enumerate(texts(60, shortest=5, longest=40, seed=8), 1)
]


def add_all_pages(found: JoinedText) -> Iterator[None]:
    for number, text in enumerate(PAGES, 1):
        found.add(number, text)
        yield


def compute_chunks(model: PackedModel, work: EncodeWork) -> tuple[list[int], list[int], list[int]]:
    """Return the beginnings, ends and tokens of a work's chunks."""
    chunks = embedding_notes(model.prepare(work)).chunks
    assert chunks is not None
    return chunks.starts, chunks.ends, chunks.tokens


@pytest.mark.parametrize("method", ["sentences", "markdown", "tokens"])
@pytest.mark.parametrize(("most", "overlap"), [(20, 0), (300, 0), (40, 12)])
def test_document_has_the_chunks_of_its_text_however_it_is_read(
    embedder: PackedModel,
    method: ChunkMethod,
    most: int,
    overlap: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dividing, "WINDOW", 1000)
    chunking = Chunking(method, max_tokens=most, overlap=overlap, late=True)
    pages = {0: PagedText(add_all_pages)}
    assert compute_chunks(
        embedder, EncodeWork([""], chunking=chunking, documents=pages)
    ) == compute_chunks(embedder, EncodeWork(["\n\n".join(PAGES)], chunking=chunking))


def rows(result: EncodeResult) -> list[tuple[object, ...]]:
    """Return each chunk with its place, text and vectors."""
    chunks = result.chunks
    assert chunks is not None
    found = []
    for row, place in enumerate(
        zip(chunks.starts, chunks.ends, chunks.tokens, chunks.texts, strict=True)
    ):
        vectors: list[object] = []
        if result.dense is not None:
            vectors.append(result.dense.values[row].tobytes())
        if result.sparse is not None:
            low, high = result.sparse.offsets[row : row + 2]
            vectors += [
                result.sparse.indices[low:high].tobytes(),
                result.sparse.values.values[low:high].tobytes(),
            ]
        if result.multi_vector is not None:
            low, high = result.multi_vector.offsets[row : row + 2]
            vectors.append(result.multi_vector.values.values[low:high].tobytes())
        found.append((*place, *vectors))
    return found


def check(
    model: PackedModel, forms: tuple[Representation, ...], chunking: Chunking, most_bytes: int
) -> None:
    """Compute the sequences of a job in a random order, and take its chunks as soon as they are
    computed.
    """
    assert isinstance(model, ComputesChunks)
    work = EncodeWork(TEXTS, role="document", representations=forms, chunking=chunking)
    prepared = model.prepare(work)
    outputs = model.forward_all(prepared)
    whole = cast(EncodeResult, model.finish(prepared, outputs))
    wanted = rows(whole)
    known: dict[int, Output] = {}
    found: list[tuple[object, ...]] = []
    items: list[int] = []
    order = random.Random(3).sample(range(len(outputs)), len(outputs))
    for index in order:
        known[index] = outputs[index]
        while (part := model.finish_rows(prepared, known, len(found), most_bytes)) is not None:
            chunks = part.chunks
            assert chunks is not None
            counts = np.diff(chunks.offsets).tolist()
            if chunks.continues:
                items[-1] += counts.pop(0)
            items += counts
            found += rows(part)
            assert found == wanted[: len(found)]
    assert len(found) == len(wanted) - 1, "the last chunk is left to the answer"
    assert whole.chunks is not None
    items[-1] += 1
    assert items == np.diff(whole.chunks.offsets).tolist()


@pytest.mark.parametrize("most_bytes", [1, 2000, MAX_PART_BYTES])
@pytest.mark.parametrize("late", [False, True])
def test_vectors_of_computed_chunks_are_those_of_the_answer(
    embedder: PackedModel, late: bool, most_bytes: int
) -> None:
    chunking = Chunking(max_tokens=7, late=late, return_text=True)
    check(embedder, ("dense",), chunking, most_bytes)


@pytest.mark.parametrize("late", [False, True])
def test_token_vectors_of_computed_chunks_are_those_of_the_answer(
    late_interaction: PackedModel, late: bool
) -> None:
    chunking = Chunking(max_tokens=9, overlap=0 if late else 3, late=late, return_text=True)
    check(late_interaction, ("multi_vector",), chunking, 3000)


def test_all_forms_of_computed_chunks_are_those_of_the_answer(hybrid: PackedModel) -> None:
    forms: tuple[Representation, ...] = ("dense", "sparse", "multi_vector")
    check(hybrid, forms, Chunking(max_tokens=12, return_text=True), 4000)
    check(
        hybrid, ("dense", "multi_vector"), Chunking(max_tokens=12, late=True, return_text=True), 1
    )


def test_sparse_vector_that_may_be_cut_is_left_to_the_answer(hybrid: PackedModel) -> None:
    work = EncodeWork(TEXTS, representations=("sparse",), chunking=Chunking(max_tokens=12))
    prepared = hybrid.prepare(work)
    known = dict(enumerate(hybrid.forward_all(prepared)))
    assert hybrid.finish_rows(prepared, known, 0, MAX_PART_BYTES) is not None
    assert (
        hybrid.finish_rows(replace(prepared, answer_bytes=8 * MAX_CHUNKS), known, 0, MAX_PART_BYTES)
        is None
    )


def test_output_that_is_not_finite_ends_the_computed_chunks(embedder: PackedModel) -> None:
    prepared = embedder.prepare(EncodeWork(TEXTS, chunking=Chunking(max_tokens=7)))
    known = dict(enumerate(embedder.forward_all(prepared)))
    known[2] = cast("np.ndarray[tuple[int], np.dtype[np.float32]]", known[2]) * np.float32("nan")
    found = embedder.finish_rows(prepared, known, 0, MAX_PART_BYTES)
    assert found is not None
    assert found.chunks is not None
    assert len(found.chunks.starts) == 2
    assert embedder.finish_rows(prepared, known, 2, MAX_PART_BYTES) is None
    assert embedder.finish_rows(prepared, {}, 0, MAX_PART_BYTES) is None
