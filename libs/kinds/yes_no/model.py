"""Rerankers that are causal language models: the logits of "yes" and "no" as the next token after a
pair.

Only those two tokens' rows of the LM head are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libs.catalog.card import Card
from libs.errors import ModelBroken
from libs.kinds.sequence_labels.processor import LabelsProcessor
from libs.models.text.families.decoders.gemma2 import final_softcap
from libs.models.text.heads.answer import AnswerHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.tokenising.chat import ChatPairs
from libs.models.text.tokenising.text import TextProcessor
from libs.models.weights import HeadRule, InFile


def head_table(card: Card) -> dict[str, HeadRule]:
    return {} if card.tied else {"lm_head": InFile("lm_head")}


def build(parts: EncoderParts) -> Built:
    text = parts.text()
    pairs = ChatPairs(parts.card, parts.root, text, shares=parts.encoder.shares_prefixes)
    head = AnswerHead(_rows(parts, text), final_softcap(parts.config))
    return Built({"logits": head}, LabelsProcessor(parts.card, text, pairs), text.tokenizer)


def _rows(parts: EncoderParts, text: TextProcessor) -> Tensor:
    """Return [answers, hidden] float32, from the head's table or, without one, from the token
    embeddings.
    """
    table = parts.state.get("lm_head.weight", parts.encoder.token_weight)
    ids = [_token(answer, text) for answer in parts.card.answers]
    if table.shape[1] != parts.encoder.hidden_size or max(ids) >= table.shape[0]:
        raise ModelBroken(
            f"{parts.file}: the language model's head is {list(table.shape)}, too small for the "
            f"tokens {ids}"
        )
    return table[ids].to(device=parts.device, dtype=torch.float32)


def _token(answer: int | str, text: TextProcessor) -> int:
    found = text.token_id(answer) if isinstance(answer, str) else answer
    if found is None:
        raise ModelBroken(f"tokenizer.json: the answer {answer!r} must be one token")
    return found


load = text_loader(build, head_table)
