"""Every family of vision-language models against transformers on random weights: equal, and the same alone as among others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.errors import InputTooLong, InvalidInput
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language, model_types
from libs.models.images.vlm.parts import ImagePart, Part, TextPart
from libs.models.images.vlm.tower import ImageTower
from libs.models.work import InputSequence
from tests.parity.vlm_models import MODELS, QUERIES, Small, opened, pages, small

# transformers and its dependencies warn of their own future.
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
def vectors(model: VisionLanguageModel, sequences: Sequence[InputSequence], head: str = "multi_vector") -> list[Tensor]:
    """The head's outputs for sequences in one packed batch, of length 1."""
    (trunk,) = model.trunks
    batch = trunk.pack(sequences, [None] * len(sequences))
    hidden = trunk.encoder.forward(batch)
    arrays = tuple(one.numpy() for one in trunk.heads[head].forward(hidden, batch, sequences))
    outputs = trunk.heads[head].split(arrays, sequences)
    return [torch.nn.functional.normalize(torch.from_numpy(np.asarray(one)), dim=-1) for one in outputs]


def worst(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error of a vector, relative to its largest value."""
    assert [one.shape for one in got] == [one.shape for one in wanted]
    return max(((one - other).abs().amax(-1) / other.abs().amax(-1)).max().item() for one, other in zip(got, wanted, strict=True))


def pages_of(model: VisionLanguageModel) -> list[InputSequence]:
    return [model.input.sequence(data, f"items[{number}]") for number, data in enumerate(pages())]


def queries_of(model: VisionLanguageModel) -> list[InputSequence]:
    return model.input.of_texts(QUERIES, "query", "end", lambda number: f"items[{number}].text")


def test_every_family_is_in_the_table() -> None:
    assert sorted({kind.split("-")[0] for kind in MODELS}) == sorted(model_types())


def test_pages_and_queries_equal_transformers(kind: str, model: VisionLanguageModel) -> None:
    """One batch of all, and each alone."""
    wanted = small(kind).pages([opened(data) for data in pages()]) + small(kind).queries(QUERIES)
    sequences = pages_of(model) + queries_of(model)
    together = vectors(model, sequences)
    assert worst(together, wanted) <= FLOAT_BOUND
    alone = [vectors(model, [one])[0] for one in sequences]
    assert worst(alone, together) <= 5e-6


def test_bfloat16_is_as_good_as_the_reference(kind: str, directory: Path) -> None:
    theirs = small(kind)
    images = [opened(data) for data in pages()]
    exact = torch.cat(theirs.pages(images) + theirs.queries(QUERIES))
    halved = Small(copy.deepcopy(theirs.model).to(torch.bfloat16), theirs.processor)
    reference = torch.cat(halved.pages(images, torch.bfloat16) + halved.queries(QUERIES, torch.bfloat16))
    model = load_vision_language(directory, dtype=torch.bfloat16, device=CPU)
    own = torch.cat(vectors(model, pages_of(model) + queries_of(model)))
    assert (own - exact).norm() <= 3 * (reference - exact).norm()


def test_prices_are_known_from_the_header(model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = pages_of(model)
    monkeypatch.setattr("libs.models.images.vlm.parts.decode", None)
    for data, one in zip(pages(), sequences, strict=True):
        assert model.input.tokens(data, "items[0]") == one.tokens
        tower = model.trunks[0].tower
        assert isinstance(tower, ImageTower)
        assert one.rows is not None
        assert model.input.patches(data, "items[0]") == sum(tower.tokens_of(picture) for picture in one.rows.inputs)


def test_parts_in_their_order(model: VisionLanguageModel) -> None:
    """Two images and a text between them, in both orders."""
    first, second = pages()[0], pages()[4]
    parts: list[Part] = [ImagePart(first, "parts[0]"), TextPart("and then", "parts[1]"), ImagePart(second, "parts[2]")]
    one = model.input.of_parts(parts, "items[0]")
    swapped = model.input.of_parts(parts[::-1], "items[0]")
    assert one.rows is not None
    assert swapped.rows is not None
    assert one.tokens == swapped.tokens
    assert len(one.rows.places) == len(swapped.rows.places)
    together = vectors(model, [swapped, one])
    assert worst([together[1]], vectors(model, [one])) <= 5e-6


def test_errors_name_the_part(model: VisionLanguageModel) -> None:
    good = ImagePart(pages()[0], "items[2].parts[0]")
    for broken in (b"", pages()[5][:300], b"<svg/>"):
        with pytest.raises(InvalidInput) as caught:
            model.input.of_parts([good, ImagePart(broken, "items[2].parts[1]")], "items[2]")
        assert caught.value.field == "items[2].parts[1]"
    mark = next(one for one in ("<image>", "<|image_pad|>") if model.input.text.token_id(one) == model.input.mark)
    with pytest.raises(InvalidInput, match="image token") as caught:
        model.input.of_parts([good, TextPart(f"a {mark}", "items[2].parts[1]")], "items[2]")
    assert caught.value.field == "items[2].parts[1]"
    with pytest.raises(InvalidInput, match="image token"):
        model.input.of_texts([mark], "query", "end", lambda number: f"items[{number}].text")
    with pytest.raises(InputTooLong) as too:
        model.input.of_parts([good, TextPart("word " * 50_000, "items[2].parts[1]")], "items[2]")
    assert too.value.field == "items[2]"


def test_long_texts_are_cut_within_their_frame(model: VisionLanguageModel) -> None:
    long, short = "what must a licensee do? " * 3_000, "what must a licensee do? "
    frame, limit = model.input.prompts.queries, model.input.text.limit
    for truncation in ("end", "start"):
        cut, whole = model.input.of_texts([long, short], "query", truncation, lambda number: f"items[{number}].text")
        assert cut.tokens == limit > whole.tokens
        assert (cut.ids[-10:] == whole.ids[-10:]).all()
        assert not frame.before or cut.ids[0] == whole.ids[0]
    with pytest.raises(InputTooLong) as caught:
        model.input.of_texts([short, long], "query", "none", lambda number: f"items[{number}].text")
    assert caught.value.field == "items[1].text"
