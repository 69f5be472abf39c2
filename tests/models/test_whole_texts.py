"""Tokens of a whole long text: joined pieces where words divide it, parts where it is one word."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, processors, trainers

from libs.models.interface.work import CancelCheck, never_cancelled
from libs.models.text.tokenising.cutting import Cutter
from libs.models.text.tokenising.whole import MAX_WHOLE_BYTES, PIECE, TokenRows, rows_in_parts

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE, which reads a run of punctuation as one word."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    made.train_from_iterator(["hello world"] * 10, trainer)
    return made


class Joined:
    """The tokens of all parts of a text.

    Attributes:
        ids: Of all tokens, special ones included.
        own: Of the tokens of the text.
        starts, ends: Of the tokens of the text.
    """

    def __init__(
        self, cutter: Cutter, text: str, check_cancelled: CancelCheck = never_cancelled
    ) -> None:
        parts = [*rows_in_parts(cutter, lambda _: (text, True), check_cancelled)]
        self.ids = np.concatenate([part.ids for part in parts])
        self.own = np.concatenate([part.ids[part.first : part.end] for part in parts])
        self.starts = np.concatenate([part.starts[part.first : part.end] for part in parts])
        self.ends = np.concatenate([part.ends[part.first : part.end] for part in parts])


class Recorded(Cutter):
    """Records the texts that it tokenises."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.texts: list[str] = []

    def encode(self, text: str) -> Encoding:
        self.texts.append(text)
        return super().encode(text)

    def rows(self, text: str) -> Joined:
        return Joined(self, text)

    def parts_of(self, text: str) -> list[str]:
        """Return the parts that a text was divided into, after the pieces that could not be
        joined.
        """
        count = next(n for n in range(1, len(self.texts) + 1) if "".join(self.texts[-n:]) == text)
        return self.texts[-count:]


def covered(rows: Joined, text: str) -> bool:
    """Return whether the tokens have all characters of the text, in order."""
    starts, ends = rows.starts, rows.ends
    return bool(
        starts[0] == 0 and ends[-1] == len(text) and (starts[1:] <= ends[:-1]).all()
    ) and bool((np.diff(starts) >= 0).all())


def test_word_up_to_the_limit_is_tokenised_in_one_call(tokenizer: Tokenizer) -> None:
    cutter, text = Recorded(tokenizer), "!?" * (MAX_WHOLE_BYTES // 2)
    rows = cutter.rows(text)
    assert cutter.texts[-1] == text
    assert len(rows.ids) == len(text)
    assert covered(rows, text)


def test_longer_word_is_divided_and_has_all_its_characters(tokenizer: Tokenizer) -> None:
    cutter, text = Recorded(tokenizer), "~=" * MAX_WHOLE_BYTES
    rows = cutter.rows(text)
    assert max(map(len, cutter.texts)) == PIECE
    assert covered(rows, text)
    np.testing.assert_array_equal(rows.ids, tokenizer.encode(text).ids)


def test_parts_end_after_sentences(tokenizer: Tokenizer) -> None:
    sentence = "\u6211\u4eec\u5728\u8fd9\u91cc" * 100 + "\u3002"
    text = sentence * (MAX_WHOLE_BYTES // len(sentence.encode()) + 2)
    one_word = Tokenizer.from_str(tokenizer.to_str())
    one_word.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cutter = Recorded(one_word)
    rows = cutter.rows(text)
    assert all(part.endswith("\u3002") for part in cutter.parts_of(text))
    np.testing.assert_array_equal(rows.ids, one_word.encode(text).ids)
    assert covered(rows, text)


def test_character_of_several_code_points_is_not_divided(tokenizer: Tokenizer) -> None:
    for shift in range(0, len(FAMILY), 2):
        text = "~" * shift + FAMILY * (MAX_WHOLE_BYTES // len(FAMILY.encode()) + 2)
        cutter = Recorded(tokenizer)
        cutter.rows(text)
        assert all(part.startswith("\U0001f468") for part in cutter.parts_of(text)[1:])


@pytest.mark.parametrize("text", [" " * 200_000 + "word", "word" + " " * 200_000, " " * 200_000])
def test_parts_of_white_space_keep_special_tokens_at_the_ends(text: str) -> None:
    words = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "word": 2, "[UNK]": 3}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    rows = Recorded(words).rows(text)
    assert rows.ids.tolist() == words.encode(text).ids
    assert rows.own.tolist() == [2] * text.count("word")


def test_cancellation_is_checked_between_parts(tokenizer: Tokenizer) -> None:
    class Cancelled(Exception):
        pass

    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 4:
            raise Cancelled

    with pytest.raises(Cancelled):
        Joined(Cutter(tokenizer), "~=" * MAX_WHOLE_BYTES, check)


def test_pieces_before_an_endless_word_stay_as_they_were_returned(tokenizer: Tokenizer) -> None:
    """The text up to the word is returned before the word is read."""
    words = "".join(f"hello world{number} " for number in range(4000))
    for word, most in (("!?" * 9000, MAX_WHOLE_BYTES), ("!?" * 90_000, 0)):
        text, read = words + word, list[int]()

        def read_text(
            characters: int, text: str = text, read: list[int] = read
        ) -> tuple[str, bool]:
            read.append(characters)
            return text[:characters], characters >= len(text)

        parts, cutter = list[TokenRows](), Cutter(tokenizer)
        for part in rows_in_parts(cutter, read_text, never_cancelled):
            if not parts:
                assert max(read) <= PIECE + 1
            parts.append(part)
        assert len(parts) > 3
        ids = np.concatenate([part.ids for part in parts])
        if most:
            np.testing.assert_array_equal(ids, tokenizer.encode(text).ids)
        else:  # the word is divided, and all before it is exact
            before = tokenizer.encode(words).ids[:-64]
            np.testing.assert_array_equal(ids[: len(before)], before)
            assert covered(Joined(cutter, text), text)
