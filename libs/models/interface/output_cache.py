"""Look up cached outputs of items with images, so that images are not decoded or computed again.

The worker stores the outputs (`services/worker/memory/images.py`). This module defines their keys
and looks them up before an image is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from libs.models.interface.sequences import Head, InputSequence, Output
from libs.models.interface.work import Part


@dataclass(frozen=True, slots=True)
class CachedOutput:
    """The output of a sequence, and the number of the sequence's tokens."""

    output: Output
    tokens: int


FindOutput = Callable[[bytes], CachedOutput | None]
"""Looks up an output by its sequence's key (`InputSequence.key`). Any thread."""


class OutputCache:
    """The output cache of one loaded model. If `find` is None, nothing is cached and no sequence
    gets a key.
    """

    def __init__(self, *dependencies: object) -> None:
        """Create the cache of one model.

        `dependencies`: everything except an item that outputs depend on, such as the model's
        revision, its data type and its image preprocessing.
        """
        self._own = sha256(repr(dependencies).encode()).digest()
        self.find: FindOutput | None = None

    def job(self) -> JobOutputCache:
        """Return the cache's view for the preparation of one job."""
        return JobOutputCache(self, self.find)

    def key(self, head: Head, images: Sequence[Part], other_input: bytes) -> bytes:
        """Return the SHA-256 digest of everything that an output depends on; empty if an image is
        not cacheable.

        `other_input`: the rest of the sequence's input.
        """
        digest = sha256(self._own)
        for piece in (head.encode(), other_input):
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
    """The cached outputs of one job's items, by key. Not thread-safe."""

    def __init__(self, output_cache: OutputCache, find: FindOutput | None) -> None:
        self._cache, self._find = output_cache, find
        self.outputs: dict[bytes, Output] = {}
        self._sequences: dict[bytes, InputSequence] = {}

    def sequence(
        self,
        head: Head,
        images: Sequence[Part],
        make: Callable[[], InputSequence],
        unmade: Callable[[int], InputSequence],
        other_input: bytes = b"",
    ) -> InputSequence:
        """Return the sequence of an item with these images.

        Args:
            make: Decodes the images. An item that the job has twice is made one time.
            unmade: Makes a sequence of a number of tokens that no forward reads, for a cached
                output.
            other_input: The rest of the sequence's input.
        """
        key = b"" if self._find is None else self._cache.key(head, images, other_input)
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
        """Return the outputs that were found, by the index of their sequence (`Prepared.known`)."""
        return {
            index: self.outputs[one.key]
            for index, one in enumerate(sequences)
            if one.key in self.outputs
        }
