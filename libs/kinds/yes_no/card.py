"""Rerankers that are causal language models: the tokens for yes and no, and the chat template that
renders a pair.

The format is that of sentence-transformers 5.4 and later (a LogitScore in modules.json). Older
checkpoints do not name their use; a card of the catalog does, by `kind: yes_no`, `answers` and
`template`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.chat import takes_messages, with_template
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import CheckpointConfig
from libs.catalog.checkpoint.modules import activation
from libs.errors import ModelBroken
from libs.kinds.kind import in_layout

_TIED = (
    "gemma",
    "gemma2",
    "gemma3_text",
)  # families with `tie_word_embeddings` true by default


def yes_no(files: Checkpoint, card: Card) -> Card:
    """Return the card of a reranker. The catalog may give its `answers` and `template`, so that
    they may be empty until `need_answers`.
    """
    score = files.modules.answers
    card = replace(
        card,
        tasks=("score",),
        scoring="yes_no",
        answers=() if score is None else _answers(score),
        tied=files.config.flag("tie_word_embeddings", card.family in _TIED),
        classes=("yes",),
        score_activation=activation(files.top, "activation_fn", "sigmoid"),
    )
    return with_template(files, card) if takes_messages(files) else card


def need_answers(card: Card) -> None:
    """Raise ModelBroken if neither the checkpoint nor the catalog gives
    its answers and template.
    """
    if not card.answers:
        raise ModelBroken(
            f"modules.json: has no LogitScore, which names the tokens for yes and no; {_ADVICE} "
            "`answers`"
        )
    if not card.template:
        raise ModelBroken(
            "sentence_bert_config.json: `modality_config` names no chat template for pairs; "
            f"{_ADVICE} `template`"
        )


_ADVICE = "a card of the catalog can do so, by `detect` with"


def _answers(score: CheckpointConfig) -> tuple[int, ...]:
    if score.values.get("true_token_id") is None:
        raise score.broken("true_token_id", "is missing: it must be the id of the token for yes")
    yes = score.number("true_token_id")
    return (
        (yes,)
        if score.values.get("false_token_id") is None
        else (yes, score.number("false_token_id"))
    )


KIND: Final = in_layout(
    "yes_no",
    lambda files: files.modules.answers is not None,
    yes_no,
    has_template=True,
    check=need_answers,
)
