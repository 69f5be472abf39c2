"""Load static embedding models: an encoder without layers that looks up a vector for each token,
and the mean over a text's tokens.
"""

from __future__ import annotations

import torch

from libs.kinds.static.parts import load_static_parts
from libs.models.interface.source import LoadArguments
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.runtime.loaded.tiers import copying
from libs.models.runtime.packed_model import PackedModel
from libs.models.text.loading import DTYPES, TextOnlyProcessor, TokenizerGuard, broken_tokenizer
from libs.models.text.tokenising.tokenizer import failing
from libs.models.text.tokens import TokenProcessor
from libs.models.text.windows.processor import WindowedProcessor


def load(source: LoadArguments) -> PackedModel:
    """Load a static embedding model.

    The table stays in float32 unless the catalog's card names a data type: a smaller type would not
    make anything faster.
    """
    card, directory, device = source.card(), source.directory, source.device
    with failing(broken_tokenizer), copying(device):
        parts = load_static_parts(directory, card, device, DTYPES.get(card.dtype, torch.float32))
        windowed = WindowedProcessor(card, parts.processor, parts.tokenizer)
        model = PackedModel(
            card,
            (Backbone(parts.encoder, {"dense": parts.head}),),
            TokenizerGuard(TextOnlyProcessor(windowed)),
            TensorNames({}, (), {}),
            device,
        )
        model.tokens = TokenProcessor(card, parts.tokenizer, parts.limit)
        if device.type != "cpu":
            model.gather()
    return model
