"""The cost of chunks grows with the text: counted are calls, tokens that are kept and outputs that
are looked up, not seconds.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.models import EncodeWork, PackedModel
from libs.models.interface.model import ComputesChunks
from libs.models.interface.sequences import Output
from libs.models.interface.work import CancelCheck, Chunking, ChunkMethod
from libs.models.text.processing.chunking import span_pooling
from libs.models.text.processing.chunking.dividing import WINDOW, ChunkSizes, divide
from libs.models.text.processing.chunking.span_pooling import GrowingWindows
from libs.models.text.tokenising.text import TextProcessor
from tests.models.test_chunks import HARD, MARKDOWN, METHODS, TEXTS, nothing, processor
from tests.parity.tokenizers import Style
from tests.support.texts import texts

INDEPENDENT: tuple[Style, ...] = ("bert", "mpnet")
"""Tokenizers that read each word by itself."""
PART_BYTES = 4096
LETTERS = "abΣIİß1 .,-'!\n\r\t\x00\x0b\x1c\x85\u00a0\u00ad\u0301\u0345\u200b\u200d\u2028\u302e"
OTHERS = "日本語。가각\u1100\u1161\u05e9\u05dc\u0633😀👩\U0001f3fd[SEP]"


def test_tokenizers_with_independent_words_are_known() -> None:
    found = [style for style in get_args(Style) if processor(style).has_independent_words]
    assert found == list(INDEPENDENT)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=LETTERS + OTHERS, min_size=1, max_size=30), st.sampled_from(INDEPENDENT))
@example("[SEP]x [SEP] y", "bert")
@example("x" * 40, "bert")
def test_part_between_words_has_the_tokens_of_its_text(own: str, style: Style) -> None:
    text = processor(style)
    sizes = ChunkSizes(text, EncodeWork([own]), 0, 1 << 20, nothing)
    sizes.enter(0, WINDOW)
    for begin in range(len(own)):
        for end in range(begin + 1, len(own) + 1):
            part = own[begin:end]
            if part == part.strip() and (known := sizes.known(begin, end)) is not None:
                assert known == text.count_tokens(part, 1 << 20)


@pytest.mark.parametrize("style", INDEPENDENT)
def test_part_that_is_not_in_the_window_is_tokenised(style: Style) -> None:
    sizes = ChunkSizes(processor(style), EncodeWork([f"a{' ' * 50}b"]), 0, 4, nothing)
    sizes.enter(0, WINDOW)
    assert sizes.count("w x y z") == 4


@pytest.mark.parametrize("style", INDEPENDENT)
@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_those_of_parts_that_are_tokenised(
    style: Style, method: ChunkMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = processor(style)
    for own in (*TEXTS, HARD * 5, MARKDOWN * 5):
        for most, overlap in ((2, 0), (16, 8), (40, 0)):
            chunking = Chunking(method, max_tokens=most, overlap=overlap)
            work = EncodeWork([own], chunking=chunking)
            found = divide(text, work, 0, 500, nothing)
            with monkeypatch.context() as patch:
                patch.setattr(TextProcessor, "has_independent_words", False)
                assert divide(text, work, 0, 500, nothing) == found


def test_sentences_are_not_tokenised_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The splitter has six candidates for each chunk. Those that end within a word are rare."""
    text, calls = processor("bert"), list[str]()
    counted = TextProcessor.count_tokens

    def count_tokens(
        self: TextProcessor, part: str, most: int, check_cancelled: CancelCheck = nothing
    ) -> int:
        calls.append(part)
        return counted(self, part, most, check_cancelled)

    monkeypatch.setattr(TextProcessor, "count_tokens", count_tokens)
    own = " ".join(f"{one.rstrip('.')}." for one in texts(300, shortest=8, longest=30, seed=6))
    work = EncodeWork([own], chunking=Chunking("sentences", max_tokens=60))
    chunks = len(divide(text, work, 0, 500, nothing))
    assert chunks > 100
    assert len(calls) < chunks / 20


class Outputs(dict[int, Output]):
    """The outputs of a job, of which look-ups are counted."""

    reads = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


def streamed(model: PackedModel, own: str) -> tuple[int, int]:
    """Compute the late chunks of a text one window after the other, and take those that are
    computed after each of them. Return the windows and the look-ups of outputs.
    """
    assert isinstance(model, ComputesChunks)
    prepared = model.prepare(EncodeWork([own], chunking=Chunking(max_tokens=9, late=True)))
    known, first = Outputs(), 0
    for index, output in enumerate(model.forward_all(prepared)):
        known[index] = output
        while (part := model.finish_rows(prepared, known, first, PART_BYTES)) is not None:
            assert part.chunks is not None
            first += len(part.chunks.starts)
    return len(prepared.sequences), known.reads


def test_late_chunks_are_streamed_at_a_cost_of_the_text(embedder: PackedModel) -> None:
    own = " ".join(texts(60, shortest=5, longest=20, seed=4))
    windows, reads = streamed(embedder, own)
    more_windows, more_reads = streamed(embedder, " ".join([own] * 4))
    assert windows > 10
    assert more_windows / windows > 3.5
    assert more_reads / more_windows < 1.2 * reads / windows


def test_tokens_of_late_windows_are_forgotten(
    embedder: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    take = GrowingWindows.take

    def noting(self: GrowingWindows, *, is_whole: bool = False) -> list[span_pooling.PooledWindow]:
        found = take(self, is_whole=is_whole)
        kept.append(self.kept_tokens)
        return found

    monkeypatch.setattr(GrowingWindows, "take", noting)
    own = " ".join(texts(500, shortest=5, longest=20, seed=4))
    prepared = embedder.prepare(EncodeWork([own], chunking=Chunking(max_tokens=9, late=True)))
    assert len(kept) > 3
    assert max(kept) < sum(one.tokens for one in prepared.sequences) / 2
