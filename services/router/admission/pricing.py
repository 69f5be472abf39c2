"""Estimate the tokens of a request from its bytes. Pure.

A request's second step in the router, after `routing/routes.py` and `validation/requests.py`.
Rates, quotas, waits and the size of jobs count these prices.
"""

from __future__ import annotations

from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.router.admission.validation.sizes import Sizes, tokens_per_byte

DEFAULT_TOKENS_PER_BYTE: Final = 0.3
"""Workers' measurements are clamped to these, so that no tenant's texts change others' prices much.

By MiniLM's tokenizer English has 0.21, Japanese 0.33, German 0.35, code 0.42, Russian 0.47, base64
0.79, punctuation 1.0. Only text unknown to the tokenizer has less. Only a text of a few letters has
more, which SPECIAL_TOKENS cover.
"""
TRUNCATED_BYTES_PER_TOKEN: Final = 1024
"""Bytes beyond a model's longest sequence that cost one token: they are truncated, but a worker
must read them.
"""
SPECIAL_TOKENS: Final = 2
"""Added to each sequence by the tokenizers of the bert family, and by most others."""


def price(
    sizes: Sizes, card: models_pb2.ModelCard | None, truncation: pb.Truncation
) -> tuple[list[int], int]:
    """Estimate the tokens of each item, and those that each job repeats. The worker counts exactly
    before it packs a batch.

    1. Truncated bytes cost only their reading. Texts that are divided into chunks or windows are
      not truncated.
    2. Images cost the tokens that the model makes of their size.
    3. Short texts cost the length to which they are padded.
    4. A text to generate costs its longest answer. Generated regions are one text for each label,
       which costs the image as well. Workers measure their speed in the same tokens
       (`Meter.add_steps`).
    """
    rate = tokens_per_byte(card, DEFAULT_TOKENS_PER_BYTE)
    is_cut = truncation != pb.TRUNCATION_NONE and not sizes.chunks
    most = card.max_tokens if card is not None and is_cut else 0
    items = [int(rate * (size + sizes.per_sequence_bytes)) + SPECIAL_TOKENS for size in sizes.items]
    for index, chunks in enumerate(sizes.chunks):
        items[index] += (chunks - 1) * (int(rate * sizes.per_sequence_bytes) + SPECIAL_TOKENS)
    per_job_bytes = int(rate * sizes.per_job_bytes)
    filled = card.images.text_tokens if card is not None else 0
    if filled:
        items = [
            max(tokens, filled) if size else tokens
            for tokens, size in zip(items, sizes.items, strict=True)
        ]
        per_job_bytes = max(per_job_bytes, filled * sizes.per_job_texts) if per_job_bytes else 0
    if most:
        items = [_cut(tokens, most, rate) for tokens in items]
        per_job_bytes = _cut(per_job_bytes, most * max(1, sizes.per_job_texts), rate)
    costs = [tokens * sizes.sequences_per_item for tokens in items]
    for index, own in sizes.images.items():
        costs[index] += own.tokens
    for index, tokens in enumerate(sizes.generated):
        costs[index] += tokens
    return costs, per_job_bytes + sizes.per_job_images.tokens


def price_reading(sizes: Sizes) -> list[int]:
    """Estimate the tokens of each entry of a request that is tokenized without a forward pass."""
    return [SPECIAL_TOKENS + size // TRUNCATED_BYTES_PER_TOKEN for size in sizes.items]


def _cut(tokens: int, most: int, rate: float) -> int:
    """Price a text of a model that takes `most` tokens: truncated tokens cost only their
    reading.
    """
    return (
        tokens
        if tokens <= most
        else most + int((tokens - most) / (rate * TRUNCATED_BYTES_PER_TOKEN))
    )
