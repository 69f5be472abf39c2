"""Load tokenizer.json into the `tokenizers` library: validate the file, and handle the library's
failures.

The file is untrusted. The library obeys it, aborts the process when memory runs out, and panics on
impossible settings. The file is therefore validated against limits (`bounds.py`) before the library
reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, normalizers

from libs.catalog.checkpoint.files import CheckpointConfig, once, read_file, shortened
from libs.errors import ModelBroken, ShoalError
from libs.models.text.tokenising.bounds import refuse_bombs
from libs.models.text.tokenising.settings import apply_settings, missing_tokens

FILE: Final = "tokenizer.json"
MAX_BYTES: Final = 128 << 20
_MAX_VALUES: Final = 4_000_000
"""Maximum JSON values, each of which takes the library 32 bytes while it reads. The largest
published vocabularies have 1.3 million, with their merges.
"""


def load_tokenizer(directory: Path, *, lowercase: bool) -> Tokenizer:
    """Load a directory's tokenizer.json, with the settings of tokenizer_config.json.

    Raises ModelBroken for a file that cannot be read, or with which a short text could take very
    long or become very large.

    Args:
        lowercase: Convert texts to lower case first, in addition to the file's normaliser.
    """
    data = read_file(directory, FILE, MAX_BYTES)
    if data is None:
        raise ModelBroken(f"{FILE}: cannot be read: the file does not exist in {directory}")
    parsed = _parsed(data)
    tokens = parsed.get("added_tokens")
    added = tokens if isinstance(tokens, list) else []
    missing = missing_tokens(
        directory, frozenset(str(each.get("content")) for each in added if isinstance(each, dict))
    )
    refuse_bombs(CheckpointConfig(FILE, {**parsed, "added_tokens": [*added, *missing]}))
    with failing(_broken):
        try:
            tokenizer: Tokenizer = Tokenizer.from_buffer(data)
        except ValueError as error:
            raise _broken(f"cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        apply_settings(tokenizer, directory, missing)
    if lowercase:
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


@contextmanager
def failing(error_of: Callable[[str], ShoalError]) -> Iterator[None]:
    """Convert the library's panics and bare Exceptions, raised for impossible requests, into
    `error_of` errors.

    A PanicException is a BaseException: it would escape every handler and end its thread.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise error_of(shortened(str(error), 200)) from None
        raise


def largest_id(tokenizer: Tokenizer) -> int:
    """Return the largest id of the vocabulary. Ids need not be contiguous."""
    return max(tokenizer.get_vocab().values(), default=-1)


def _parsed(data: bytes) -> Mapping[str, object]:
    """Return the JSON as the library will read it.

    Raises ModelBroken for JSON that the library would read differently, or in far more memory.
    """
    if (values := data.count(b",")) > _MAX_VALUES:
        raise _broken(f"has up to {values:,} values; the maximum is {_MAX_VALUES:,}")
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _broken(f"cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, dict):
        raise _broken("must contain a JSON object")
    return found


def _broken(problem: str) -> ModelBroken:
    return ModelBroken(shortened(f"{FILE}: {problem}"))


def need_tokens(tokenizer: Tokenizer, tokens: Iterable[str], advice: str) -> None:
    """Raise ModelBroken, with the advice, unless the vocabulary has all tokens of a prompt."""
    for token in tokens:
        if tokenizer.token_to_id(token) is None:
            raise ModelBroken(
                f"tokenizer.json: token {token!r}, which the prompt needs, is missing. {advice}"
            )
