"""The interface between requests and the decode loop: a Reader builds a job's prompts, and results
from its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Final, Protocol

import torch
from shoal.extractions import Extraction, TokenLogprob
from tokenizers import Tokenizer
from torch import Tensor

from libs.catalog.card import Card
from libs.errors import TaskNotSupported
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.grammars import FIELD, Grammar, parse_answer
from libs.models.generation.stops import StopStrings, text_before_stop
from libs.models.generation.tools import FIELD as TOOLS_FIELD
from libs.models.generation.tools import ToolForm
from libs.models.interface.packed import GivenRows
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import GeneratedIds, InputSequence, YieldPoint
from libs.models.interface.work import CancelCheck, GenerationWork, Sampling, TextWork

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""
TokenText = Callable[[int], str]
"""Converts one token to text; empty for a token that is not part of texts."""
INCOMPLETE: Final = "\ufffd"
"""A tokenizer's output for the first bytes of a character."""

_WORD: Final = "\u2581"
"""SentencePiece's mark for the space before a word, which decoders drop at the beginning of a
text.
"""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Generation options of one sequence: the `InputSequence.input` of readers of texts and
    conversations. Attributes that are not listed here are as in `SequenceRequest`; grammar and
    `ends` are the job's, the seed is the sequence's.

    Attributes:
        most: Maximum tokens of the answer, 0 for the checkpoint's number.
    """

    most: int
    grammar: Grammar | None = None
    settings: DecodeSettings | None = None
    ends: StopStrings | None = None
    top_logprobs: int | None = None
    seed: bytes = b""

    @staticmethod
    def from_sequence(sequence: InputSequence) -> GenerationOptions:
        if not isinstance(sequence.input, GenerationOptions):
            raise TypeError("`input` must be the one that `prepare` set")
        return sequence.input

    def request(
        self,
        prompt: Ids | None = None,
        states: Tensor | None = None,
        given: GivenRows | None = None,
        axes: Ids | None = None,
    ) -> SequenceRequest:
        """Build a request with the grammar at its beginning, since a sequence may be generated
        again.
        """
        return SequenceRequest(
            prompt=prompt,
            states=states,
            most=self.most or None,
            settings=self.settings,
            allows=None if self.grammar is None else self.grammar.allows(),
            given=given,
            axes=axes,
            seed=self.seed,
            ends=self.ends,
            top_logprobs=self.top_logprobs,
        )


def generation_options(
    work: TextWork, card: Card, settings: DecodeSettings, decode: Decode, grammar: Grammar | None
) -> list[GenerationOptions]:
    """Return the options of each item. Raises TaskNotSupported.

    Args:
        settings: The settings of the checkpoint.
        decode: Converts tokens to text.
    """
    own = sampled_settings(settings, work.sampling)
    if work.top_logprobs is not None and own.beams > 1:
        reason = (
            f"{card.model} uses beam search ({own.beams} beams), which has no log probabilities: "
            "set a temperature above 0"
        )
        raise TaskNotSupported(reason, field="text.top_logprobs")
    ends = StopStrings(decode, work.stops) if work.stops else None
    same = GenerationOptions(
        work.max_tokens, grammar, None if own == settings else own, ends, work.top_logprobs
    )
    return [replace(same, seed=seed) for seed in work.seeds or (b"",) * len(work.texts)]


def sampled_settings(settings: DecodeSettings, sampling: Sampling) -> DecodeSettings:
    """Apply a request's sampling to the checkpoint's settings. Sampling turns beam search off."""
    given = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    temperature = sampling.temperature
    if temperature is None and (
        sampling.top_k or sampling.min_p or (sampling.top_p is not None and sampling.top_p < 1)
    ):
        temperature = settings.temperature or 1.0
    if temperature is not None:
        given["temperature"] = temperature
    if temperature:
        given["beams"] = 1
    return replace(settings, **given)


_SAMPLING: Final = tuple(field.name for field in fields(Sampling))


def refuse_tools(work: GenerationWork, card: Card) -> None:
    """Raise TaskNotSupported for tools. Called for models without a chat template in a supported
    tool format.
    """
    if not isinstance(work, TextWork):
        return
    cure = "the chat templates of Qwen 2.5 and 3, Hermes and Llama 3 support them"
    if work.tools:
        raise TaskNotSupported(
            f"{card.model} does not support function calls: {cure}", field=TOOLS_FIELD
        )
    if work.item_role == "tool" or any(
        turn.tool_calls or turn.role == "tool" for turn in work.turns
    ):
        raise TaskNotSupported(
            f"{card.model} does not support function results: {cure}", field="text.turns"
        )


def refuse_sampling(work: GenerationWork, card: Card) -> None:
    """Raise TaskNotSupported for sampling. Called for models that always return the most likely
    answer in a fixed format.
    """
    if not isinstance(work, TextWork):
        return
    own = sampled_settings(DecodeSettings(), work.sampling)
    is_set = {
        "text.sampling": replace(own, top_k=0, top_p=1.0, min_p=0.0) != DecodeSettings(),
        "text.stop": bool(work.stops),
        "text.top_logprobs": work.top_logprobs is not None,
        "text.raw_prompt": work.raw_prompt,
    }
    refuse_tools(work, card)
    for name, was_set in is_set.items():
        if was_set:
            raise TaskNotSupported(
                f"{card.model} always returns the most likely answer: remove {name}",
                field=name,
            )


def refuse_schema(work: GenerationWork, card: Card) -> None:
    """Raise TaskNotSupported for a JSON schema. Called for models without one, or with a fixed
    answer format.
    """
    if isinstance(work, TextWork) and work.json_schema:
        raise TaskNotSupported(
            f"{card.model} does not support JSON schemas: use a model with a chat template",
            field=FIELD,
        )


def refuse_chat(work: GenerationWork, card: Card) -> None:
    """Raise TaskNotSupported for conversations. Called for models without a chat template."""
    if isinstance(work, TextWork) and work.turns:
        message = f"{card.model} reads one message: conversations need a model with a chat template"
        raise TaskNotSupported(message, field="text.turns")
    if isinstance(work, TextWork) and work.template_values:
        raise TaskNotSupported(
            f"{card.model} has no chat template, so it takes no values",
            field="text.template_values",
        )


def extraction(
    work: GenerationWork,
    decode: Decode,
    generated: GeneratedIds,
    token_text: TokenText,
    tools: ToolForm | None = None,
) -> Extraction:
    """Build the result of a generated text: its JSON, function calls and tokens.

    Raises InvalidInput if the grammar could not be followed to its end.
    """
    ids: list[int] = generated.ids.tolist()
    whole = decode(ids)
    if not isinstance(work, TextWork):
        return Extraction(text=whole.strip(), finish_reason=generated.finish)
    text = text_before_stop(whole, work.stops)
    is_whole = len(text) == len(whole)
    tokens: tuple[TokenLogprob, ...] = ()
    if generated.scores:
        count = len(ids) if is_whole else _tokens_with(len(text), ids, decode)
        tokens = _tokens(count, generated, token_text)
    text, calls = tools.read(text) if tools is not None and work.tools else (text, ())
    text = text if work.raw_prompt else text.strip()
    form = parse_answer(text, generated.finish) if work.json_schema and is_whole else None
    return Extraction(
        text=text, finish_reason=generated.finish, form=form, tokens=tokens, tool_calls=calls
    )


def _tokens(count: int, generated: GeneratedIds, token_text: TokenText) -> tuple[TokenLogprob, ...]:
    """Return the first `count` tokens without those that have no text, as a stop token."""
    found: list[TokenLogprob] = []
    scored = zip(generated.ids.tolist(), generated.scores, strict=True)
    for number, score in islice(scored, count):
        text = token_text(number)
        top = tuple(TokenLogprob(token_text(other), logprob) for other, logprob in score.top)
        if text:
            found.append(TokenLogprob(text, score.logprob, top))
    return tuple(found)


def _tokens_with(characters: int, ids: list[int], decode: Decode) -> int:
    """Return the number of tokens that hold the text's first `characters` characters.

    A character may have several tokens, none of which has its own text, so prefixes are
    decoded: about log2(tokens) of them.
    """

    def size(count: int) -> int:
        return len(decode(ids[:count]).rstrip(INCOMPLETE))

    return bisect_left(range(len(ids)), characters, key=size)


def token_text(tokenizer: Tokenizer, number: int) -> str:
    """Return a token's text with the space before a word; empty for a special token."""
    text: str = tokenizer.decode([number])
    begins_word = (tokenizer.id_to_token(number) or "").startswith(_WORD)
    return f" {text}" if begins_word and not text.startswith(" ") else text


def empty_states(sequence: InputSequence) -> Tensor:
    """Return rows without memory in the place of the encoder's."""
    return torch.empty(len(sequence.ids), 0)


class Reader(Protocol):
    """`prepare` (preparing threads) -> `plan` and `requests` (the device thread) -> the decode loop
    -> `finish` (finishing threads).

    A job has one sequence for each generated text, in the order of items and of an item's pages.
    """

    language_model: LanguageModel
    tokenizer: Tokenizer

    @property
    def tool_form(self) -> ToolForm | None:
        """The format of its function calls; None if it calls none."""

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        """Build a job's prompts, and notes for `finish`. Raises InvalidInput with the path of the
        item.

        `ids` has a token for each row of the prompt, or of the encoder's input, so its length
        determines the cost; images are in `rows` or `input`. `check_cancelled` is called every few
        milliseconds.
        """

    def plan(self, sequence: InputSequence) -> SequenceRequest:
        """Build a request of the same size as `requests` does, without the rows of an encoder or a
        vision tower: those of `states` are empty.
        """

    def requests(
        self, sequences: list[InputSequence], yield_point: YieldPoint
    ) -> list[SequenceRequest]:
        """Build the requests of the decode loop, running the batch's encoder or vision tower."""

    def can_stream(self, notes: object) -> bool:
        """Return whether `text` returns parts of the job's final answers. `notes`: those of
        `prepare`.
        """

    def text(self, ids: list[int]) -> str:
        """Return the text of the tokens so far, for streaming; it ends before an incomplete
        character.
        """

    def finish(
        self, work: GenerationWork, notes: object, generated: list[GeneratedIds]
    ) -> ExtractResult:
        """Build the result of a job."""
