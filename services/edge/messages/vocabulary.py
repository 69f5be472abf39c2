"""Texts of token ids by a vocabulary of OpenAI's tokenizers, in tiktoken's format (SHOAL_CL100K).
Pure.

LangChain's OpenAIEmbeddings sends ids of cl100k_base unless it is told not to. Turned back into
text they are what the caller meant, whatever the model's own tokenizer is.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SPECIAL: Final[Mapping[int, bytes]] = {
    100257: b"<|endoftext|>",
    100258: b"<|fim_prefix|>",
    100259: b"<|fim_middle|>",
    100260: b"<|fim_suffix|>",
    100276: b"<|endofprompt|>",
}
"""Those of cl100k_base, which stand in no file."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token, by its id."""

    tokens: Mapping[int, bytes]

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids. Where it was cut within a character (LangChain cuts at 8,191 tokens),
        U+FFFD stands for what is left of that. Raises KeyError with an id that there is not."""
        return b"".join([self.tokens[one] for one in ids]).decode("utf-8", "replace")


def read_vocabulary(content: bytes) -> Vocabulary:
    """A file of tiktoken's: a line a token, its bytes in base64, a blank, its id. Raises ValueError
    naming the line.
    """
    tokens = dict(SPECIAL)
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[int(rank)] = binascii.a2b_base64(token, strict_mode=True)
        except ValueError:
            raise ValueError(
                f"line {number} is not a token in base64, a blank and its id"
            ) from None
    if len(tokens) == len(SPECIAL):
        raise ValueError("there is no token in it")
    return Vocabulary(tokens)
