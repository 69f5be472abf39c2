"""Bounds of the answers to Tokenize and Detokenize, by the size of the request: constants and
arithmetic, no tokenizer.

A router refuses a request with a possibly too large answer before any work is done. It has no
tokenizer, so it computes the maximum number of tokens from these constants, and a worker refuses a
job that exceeds it.
"""

from __future__ import annotations

from typing import Final

TOKEN_BYTES: Final = 12
"""The most bytes of a token in an answer: its id, its start and its end, as variable-length
integers below 2**28.
"""
TEXT_TOKENS: Final = 16
"""Tokens of a text beyond one for each of its bytes: special tokens, and short texts of ligatures
that normalisers take apart.
"""
NAME_BYTES: Final = 8
"""Bytes of tokens' names for each byte of a text: byte-level tokenizers write two for a byte,
others add three to a word.
"""
TEXT_NAME_BYTES: Final = 256
"""Bytes of tokens' names of a text beyond that, mostly of special tokens."""
ID_BYTES: Final = 64
"""Bytes of text for each id. The average of texts is below 8; runs of spaces are tokens of up to
128.
"""
SEQUENCE_BYTES: Final = 512
"""Bytes of text of a sequence beyond that."""
RESULT_BYTES: Final = 48
"""Bytes of a text in an answer in addition to its tokens: counts, and the frames of lists."""


def max_tokens(text_bytes: int, texts: int) -> int:
    """Return the maximum number of tokens of texts with this many bytes."""
    return text_bytes + TEXT_TOKENS * texts


def max_name_bytes(text_bytes: int, texts: int) -> int:
    """Return the most bytes that the names of the tokens of such texts may have."""
    return NAME_BYTES * text_bytes + TEXT_NAME_BYTES * texts


def max_text_bytes(ids: int, sequences: int) -> int:
    """Return the maximum number of bytes of the texts of this many ids."""
    return ID_BYTES * ids + SEQUENCE_BYTES * sequences
