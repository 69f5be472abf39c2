"""Finds the outputs of items with images that were computed before, so that they are neither
decoded nor computed again.

The worker keeps the outputs (`services/worker/memory/images.py`); here is what identifies one, and
the look before an image is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from libs.models.work import Head, InputSequence, Output, Part


@dataclass(frozen=True, slots=True)
class CachedOutput:
    """The output of a sequence, and how many tokens the sequence had."""

    output: Output
    tokens: int


FindOutput = Callable[[bytes], CachedOutput | None]
"""Looks an output up by its sequence's key (`InputSequence.key`). Any thread."""


class OutputCache:
    """Of one loaded model. `find` None: nothing is kept, and no sequence gets a key."""

    def __init__(self, *what: object) -> None:
        """`what`: on what outputs depend beside an item: the model's revision, its data type, how
        images are preprocessed.
        """
        self._own = sha256(repr(what).encode()).digest()
        self.find: FindOutput | None = None

    def job(self) -> JobOutputCache:
        """For the preparation of one job."""
        return JobOutputCache(self, self.find)

    def key(self, head: Head, images: Sequence[Part], beside: bytes) -> bytes:
        """The SHA-256 digest of everything that an output depends on; empty where an image may not
        be kept.

        `beside`: the rest of the sequence's input.
        """
        digest = sha256(self._own)
        for piece in (head.encode(), beside):
            digest.update(len(piece).to_bytes(8, "big") + piece)
        for image in images:
            if image.scope is None or not isinstance(image.content, bytes):
                return b""
            scope = image.scope.encode()
            digest.update(
                len(scope).to_bytes(8, "big") + scope + len(image.content).to_bytes(8, "big")
            )
            digest.update(image.content)
        return digest.digest()


class JobOutputCache:
    """What is known of one job's items. Not thread-safe. `outputs`: those that were found, by
    key.
    """

    def __init__(self, output_cache: OutputCache, find: FindOutput | None) -> None:
        self._recall, self._find = output_cache, find
        self.outputs: dict[bytes, Output] = {}
        self._sequences: dict[bytes, InputSequence] = {}

    def sequence(
        self,
        head: Head,
        images: Sequence[Part],
        make: Callable[[], InputSequence],
        unmade: Callable[[int], InputSequence],
        beside: bytes = b"",
    ) -> InputSequence:
        """The sequence of an item with these images.

        `make` decodes them; an item that the job has twice is made once. `unmade`: by its number of
        tokens a sequence whose output was found, which no forward sees.
        """
        key = b"" if self._find is None else self._recall.key(head, images, beside)
        if not key or self._find is None:
            return make()
        made = self._sequences.get(key)
        if made is None:
            kept = self._find(key)
            if kept is None:
                made = replace(make(), key=key)
            else:
                made = replace(unmade(kept.tokens), key=key)
                self.outputs[key] = kept.output
            self._sequences[key] = made
        return made

    def known(self, sequences: Sequence[InputSequence]) -> Mapping[int, Output]:
        """The outputs that were found, by the index of their sequence (`Prepared.known`)."""
        return {
            index: self.outputs[one.key]
            for index, one in enumerate(sequences)
            if one.key in self.outputs
        }
