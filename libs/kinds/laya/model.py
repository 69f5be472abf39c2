"""laya: a choice among the request's labels, each an option after a marker of one sequence."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from libs.errors import ModelBroken
from libs.kinds.laya.card import FILE, TOKENIZER_FOLDER, read_laya
from libs.kinds.laya.head import OptionsHead
from libs.kinds.laya.processor import LayaProcessor, MarkerTokens
from libs.models.text.heads.state import HeadState
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.tokenising.text import special_token
from libs.models.text.tokenising.tokenizer import load_tokenizer


def build(parts: EncoderParts) -> Built:
    settings, size = read_laya(parts.directory), parts.encoder.hidden_size
    if parts.encoder.causal:
        raise ModelBroken(
            f"encoder/config.json: describes a decoder ({parts.card.family}): its options do not "
            "see the text"
        )
    if size % max(1, size // 64):
        raise ModelBroken(
            f"encoder/config.json: `hidden_size` is {size}, not a multiple of the head size 64"
        )
    state = HeadState(parts.rest, parts.device, FILE)
    head = OptionsHead(state, settings.layers, size, parts.file)
    state.drop("act_head.")  # whether to act, which answers do not contain
    state.drop("temperature")  # of the training; answers use those of rl_agent_config.json
    state.check_all_used()
    tokenizer = load_tokenizer(parts.directory / TOKENIZER_FOLDER, lowercase=False)
    processor = LayaProcessor(parts.card, settings, tokenizer, _marks(parts, tokenizer))
    return Built({"options": head}, processor, tokenizer)


def _marks(parts: EncoderParts, tokenizer: Tokenizer) -> MarkerTokens:
    folder = parts.directory / TOKENIZER_FOLDER
    first, last, option = (
        _token(folder, tokenizer, role) for role in ("cls_token", "sep_token", "mask_token")
    )
    return MarkerTokens(first, last, option, text=special_token(folder, "mask_token"))


def _token(folder: Path, tokenizer: Tokenizer, role: str) -> int:
    index: int | None = tokenizer.token_to_id(special_token(folder, role))
    if index is None:
        raise ModelBroken(
            f"{TOKENIZER_FOLDER}/tokenizer_config.json: tokenizer.json does not contain its "
            f"`{role}`"
        )
    return index


load = text_loader(build)
