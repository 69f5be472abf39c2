"""Render a query and a document as one text with the checkpoint's chat template, for rerankers that
are language models.

A template is rendered once, with placeholders for the texts, when a model is loaded
(`renderer.py`). Requests only fill the placeholders, because a reranker scores thousands of pairs a
second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.errors import InvalidInput, ModelBroken
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import CancelCheck, Truncation, never_cancelled
from libs.models.text.checks import document_path, query_path
from libs.models.text.tokenising.renderer import NAME, rendered, rendered_text, special_tokens
from libs.models.text.tokenising.text import TextProcessor, too_long

Ids = NDArray[np.int32]

# Placeholders for the texts: characters of Unicode's private use area.
_QUERY, _DOCUMENT, _INSTRUCTION = "\ue000", "\ue001", "\ue002"
_MARKS = re.compile(f"([{_QUERY}{_DOCUMENT}{_INSTRUCTION}])")
# Texts that a template must render unchanged.
_SAMPLES = {
    _QUERY: " a query?\n\n",
    _DOCUMENT: "\n A <b>document</b>,\n  in \\lines\\ " + "and more " * 300,
    _INSTRUCTION: " an {instruction} ",
}
# Documents with different first and last tokens: the tokens that they share are the template's.
_PROBES = ("0", "1 2 3 4")
_LONG: Final = 2
"""Characters per token. A template and query with more may exceed the limit without any document,
which is checked first.
"""


@dataclass(frozen=True, slots=True)
class TemplateFrame:
    """A rendered template for a query, a document and possibly an instruction. `pieces` are fixed
    texts and placeholders.
    """

    pieces: tuple[str, ...]

    @staticmethod
    def from_renderings(marked: str, filled: str, samples: Mapping[str, str]) -> TemplateFrame:
        """Build the frame from a template's renderings.

        Raises ModelBroken for a template without a place for a pair, or that changes its texts.

        Args:
            marked: The rendering of placeholders.
            filled: The rendering of `samples`.
        """
        frame = TemplateFrame(tuple(_MARKS.split(marked)))
        for mark, role in ((_QUERY, "query"), (_DOCUMENT, "document")):
            if mark not in frame.pieces:
                raise ModelBroken(f"{NAME}: it has no place for a message of the role {role!r}")
        if frame.pieces.count(_DOCUMENT) > 1:
            raise ModelBroken(f"{NAME}: it repeats the document, which is not supported")
        if filled != frame.fill(samples):
            raise ModelBroken(
                f"{NAME}: it changes the texts of messages, which must be inserted unchanged"
            )
        return frame

    @property
    def instructed(self) -> bool:
        return _INSTRUCTION in self.pieces

    def around(self, texts: Mapping[str, str]) -> tuple[str, str]:
        """Return the text before and after the document."""
        place = self.pieces.index(_DOCUMENT)
        before, after = (
            TemplateFrame(part).fill(texts)
            for part in (self.pieces[:place], self.pieces[place + 1 :])
        )
        return before, after

    def fill(self, texts: Mapping[str, str]) -> str:
        """Replace placeholders by `texts`."""
        return "".join(texts.get(piece, piece) for piece in self.pieces)


class ChatPairs:
    """The pairs of one model.

    Args:
        shares: Compute the common prefix of a job's sequences once (prefix sharing, for causal
            models).
    """

    def __init__(self, card: Card, root: Path, text: TextProcessor, *, shares: bool) -> None:
        """`root` is the tokenizer's directory. Raises ModelBroken for an unusable template."""
        self._text, self._shares = text, shares
        special = special_tokens(root)
        values = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **special,
            **card.template_values,
        }
        marks = {mark: mark for mark in _SAMPLES}
        no_marks, no_samples = marks | {_INSTRUCTION: ""}, _SAMPLES | {_INSTRUCTION: ""}
        pairs = [
            values | _messages(texts, card.message_parts)
            for texts in (no_marks, no_samples, marks, _SAMPLES)
        ]
        marked, filled, marked_too, filled_too = rendered(card.template, pairs)
        self._plain = TemplateFrame.from_renderings(
            rendered_text(marked), rendered_text(filled), no_samples
        )
        try:
            self._instructed = TemplateFrame.from_renderings(
                rendered_text(marked_too), rendered_text(filled_too), _SAMPLES
            )
        except ModelBroken:  # some templates reject messages of the role system
            self._instructed = self._plain

    @staticmethod
    def where_it_fits(
        card: Card, root: Path, text: TextProcessor, *, shares: bool
    ) -> ChatPairs | None:
        """Return None for a model without a template, or with a template that does not support
        pairs, such as that of a plain language model.
        """
        if not card.template:
            return None
        try:
            return ChatPairs(card, root, text, shares=shares)
        except ModelBroken:
            return None

    def encode(
        self,
        query: str,
        documents: list[str],
        instruction: str,
        truncation: Truncation,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> list[InputSequence]:
        """Return one sequence per document. A document is truncated if its sequence would be too
        long."""
        if instruction and not self._instructed.instructed:
            raise InvalidInput(
                "the model's chat template has no place for an instruction: leave it empty",
                field="instruction",
            )
        frame = self._instructed if instruction else self._plain
        before, after = frame.around({_QUERY: query, _INSTRUCTION: instruction})
        limit = self._text.limit
        own = (
            self._own(before, after, check_cancelled)
            if len(before) + len(after) > _LONG * limit
            else None
        )
        found, cut = [], []
        encoded = self._text.encode_plain(
            documents, truncation, check_cancelled, before=before, after=after
        )
        for number, (ids, is_whole) in enumerate(encoded):
            if len(ids) > limit and truncation == "none":
                raise too_long(
                    document_path(number),
                    len(ids),
                    limit,
                    "with the chat template",
                    more=not is_whole,
                )
            cut.append(document_path(number) if len(ids) > limit else "")
            if len(ids) > limit:
                own = own or self._own(before, after, check_cancelled)
                ids = _cut(ids, *own, limit, truncation)
            found.append(ids)
        return self._sequences(found, cut)

    def _own(self, before: str, after: str, check_cancelled: CancelCheck) -> tuple[int, int]:
        """Return the number of tokens of the template and query, before and after a document."""
        first, second = (
            ids
            for ids, _ in self._text.encode_plain(
                _PROBES, "none", check_cancelled, before=before, after=after
            )
        )
        begin, end = _common(first, second), _common(first[::-1], second[::-1])
        if begin + end >= self._text.limit:
            raise too_long(
                query_path(0),
                begin + end + 1,
                self._text.limit,
                "with the chat template and a token of a document",
            )
        return begin, end

    def _sequences(self, found: list[Ids], cut: list[str]) -> list[InputSequence]:
        shared = 0
        if self._shares and len(found) > 1:
            shared = min(_common(found[0], ids) for ids in found[1:])
            shared = min(shared, min(len(ids) for ids in found) - 1)
        if shared <= 0:
            return [InputSequence(ids, cut=path) for ids, path in zip(found, cut, strict=True)]
        before = found[0][:shared]
        return [
            InputSequence(ids[shared:], before=before, cut=path)
            for ids, path in zip(found, cut, strict=True)
        ]


def _cut(ids: Ids, before: int, after: int, limit: int, truncation: Truncation) -> Ids:
    """Truncate the document: the template's tokens and one end of the document stay."""
    if truncation == "end":
        return np.concatenate([ids[: limit - after], ids[len(ids) - after :]])
    return np.concatenate([ids[:before], ids[len(ids) - (limit - before) :]])


def _messages(texts: Mapping[str, str], parts: bool) -> dict[str, object]:
    """Return a pair as sentence-transformers does: messages of the roles query and document, after
    an instruction as system.

    Templates of the catalog can also use the texts by name.
    """
    query, document, instruction = (texts[mark] for mark in (_QUERY, _DOCUMENT, _INSTRUCTION))
    roles = {"system": instruction, "query": query, "document": document}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
        for role, text in roles.items()
        if role != "system" or text
    ]
    return {"messages": messages, "query": query, "document": document, "instruction": instruction}


def _common(first: Ids, second: Ids) -> int:
    """Return the length of the common prefix of two sequences of ids."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
