"""Load static embedding models: an encoder without layers that looks up a vector for each token,
and the mean over a text's tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.models.backbone import Backbone
from libs.models.loaded.peft import Names
from libs.models.loaded.tiers import copying
from libs.models.packed_model import PackedModel
from libs.models.text.loading import DTYPES, TextOnlyProcessor, TokenizerGuard, broken_tokenizer
from libs.models.text.static_parts import load_static_parts
from libs.models.text.tokenising.tokenizer import failing
from libs.models.text.tokens import TokenProcessor
from libs.models.text.windows.processor import WindowedProcessor


def load_static_model(
    directory: Path, model_id: str, device: torch.device, overrides: Overrides | None = None
) -> PackedModel:
    """Load a static embedding model, as `libs.models.load_model` does.

    The table stays in float32 unless the catalog's card names a data type: a smaller type would not
    make anything faster.
    """
    card = read_card(directory, model_id, overrides)
    with failing(broken_tokenizer), copying(device):
        parts = load_static_parts(directory, card, device, DTYPES.get(card.dtype, torch.float32))
        windowed = WindowedProcessor(card, parts.processor, parts.tokenizer)
        model = PackedModel(
            card,
            (Backbone(parts.encoder, {"dense": parts.head}),),
            TokenizerGuard(TextOnlyProcessor(windowed)),
            Names({}, (), {}),
            device,
        )
        model.tokens = TokenProcessor(card, parts.tokenizer, parts.limit)
        if device.type != "cpu":
            model.gather()
    return model
