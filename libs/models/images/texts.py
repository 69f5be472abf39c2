"""Texts of models that read texts and images: tokenizer rules of a family that tokenizer.json
lacks.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from libs.catalog.checkpoint.files import need_config, read_config
from libs.kinds.images.card import OPEN_CLIP, is_open_clip
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import CancelCheck, Truncation
from libs.models.layers.spec import Config
from libs.models.text.tokenising.text import TextProcessor, special_token
from libs.models.text.tokenising.tokenizer import load_tokenizer

_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules that are applied to texts.

    Attributes:
        lower: Lower-case texts.
        spaced: Collapse repeated whitespace to one space.
        canonical: Remove ASCII punctuation too.
        underscore: Replacement of underscores.
        padding: Id that pads each text to the model's maximum length, as in its training; None for
            no padding.
        ends_once: The model reads a text up to its first end token.
    """

    lower: bool = False
    spaced: bool = False
    canonical: bool = False
    underscore: str = ""
    padding: int | None = None
    ends_once: bool = False


_CLEANING: Final = {
    "whitespace": TextRules(spaced=True),
    "lower": TextRules(lower=True, spaced=True),
    "canonicalize": TextRules(lower=True, canonical=True, underscore=" "),
}


class ImageModelTexts:
    """Converts texts to sequences of the text backbone. Thread-safe."""

    def __init__(self, text: TextProcessor, rules: TextRules) -> None:
        self._text, self._rules = text, rules

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def filled(self) -> int:
        """Tokens of every text if texts are padded; else 0."""
        return 0 if self._rules.padding is None else self._text.limit

    def sequence(
        self, text: str, field: str, truncation: Truncation, check_cancelled: CancelCheck
    ) -> InputSequence:
        """Convert a text. Raises InputTooLong or InvalidInput with `field`, the text's path."""
        (sequence,) = self._text.encode(
            [self._written(text)], truncation, lambda _: field, check_cancelled=check_cancelled
        )
        ids = sequence.ids
        if self._rules.ends_once:
            ids = ids[: int(np.argmax(ids == ids[-1])) + 1]
        if self._rules.padding is not None:
            ids = np.concatenate(
                [ids, np.full(self._text.limit - len(ids), self._rules.padding, np.int32)]
            )
        return InputSequence(ids, cut=sequence.cut)

    def _written(self, text: str) -> str:
        text = text.lower() if self._rules.lower else text
        if self._rules.canonical:
            text = text.replace("_", self._rules.underscore).translate(_PUNCTUATION)
        return " ".join(text.split()) if self._rules.canonical or self._rules.spaced else text


def read_texts(root: Path, limit: int) -> ImageModelTexts:
    """Read the tokenizer and its rules. Raises ModelBroken.

    Args:
        root: The directory of config.json, or open_clip's, and the tokenizer.
        limit: Maximum length of a text in tokens.
    """
    tokenizer = load_tokenizer(root, lowercase=False)
    text = TextProcessor(tokenizer, limit=limit, segments=False)
    if is_open_clip(root):
        return ImageModelTexts(
            text,
            _open_clip_rules(
                root, Config(need_config(root, OPEN_CLIP).values, file=OPEN_CLIP), text
            ),
        )
    return ImageModelTexts(
        text, _rules(root, Config(need_config(root, "config.json").values), text)
    )


def _open_clip_rules(root: Path, config: Config, text: TextProcessor) -> TextRules:
    """Read the rules of open_clip's HFTokenizer: `clean` normalises a text, or only its whitespace.
    Texts are always padded.
    """
    texts = config.part("model_cfg").part("text_cfg")
    texts.require(
        "strip_sep_token", False
    )  # other models use it; it would turn the ends of texts into padding
    clean = texts.part("tokenizer_kwargs").text("clean", "whitespace")
    if clean not in _CLEANING:
        raise texts.unsupported(
            "tokenizer_kwargs", f"its `clean` is {clean!r}; supported are {', '.join(_CLEANING)}"
        )
    padding = text.token_id(special_token(root, "pad_token"))
    return replace(
        _CLEANING[clean], padding=texts.integer("pad_id", 0) if padding is None else padding
    )


def _rules(root: Path, config: Config, text: TextProcessor) -> TextRules:
    if config.text("model_type") not in ("siglip", "siglip2"):
        return TextRules(ends_once=True)
    named = read_config(root, "tokenizer_config.json")
    kind = "" if named is None else named.text("tokenizer_class")
    padding = text.token_id(special_token(root, "pad_token"))
    if padding is None:
        padding = config.part("text_config").integer("pad_token_id", 1)
    # SigLIP 2 has Gemma's tokenizer, which keeps punctuation.
    return TextRules(
        lower=True,
        canonical=kind.startswith("Siglip") and not kind.startswith("Siglip2"),
        padding=padding,
    )
