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
    """Returns the tokens that the model's own tokenizer makes of texts: ids, places in the text,
    and counts.

    The model is loaded as for `encode`, but computes nothing. Every token of a text is returned,
    and how many of them `encode` would keep; with `truncation` "end" or "start" only those that it
    keeps, and "none" refuses a text that is too long. `count_only`: counts alone. `return_tokens`:
    the tokens as the vocabulary writes them, too. A single text is a list of one; each has at most
    96 KiB. Prompts are not added. Raises ShoalError.
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
    """Returns the texts that the model's tokenizer makes of ids: of one sequence, or of several.
    Raises ShoalError.
    """
    plan = DetokenizePlan(
        ids, Options(model, None, "", pool, priority, "raise"), skip_special=skip_special_tokens
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
