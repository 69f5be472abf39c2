"""The verbs of a model's tokenizer. See `shoal.verbs` for how clients get them."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.calls.caller import Progress
from shoal.requests.arguments import Options
from shoal.requests.tokens import DetokenizePlan, TokenizePlan
from shoal.tasks import Priority, Truncation
from shoal.tokens import DetokenizeResult, TokenIds, TokenizeResult
from shoal.verbs.base import ClientBase


async def tokenize(
    client: ClientBase,
    model: str,
    texts: str | Sequence[str],
    *,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    count_only: bool = False,
    return_tokens: bool = False,
    pool: str = "",
    priority: Priority | None = None,
    timeout: float | None = None,
    on_progress: Progress | None = None,
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
    options = Options(model, truncation, "", pool, priority, "raise")
    plan = TokenizePlan(
        texts, options, special=add_special_tokens, count_only=count_only, names=return_tokens
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def detokenize(
    client: ClientBase,
    model: str,
    ids: TokenIds | Sequence[TokenIds],
    *,
    skip_special_tokens: bool = False,
    pool: str = "",
    priority: Priority | None = None,
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> DetokenizeResult:
    """Return the texts that the model's tokenizer makes of ids: of one sequence, or of several.
    Raises ShoalError.
    """
    plan = DetokenizePlan(
        ids, Options(model, None, "", pool, priority, "raise"), skip_special=skip_special_tokens
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
