"""The interface between what a model is asked for and the decode loop: a Reader makes prompts of
jobs, and answers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Protocol

from tokenizers import Tokenizer
from torch import Tensor

from libs.catalog.card import Card
from libs.errors import TaskNotSupported
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.sequences import Request
from libs.models.generation.decoding.settings import Settings
from libs.models.generation.decoding.writer import Writer
from libs.models.generation.grammars import FIELD, Grammar, form_of
from libs.models.generation.stops import StopStrings, before_stop
from libs.models.generation.tools import FIELD as TOOLS_FIELD
from libs.models.generation.tools import ToolForm
from libs.models.packed import GivenRows
from libs.models.results import Extraction, ExtractResult, TokenLogprob
from libs.models.work import (
    CancelCheck,
    GeneratedIds,
    GenerationWork,
    InputSequence,
    Sampling,
    TextWork,
    YieldPoint,
)

Decode = Callable[[Sequence[int]], str]
"""Token ids to their text."""
TokenText = Callable[[int], str]
"""A token to its text alone; empty for one that is not in texts."""

_WORD: Final = "\u2581"
"""What tokens of SentencePiece have for the space before a word, which their decoders leave out at
the beginning of a text.
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """`InputSequence.input` of readers of texts and conversations. `most`: tokens of the answer, 0:
    the checkpoint's own number.

    The others are those of `Request`; a grammar and `ends` are the job's, a seed is the sequence's.
    """

    most: int
    grammar: Grammar | None = None
    settings: Settings | None = None
    ends: StopStrings | None = None
    top_logprobs: int | None = None
    seed: bytes = b""

    @staticmethod
    def of(sequence: InputSequence) -> Asked:
        if not isinstance(sequence.input, Asked):
            raise TypeError("`input` is that of `prepare`")
        return sequence.input

    def request(
        self,
        prompt: Ids | None = None,
        states: Tensor | None = None,
        given: GivenRows | None = None,
        axes: Ids | None = None,
    ) -> Request:
        """With the grammar from its beginning, since a sequence may be written again."""
        return Request(
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


def asked(
    work: TextWork, card: Card, settings: Settings, decode: Decode, grammar: Grammar | None
) -> list[Asked]:
    """One for each item. `settings`: the checkpoint's; `decode`: tokens to text. Raises
    TaskNotSupported.
    """
    own = sampled_settings(settings, work.sampling)
    if work.top_logprobs is not None and own.beams > 1:
        reason = f"answers of {card.model} are by {own.beams} beams, which have no log probabilities: set a temperature above 0"
        raise TaskNotSupported(reason, field="text.top_logprobs")
    ends = StopStrings(decode, work.stops) if work.stops else None
    same = Asked(
        work.max_tokens, grammar, None if own == settings else own, ends, work.top_logprobs
    )
    return [replace(same, seed=seed) for seed in work.seeds or (b"",) * len(work.texts)]


def sampled_settings(settings: Settings, sampling: Sampling) -> Settings:
    """The checkpoint's settings as a request changes them. Answers that are sampled are not by
    beams.
    """
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
    """For models without a chat template that has tools in a form that is served. Raises
    TaskNotSupported.
    """
    if not isinstance(work, TextWork):
        return
    cure = "the chat templates of Qwen 2.5 and 3, Hermes and Llama 3 have them"
    if work.tools:
        raise TaskNotSupported(f"{card.model} calls no functions: {cure}", field=TOOLS_FIELD)
    if work.item_role == "tool" or any(
        turn.tool_calls or turn.role == "tool" for turn in work.turns
    ):
        raise TaskNotSupported(
            f"{card.model} reads no results of functions: {cure}", field="text.turns"
        )


def refuse_sampling(work: GenerationWork, card: Card) -> None:
    """For models with answers in a form of theirs, which are always the likeliest. Raises
    TaskNotSupported.
    """
    if not isinstance(work, TextWork):
        return
    own = sampled_settings(Settings(), work.sampling)
    is_set = {
        "text.sampling": replace(own, top_k=0, top_p=1.0, min_p=0.0) != Settings(),
        "text.stop": bool(work.stops),
        "text.top_logprobs": work.top_logprobs is not None,
        "text.raw_prompt": work.raw_prompt,
    }
    refuse_tools(work, card)
    for name, was_set in is_set.items():
        if was_set:
            raise TaskNotSupported(
                f"{card.model} writes the likeliest answer to an image: leave {name} out",
                field=name,
            )


def refuse_schema(work: GenerationWork, card: Card) -> None:
    """For models that answer in no form, or in one of their own. Raises TaskNotSupported."""
    if isinstance(work, TextWork) and work.json_schema:
        raise TaskNotSupported(
            f"{card.model} writes no JSON by a schema: models with a chat template do, of texts or of images",
            field=FIELD,
        )


def refuse_chat(work: GenerationWork, card: Card) -> None:
    """For models without a chat template, which read no conversations of several turns. Raises
    TaskNotSupported.
    """
    if isinstance(work, TextWork) and work.turns:
        message = (
            f"{card.model} reads one message: conversations are for models with a chat template"
        )
        raise TaskNotSupported(message, field="text.turns")
    if isinstance(work, TextWork) and work.template_values:
        raise TaskNotSupported(
            f"{card.model} has no chat template to give values to", field="text.template_values"
        )


def extraction(
    work: GenerationWork,
    whole: str,
    written: GeneratedIds,
    token_text: TokenText,
    tools: ToolForm | None = None,
) -> Extraction:
    """An answer, with what it says where it is JSON, its calls of functions and its tokens.
    `whole`: the text of all its tokens.

    Raises InvalidInput for one whose grammar could not be followed to its end.
    """
    if not isinstance(work, TextWork):
        return Extraction(text=whole.strip(), finish=written.finish)
    text = before_stop(whole, work.stops)
    tokens = _tokens(len(text), written, token_text) if written.scores else ()
    is_whole = len(text) == len(whole)
    text, calls = tools.read(text) if tools is not None and work.tools else (text, ())
    text = text if work.raw_prompt else text.strip()
    form = form_of(text, written.finish) if work.json_schema and is_whole else None
    return Extraction(text=text, finish=written.finish, json=form, tokens=tokens, tool_calls=calls)


def _tokens(
    characters: int, written: GeneratedIds, token_text: TokenText
) -> tuple[TokenLogprob, ...]:
    """Those that a text of this many characters is made of: neither a stop token nor those of a
    stop string.
    """
    found: list[TokenLogprob] = []
    for number, score in zip(written.ids.tolist(), written.scores, strict=True):
        text = token_text(number)
        if characters <= 0:
            break
        characters -= len(text)
        top = tuple(TokenLogprob(token_text(other), logprob) for other, logprob in score.top)
        if text:
            found.append(TokenLogprob(text, score.logprob, top))
    return tuple(found)


def token_text(tokenizer: Tokenizer, number: int) -> str:
    """A token's text alone, with the space before a word; empty for a special token."""
    text: str = tokenizer.decode([number])
    begins_word = (tokenizer.id_to_token(number) or "").startswith(_WORD)
    return f" {text}" if begins_word and not text.startswith(" ") else text


class Reader(Protocol):
    """`prepare` (preparing threads) -> `requests` (the device thread) -> the decode loop ->
    `finish` (finishing threads).

    One sequence for each text that is written, in the order of items (and of an item's pages).
    `writer`: what the loop runs. `tokenizer`: the model's.
    """

    writer: Writer
    tokenizer: Tokenizer

    @property
    def tool_form(self) -> ToolForm | None:
        """The form in which its answers call functions; None: they call none."""

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        """A job's prompts, and notes for `finish`. Raises InvalidInput with the path of the item.

        `ids` has a token for each row of the prompt, or of the encoder's input, so that costs are
        known by its length; images are in `rows` or `input`. `check_cancelled` is called every few
        milliseconds.
        """

    def requests(self, sequences: list[InputSequence], yield_point: YieldPoint) -> list[Request]:
        """What the loop is to write: runs the encoder or the vision tower of a batch. `yield_point`: a
        preemption point.
        """

    def reads_along(self, notes: object) -> bool:
        """Whether the answers of a job are what `text` says while they are written. `notes`: those
        of `prepare`.
        """

    def text(self, ids: list[int]) -> str:
        """The text of the tokens written so far, for clients that read along: ends before an
        incomplete character.
        """

    def finish(
        self, work: GenerationWork, notes: object, written: list[GeneratedIds]
    ) -> ExtractResult:
        """The answer of a job."""
