"""Vision-language models through the mesh: directories without specific code, next to a text
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import grpc
import numpy as np
import pypdfium2
import pytest
import shoal
import torch
from shoal import errors
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, models_pb2_grpc
from torch import Tensor

from tests.mesh.test_families import relative_error
from tests.parity.test_jina_reranker import jina_reranker
from tests.parity.vlm_models import (
    QUERIES,
    Small,
    conversation,
    opened,
    pages,
    small,
    write_vlm_adapter,
)
from tests.support import pdfs
from tests.support.cluster import Cluster

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

FILES = pages()
KINDS = ("colpali", "idefics3", "qwen2_vl", "colqwen2")


@pytest.fixture(scope="module")
def readers(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the model IDs by kind."""
    for kind in KINDS:
        made = tmp_path_factory.mktemp(kind) / "made"
        small(kind).save(made)
        made.rename(checkpoints / "random" / f"{kind}-pages")
    return {kind: f"random/{kind}-pages" for kind in KINDS}


def worst(got: Iterable[np.ndarray], wanted: Sequence[Tensor]) -> float:
    return max(
        relative_error(np.asarray(one), other.numpy())
        for one, other in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_queries_equal_transformers(
    client: shoal.Client, readers: dict[str, str], kind: str
) -> None:
    """Pages of different sizes, together and alone, are as close to float64 as transformers in
    float32.
    """
    model, theirs, double = readers[kind], small(kind), small(kind).doubled()
    images = [opened(data) for data in FILES]
    wanted, queries = double.pages(images, torch.float64), double.queries(QUERIES, torch.float64)
    single = [one.numpy() for one in (*theirs.pages(images), *theirs.queries(QUERIES))]
    bound = max(1e-5, worst(single, [*wanted, *queries]))
    result = client.encode(model, FILES)
    assert worst(result.multi_vector, wanted) <= bound
    assert 0 < result.usage.image_tokens < result.usage.input_tokens == sum(map(len, wanted))
    for number in (1, 3):
        alone = client.encode(model, [FILES[number]]).multi_vector
        assert worst(alone, wanted[number : number + 1]) <= bound
    asked = client.encode(model, QUERIES, role="query")
    assert worst(asked.multi_vector, queries) <= bound
    assert not asked.usage.image_tokens
    mixed = client.encode(model, [QUERIES[0], FILES[0]], role="query").multi_vector
    assert worst(mixed, [queries[0], wanted[0]]) <= bound


@pytest.mark.parametrize("kind", KINDS[:3])
def test_scores_are_maxsim(client: shoal.Client, readers: dict[str, str], kind: str) -> None:
    """Texts and pages are each scored against pages."""
    theirs = small(kind)
    rows = theirs.pages([opened(data) for data in FILES[:4]])
    for query, vectors in ((QUERIES[0], theirs.queries(QUERIES[:1])[0]), (FILES[1], rows[1])):
        wanted = np.array([(vectors @ page.T).amax(-1).sum().item() for page in rows])
        assert (
            relative_error(np.asarray(client.score(readers[kind], query, FILES[:4]).scores), wanted)
            <= 1e-5
        )


@pytest.mark.parametrize(("number_format", "bound"), [("float16", 1e-3), ("int8", 1e-2)])
def test_smaller_vectors(
    client: shoal.Client,
    readers: dict[str, str],
    number_format: Literal["float16", "int8"],
    bound: float,
) -> None:
    wanted = small("colpali").pages([opened(data) for data in FILES[:2]])
    got = client.encode(readers["colpali"], FILES[:2], data_type=number_format).multi_vector
    for one, other in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(one, np.float32) - other.numpy()).max() <= bound


def test_vision_and_text_models_on_one_worker(
    client: shoal.Client, readers: dict[str, str]
) -> None:
    """All requests are concurrent on one worker."""
    asked: list[tuple[str, list[bytes | str]]]
    asked = [
        (readers["colpali"], [*FILES[:3]]),
        ("random/bert-embed", [*QUERIES]),
        (readers["qwen2_vl"], [*FILES[:2], *QUERIES]),
    ]

    def rows(model: str, items: list[bytes | str]) -> np.ndarray:
        found = client.encode(model, items)
        return (
            found.dense
            if "dense" in found.representations
            else np.concatenate(list(found.multi_vector))
        )

    before = [rows(*one) for one in asked]
    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(lambda one: rows(*one), asked * 3))
    for number, one in enumerate(found):
        assert relative_error(one, before[number % 3]) <= 1e-5


def test_item_of_parts(mesh: Cluster, readers: dict[str, str]) -> None:
    """Texts and images keep their order; a broken image is refused."""
    shown = [pb.Part(image=pb.Image(data=data)) for data in FILES[:2]]
    with grpc.insecure_channel(mesh.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for kind in ("colpali", "qwen2_vl"):
            parts = [shown[0], pb.Part(text="and then"), shown[1]]
            items = [pb.Item(parts=parts), pb.Item(parts=parts[:1]), pb.Item(image=shown[0].image)]
            answer = stub.Encode(pb.EncodeRequest(model=readers[kind], items=items)).multi_vector
            counts = np.diff(answer.offsets)
            assert counts[1] == counts[2] < counts[0]
            items.append(pb.Item(parts=[shown[0], pb.Part(image=pb.Image(data=FILES[1][:200]))]))
            with pytest.raises(grpc.RpcError) as caught:
                stub.Encode(pb.EncodeRequest(model=readers[kind], items=items))
            assert "truncated or damaged" in (caught.value.details() or "")


def test_pages_of_a_document_keep_their_order(
    client: shoal.Client, readers: dict[str, str]
) -> None:
    """Pages equal the same images between texts."""
    data = pdfs.document(["first", "second", "third"], (144, 96))
    pages = [
        page.render(scale=1, rev_byteorder=True).to_numpy() for page in pypdfium2.PdfDocument(data)
    ]
    for kind in ("colpali", "qwen2_vl"):
        asked = shoal.Parts(
            FILES[0], shoal.Document(data, 2, 3, 72), "and then", shoal.Document(data, 1, 1, 72)
        )
        wanted = client.encode(
            readers[kind], [shoal.Parts(FILES[0], *pages[1:], "and then", pages[0])]
        ).multi_vector[0]
        assert (
            relative_error(
                np.asarray(client.encode(readers[kind], asked).multi_vector[0]), np.asarray(wanted)
            )
            <= 1e-5
        )


def test_unsupported_instruction_is_refused(client: shoal.Client, readers: dict[str, str]) -> None:
    with pytest.raises(errors.InvalidInput, match="takes no instruction"):
        client.encode(readers["colpali"], [FILES[0]], instruction="Find it.")


def test_card_of_vision_language_models(
    client: shoal.Client, mesh: Cluster, readers: dict[str, str]
) -> None:
    for kind in KINDS:
        client.encode(readers[kind], [FILES[0]])
        with grpc.insecure_channel(mesh.address) as channel:
            stub = models_pb2_grpc.ModelServiceStub(channel)
            card = stub.GetModel(models_pb2.GetModelRequest(model=readers[kind])).model.card
        assert list(card.inputs) == [
            models_pb2.INPUT_KIND_TEXT,
            models_pb2.INPUT_KIND_IMAGE,
            models_pb2.INPUT_KIND_DOCUMENT,
        ]
        assert list(card.representations) == [pb.REPRESENTATION_MULTI_VECTOR]
        assert card.tasks == [models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE]


JUDGED = "Retrieve relevant documents for the query."
TURN = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
EMBEDS, JUDGES, RANKS = (
    "Qwen/Qwen3-VL-Embedding-2B",
    "Qwen/Qwen3-VL-Reranker-2B",
    "jinaai/jina-reranker-m0",
)


@pytest.fixture(scope="module")
def carded(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write models under names with shipped cards, which define their use."""
    made = tmp_path_factory.mktemp("carded")
    for model, theirs in (
        (EMBEDS, conversation()),
        (JUDGES, conversation()),
        (RANKS, jina_reranker()),
    ):
        folder = made / model.replace("/", "-")
        theirs.save(folder)
        (checkpoints / model).parent.mkdir(exist_ok=True)
        folder.rename(checkpoints / model)


@torch.inference_mode()
def test_qwen3_vl_embeds_texts_and_pages(client: shoal.Client, carded: None) -> None:
    del carded
    found = client.encode(EMBEDS, [FILES[1], "a page"], timeout=120).dense
    asked = "Represent the user's input."
    states = [
        conversation().last(TURN.format(asked, SHOWN), [opened(FILES[1])])[0],
        conversation().last(TURN.format(asked, "a page"), [])[0],
    ]
    assert found is not None
    wanted = [torch.nn.functional.normalize(state, dim=-1) for state in states]
    assert worst(list(found), wanted) <= 1e-5


@torch.inference_mode()
def test_qwen3_vl_judges_texts_and_pages(client: shoal.Client, carded: None) -> None:
    del carded
    found = client.score(JUDGES, QUERIES[0], [FILES[1], "a page"], scale="logit", timeout=120)
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    yes, no = (
        conversation().processor.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")
    )
    for score, shown, images in zip(
        found.scores, (SHOWN, "a page"), ([opened(FILES[1])], []), strict=True
    ):
        pair = f"<Instruct>: {JUDGED}<Query>:{QUERIES[0]}\n<Document>:{shown}"
        _, logits = conversation().last(TURN.format(system, pair), images)
        assert score == pytest.approx(float(logits[yes] - logits[no]), rel=1e-5, abs=1e-5)


def test_jina_reranker_ranks_texts_and_pages(client: shoal.Client, carded: None) -> None:
    del carded
    documents: list[str | bytes] = [FILES[1], "a page", FILES[5]]
    found = client.score(RANKS, QUERIES[0], documents, scale="logit", timeout=120)
    wanted = [jina_reranker().logit(QUERIES[0], one) for one in documents]
    assert list(found.scores) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def merged(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Return the adapter `random/merged-pages` merged into its base, `random/based-pages`. The base
    of `random/lost-pages` is missing.
    """
    made = tmp_path_factory.mktemp("adapters")
    small("qwen2_5_vl").save(made / "base")
    adapted = write_vlm_adapter("qwen2_5_vl", made / "merged", "random/based-pages")
    write_vlm_adapter("qwen2_5_vl", made / "lost", "random/not-here")
    adapted.processor.image_processor.save_pretrained(made / "lost")
    for name, place in (("base", "based"), ("merged", "merged"), ("lost", "lost")):
        (made / name).rename(checkpoints / "random" / f"{place}-pages")
    return adapted


def test_adapter_is_a_model_merged_into_its_base(client: shoal.Client, merged: Small) -> None:
    """The base itself is served too, under both names."""
    for model, theirs in (
        ("random/merged-pages", merged),
        ("random/based-pages", small("qwen2_5_vl")),
    ):
        wanted = theirs.pages([opened(data) for data in FILES[:2]])
        assert worst(client.encode(model, FILES[:2]).multi_vector, wanted) <= 1e-5
        assert (
            worst(client.encode(model, QUERIES, role="query").multi_vector, theirs.queries(QUERIES))
            <= 1e-5
        )


def test_adapter_without_its_base_is_refused_with_the_bases_name(
    client: shoal.Client, merged: Small
) -> None:
    del merged
    with pytest.raises(errors.ShoalError, match="random/not-here"):
        client.encode("random/lost-pages", [FILES[0]])


def test_pages_are_computed_once_and_pooled(client: shoal.Client, readers: dict[str, str]) -> None:
    """A repeated page, pooled or not, is not computed again. Pooling returns fewer vectors of
    length 1.
    """
    model = readers["colqwen2"]
    whole = client.encode(model, FILES)
    fewer = client.encode(model, FILES, pooling_factor=4)
    assert fewer.timings.forward_seconds == 0
    assert fewer.usage.image_tokens == whole.usage.image_tokens
    for pooled, page in zip(fewer.multi_vector, whole.multi_vector, strict=True):
        assert 1 <= len(pooled) <= max(1, len(page) // 4)
        np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), 1, rtol=1e-5)
    with pytest.raises(errors.InvalidInput, match="pooling_factor"):
        client.encode(model, FILES[:1], pooling_factor=65)
