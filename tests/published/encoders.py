"""Models that return vectors, scores and labels: the mesh's results equal those of the models'
packages.

Comparisons have the signature of those in `generation.py`. The bounds are 1e-4 for the cosine
distance of vectors and 1e-3 for scores and probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Protocol, cast

import gliclass
import numpy as np
import pytest
import shoal
import torch
import transformers
from gliner2 import GLiNER2
from gliner2.inference.engine import BoundaryExtractor
from numpy.typing import ArrayLike
from PIL import Image
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from shoal.extractions import Extraction
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure

from tests.mesh.test_sparse import whole
from tests.parity import gliner2_models, test_boundary, test_gliner2
from tests.parity.image_repositories import canonical
from tests.published.inputs import LABELS, PHOTOS, QUERY, TEXTS

FAR: Final = 1e-4
"""Maximum difference of a cosine from 1."""
CLOSE: Final = 1e-3
_EXACT: Final[dict[str, Any]] = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}}


def dense(client: shoal.Client, model: str, directory: Path) -> None:
    theirs = SentenceTransformer(str(directory), **_EXACT)
    _near(client.encode(model, TEXTS).dense, theirs.encode(TEXTS))


def sparse(client: shoal.Client, model: str, directory: Path) -> None:
    theirs = SparseEncoder(str(directory), **_EXACT)
    queries, documents = (
        client.encode(model, TEXTS, role="query").sparse,
        client.encode(model, TEXTS, role="document").sparse,
    )
    assert queries is not None
    assert documents is not None
    _near(whole(queries), theirs.encode_query(TEXTS).to_dense().numpy())
    _near(whole(documents), theirs.encode_document(TEXTS).to_dense().numpy())


def multi_vector(client: shoal.Client, model: str, directory: Path) -> None:
    theirs = MultiVectorEncoder(str(directory), **_EXACT)
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    for role, wanted in (("query", queries), ("document", documents)):
        found = client.encode(model, TEXTS, role=role).multi_vector  # type: ignore[arg-type]
        assert found is not None
        assert [len(rows) for rows in found] == [len(rows) for rows in wanted]
        _near(found.values, np.concatenate([np.asarray(rows) for rows in wanted]))


def reranker(client: shoal.Client, model: str, directory: Path) -> None:
    theirs = CrossEncoder(str(directory), **_EXACT)
    wanted = theirs.predict([(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Identity())
    found = client.score(model, QUERY, TEXTS, scale="logit").scores
    np.testing.assert_allclose(found, wanted, atol=CLOSE * np.abs(wanted).max())


def zero_shot(client: shoal.Client, model: str, directory: Path) -> None:
    """Labels by hypotheses."""
    pipeline = transformers.pipeline(
        "zero-shot-classification", str(directory), device="cpu", dtype=torch.float32
    )
    theirs = cast("list[dict[str, Any]]", pipeline(TEXTS, candidate_labels=LABELS))
    _labelled(
        client, model, [dict(zip(one["labels"], one["scores"], strict=True)) for one in theirs]
    )


def labels(client: shoal.Client, model: str, directory: Path) -> None:
    """GLiClass, by its package."""
    theirs = gliclass.GLiClassModel.from_pretrained(str(directory)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pipeline = gliclass.ZeroShotClassificationPipeline(
        theirs, tokenizer, device="cpu", progress_bar=False
    )
    kinds = {"batch_size": 1, "classification_type": "single-label", "return_hierarchical": True}
    _labelled(client, model, pipeline(TEXTS, LABELS, **kinds))


SCHEMA: Final = Schema(
    entities=(SchemaLabel("person"), SchemaLabel("city", "where something happened")),
    classifications=(SchemaClassification("topic", tuple(map(SchemaLabel, LABELS))),),
    structures=(
        SchemaStructure("invention", (SchemaField("inventor", dtype="str"), SchemaField("year"))),
    ),
)


class Flat(Protocol):
    """Answers to a schema as scores by place, of either architecture."""

    def ours(self, found: Extraction, /) -> test_gliner2.Found: ...

    def theirs(
        self, text: str, answer: Mapping[str, Any], schema: Schema, /
    ) -> test_gliner2.Found: ...


def gliner2(client: shoal.Client, model: str, directory: Path) -> None:
    """GLiNER2, by its package."""
    _of_schema(
        client,
        model,
        gliner2_models.Reference(GLiNER2.from_pretrained(str(directory)).eval(), directory),
        test_gliner2,
    )


def gliner25(client: shoal.Client, model: str, directory: Path) -> None:
    """Compare GLiNER2.5 with the same package; its structures are records."""
    theirs = BoundaryExtractor.from_pretrained(str(directory)).eval()
    _of_schema(
        client, model, gliner2_models.Reference(theirs, directory, records=True), test_boundary
    )


def _of_schema(
    client: shoal.Client, model: str, theirs: gliner2_models.Reference, flat: Flat
) -> None:
    found = 0
    for text, answer, one in zip(
        TEXTS, theirs.answers(TEXTS, SCHEMA), client.extract(model, TEXTS, SCHEMA), strict=True
    ):
        ours, wanted = flat.ours(one), flat.theirs(text, answer, SCHEMA)
        # Of a classification with one answer the package gives the best label only.
        topics = sorted(
            (place for place in ours if place[0] == "class"), key=lambda place: ours[place]
        )
        ours = {place: score for place, score in ours.items() if place not in topics[:-1]}
        assert ours.keys() == wanted.keys()
        assert all(abs(score - wanted[place]) <= CLOSE for place, score in ours.items())
        found += sum(place[0] == "entity" for place in ours)
    assert found, "nothing was found, so nothing was compared"


def images(client: shoal.Client, model: str, directory: Path) -> None:
    """CLIP and SigLIP: photographs and texts in one space."""
    theirs = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    shown = [Image.open(BytesIO(photo)).convert("RGB") for photo in PHOTOS]
    with torch.inference_mode():
        pixels = processor(images=shown, return_tensors="pt")["pixel_values"]
        wanted = theirs.get_image_features(pixel_values=pixels).pooler_output.numpy()
        rows = [_clip_ids(theirs.config, directory, label) for label in LABELS]
        said = np.concatenate(
            [theirs.get_text_features(input_ids=ids).pooler_output.numpy() for ids in rows]
        )
    _near(client.encode(model, PHOTOS).dense, wanted)
    _near(client.encode(model, LABELS).dense, said)


def _clip_ids(config: Any, directory: Path, text: str) -> torch.Tensor:
    """[1, tokens]; SigLIP's are always as many as it has positions (transformers' tokenizer of it
    needs sentencepiece).
    """
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json")
    )
    if config.model_type != "siglip":
        return tokenizer([text], return_tensors="pt")["input_ids"]
    length = config.text_config.max_position_embeddings
    ids = tokenizer(canonical(text))["input_ids"][:length]
    return torch.tensor([ids + [config.text_config.pad_token_id] * (length - len(ids))])


def _near(found: ArrayLike | None, wanted: ArrayLike) -> None:
    """Rows [rows, dimensions], by the cosine of each."""
    assert found is not None
    ours, theirs = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert ours.shape == theirs.shape
    cosines = (
        (ours * theirs).sum(-1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)
    )
    assert cosines.min() >= 1 - FAR, cosines


def _labelled(
    client: shoal.Client, model: str, wanted: list[Mapping[str, float]] | list[dict[str, float]]
) -> None:
    answer = client.classify(model, TEXTS, LABELS)
    for one, scores in zip(answer.results, wanted, strict=True):
        assert {label.label: label.score for label in one.labels} == pytest.approx(
            scores, abs=CLOSE
        )
