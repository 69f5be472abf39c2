"""A model with other input than token ids: rows of embeddings, a tower that computes them, and a
second encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.errors import InvalidInput
from libs.models import EncodeWork, InputRows, InputSequence, Output, PackedModel, Prepared, Result
from libs.models.interface.packed import Packed
from libs.models.interface.processor import Processor
from libs.models.interface.work import CancelCheck, Work, never_cancelled
from libs.models.layers.embeddings import InputLayer
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import EncoderSpec, LayerSpec
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.text.heads.pooled import PooledHead
from tests.models.conftest import load
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

CPU = torch.device("cpu")
PATCH = 12
"""Numbers in a patch."""


def ids(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def vectors(outputs: Sequence[Output]) -> NDArray[np.float32]:
    return np.stack(cast("Sequence[NDArray[np.float32]]", outputs))


class Patches(InputLayer):
    """Patches to hidden states, by one projection; the encoder takes no token ids."""

    def __init__(self, hidden: int, longest: int) -> None:
        super().__init__()
        self.project = nn.Linear(PATCH, hidden)
        self.max_positions, self.row_size = longest, PATCH

    def forward(self, batch: Packed) -> Tensor:
        assert batch.given is not None
        return cast(Tensor, self.project(batch.given.values)).index_select(
            0, batch.given.places.argsort()
        )


def patch_encoder(hidden: int = 64) -> PackedEncoder:
    torch.manual_seed(7)
    spec = EncoderSpec(
        hidden=hidden,
        heads=4,
        head_size=hidden // 4,
        ffn=96,
        layers=(LayerSpec(),) * 2,
        norm="pre",
        norm_eps=1e-5,
        activation="gelu",
    )
    encoder = PackedEncoder(spec, Patches(hidden, longest=32))
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.1)
    encoder.prepare()
    return encoder.requires_grad_(False).eval()


class Pairs(nn.Module):
    """A tower that makes one row of an encoder's input of two rows of bytes: the sum of their
    projections.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.weight = nn.Parameter(torch.randn(PATCH, hidden) / 50, requires_grad=False)

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        rows = torch.from_numpy(np.concatenate(inputs)).float() @ self.weight
        return rows[0::2] + rows[1::2]


class Fixed(Processor):
    """Prepares its input unchanged."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def prepare(self, work: Work, check_cancelled: CancelCheck) -> Prepared:
        return self._prepared

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        raise NotImplementedError


def joined(
    text: PackedModel,
    *further: Backbone,
    first: Backbone | None = None,
    prepared: Prepared | None = None,
) -> PackedModel:
    """A model of the text model's backbone, or `first`, and further ones."""
    given = prepared or Prepared(EncodeWork([]), "dense", [])
    return PackedModel(
        text.card,
        (first or text.backbones[0], *further),
        Fixed(given),
        TensorNames({}, (), {}),
        CPU,
    )


def of_images(*counts: int) -> list[InputSequence]:
    numbers = np.random.default_rng(3)
    return [
        InputSequence(
            np.zeros(count, np.int32),
            rows=InputRows(
                np.arange(count, dtype=np.int32),
                numbers.standard_normal((count, PATCH)).astype(np.float32),
            ),
        )
        for count in counts
    ]


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3", "gemma3_text", "deberta-v2"])
def test_rows_of_embeddings_take_the_place_of_ids(tmp_path: Path, kind: str) -> None:
    """The embeddings of some tokens as rows give what their ids give, alone and among sequences of
    ids.
    """
    model = load(write_checkpoint(kind, tmp_path, sentence=SentenceFiles()))
    whole = InputSequence(ids(5, 17, 33, 9, 21, 40))
    with torch.inference_mode():
        embedded = (
            model.backbones[0].encoder.embed.forward(Packed.from_sequences([whole.ids])).numpy()
        )
    places = ids(1, 2, 4)
    given = InputSequence(ids(5, 0, 0, 9, 0, 40), rows=InputRows(places, embedded[places]))
    other, third = InputSequence(ids(8, 3, 5)), InputSequence(ids(*range(1, 20)))
    wanted = vectors(model.forward("dense", [whole, other, third]))
    np.testing.assert_allclose(
        vectors(model.forward("dense", [given])), wanted[:1], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        vectors(model.forward("dense", [third, given, other])),
        wanted[[2, 0, 1]],
        rtol=1e-5,
        atol=1e-6,
    )
    plain = InputSequence(given.ids)
    assert np.abs(vectors(model.forward("dense", [plain])) - wanted[:1]).max() > 1e-3, (
        "placeholders alone are another text"
    )


def test_two_encoders_in_one_model(embedder: PackedModel) -> None:
    encoder = patch_encoder()
    model = joined(embedder, Backbone(encoder, {"image": PooledHead(("mean",), ())}))
    assert set(model.heads) == {"dense", "dense_spans", "image"}
    assert model.bytes == embedder.bytes + encoder.bytes
    assert model.probe() >= embedder.probe()
    images = of_images(9, 4, 25)
    together = vectors(model.forward("image", images))
    for number, image in enumerate(images):
        np.testing.assert_allclose(
            vectors(model.forward("image", [image]))[0], together[number], rtol=1e-5, atol=1e-6
        )
    with torch.inference_mode():
        alone = encoder.forward(Backbone(encoder, {}).pack(images[:1], [None])).mean(0).numpy()
    np.testing.assert_allclose(together[0], alone, rtol=1e-5, atol=1e-6)
    texts = [InputSequence(ids(5, 17, 33)), InputSequence(ids(8, 3))]
    np.testing.assert_array_equal(
        vectors(model.forward("dense", texts)), vectors(embedder.forward("dense", texts))
    )


def test_input_longer_than_its_encoder_is_refused(embedder: PackedModel) -> None:
    """The text encoder's limits are others: 128 positions, and a vocabulary."""
    backbone = Backbone(patch_encoder(), {"image": PooledHead(("mean",), ())})
    fits, too_long = (Prepared(EncodeWork([]), "image", of_images(count)) for count in (32, 33))
    assert (
        joined(embedder, backbone, prepared=fits).prepare(EncodeWork([]), never_cancelled) is fits
    )
    with pytest.raises(InvalidInput, match="produces 33 tokens; its encoder takes at most 32"):
        joined(embedder, backbone, prepared=too_long).prepare(EncodeWork([]), never_cancelled)


def test_tower_makes_the_rows(embedder: PackedModel) -> None:
    """Bytes through the tower give the same result as the tower's rows without it; its weights are
    counted and moved with the model's.
    """
    tower = Pairs(64)
    plain = embedder.backbones[0]
    model = joined(embedder, first=Backbone(plain.encoder, plain.heads, tower))
    assert model.bytes == embedder.bytes + tower.weight.nbytes
    assert tower in model.modules()
    pixels = np.random.default_rng(5).integers(0, 256, (6, PATCH), np.uint8)
    rows = tower.forward([pixels]).numpy()
    text = InputSequence(ids(5, 17, 33, 9))
    seen = InputSequence(ids(5, 0, 0, 0, 9), rows=InputRows(ids(1, 2, 3), pixels))
    wanted = vectors(
        embedder.forward("dense", [text, replace(seen, rows=InputRows(ids(1, 2, 3), rows))])
    )
    np.testing.assert_allclose(
        vectors(model.forward("dense", [text, seen])), wanted, rtol=1e-5, atol=1e-6
    )
