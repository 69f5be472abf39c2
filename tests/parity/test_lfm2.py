"""LFM2 against transformers, and its retrievers, LFM2-ColBERT and LFM2.5's bidirectional models, in
their published layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from transformers.models.lfm2 import modeling_lfm2

from libs.catalog.cards import read_catalog
from libs.errors import InvalidInput
from libs.models import PackedModel, ScoreWork, load_model
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence
from libs.models.layers.convolution import convolve
from libs.models.runtime.backbone import Backbone
from tests.parity.checkpoints import SentenceFiles, random_model, write_checkpoint
from tests.parity.test_decoders import reconfigure
from tests.parity.test_families import load, packed, random_ids, reference, worst
from tests.parity.test_heads import (
    TEXTS,
    assert_close,
    dense,
    scores,
    token_vectors,
    write_json,
    write_pylate_dense,
)

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

BOTH_WAYS = {"architectures": ["Lfm2BidirectionalModel"]}
LENGTHS = [3, 1, 17, 2, 40]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def centred(self: Any, hidden_states: Tensor, **_: object) -> Tensor:
    """Compute Lfm2ShortConv as the code of LFM2.5's checkpoints does: centred, padding included."""
    before, after, values = self.in_proj(hidden_states).chunk(3, dim=-1)
    weight = self.conv.weight
    mixed = F.conv1d(
        (before * values).transpose(1, 2),
        weight,
        self.conv.bias,
        padding=weight.shape[-1] // 2,
        groups=len(weight),
    )[..., : hidden_states.shape[1]]
    return self.out_proj(after * mixed.transpose(1, 2))


def look_both_ways(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change transformers' model as the code of LFM2.5's checkpoints does."""
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", centred)
    for module in model.modules():
        if isinstance(module, modeling_lfm2.Lfm2Model):
            module.config.is_causal = False
        if isinstance(module, modeling_lfm2.Lfm2Attention):
            module.is_causal = False


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_convolution_equals_that_of_each_sequence(
    width: int, after: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((sum(LENGTHS), 8), (8, width), (8,))
    )
    positions = Packed.from_sequences([np.zeros(size, np.int32) for size in LENGTHS]).positions
    found = convolve(x, weight, bias, positions, after=after)
    assert found.dtype is dtype
    for own, one in zip(found.split(LENGTHS), x.split(LENGTHS), strict=True):
        padded = F.pad(one.double().T, (width - 1 - after, after))
        wanted = F.conv1d(padded, weight.double()[:, None], bias.double(), groups=8).T
        torch.testing.assert_close(own, wanted.to(dtype))


@pytest.mark.parametrize("config", [{}, BOTH_WAYS])
def test_sequence_does_not_read_its_neighbours(config: dict[str, object], tmp_path: Path) -> None:
    """Exactly: other tokens before and after it change no bit of a sequence."""
    directory = write_checkpoint("lfm2", tmp_path, layers=3)
    encoder = load(reconfigure(directory, config))
    first, own, last = random_ids((30, 12, 30))
    wanted = packed(encoder, [first, own, last])[1]
    assert torch.equal(packed(encoder, [first[::-1].copy(), own, last[::-1].copy()])[1], wanted)
    assert worst(packed(encoder, [own]), [wanted]) <= 1e-5


@pytest.mark.parametrize(("width", "bias"), [(3, False), (4, True), (5, False)])
def test_bidirectional_model_equals_the_published_code(
    width: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"conv_L_cache": width, "conv_bias": bias}
    ids = random_ids()
    directory = reconfigure(write_checkpoint("lfm2", tmp_path, layers=3, config=config), BOTH_WAYS)
    model = random_model("lfm2", layers=3, config=config)
    look_both_ways(model, monkeypatch)
    exact = reference(model, ids)
    encoder = load(directory)
    assert not encoder.causal
    assert worst(packed(encoder, ids), exact) <= 1e-5
    assert worst([packed(encoder, [sequence])[0] for sequence in ids], exact) <= 1e-5
    batch = Packed.from_sequences(ids)
    both: tuple[Rows, ...] = ("first", "last")
    for rows in both:
        wanted = torch.stack([one[0 if rows == "first" else -1] for one in exact])
        assert worst([encoder(batch, rows=rows)], [wanted]) <= 1e-5
    low = worst(reference(model.to(torch.bfloat16), ids), exact)
    assert worst(packed(load(directory, torch.bfloat16), ids), exact) < 3 * low


def test_prefixes_are_not_shared(tmp_path: Path) -> None:
    """A convolution reads the prefix's last tokens, which another sequence would have."""
    encoder = load(write_checkpoint("lfm2", tmp_path))
    ids = random_ids((9,))[0]
    assert encoder.causal
    assert not encoder.shares_prefixes
    assert encoder.is_graph_capturable
    Backbone(encoder, {}).refuse_outside([InputSequence(ids, seen=3)])
    with pytest.raises(InvalidInput, match="cannot share a prefix"):
        Backbone(encoder, {}).refuse_outside([InputSequence(ids, before=ids)])


def load_carded(directory: Path, model: str) -> PackedModel:
    """Load the model in a directory with the card that is shipped for `model`."""
    card = read_catalog().overrides(model)
    assert card is not None
    return load_model(directory, model, torch.device("cpu"), torch.float32, card)


def write_colbert(directory: Path, **settings: object) -> Path:
    """Write LFM2-ColBERT's layout: PyLate's files, markers that are tokens, no mask token, and
    tensors as transformers' Lfm2Model names them.
    """
    write_checkpoint("lfm2", directory, layers=3, config={"vocab_size": 410})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("[Q] ", "[D] ")])
    tokenizer.save(str(directory / "tokenizer.json"))
    top = {
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 32,
        "document_length": 64,
        "attend_to_expansion_tokens": False,
        "skiplist_words": list("!,.;()"),
        "similarity_fn_name": "MaxSim",
    }
    write_json(directory / "config_sentence_transformers.json", top | settings)
    write_json(
        directory / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ],
    )
    write_pylate_dense(directory / "1_Dense", 64, 16, residual=False)
    return directory


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("model", ["LFM2-ColBERT-350M", "LFM2.5-ColBERT-350M"])
def test_colbert_equals_the_reference(
    model: str, attend: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions read the tokens that expand a query, as in training. transformers 5 sets them to
    zero, and LFM2.5's code restores them.
    """
    directory = write_colbert(tmp_path, attend_to_expansion_tokens=attend)
    theirs = MultiVectorEncoder(str(directory), device="cpu")
    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda states, _: states)
    if model == "LFM2.5-ColBERT-350M":
        look_both_ways(theirs, monkeypatch)
        reconfigure(directory, BOTH_WAYS)
    ours = load_carded(directory, f"LiquidAI/{model}")
    # Alone: padding of a batch would reach the last tokens of the reference's documents.
    queries = theirs.encode_query(TEXTS, batch_size=1)
    documents = theirs.encode_document(TEXTS, batch_size=1)
    for found, wanted in zip(token_vectors(ours, TEXTS, "query"), queries, strict=True):
        assert found.shape == (32, 16)
        assert_close(found, wanted.numpy())
    for found, wanted in zip(token_vectors(ours, TEXTS, "document"), documents, strict=True):
        assert_close(found, wanted.numpy())
    expected = theirs.similarity(queries[:1], documents)[0].numpy()
    assert_close(scores(ours, ScoreWork(TEXTS[0], TEXTS)), expected)


def test_embedding_equals_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2.5-Embedding reads the first token of bidirectional states, and has no Normalize."""
    prompts = {"query": "query: ", "document": "document: "}
    sentence = SentenceFiles(pooling="cls_token", normalize=False, prompts=prompts)
    write_checkpoint("lfm2", tmp_path, layers=3, sentence=sentence)
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    look_both_ways(theirs, monkeypatch)
    ours = load_carded(reconfigure(tmp_path, BOTH_WAYS), "LiquidAI/LFM2.5-Embedding-350M")
    assert ours.card.prompts == prompts
    for role in ("query", "document"):
        wanted = theirs.encode(
            TEXTS, prompt_name=role, normalize_embeddings=ours.card.normalize, batch_size=1
        )
        assert_close(dense(ours, TEXTS, role), wanted)


def test_masked_language_models_prefix_is_read(tmp_path: Path) -> None:
    """Lfm2BidirectionalForMaskedLM of the checkpoint's code keeps the encoder under `lfm2`."""
    directory = reconfigure(write_checkpoint("lfm2", tmp_path), BOTH_WAYS)
    ids = random_ids((1, 20))
    wanted = packed(load(directory), ids)
    stored = load_file(directory / "model.safetensors")
    named = {f"lfm2.{name}": tensor for name, tensor in stored.items()}
    save_file(named | {"lm_head.weight": torch.ones(4, 4)}, directory / "model.safetensors")
    assert worst(packed(load(directory), ids), wanted) == 0.0
