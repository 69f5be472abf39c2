"""bge-m3's three forms against FlagEmbedding's formulas, implemented below one text at a time.

The package needs an older transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from libs.errors import InvalidInput, ModelBroken
from libs.models import (
    EncodeResult,
    EncodeWork,
    PackedModel,
    Representation,
    ScoreResult,
    ScoreWork,
    load_model,
)
from tests.models.restoring import restore
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.test_heads import TEXTS, assert_close, dense, run, write_json

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

Rows = list[NDArray[np.float32]]
ALL: tuple[Representation, ...] = ("dense", "sparse", "multi_vector")


@dataclass(frozen=True, slots=True)
class Reference:
    """The output of FlagEmbedding's M3 model for a text: a unit vector, weights by token id, unit
    vectors of all tokens but [CLS].
    """

    dense: torch.Tensor
    lexical: Mapping[int, float]
    tokens: torch.Tensor


def write_m3(
    directory: Path,
    *,
    layers: tuple[str, ...] = ("sparse_linear", "colbert_linear"),
    pickled: bool = False,
) -> Path:
    files = SentenceFiles(pooling="cls_token", normalize=True)
    write_checkpoint("xlm-roberta", directory, sentence=files)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    write_json(directory / "tokenizer_config.json", settings | {"eos_token": "</s>"})
    for name, layer in linears().items():
        if name in layers:
            tensors = {
                key: tensor.detach().contiguous() for key, tensor in layer.state_dict().items()
            }
            torch.save(tensors, directory / f"{name}.pt") if pickled else save_file(
                tensors, directory / f"{name}.safetensors"
            )
    return directory


def linears() -> dict[str, torch.nn.Linear]:
    made = {"sparse_linear": torch.nn.Linear(64, 1), "colbert_linear": torch.nn.Linear(64, 24)}
    generator = torch.Generator().manual_seed(6)
    for layer in made.values():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return made


@torch.inference_mode()
def reference(
    directory: Path, texts: list[str], dtype: torch.dtype = torch.float32
) -> list[Reference]:
    """Compute each text alone: cls pooling; the largest relu(linear) by token id; linear of the
    tokens from the second on.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, dtype=dtype).eval()
    layers = {name: layer.to(dtype) for name, layer in linears().items()}
    unused = {
        tokenizer.cls_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    found = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
        hidden = model(**inputs).last_hidden_state[0]
        weights: dict[int, float] = {}
        for number, weight in zip(
            inputs["input_ids"][0].tolist(),
            layers["sparse_linear"](hidden)[:, 0].relu().tolist(),
            strict=True,
        ):
            if number not in unused and weight > weights.get(number, 0.0):
                weights[number] = weight
        vectors = torch.nn.functional.normalize(layers["colbert_linear"](hidden[1:]), dim=-1)
        found.append(
            Reference(
                torch.nn.functional.normalize(hidden[0], dim=-1).float(), weights, vectors.float()
            )
        )
    return found


def parts_of_score(query: Reference, document: Reference) -> tuple[float, float, float]:
    """Return FlagEmbedding's dense, sparse and colbert score."""
    lexical = sum(
        weight * document.lexical.get(number, 0.0) for number, weight in query.lexical.items()
    )
    best = (query.tokens @ document.tokens.T).amax(1).sum() / len(query.tokens)
    return float(query.dense @ document.dense), lexical, float(best)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "test/m3", torch.device("cpu"), dtype)


def encode(model: PackedModel, *forms: Representation) -> EncodeResult:
    result = run(model, EncodeWork(TEXTS, representations=forms))[0]
    assert isinstance(result, EncodeResult)
    return result


def scores(model: PackedModel, work: ScoreWork) -> NDArray[np.float32]:
    result = run(model, work)[0]
    assert isinstance(result, ScoreResult)
    return result.scores


def lexical(result: EncodeResult) -> list[dict[int, float]]:
    assert result.sparse is not None
    rows, values = result.sparse, restore(result.sparse.values)
    return [
        dict(zip(rows.indices[start:end].tolist(), values[start:end].tolist(), strict=True))
        for start, end in pairwise(rows.offsets)
    ]


def token_rows(result: EncodeResult) -> Rows:
    assert result.multi_vector is not None
    values = restore(result.multi_vector.values)
    return [values[start:end] for start, end in pairwise(result.multi_vector.offsets)]


def test_one_forward_returns_three_representations(tmp_path: Path) -> None:
    model, expected = load(write_m3(tmp_path)), reference(tmp_path, TEXTS)
    card = model.card
    assert (card.kind, card.representations, card.dimensions, card.multi_vector_dimensions) == (
        "hybrid",
        ALL,
        64,
        24,
    )
    assert (
        model.prepare(EncodeWork(TEXTS, representations=("multi_vector", "dense", "sparse"))).head
        == "dense+sparse+multi_vector"
    )
    result = encode(model, *ALL)
    assert result.dense is not None
    assert_close(restore(result.dense), torch.stack([item.dense for item in expected]).numpy())
    for ours, theirs in zip(token_rows(result), expected, strict=True):
        assert_close(ours, theirs.tokens.numpy())
    largest = max(weight for item in expected for weight in item.lexical.values())
    for weights, theirs in zip(lexical(result), expected, strict=True):
        assert list(weights) == sorted(theirs.lexical)
        assert weights == pytest.approx(theirs.lexical, rel=1e-5, abs=1e-5 * largest)
    assert any(item.lexical for item in expected)


def test_each_representation_alone(tmp_path: Path) -> None:
    model = load(write_m3(tmp_path))
    together, main = encode(model, *ALL), encode(model)
    assert together.dense is not None
    assert (main.sparse, main.multi_vector) == (None, None)
    assert_close(dense(model, TEXTS), restore(together.dense))
    alone = encode(model, "sparse")
    assert (alone.dense, alone.multi_vector) == (None, None)
    for one, other in zip(lexical(alone), lexical(together), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    for rows, others in zip(
        token_rows(encode(model, "multi_vector")), token_rows(together), strict=True
    ):
        assert_close(rows, others)


def test_bfloat16_is_as_good_as_the_reference_in_bfloat16(tmp_path: Path) -> None:
    model, exact = load(write_m3(tmp_path), torch.bfloat16), reference(tmp_path, TEXTS)
    half, result = reference(tmp_path, TEXTS, torch.bfloat16), encode(model, *ALL)
    assert result.dense is not None
    vectors = torch.from_numpy(restore(result.dense))
    rows = [torch.from_numpy(row) for row in token_rows(result)]
    ours = [Reference(*parts) for parts in zip(vectors, lexical(result), rows, strict=True)]
    for error, own in zip(errors(ours, exact), errors(half, exact), strict=True):
        assert 0 < error < 3 * own


def errors(found: list[Reference], exact: list[Reference]) -> tuple[float, float, float]:
    """Return the largest error of each form, over all texts."""
    pairs = list(zip(found, exact, strict=True))
    weights = [
        (one.lexical.get(key, 0.0), weight)
        for one, other in pairs
        for key, weight in other.lexical.items()
    ]
    return (
        max(float((one.dense - other.dense).abs().max()) for one, other in pairs),
        max(abs(one - other) for one, other in weights),
        max(float((one.tokens - other.tokens).abs().max()) for one, other in pairs),
    )


def test_score_is_the_weighted_mean_of_all_three(tmp_path: Path) -> None:
    model, found = load(write_m3(tmp_path)), reference(tmp_path, TEXTS)
    parts = np.array([parts_of_score(found[0], item) for item in found], dtype=np.float32)
    expected = parts @ np.array([0.4, 0.2, 0.4], dtype=np.float32)
    assert_close(scores(model, ScoreWork(TEXTS[0], TEXTS)), expected)
    with pytest.raises(InvalidInput) as caught:
        model.prepare(ScoreWork("a", ["b"], scale="probability"))
    assert caught.value.field == "scale"


@pytest.mark.parametrize(
    ("layer", "place", "weight"), [("sparse_linear", 1, 0.2), ("colbert_linear", 2, 0.4)]
)
def test_single_layer_checkpoint_is_served(
    tmp_path: Path, layer: str, place: int, weight: float
) -> None:
    model, found = load(write_m3(tmp_path, layers=(layer,))), reference(tmp_path, TEXTS)
    assert model.card.representations == ("dense", ALL[place])
    parts = np.array([parts_of_score(found[0], item) for item in found], dtype=np.float32)
    expected = (0.4 * parts[:, 0] + weight * parts[:, place]) / (0.4 + weight)
    assert_close(scores(model, ScoreWork(TEXTS[0], TEXTS)), expected.astype(np.float32))


def test_options_depend_on_requested_representations(tmp_path: Path) -> None:
    model = load(write_m3(tmp_path))
    cut = run(model, EncodeWork(TEXTS, representations=("dense", "sparse"), dimensions=16))[0]
    assert isinstance(cut, EncodeResult)
    assert cut.dense is not None
    assert cut.dense.shape == (len(TEXTS), 16)
    assert run(model, EncodeWork(TEXTS, data_type="int8"))
    for work, field in (
        (EncodeWork(["a"], representations=("sparse",), dimensions=16), "dimensions"),
        (EncodeWork(["a"], representations=("multi_vector",), dimensions=16), "dimensions"),
        (EncodeWork(["a"], representations=("dense",), dimensions=65), "dimensions"),
        (EncodeWork(["a"], representations=("dense", "sparse"), data_type="binary"), "data_type"),
        (
            EncodeWork(["a"], representations=("multi_vector", "dense"), data_type="uint8"),
            "data_type",
        ),
    ):
        with pytest.raises(InvalidInput) as caught:
            model.prepare(work)
        assert caught.value.field == field


def test_pickled_layers_are_not_read(tmp_path: Path) -> None:
    card = load(write_m3(tmp_path, pickled=True)).card
    assert (card.kind, card.representations) == ("dense", ("dense",))
    assert [note.partition(":")[0] for note in card.notes] == [
        "sparse_linear.pt",
        "colbert_linear.pt",
    ]
    assert "`shoal models convert DIR`" in card.notes[0]


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("sparse_linear", {"weight": torch.ones(1, 64)}, "`linear.bias`"),
        (
            "sparse_linear",
            {"weight": torch.ones(2, 64), "bias": torch.ones(2)},
            r"`linear.weight` has the shape \(2, 64\)",
        ),
        (
            "colbert_linear",
            {"weight": torch.ones(8, 32), "bias": torch.ones(8)},
            r"`linear.weight` has the shape \(8, 32\)",
        ),
        (
            "colbert_linear",
            {"weight": torch.ones(8, 64), "bias": torch.ones(8), "more": torch.ones(1)},
            "only `weight` and `bias`",
        ),
        ("colbert_linear", {"bias": torch.ones(8)}, "no matrix `weight`"),
    ],
)
def test_mismatched_layers_are_refused(
    tmp_path: Path, name: str, tensors: dict[str, torch.Tensor], message: str
) -> None:
    write_m3(tmp_path)
    save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelBroken, match=message) as caught:
        load(tmp_path)
    assert f"{name}.safetensors" in str(caught.value)
