"""Log probabilities are those of the text's tokens, of which a character may have several."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from libs.models.generation.reader import extraction, token_text
from libs.models.interface.sequences import GeneratedIds, TokenScore
from libs.models.interface.work import TextWork

EMOJI = "\U0001f600"


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A token for each byte: an emoji has four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


@pytest.mark.parametrize(
    ("whole", "stop", "text"),
    [
        (f"{EMOJI}{EMOJI}{EMOJI} the answer is 42", (), f"{EMOJI}{EMOJI}{EMOJI} the answer is 42"),
        (f"{EMOJI}{EMOJI} the answerEND.", ("END",), f"{EMOJI}{EMOJI} the answer"),
        (f"ends with {EMOJI}END", ("END",), f"ends with {EMOJI}"),
        ("ENDnothing", ("END",), ""),
    ],
)
def test_each_token_of_the_text_has_its_log_probability(
    whole: str, stop: tuple[str, ...], text: str, tokenizer: Tokenizer
) -> None:
    ids = np.array(tokenizer.encode(whole).ids, np.int32)
    scores = tuple(TokenScore(-float(place), ()) for place in range(len(ids)))
    work = TextWork(["a"], top_logprobs=0, stops=stop)
    found = extraction(
        work, tokenizer.decode, GeneratedIds(ids, "stop", scores), partial(token_text, tokenizer)
    )
    assert found.text == text
    assert [token.logprob for token in found.tokens] == [
        -float(place) for place in range(len(text.encode()))
    ]
