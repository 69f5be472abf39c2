"""Convert the ordered parts of an item, texts and images, to one sequence of the text encoder, and
price images from their headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvalidInput, TaskNotSupported
from libs.models.images.decoding import LIMITS, ImageLimits, Pixels, decoding, header_size
from libs.models.images.vlm.image_converter import (
    ImageConverter,
    ImageTokens,
    expand_marks,
    mrope_positions,
)
from libs.models.interface.output_cache import JobOutputCache
from libs.models.interface.sequences import Head, InputRows, InputSequence
from libs.models.interface.work import CancelCheck, Part, Role, Truncation, never_cancelled
from libs.models.text.tokenising.text import TextProcessor, Where, too_long

Ids = NDArray[np.int32]

_NO_IMAGE: Final = np.zeros((0, 0, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class TextFrame:
    """Text before and after an item, including special tokens."""

    before: str = ""
    after: str = ""


INSTRUCTION: Final = "\ue002"
"""Placeholder for the instruction in a prompt: a character of Unicode's private use area."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Text before the query and before the document of a pair, and the substitute for an empty
    one.

    Attributes:
        document_first: The document precedes the query.
    """

    query: str
    document: str
    nothing: str
    document_first: bool = False


@dataclass(frozen=True, slots=True)
class Prompts:
    """The frames of a model's items.

    Attributes:
        images: Frame of items with images.
        texts: Frame of texts.
        queries: Frame of texts with that role.
        default: Role of a text without one.
        instruction: Default instruction; empty if the model takes none.
        pair: For models that score pairs.
        lead: Text between an item's last image and its text.
        last: Id of a token after each sequence, which is not the token of a text.
    """

    images: TextFrame
    texts: TextFrame
    queries: TextFrame
    default: Role = "query"
    instruction: str = ""
    pair: Pair | None = None
    lead: str = ""
    last: int | None = None

    def with_instruction(self, instruction: str) -> Prompts:
        """Insert an instruction. Raises InvalidInput if the model takes none."""
        if instruction and not self.instruction:
            raise InvalidInput("the model takes no instruction: remove it", field="instruction")
        if not self.instruction:
            return self
        text = instruction or self.instruction
        images, texts, queries = (
            TextFrame(one.before.replace(INSTRUCTION, text), one.after)
            for one in (self.images, self.texts, self.queries)
        )
        pair = (
            None
            if self.pair is None
            else replace(self.pair, query=self.pair.query.replace(INSTRUCTION, text))
        )
        return replace(self, images=images, texts=texts, queries=queries, pair=pair)

    def within(self, before: str, after: str) -> Prompts:
        """Add special tokens around all frames."""
        images, texts, queries = (
            TextFrame(before + one.before, one.after + after)
            for one in (self.images, self.texts, self.queries)
        )
        return replace(self, images=images, texts=texts, queries=queries)

    def text_frame(self, role: Role) -> TextFrame:
        return self.queries if (role or self.default) == "query" else self.texts


@dataclass(frozen=True, slots=True)
class Recalled:
    """The cached state of one job's items, for the head that will process them.

    Attributes:
        images: Decoded images by the file's digest, if items share images, such as a query's image
            before each document of a pair model. None: items share no images.
    """

    head: Head
    known: JobOutputCache
    images: dict[bytes, tuple[Pixels, ...]] | None = None


@dataclass(frozen=True, slots=True)
class PartsInput:
    """Converts items to sequences. Thread-safe.

    Attributes:
        text: Tokenises texts; `text.limit` is the maximum tokens of a sequence.
        mark: Id of the image token, which texts must not contain.
        most: Maximum patches of an item.
    """

    text: TextProcessor
    image_converter: ImageConverter
    prompts: Prompts
    mark: int
    most: int = 1 << 17
    limits: ImageLimits = field(default=LIMITS)

    def tokens(self, data: bytes, field: str) -> int:
        """Return the tokens of an item of one image, from the image's header: nothing is
        decoded. Raises as `encode_parts`.
        """
        image = self._image_tokens(data, field)
        return len(self._placed([image], image.text + self.prompts.lead, field, field)[0])

    def patches(self, data: bytes, field: str) -> int:
        """Return the tower tokens of an image from its header. Raises InvalidInput if it is
        unreadable.
        """
        return self._image_tokens(data, field).patches

    def sequence(self, data: bytes, field: str) -> InputSequence:
        """Return the sequence of an item of one image."""
        return self.encode_parts([Part(data, field)], field)

    def encode_texts(
        self,
        texts: list[str],
        role: Role,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck = never_cancelled,
        instruction: str = "",
    ) -> list[InputSequence]:
        """Put texts in their role's frame, which is never cut. Raises InvalidInput for a text with
        the model's image token.
        """
        frame, limit = self.prompts.with_instruction(instruction).text_frame(role), self._limit
        found: list[InputSequence] = []
        encoded = self.text.encode_plain(
            texts, truncation, check_cancelled, before=frame.before, after=frame.after
        )
        for number, (ids, is_whole) in enumerate(encoded):
            if len(ids) > limit and truncation == "none":
                raise too_long(
                    where(number), len(ids), limit, "with the model's prompt", more=not is_whole
                )
            cut = where(number) if len(ids) > limit else ""
            if cut:
                ids = _cut(
                    ids, self._count(frame.before), self._count(frame.after), limit, truncation
                )
            if (ids == self.mark).any():
                raise _marked(where(number))
            if not len(ids):
                raise InvalidInput(
                    f"{where(number)} has no text that the model's tokenizer knows",
                    field=where(number),
                )
            found.append(InputSequence(self._ended(ids), cut=cut))
        return found

    def encode_parts(
        self,
        parts: Sequence[Part],
        field: str,
        role: Role = "",
        truncation: Truncation = "end",
        check_cancelled: CancelCheck = never_cancelled,
        instruction: str = "",
        recalled: Recalled | None = None,
    ) -> InputSequence:
        """Convert one item: its parts in order, in the frame of images if it has one.

        Images are never cut, and neither are texts next to them. An item with a cached output is
        not decoded. Raises InputTooLong for an item with images beyond the limit, and InvalidInput
        with the part's path for a damaged file; sizes are checked before decoding.

        Args:
            field: The item's path in the job.
            recalled: Cached outputs.
        """
        files = [part for part in parts if isinstance(part.content, bytes)]
        images = [(part.content, part.field) for part in files if isinstance(part.content, bytes)]
        if not images:
            joined = "".join(part.content for part in parts if isinstance(part.content, str))
            where = parts[0].field if len(parts) == 1 else field
            return self.encode_texts(
                [joined], role, truncation, lambda _: where, check_cancelled, instruction
            )[0]
        image_tokens = [self._image_tokens(data, path) for data, path in images]
        patches = sum(one.patches for one in image_tokens)
        if patches > self.most:
            raise InvalidInput(
                f"the images of {field} have {patches:,} patches; at most {self.most:,} are "
                "allowed",
                field=field,
            )
        texts = iter(
            [*(one.text for one in image_tokens[:-1]), image_tokens[-1].text + self.prompts.lead]
        )
        whole = "".join(
            part.content if isinstance(part.content, str) else next(texts) for part in parts
        )
        suspect = next((part.field for part in parts if isinstance(part.content, str)), field)
        ids, places = self._placed(
            image_tokens, whole, field, suspect, instruction, check_cancelled
        )

        def made() -> InputSequence:
            decoded: list[NDArray[np.generic]] = []
            for data, path in images:
                check_cancelled()
                decoded += self._decoded(data, path, None if recalled is None else recalled.images)
            rows = InputRows(places, decoded[0], tuple(decoded[1:]))
            return InputSequence(
                ids, rows=rows, axes=mrope_positions(len(ids), places, image_tokens)
            )

        def unmade(_: int) -> InputSequence:
            return InputSequence(ids, rows=InputRows(places, _NO_IMAGE))

        return (
            made()
            if recalled is None
            else recalled.known.sequence(recalled.head, files, made, unmade, ids.tobytes())
        )

    def encode_pair(
        self,
        query: Sequence[Part],
        document: Sequence[Part],
        field: str,
        truncation: Truncation = "end",
        check_cancelled: CancelCheck = never_cancelled,
        instruction: str = "",
        recalled: Recalled | None = None,
    ) -> InputSequence:
        """Convert a query and a document of a pair model. `field`: the document's path. Raises as
        `encode_parts`.
        """
        pair = self.prompts.with_instruction(instruction).pair
        if pair is None:
            raise TaskNotSupported("the model has no prompt for pairs")
        if pair.document_first:
            return self._document_first(
                pair, query, document, field, truncation, check_cancelled, recalled
            )
        nothing = [Part(pair.nothing, field)]
        first, second = Part(pair.query, field), Part(pair.document, field)
        parts = [first, *(query or nothing), second, *(document or nothing)]
        return self.encode_parts(
            parts, field, "", truncation, check_cancelled, instruction, recalled
        )

    def _document_first(
        self,
        pair: Pair,
        query: Sequence[Part],
        document: Sequence[Part],
        field: str,
        truncation: Truncation,
        check_cancelled: CancelCheck,
        recalled: Recalled | None,
    ) -> InputSequence:
        """Convert a pair. A query of text is part of the frame, so that only the document is
        cut.
        """
        texts = [part.content for part in query if isinstance(part.content, str)]
        after = [Part(pair.query, field), *query]
        parts, frame = [*document, *after], TextFrame(pair.document)
        if len(texts) == len(query):
            parts, frame = [*document], TextFrame(pair.document, pair.query + "".join(texts))
            ((ids, is_whole),) = self.text.encode_plain([frame.after], "end", check_cancelled)
            if not is_whole or self._count(frame.before) + len(ids) >= self._limit:
                where = query[0].field if query else field
                raise too_long(where, self._limit, self._limit, "without a document", more=True)
        prompts = replace(self.prompts, images=frame, texts=frame, queries=frame)
        return replace(self, prompts=prompts).encode_parts(
            parts or [Part(pair.nothing, field)],
            field,
            "",
            truncation,
            check_cancelled,
            recalled=recalled,
        )

    def frame_tokens(self) -> int:
        """Return the number of tokens around the item of one image."""
        frame = self.prompts.with_instruction("").images
        texts = (frame.before, self.prompts.lead, frame.after)
        return sum(map(self._count, texts)) + (self.prompts.last is not None)

    @property
    def _limit(self) -> int:
        """The maximum tokens of a sequence without the last one."""
        return self.text.limit - (self.prompts.last is not None)

    def _ended(self, ids: Ids) -> Ids:
        last = self.prompts.last
        return ids if last is None else np.append(ids, np.array([last], ids.dtype))

    def _decoded(
        self, data: bytes, path: str, before: dict[bytes, tuple[Pixels, ...]] | None
    ) -> tuple[Pixels, ...]:
        """Decode a file. `before`: images decoded earlier; new ones are added."""
        digest = b"" if before is None else sha256(data).digest()
        if before is not None and digest in before:
            return before[digest]
        with decoding(data, path, self.limits) as image:
            made = self.image_converter.apply(image, path)
        if before is not None:
            before[digest] = made
        return made

    def _image_tokens(self, data: bytes, field: str) -> ImageTokens:
        return self.image_converter.tokens_of_size(*header_size(data, field, self.limits), field)

    def _placed(
        self,
        image_tokens: Sequence[ImageTokens],
        whole: str,
        field: str,
        suspect: str,
        instruction: str = "",
        check_cancelled: CancelCheck = never_cancelled,
    ) -> tuple[Ids, Ids]:
        """Return ids and the indices of the images' rows. `suspect`: path of a text, reported if it
        has an image token.
        """
        frame, limit = self.prompts.with_instruction(instruction).images, self._limit
        ((ids, is_whole),) = self.text.encode_plain(
            [whole], "end", check_cancelled, before=frame.before, after=frame.after
        )
        if not is_whole:
            raise too_long(field, limit, limit, "with the model's prompt", more=True)
        found = expand_marks(
            ids, self.mark, tuple(rows for one in image_tokens for rows in one.rows)
        )
        if found is None:
            raise _marked(suspect)
        if len(found[0]) > limit:
            raise too_long(
                field, len(found[0]), limit, "including its images and the model's prompt"
            )
        return self._ended(found[0]), found[1]

    def _count(self, text: str) -> int:
        if not text:
            return 0
        ((ids, _),) = self.text.encode_plain([text], "none", never_cancelled)
        return len(ids)


def _cut(ids: Ids, before: int, after: int, limit: int, truncation: Truncation) -> Ids:
    """Cut the text at one end, keeping the frame's tokens."""
    if truncation == "end":
        return np.concatenate([ids[: max(limit - after, 0)], ids[len(ids) - after :]])
    return np.concatenate([ids[:before], ids[len(ids) - max(limit - before, 0) :]])


def _marked(field: str) -> InvalidInput:
    return InvalidInput(f"{field} contains the model's image token", field=field)
