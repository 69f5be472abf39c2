"""Vision-language models as they are loaded to be served: cards, the router's price of an image,
and judging of pairs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shoal.v1 import models_pb2

from libs.catalog.detect import read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import TaskNotSupported
from libs.image_size import read_image_size
from libs.kinds.vision_language.card import MODEL_TYPES
from libs.models import load_model
from libs.models.images.vlm.loading import model_types
from libs.models.interface.results import EncodeResult, ScoreResult
from libs.models.interface.work import EncodeWork, Part, ScoreWork
from libs.models.runtime.packed_model import PackedModel
from services.router.admission.validation import image_price
from services.worker.mesh.codec import to_card
from tests.parity.vlm_models import QUERIES, conversation, pages, small

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


def loaded(directory: Path, kind: str = "") -> PackedModel:
    hints = Hints(kind=kind or None)
    return load_model(
        directory, "some/model", CPU, torch.float32, Overrides("a card", detect=hints)
    )


def test_every_family_has_a_card() -> None:
    assert sorted(MODEL_TYPES) == sorted(model_types())


@pytest.mark.parametrize(
    "kind",
    [
        "colpali",
        "idefics3",
        "colmodernvbert",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "colqwen2",
        "colqwen3",
    ],
)
def test_prices_are_near_the_truth(tmp_path: Path, kind: str) -> None:
    """The router's, from the header's size: never below half of it, and at most three times it, or
    a few tokens more.
    """
    small(kind).save(tmp_path)
    model = loaded(tmp_path)
    assert model.card.multi_vector_dimensions == 16
    sizes: models_pb2.ImageInput = to_card(model.card).images
    for data in pages():
        work = EncodeWork([""], parts={0: (Part(data, "items[0].image"),)})
        (sequence,) = model.prepare(work).sequences
        price = image_price.image_tokens(read_image_size(data), sizes)
        assert sequence.tokens / 2 <= price <= 3 * sequence.tokens + 16


def test_use_is_as_the_catalog_says(tmp_path: Path) -> None:
    conversation().save(tmp_path)
    assert read_card(tmp_path, "some/model").representations == ("multi_vector",)
    dense, judge = loaded(tmp_path, "dense"), loaded(tmp_path, "yes_no")
    page = (Part(pages()[1], "items[0].image"),)
    prepared = dense.prepare(EncodeWork(["", QUERIES[0]], instruction="Find it.", parts={0: page}))
    result = dense.finish(prepared, dense.forward_all(prepared))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    assert result.dense.shape == (2, dense.card.dimensions)
    np.testing.assert_allclose(np.linalg.norm(result.dense.values, axis=-1), 1, rtol=1e-5)
    assert 0 < prepared.image_tokens < prepared.tokens
    scores = {}
    for scale in ("", "logit", "probability"):
        shown = (Part(pages()[1], "documents[0].image"),)
        asked = judge.prepare(ScoreWork(QUERIES[0], ["", "a page"], scale=scale, parts={0: shown}))
        found = judge.finish(asked, judge.forward_all(asked))
        assert isinstance(found, ScoreResult)
        scores[scale] = found.scores
    np.testing.assert_allclose(1 / (1 + np.exp(-scores["logit"])), scores["probability"], rtol=1e-5)
    np.testing.assert_allclose(scores[""], scores["probability"], rtol=1e-6)  # of two forwards
    with pytest.raises(TaskNotSupported):
        judge.prepare(EncodeWork(["a"]))


def test_wrapper_without_a_projection_gives_its_states_and_puts_texts_after_their_prefix(
    tmp_path: Path,
) -> None:
    """Nemotron ColEmbed: a document's text follows its image and "passage:"."""
    small("qwen3_vl_nemotron_embed").save(tmp_path)
    model = loaded(tmp_path)
    assert model.card.multi_vector_dimensions == 48
    shown = (Part(pages()[0], "items[0].parts[0]"), Part("a page", "items[0].parts[1]"))
    prepared = model.prepare(EncodeWork(["", "a page"], parts={0: shown}))
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, EncodeResult)
    assert result.multi_vector is not None
    assert result.multi_vector.values.shape == (prepared.tokens, 48)
    tokenizer = small("qwen3_vl_nemotron_embed").processor.tokenizer
    end = "passage: a page<|im_end|>\n<|im_start|>assistant\n"
    wanted = [
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{end}",
        f"<|im_start|>user\n{end}",
    ]
    for sequence, text in zip(prepared.sequences, wanted, strict=True):
        ids = tokenizer(text)["input_ids"]
        mark = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        rows = 0 if sequence.rows is None else len(sequence.rows.places)
        found = [*sequence.ids[:6], *sequence.ids[6 + rows :]] if rows else list(sequence.ids)
        assert found == [one for one in ids if one != mark]
