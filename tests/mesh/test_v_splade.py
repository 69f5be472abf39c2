"""V-SPLADE through the mesh: sparse vectors of pages, queries that never reach the device, and
their products.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pypdfium2
import pytest
import shoal
from numpy.typing import NDArray
from shoal import errors
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, models_pb2_grpc

from tests.mesh.test_families import relative_error
from tests.mesh.test_sparse import whole
from tests.parity.v_splade_models import v_splade
from tests.parity.vlm_models import QUERIES, opened, pages
from tests.support import pdfs
from tests.support.cluster import Cluster

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

FILES = pages()


@pytest.fixture(scope="module")
def reader(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("v-splade") / "made"
    v_splade().save(made)
    made.rename(checkpoints / "random" / "v-splade")
    return "random/v-splade"


def rows(result: shoal.EncodeResult) -> NDArray[np.float32]:
    assert result.sparse is not None
    return whole(result.sparse)


def test_pages_and_queries_equal_the_reference(client: shoal.Client, reader: str) -> None:
    """Pages of different sizes are together, alone, and with a text."""
    wanted = v_splade().pages([opened(data) for data in FILES]).numpy()
    asked = v_splade().queries(QUERIES).numpy()
    result = client.encode(reader, FILES, role="document")
    assert relative_error(rows(result), wanted) <= 1e-5
    assert 0 < result.usage.image_tokens < result.usage.input_tokens
    for number in (1, 3):
        assert (
            relative_error(
                rows(client.encode(reader, [FILES[number]])), wanted[number : number + 1]
            )
            <= 1e-5
        )
    queries = client.encode(reader, QUERIES, role="query")
    assert relative_error(rows(queries), asked) <= 1e-5
    tokens = v_splade().processor.tokenizer(QUERIES, add_special_tokens=False)["input_ids"]
    assert (queries.usage.input_tokens, queries.usage.image_tokens) == (sum(map(len, tokens)), 0)
    assert queries.timings.forward_seconds == 0
    mixed = client.encode(reader, [QUERIES[0], FILES[0], QUERIES[2]])
    assert relative_error(rows(mixed), np.stack([asked[0], wanted[0], asked[2]])) <= 1e-5


def test_scores_are_products(client: shoal.Client, reader: str) -> None:
    """A text and a page are each scored against pages."""
    shown = v_splade().pages([opened(data) for data in FILES]).numpy()
    for query, vector in (
        (QUERIES[0], v_splade().queries(QUERIES[:1])[0].numpy()),
        (FILES[1], shown[1]),
    ):
        assert (
            relative_error(np.asarray(client.score(reader, query, FILES).scores), shown @ vector)
            <= 2e-5
        )


def test_pages_of_a_document_with_words(client: shoal.Client, reader: str) -> None:
    data = pdfs.document(["first", "second"], (144, 96))
    drawn = [
        page.render(scale=1, rev_byteorder=True).to_numpy() for page in pypdfium2.PdfDocument(data)
    ]
    wanted = rows(client.encode(reader, [shoal.Parts(*drawn, "two pages")]))
    assert (
        relative_error(
            rows(client.encode(reader, shoal.Parts(shoal.Document(data, 1, 2, 72), "two pages"))),
            wanted,
        )
        <= 1e-5
    )


def test_pages_are_computed_once(client: shoal.Client, reader: str) -> None:
    first = client.encode(reader, FILES)
    again = client.encode(reader, [*FILES, QUERIES[0]])
    assert again.timings.forward_seconds == 0
    assert again.usage.image_tokens == first.usage.image_tokens
    np.testing.assert_array_equal(rows(again)[:-1], rows(first))


def test_unsupported_requests_are_refused(client: shoal.Client, reader: str) -> None:
    with pytest.raises(errors.TaskNotSupported, match="dense"):
        client.encode(reader, [FILES[0]], representations=["dense"])
    with pytest.raises(errors.TaskNotSupported, match="are queries"):
        client.encode(reader, [FILES[0], "a page in words"], role="document")
    with pytest.raises(errors.TaskNotSupported, match="are queries"):
        client.score(reader, QUERIES[0], [FILES[0], "a page in words"])
    with pytest.raises(errors.InvalidInput, match="takes no instruction"):
        client.encode(reader, [QUERIES[0]], instruction="Find it.")


def test_card_of_the_model(client: shoal.Client, mesh: Cluster, reader: str) -> None:
    client.encode(reader, [FILES[0]])
    with grpc.insecure_channel(mesh.address) as channel:
        stub = models_pb2_grpc.ModelServiceStub(channel)
        card = stub.GetModel(models_pb2.GetModelRequest(model=reader)).model.card
    assert list(card.inputs) == [
        models_pb2.INPUT_KIND_TEXT,
        models_pb2.INPUT_KIND_IMAGE,
        models_pb2.INPUT_KIND_DOCUMENT,
    ]
    assert list(card.representations) == [pb.REPRESENTATION_SPARSE]
    assert card.tasks == [models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE]
