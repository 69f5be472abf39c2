"""Every family of vision-language models against transformers on random weights: equal, and the
same alone as among others.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from libs.catalog.checkpoint.adapter import read_base_model
from libs.errors import InputTooLong, InvalidInput, ModelBroken
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language, model_types
from libs.models.images.vlm.tower import ImageTower
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import Part
from tests.parity.vlm_models import (
    MODELS,
    QUERIES,
    Small,
    conversation,
    opened,
    pages,
    small,
    write_vlm_adapter,
)

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FLOAT_BOUND = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    small(kind).save(folder)
    return folder


@pytest.fixture(scope="module")
def model(directory: Path) -> VisionLanguageModel:
    return load_vision_language(directory, dtype=torch.float32, device=CPU)


@torch.inference_mode()
def vectors(
    model: VisionLanguageModel, sequences: Sequence[InputSequence], head: str = "multi_vector"
) -> list[Tensor]:
    """Return the head's outputs, of length 1, for sequences in one packed batch."""
    (backbone,) = model.backbones
    batch = backbone.pack(sequences, [None] * len(sequences))
    hidden = backbone.encoder.forward(batch)
    arrays = tuple(one.numpy() for one in backbone.heads[head].forward(hidden, batch, sequences))
    outputs = backbone.heads[head].split(arrays, sequences)
    return [
        torch.nn.functional.normalize(torch.from_numpy(np.asarray(one)), dim=-1) for one in outputs
    ]


def worst(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest error of a vector, relative to its largest value."""
    assert [one.shape for one in got] == [one.shape for one in wanted]
    return max(
        ((one - other).abs().amax(-1) / other.abs().amax(-1)).max().item()
        for one, other in zip(got, wanted, strict=True)
    )


def prepare_pages(model: VisionLanguageModel) -> list[InputSequence]:
    return [model.input.sequence(data, f"items[{number}]") for number, data in enumerate(pages())]


def prepare_queries(model: VisionLanguageModel) -> list[InputSequence]:
    return model.input.encode_texts(QUERIES, "query", "end", lambda number: f"items[{number}].text")


def test_every_family_is_in_the_table() -> None:
    writes = {"glm_ocr", "lighton_ocr", "paddleocr_vl"}  # and have no vectors: tests/readers
    assert {kind.split("-")[0] for kind in MODELS} == set(model_types()) - writes


def test_pages_and_queries_equal_transformers(kind: str, model: VisionLanguageModel) -> None:
    """Results in float32, in one batch and alone, are as near to float64 as transformers' are."""
    theirs = small(kind)
    images = [opened(data) for data in pages()]
    wanted = theirs.pages(images) + theirs.queries(QUERIES)
    double = theirs.doubled()
    exact = double.pages(images, torch.float64) + double.queries(QUERIES, torch.float64)
    sequences = prepare_pages(model) + prepare_queries(model)
    together = vectors(model, sequences)
    assert worst(together, exact) <= max(FLOAT_BOUND, worst(wanted, exact))
    alone = [vectors(model, [one])[0] for one in sequences]
    assert worst(alone, together) <= 5e-6


def test_bfloat16_is_as_good_as_the_reference(kind: str, directory: Path) -> None:
    theirs = small(kind)
    images = [opened(data) for data in pages()]
    exact = torch.cat(theirs.pages(images) + theirs.queries(QUERIES))
    halved = Small(copy.deepcopy(theirs.model).to(torch.bfloat16), theirs.processor)
    reference = torch.cat(
        halved.pages(images, torch.bfloat16) + halved.queries(QUERIES, torch.bfloat16)
    )
    model = load_vision_language(directory, dtype=torch.bfloat16, device=CPU)
    own = torch.cat(vectors(model, prepare_pages(model) + prepare_queries(model)))
    assert (own - exact).norm() <= 3 * (reference - exact).norm()


def test_prices_are_known_from_the_header(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = prepare_pages(model)
    monkeypatch.setattr("libs.models.images.vlm.parts.decoding", None)
    for data, one in zip(pages(), sequences, strict=True):
        assert model.input.tokens(data, "items[0]") == one.tokens
        tower = model.backbones[0].tower
        assert isinstance(tower, ImageTower)
        assert one.rows is not None
        assert model.input.patches(data, "items[0]") == sum(
            tower.count_tokens(picture) for picture in one.rows.inputs
        )


def test_order_of_parts_is_kept(model: VisionLanguageModel) -> None:
    """Two images and a text between them are sent in both orders."""
    first, second = pages()[0], pages()[4]
    parts: list[Part] = [
        Part(first, "parts[0]"),
        Part("and then", "parts[1]"),
        Part(second, "parts[2]"),
    ]
    one = model.input.encode_parts(parts, "items[0]")
    swapped = model.input.encode_parts(parts[::-1], "items[0]")
    assert one.rows is not None
    assert swapped.rows is not None
    assert one.tokens == swapped.tokens
    assert len(one.rows.places) == len(swapped.rows.places)
    together = vectors(model, [swapped, one])
    assert worst([together[1]], vectors(model, [one])) <= 5e-6


def test_errors_name_the_part(model: VisionLanguageModel) -> None:
    good = Part(pages()[0], "items[2].parts[0]")
    for broken in (b"", pages()[5][:300], b"<svg/>"):
        with pytest.raises(InvalidInput) as caught:
            model.input.encode_parts([good, Part(broken, "items[2].parts[1]")], "items[2]")
        assert caught.value.field == "items[2].parts[1]"
    mark = next(
        one
        for one in ("<image>", "<|image_pad|>")
        if model.input.text.token_id(one) == model.input.mark
    )
    with pytest.raises(InvalidInput, match="image token") as caught:
        model.input.encode_parts([good, Part(f"a {mark}", "items[2].parts[1]")], "items[2]")
    assert caught.value.field == "items[2].parts[1]"
    with pytest.raises(InvalidInput, match="image token"):
        model.input.encode_texts([mark], "query", "end", lambda number: f"items[{number}].text")
    with pytest.raises(InputTooLong) as too:
        model.input.encode_parts([good, Part("word " * 50_000, "items[2].parts[1]")], "items[2]")
    assert too.value.field == "items[2]"


def test_long_texts_are_truncated_within_their_frame(model: VisionLanguageModel) -> None:
    long, short = "what must a licensee do? " * 3_000, "what must a licensee do? "
    frame, limit = model.input.prompts.queries, model.input.text.limit
    for truncation in ("end", "start"):
        cut, whole = model.input.encode_texts(
            [long, short], "query", truncation, lambda number: f"items[{number}].text"
        )
        assert cut.tokens == limit > whole.tokens
        assert (cut.ids[-10:] == whole.ids[-10:]).all()
        assert not frame.before or cut.ids[0] == whole.ids[0]
    with pytest.raises(InputTooLong) as caught:
        model.input.encode_texts(
            [short, long], "query", "none", lambda number: f"items[{number}].text"
        )
    assert caught.value.field == "items[1].text"


def test_added_tokens_in_a_separate_table_are_read(tmp_path: Path) -> None:
    """Added tokens follow the others in colpali-engine's releases of ModernVBERT, and config.json
    counts only them.
    """
    theirs = small("modernvbert")
    theirs.save(tmp_path)
    file, place = tmp_path / "model.safetensors", "model.text_model.embeddings.tok_embeddings."
    tensors, config = load_file(file), json.loads((tmp_path / "config.json").read_text())
    table = tensors[f"{place}weight"]
    apart = {
        f"{place}weight": table[:400].clone(),
        f"{place}additional_embedding.weight": table[400:].clone(),
    }
    save_file(tensors | apart, file)
    config["text_config"]["vocab_size"] = 400
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_vision_language(tmp_path, dtype=torch.float32, device=CPU)
    wanted = theirs.pages([opened(data) for data in pages()[:2]]) + theirs.queries(QUERIES)
    assert (
        worst(vectors(model, prepare_pages(model)[:2] + prepare_queries(model)), wanted)
        <= FLOAT_BOUND
    )


def test_adapters_are_merged_into_their_base(tmp_path: Path) -> None:
    """Adapters are saved by PEFT for colpali-engine: of the language model, the tower and the
    projection."""
    theirs, base, adapter = small("qwen2_5_vl"), tmp_path / "base", tmp_path / "adapter"
    theirs.save(base)
    images = [opened(data) for data in pages()[:2]]
    adapted = write_vlm_adapter("qwen2_5_vl", adapter, "some/base")
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert read_base_model(adapter) == "some/base"
    assert read_base_model(base) == ""
    with pytest.raises(ModelBroken, match="needs its base model 'some/base'"):
        load_vision_language(adapter, dtype=torch.float32, device=CPU)
    model = load_vision_language(adapter, dtype=torch.float32, device=CPU, base=base)
    wanted = adapted.pages(images) + adapted.queries(QUERIES)
    assert (
        worst(vectors(model, prepare_pages(model)[:2] + prepare_queries(model)), wanted)
        <= FLOAT_BOUND
    )
    odd = {
        f"base_model.model.model.extra.lora_{factor}.weight": torch.zeros(3, 3) for factor in "AB"
    }
    save_file(tensors | odd, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelBroken, match="an adapter updates the tensor"):
        load_vision_language(adapter, dtype=torch.float32, device=CPU, base=base)


@torch.inference_mode()
def test_language_models_embed_and_rerank(tmp_path: Path) -> None:
    """Qwen3-VL-Embedding returns the last token's state; Qwen3-VL-Reranker returns yes or no, with
    images on either side.
    """
    theirs = conversation()
    theirs.save(tmp_path)
    with pytest.raises(ModelBroken, match="a card must define the language model's use"):
        load_vision_language(tmp_path, dtype=torch.float32, device=CPU)
    page, part = pages()[1], Part("a page", "items[0].parts[1]")
    mark = "<|vision_start|><|image_pad|><|vision_end|>"

    dense = load_vision_language(tmp_path, dtype=torch.float32, device=CPU, use="dense")
    begin = "<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    hidden, _ = theirs.last(f"{begin}{mark}a page{end}", [opened(page)])
    one = dense.input.encode_parts(
        [Part(page, "items[0].parts[0]"), part], "items[0]", instruction="Find it."
    )
    other = dense.input.encode_texts(["a page"], "document", "end", lambda _: "items[0].text")
    got = vectors(dense, [one, *other], "dense")
    assert worst(got[:1], [torch.nn.functional.normalize(hidden, dim=-1)]) <= FLOAT_BOUND
    words, _ = theirs.last(
        f"{begin}a page{end}".replace("Find it.", "Represent the user's input."), []
    )
    assert worst(got[1:], [torch.nn.functional.normalize(words, dim=-1)]) <= FLOAT_BOUND

    score = load_vision_language(tmp_path, dtype=torch.float32, device=CPU, use="score")
    pair = score.input.encode_pair(
        [Part("what?", "query.text")], [Part(page, "documents[0].image")], "documents[0]"
    )
    text = f"<Instruct>: Retrieve relevant documents for the query.<Query>:what?\n<Document>:{mark}"
    judged = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        "provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    _, logits = theirs.last(
        f"<|im_start|>system\n{judged}<|im_end|>\n<|im_start|>user\n{text}{end}", [opened(page)]
    )
    yes, no = (score.input.text.token_id(word) for word in ("yes", "no"))
    backbone = score.backbones[0]
    batch = backbone.pack([pair], [None])
    (found,) = backbone.heads["score"].forward(
        backbone.encoder.forward(batch, "last"), batch, [pair]
    )
    torch.testing.assert_close(found[0, 0], logits[yes] - logits[no], rtol=1e-5, atol=1e-5)
    wordless = replace(dense.input, prompts=replace(dense.input.prompts, instruction=""))
    with pytest.raises(InvalidInput, match="takes no instruction"):
        wordless.encode_texts(
            ["a"], "query", "end", lambda _: "items[0].text", instruction="Find it."
        )


def test_sentence_transformers_pooling_is_served(tmp_path: Path) -> None:
    conversation().save(tmp_path)
    kinds = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "", "type": kind} for kind in kinds])
    )
    model = load_vision_language(tmp_path, dtype=torch.float32, device=CPU)
    assert list(model.backbones[0].heads) == ["dense"]
