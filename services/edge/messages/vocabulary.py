"""Convert token ids of OpenAI's tokenizers to text, by a vocabulary in tiktoken's format
(SHOAL_CL100K). Pure.

LangChain's OpenAIEmbeddings sends ids of cl100k_base by default. Converted to text, they have the
caller's meaning for any tokenizer of the model.
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
"""The special tokens of cl100k_base, which no file contains."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token by its id."""

    tokens: Mapping[int, bytes]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids. If it was cut inside a character (LangChain cuts at 8,191
        tokens), U+FFFD replaces the incomplete character. Raises KeyError for an unknown id.
        """
        return b"".join([self.tokens[one] for one in ids]).decode("utf-8", "replace")


def read_vocabulary(content: bytes) -> Vocabulary:
    """Parse a tiktoken file: per line the token's bytes in base64, a space, and its id. Raises
    ValueError that names the line.
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
                f"line {number} is not a token in base64, a space and its id"
            ) from None
    if len(tokens) == len(SPECIAL):
        raise ValueError("the file contains no tokens")
    return Vocabulary(tokens)
