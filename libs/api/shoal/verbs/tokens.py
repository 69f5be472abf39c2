"""The verbs of a model's tokenizer. See `shoal.verbs` for how clients get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from shoal.options import CallOptions, with_options
from shoal.requests.tokens import DetokenizePlan, TokenizePlan
from shoal.tasks import Truncation
from shoal.tokens import DetokenizeResult, TokenIds, TokenizeResult
from shoal.verbs.base import ClientBase


@with_options
async def tokenize(
    client: ClientBase,
    model: str,
    texts: str | Sequence[str],
    *,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    count_only: bool = False,
    return_tokens: bool = False,
    **options: Unpack[CallOptions],
) -> TokenizeResult:
    """Return the token ids of texts by the model's own tokenizer, with their positions and counts.

    The model is loaded as for `encode`, but runs no forward pass. Prompts are not added.
    Raises ShoalError.

    Args:
        texts: one text or several, each of at most 96 KiB.
        truncation: by default all tokens of a text are returned, with the number that `encode`
            would keep; "end" and "start" return only those, and "none" refuses a longer text.
        count_only: return counts without ids.
        return_tokens: return the tokens' texts from the vocabulary, too.
    """
    plan = TokenizePlan(
        texts,
        model,
        options,
        truncation=truncation,
        special=add_special_tokens,
        count_only=count_only,
        names=return_tokens,
    )
    return await client._caller.run(plan, options)


@with_options
async def detokenize(
    client: ClientBase,
    model: str,
    ids: TokenIds | Sequence[TokenIds],
    *,
    skip_special_tokens: bool = False,
    **options: Unpack[CallOptions],
) -> DetokenizeResult:
    """Return the texts that the model's tokenizer makes of ids: of one sequence, or of several.
    Raises ShoalError.
    """
    plan = DetokenizePlan(ids, model, options, skip_special=skip_special_tokens)
    return await client._caller.run(plan, options)
