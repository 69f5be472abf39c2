"""Constrain generation by a JSON Schema: llguidance returns the tokens that may follow.

A preparing thread compiles a schema, and matchers of one schema share a cache. The device thread
queries a matcher between two steps, without the GIL: 10 to 100 microseconds a token
(docs/decisions/0048).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from tokenizers import Tokenizer

from libs.errors import InvalidInput, TaskNotSupported
from libs.models.generation.decoding.rules import Bits, Ids
from libs.models.generation.grammars.schemas import FIELD, check_schema, refuse
from libs.models.generation.tools import FIELD as TOOLS_FIELD
from libs.models.generation.tools import (
    CallMarks,
    ToolForm,
    grammar_source,
    has_strict_function,
    parameter_schemas,
)
from libs.models.interface.work import TextWork

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_CACHED_SCHEMAS: Final = 16
"""Compiled schemas cached per model (least recently used are evicted)."""
LIMITS: Final = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
}
"""Limits of a schema's compilation and of a step, in llguidance's units; a state takes 1 to 2
kB.
"""
_FORM: Final[JsonCompileOptions] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
}
"""The whitespace of Python's json.dumps. If a grammar allows any whitespace, a small model may
write nothing else.
"""


class Matcher(Protocol):
    """The part of llguidance's LLMatcher in use. After an error its state never changes."""

    def deep_copy(self) -> Matcher: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled schema.

    Attributes:
        stops: Tokens that end an answer.
    """

    matcher: Matcher
    stops: Bits

    def allows(self) -> Following:
        """Start the grammar for one sequence: an `Allows`."""
        return Following(self.matcher.deep_copy(), self.stops)


class Following:
    """A grammar's state in one sequence. Once the grammar cannot be followed, only a stop token is
    allowed.
    """

    def __init__(self, matcher: Matcher, stops: Bits) -> None:
        self._matcher, self._stops = matcher, stops
        # State of the device thread.
        self._seen: Ids = np.zeros(0, np.int32)

    def __call__(self, generated: Ids) -> Bits:
        """Return the tokens that may follow. For beams, tokens that differ from the last call are
        rolled back.
        """
        both = min(len(generated), len(self._seen))
        differing = np.flatnonzero(generated[:both] != self._seen[:both])
        same = int(differing[0]) if len(differing) else both
        if len(self._seen) > same:
            self._matcher.rollback(len(self._seen) - same)
        new: list[int] = generated[same:].tolist()
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._seen = generated[: same + taken].copy()
        return self._stops if taken < len(new) else _mask(self._matcher, self._stops)


class Grammars:
    """The compiled grammars of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stops: Sequence[int]) -> None:
        """Create the cache.

        Args:
            vocabulary: Number of tokens; ids from here on are not tokens.
            stops: Tokens that end an answer.
        """
        self._tokenizer, self._vocabulary, self._stops = tokenizer, vocabulary, [*stops]
        bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
        bits[self._stops] = 1
        self._stop_bits: Bits = np.packbits(bits, bitorder="little")
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._trie: LLTokenizer | None = None
        self._matchers: OrderedDict[bytes, Matcher] = OrderedDict()

    def compile_schema(self, schema: str) -> Grammar | None:
        """Compile a JSON schema; None for an empty one.

        Raises InvalidInput with the path in the schema if it is not supported, and TaskNotSupported
        if the worker or the model cannot generate JSON.
        """
        return self._grammar(schema, schema, FIELD) if schema else None

    def compile_tools(self, work: TextWork, form: ToolForm) -> Grammar | None:
        """Compile a grammar of function calls; None for free text.

        Parameters that no grammar can express, as with `uniqueItems`, are not enforced if the model
        is free to call nothing. Otherwise raises as `compile_schema`.
        """
        if not work.calls_tool and not self.is_installed:
            return None
        source = grammar_source(work, form, self._marks(form), _FORM)
        if source is None:
            return None
        try:
            return self._grammar(source, None, TOOLS_FIELD, parameter_schemas(work))
        except (InvalidInput, TaskNotSupported):
            if work.calls_tool or has_strict_function(work):
                raise
            return None

    @property
    def is_installed(self) -> bool:
        """True if llguidance is installed."""
        return importlib.util.find_spec("llguidance") is not None

    def _marks(self, form: ToolForm) -> CallMarks:
        added = self._tokenizer.get_added_tokens_decoder().items()
        plain = {
            token.content: number
            for number, token in added
            if not token.special and number < self._vocabulary
        }
        opens, closes = plain.pop(form.opens, None), plain.pop(form.closes, None)
        return CallMarks(opens, closes, sorted(plain.values()))

    def _grammar(
        self,
        source: str,
        schema: str | None,
        field: str,
        tools: Sequence[tuple[str, str, dict[str, Any]]] = (),
    ) -> Grammar:
        digest = hashlib.sha256(source.encode()).digest()
        with self._lock:
            kept = self._matchers.get(digest)
            if kept is not None:
                self._matchers.move_to_end(digest)
        # The shared cache of a schema's matchers may have grown to its limit: compile the schema
        # again.
        if kept is None or not _begins(kept.deep_copy()):
            for path, _, parameters in tools:
                check_schema(json.dumps(parameters), path)
            kept = self._compiled(source, schema, field)
            if not _begins(kept.deep_copy()):
                raise TaskNotSupported("the model has no tokens for the schema", field=field)
            with self._lock:
                self._matchers[digest] = kept
                while len(self._matchers) > MAX_CACHED_SCHEMAS:
                    self._matchers.popitem(last=False)
        return Grammar(kept, self._stop_bits)

    def _compiled(self, source: str, schema: str | None, field: str) -> Matcher:
        """Compile the answer's `schema`; if None, `source` is a grammar."""
        if schema is not None:
            check_schema(schema)
        if not self._stops:
            raise TaskNotSupported(
                "JSON needs a token that ends an answer; the model's files name none", field=field
            )
        trie = self._tokens(field)
        from llguidance import LLMatcher, LLParserLimits

        try:
            if schema is None:
                grammar = LLMatcher.grammar_from_lark(source)
            else:
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_FORM)
        except ValueError as error:
            refuse("#", str(error), field)
        limits = LLParserLimits(**LIMITS, precompute_large_lexemes=False, verbose_errors=False)
        made: Matcher = LLMatcher(trie, grammar, log_level=0, limits=limits)
        if made.is_error():
            refuse(
                "#", " ".join(made.get_error().removesuffix("<non-verbose/>").split())[:500], field
            )
        return made

    def _tokens(self, field: str) -> LLTokenizer:
        """Build llguidance's view of the vocabulary one time: about a kilobyte a token."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            message = "this worker does not support JSON schemas: llguidance is not installed"
            raise TaskNotSupported(
                f"{message}: pip install 'shoal-mesh[grammar]'", field=field
            ) from None
        with self._lock:
            if self._trie is None:
                try:
                    self._trie = LLTokenizer(
                        self._tokenizer.to_str(),
                        n_vocab=self._vocabulary,
                        eos_token=self._stops,
                        slices=LLTokenizer.json_slices(),
                    )
                except ValueError as error:
                    raise TaskNotSupported(
                        f"the model's tokenizer does not support grammars: {error}", field=field
                    ) from None
            return self._trie


def _begins(matcher: Matcher) -> bool:
    return any(matcher.compute_bitmask()) and not matcher.is_error()


def _mask(matcher: Matcher, stops: Bits) -> Bits:
    found: Bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return found if found.any() and not matcher.is_error() else stops
