"""`shoal tokenize`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from shoal.cli.console import bar, counted, emit, preview, show, table
from shoal.cli.inference.arguments import AsJson, TextFile, Texts
from shoal.cli.inference.files import Selection
from shoal.cli.inference.inputs import located, read
from shoal.cli.model_names import ModelId
from shoal.cli.options import OpenClient, connected
from shoal.options import PoolOption, PriorityOption
from shoal.tasks import Truncation
from shoal.tokens import TokenizeResult, Tokens

_MAX_SHOWN_TOKENS = 20
"""Tokens of a text that the table shows."""


@connected
def tokenize(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    source: TextFile = None,
    count: Annotated[
        bool, typer.Option("--count", help="Print only the number of tokens of each text.")
    ] = False,
    special: Annotated[
        bool,
        typer.Option(
            "--special/--no-special",
            help="Include the special tokens that the model puts around a text.",
        ),
    ] = True,
    truncation: Annotated[
        Truncation | None,
        typer.Option(
            "--truncation",
            help="Show only the tokens that the model keeps; default all.",
            show_default=False,
        ),
    ] = None,
    pool: PoolOption = "",
    priority: PriorityOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens of texts for a model, and the part that it would cut off."""
    records = read(texts, source, Selection(None, None, skips_invalid=False))
    with located(records, "texts"), bar("tokenizing", len(records)) as on_progress:
        result = open_client().tokenize(
            model,
            [record.text for record in records],
            add_special_tokens=special,
            truncation=truncation,
            count_only=count,
            return_tokens=not count,
            pool=pool,
            priority=priority,
            on_progress=on_progress,
        )
    if as_json:
        emit(_document(model, result, count_only=count))
    elif count:
        sys.stdout.writelines(f"{number}\n" for number in result.counts)
    else:
        _show(model, result, [record.text for record in records])


def _document(model: str, result: TokenizeResult, *, count_only: bool) -> dict[str, object]:
    return {
        "model": model,
        "revision": result.revision,
        "max_tokens": result.max_tokens,
        "usage": {"input_tokens": result.usage.input_tokens},
        "timings": asdict(result.timings),
        "results": [_row(tokens, count_only=count_only) for tokens in result],
    }


def _row(tokens: Tokens, *, count_only: bool) -> dict[str, object]:
    row: dict[str, object] = {"count": tokens.count, "kept_tokens": tokens.kept_tokens}
    if count_only:
        return row
    return row | {
        "kept_start": tokens.kept_start,
        "kept_end": tokens.kept_end,
        "ids": tokens.ids.tolist(),
        "starts": tokens.starts.tolist(),
        "ends": tokens.ends.tolist(),
        "tokens": list(tokens.names),
        "special_before": tokens.special_before,
        "special_after": tokens.special_after,
    }


def _show(model: str, result: TokenizeResult, texts: list[str]) -> None:
    made = table(
        f"{model}  {counted(result.usage.input_tokens, 'token')}",
        "text",
        "tokens",
        "kept",
        "",
        right=("tokens", "kept"),
    )
    for text, tokens in zip(texts, result, strict=True):
        made.add_row(
            preview(text), f"{tokens.count:,}", f"{tokens.kept_tokens:,}", " ".join(_names(tokens))
        )
    show(made)


def _names(tokens: Tokens) -> Iterator[str]:
    for name, number in zip(tokens.names[:_MAX_SHOWN_TOKENS], tokens.ids.tolist(), strict=False):
        yield f"{name}:{number}"
    if len(tokens.names) > _MAX_SHOWN_TOKENS:
        yield f"… {len(tokens.names) - _MAX_SHOWN_TOKENS:,} more"
