"""NV-Embed: a latent attention layer after the encoder."""

from __future__ import annotations

from libs.kinds.nvembed.card import read_latent
from libs.kinds.nvembed.head import LatentHead
from libs.kinds.nvembed.processor import LatentProcessor
from libs.models.text.heads.state import HeadState
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.tokenising.text import special_token


def build(parts: EncoderParts) -> Built:
    """Every tensor outside the encoder belongs to the latent attention layer."""
    settings, state = (
        read_latent(parts.directory),
        HeadState(parts.rest, parts.device, "config.json"),
    )
    head = LatentHead(settings, state, parts.encoder.hidden_size, parts.encoder.dtype, parts.file)
    state.check_all_used()
    end = special_token(parts.root, "eos_token") if settings.ends else ""
    text = parts.text()
    return Built({"dense": head}, LatentProcessor(parts.card, text, end), text.tokenizer)


load = text_loader(build)
