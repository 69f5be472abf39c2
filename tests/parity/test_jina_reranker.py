"""jina-reranker-m0 against its published code, transcribed over transformers' Qwen2-VL: pairs of
texts and images on either side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from libs.catalog.detect import read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import InputTooLong, ModelBroken, TaskNotSupported
from libs.models import PackedModel, load_model
from libs.models.interface.results import ScoreResult
from libs.models.interface.work import EncodeWork, Part, ScoreWork, Truncation
from tests.parity.vlm_models import draw, opened, pages, small

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
QUERY = "what must a licensee do"
TEXTS = ["a page", "naïve café, 東京 and so on", "\n**Query**:\n"]
SCORE_TOKEN, LOGIT_BIAS = 100, 2.65
MARK = "<|vision_start|><|image_pad|><|vision_end|>"

Content = str | bytes


@dataclass(frozen=True)
class Reference:
    """The published class: Qwen2-VL, and `score` over the last token's state."""

    model: Any
    score: nn.Sequential
    tokenizer: transformers.PreTrainedTokenizerFast
    images: transformers.BaseImageProcessor

    def save(self, directory: Path) -> None:
        """Save the model as published: without a language head, with `score` next to the rest."""
        small("qwen2_vl").save(directory)  # the tokenizer, and other limits of an image's pixels
        self.model.save_pretrained(directory)
        tensors = {f"score.{name}": tensor for name, tensor in self.score.state_dict().items()}
        file = directory / "model.safetensors"
        save_file(load_file(file) | tensors, file)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps(config | {"architectures": ["JinaVLForRanking"]})
        )

    @torch.inference_mode()
    def logit(self, query: Content, document: Content) -> float:
        """Return the logit of `compute_score`'s sigmoid: the document precedes the query."""
        shown = [opened(one) for one in (document, query) if isinstance(one, bytes)]
        first, second = (one if isinstance(one, str) else MARK for one in (document, query))
        text = f"**Document**:\n{first}\n**Query**:\n{second}"
        given: dict[str, Tensor] = dict(self.images(shown, return_tensors="pt")) if shown else {}
        for rows in (given["image_grid_thw"].prod(-1) // 4).tolist() if shown else []:
            text = text.replace("<|image_pad|>", "<|image|>" * rows, 1)
        ids = self.tokenizer(text.replace("<|image|>", "<|image_pad|>"))["input_ids"]
        tokens = torch.tensor([[*ids, SCORE_TOKEN]])
        kinds = (tokens == self.model.config.image_token_id).int()
        hidden = self.model(input_ids=tokens, mm_token_type_ids=kinds, **given).last_hidden_state
        return float(self.score(hidden[:, -1])) - LOGIT_BIAS


@cache
def jina_reranker() -> Reference:
    model = small("qwen2_vl").model.model
    width = model.config.text_config.hidden_size
    score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    draw(score)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 3136, "longest_edge": 602_112}
    )
    return Reference(model, score, small("qwen2_vl").processor.tokenizer, images)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return jina_reranker()


@pytest.fixture(scope="module")
def directory(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jina-reranker-m0")
    reference.save(made)
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> PackedModel:
    return load_model(directory, "jinaai/jina-reranker-m0", CPU, torch.float32)


def scores(
    model: PackedModel, query: Content, documents: Sequence[Content], **settings: Any
) -> list[float]:
    parts = {
        number: (Part(one, f"documents[{number}].image"),)
        for number, one in enumerate(documents)
        if isinstance(one, bytes)
    }
    texts = [one if isinstance(one, str) else "" for one in documents]
    asked = ScoreWork(query if isinstance(query, str) else "", texts, parts=parts, **settings)
    if isinstance(query, bytes):
        asked = ScoreWork(
            "", texts, parts=parts, query_parts=(Part(query, "query.image"),), **settings
        )
    prepared = model.prepare(asked)
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, ScoreResult)
    return [float(one) for one in result.scores]


def test_pairs_score_as_by_the_published_code(reference: Reference, model: PackedModel) -> None:
    page, other = pages()[1], pages()[5]
    documents: list[Content] = [*TEXTS, page, other]
    for query in (QUERY, page):
        wanted = np.array([reference.logit(query, one) for one in documents])
        found = np.array(scores(model, query, documents, scale="logit"))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert np.ptp(wanted) > 0.1
        for scale in ("", "probability"):
            found = np.array(scores(model, query, documents, scale=scale))
            np.testing.assert_allclose(found, 1 / (1 + np.exp(-wanted)), rtol=1e-5)


def test_only_the_document_of_a_long_pair_is_cut(reference: Reference, model: PackedModel) -> None:
    """The query follows the document, and remains."""

    def tokens(words: int) -> int:
        text = f"**Document**:\n{document(words)}\n**Query**:\n{QUERY}"
        return len(reference.tokenizer(text)["input_ids"]) + 1

    def document(words: int) -> str:
        return " ".join(["a"] * words)

    fitting = model.card.max_tokens - tokens(1) + 1
    assert tokens(fitting) == model.card.max_tokens, "a word is a token"
    [found] = scores(model, QUERY, [document(fitting + 50)], scale="logit")
    assert found == pytest.approx(reference.logit(QUERY, document(fitting)), abs=1e-4)
    assert abs(found - reference.logit("", document(fitting))) > 1e-2


@pytest.mark.parametrize("truncation", ["end", "start", "none"])
def test_query_that_leaves_no_room_for_a_document_is_refused(
    model: PackedModel, truncation: Truncation
) -> None:
    for words in (model.card.max_tokens, 5 * model.card.max_tokens):
        with pytest.raises(InputTooLong, match=r"^query\.text has more than .* without a document"):
            scores(model, "a " * words, TEXTS, truncation=truncation)


def test_card_scores_pairs_of_texts_and_images(directory: Path, model: PackedModel) -> None:
    card = read_card(directory, "jinaai/jina-reranker-m0")
    assert (card.kind, card.tasks, card.inputs) == ("images", ("score",), ("text", "image"))
    with pytest.raises(TaskNotSupported):
        model.prepare(EncodeWork(["a"]))
    hints = Overrides("a card", detect=Hints(kind="dense"))
    with pytest.raises(ModelBroken, match="JinaVLForRanking, which has no vectors"):
        load_model(directory, "some/model", CPU, torch.float32, hints)


@pytest.mark.parametrize("name", ["score.0.bias", "score.2.weight"])
def test_missing_layer_of_the_score_is_named(directory: Path, tmp_path: Path, name: str) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelBroken, match=name):
        load_model(tmp_path, "some/model", CPU, torch.float32)
