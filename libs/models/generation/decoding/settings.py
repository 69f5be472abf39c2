"""Generation settings of a checkpoint: its generation_config.json, with transformers' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from libs.catalog.checkpoint.files import need_config, read_config
from libs.errors import ModelBroken
from libs.models.generation.decoding.sampling import Sampler
from libs.models.layers.spec import Config

FILE: Final = "generation_config.json"
_MAX_NEW: Final = 256  # tokens of an answer, if neither request nor checkpoint sets them
MAX_STOPS: Final = 64
MAX_SUPPRESSED: Final = 65_536
"""Length of one list of ids that are never chosen: image models bar all of their codes from
texts.
"""
MAX_BAD_WORDS: Final = 1_024
MAX_BAD_WORD_IDS: Final = 64
"""Limits of the list and of each entry. All entries are compared with a text's end before each
token.
"""
MAX_BEAMS: Final = 32
MAX_NGRAM: Final = 1_024
MAX_LENGTH_PENALTY: Final = 16.0
"""Limit of the power of the answer's length."""
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "remove_invalid_values": (False,),
}
"""Settings that change answers and are not served, with their neutral values."""
_NEUTRAL_SAMPLED: Final[Mapping[str, tuple[object, ...]]] = {
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
}
"""Further such settings of checkpoints that sample."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Settings of an answer. Lengths include the decoder's prompt, except those of new tokens.

    Attributes:
        stops: Token ids that end an answer.
        start: First token of an encoder-decoder model's decoder.
        bad_words: Token sequences that are never completed.
        forced_first: Token after a prompt of one.
        forced_last: Last token of an answer that reaches its maximum length.
        vocabulary: Ids from here on are never chosen; None for no bound.
        temperature: 0 for the most likely token. Above 0, `top_k`, `top_p` and `min_p` restrict the
            candidates.
        renormalizes: Beam scores are normalised again after tokens were barred.
    """

    stops: tuple[int, ...] = ()
    start: int | None = None
    max_new: int | None = None
    max_length: int | None = None
    min_new: int = 0
    min_length: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None
    vocabulary: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    renormalizes: bool = False

    def sampler(self, key: bytes) -> Sampler | None:
        """Return a sampler with a random key; None for greedy search and beam search."""
        if self.temperature == 0.0 or self.beams > 1:
            return None
        return Sampler(self.temperature, self.top_k, self.top_p, self.min_p, key)

    def check_vocabulary(self, size: int) -> None:
        """Check that all token ids are below `size`. Raises ModelBroken, naming the key."""
        one = {
            "decoder_start_token_id": self.start,
            "forced_bos_token_id": self.forced_first,
            "forced_eos_token_id": self.forced_last,
        }
        lists = {
            "eos_token_id": self.stops,
            "suppress_tokens": self.suppressed,
            "begin_suppress_tokens": self.suppressed_first,
            "bad_words_ids": tuple(each for word in self.bad_words for each in word),
            **{key: () if each is None else (each,) for key, each in one.items()},
        }
        for key, ids in lists.items():
            if ids and not 0 <= min(ids) <= max(ids) < size:
                outside = next(each for each in ids if not 0 <= each < size)
                raise ModelBroken(
                    f"{FILE}: {key} has the token id {outside}: ids from 0 to {size - 1:,} are "
                    "served"
                )

    def longest(self, prompt: int, most: int | None, positions: int) -> int:
        """Return the maximum new tokens after a prompt: the request's `most` or the checkpoint's
        number, within the model's positions.
        """
        if most is None:
            most = (
                self.max_new
                if self.max_new is not None
                else None
                if self.max_length is None
                else self.max_length - prompt
            )
        return max(0, min(_MAX_NEW if most is None else most, positions - prompt))


def read_settings(directory: Path) -> DecodeSettings:
    """Read generation_config.json or, without it, config.json with its decoder's settings (Donut,
    Florence-2).

    A decoder's `max_length` is not read: early versions of transformers wrote its default, 20
    tokens, into every part of a file.

    Raises ModelBroken, naming the file and key, for settings that are not served.
    """
    own = read_config(directory, FILE)
    if own is not None:
        return parse_settings(Config(own.values, file=FILE))
    config = need_config(directory, "config.json")
    parts = [{**config.part(key).values, "max_length": None} for key in ("text_config", "decoder")]
    said = [
        (key, value)
        for part in (*parts, config.values)
        for key, value in part.items()
        if value is not None
    ]
    return parse_settings(Config(dict(said)))


def parse_settings(config: Config) -> DecodeSettings:
    """Read the settings of one object. Raises as `read_settings`."""
    for key, neutral in _NEUTRAL.items():
        if config.has(key) and config.values[key] not in neutral:
            raise config.unsupported(key, "this setting is not served")
    beams, is_sampled = config.size("num_beams", 1), config.flag("do_sample", False)
    if beams > MAX_BEAMS:
        raise config.unsupported("num_beams", f"at most {MAX_BEAMS} are served")
    if is_sampled:
        for key, neutral in _NEUTRAL_SAMPLED.items():
            if config.has(key) and config.values[key] not in neutral:
                raise config.unsupported(key, "this setting is not served where do_sample is true")
    return DecodeSettings(
        stops=_ids(config, "eos_token_id", MAX_STOPS),
        start=_first(config, "decoder_start_token_id", "bos_token_id"),
        max_new=_size(config, "max_new_tokens"),
        max_length=_size(config, "max_length"),
        min_new=config.integer("min_new_tokens", 0),
        min_length=config.integer("min_length", 0),
        beams=beams,
        length_penalty=config.number(
            "length_penalty", 1.0, least=-MAX_LENGTH_PENALTY, most=MAX_LENGTH_PENALTY
        ),
        early_stopping=_early(config),
        repetition_penalty=config.number(
            "repetition_penalty", 1.0, least=MIN_REPETITION_PENALTY, most=MAX_REPETITION_PENALTY
        ),
        no_repeat_ngram=int(config.number("no_repeat_ngram_size", 0, least=0, most=MAX_NGRAM)),
        bad_words=_words(config),
        suppressed=_ids(config, "suppress_tokens", MAX_SUPPRESSED),
        suppressed_first=_ids(config, "begin_suppress_tokens", MAX_SUPPRESSED),
        forced_first=_first(config, "forced_bos_token_id"),
        forced_last=_first(config, "forced_eos_token_id"),
        temperature=_within(config, "temperature", 1.0, 0.0, math.inf)
        if is_sampled and beams == 1
        else 0.0,
        top_k=config.integer("top_k", 0),
        top_p=_within(config, "top_p", 1.0, 0.0, 1.0),
        min_p=_within(config, "min_p", 0.0, 0.0, 1.0),
        renormalizes=config.flag("renormalize_logits", False),
    )


def _size(config: Config, key: str) -> int | None:
    return config.size(key) if config.has(key) else None


def _ids(config: Config, key: str, most: int) -> tuple[int, ...]:
    """Read one id or a list of at most `most` of them."""
    if not config.has(key):
        return ()
    value = config.values[key]
    values = value if isinstance(value, list) else [value]
    if len(values) > most:
        raise config.unsupported(
            key, f"it has {len(values):,} token ids; at most {most:,} are served"
        )
    found = Config({f"{key}[{place}]": each for place, each in enumerate(values)}, file=FILE)
    return tuple(found.integer(f"{key}[{place}]") for place in range(len(values)))


def _first(config: Config, *keys: str) -> int | None:
    return next((ids[0] for key in keys if (ids := _ids(config, key, MAX_STOPS))), None)


def _within(config: Config, key: str, default: float, least: float, most: float) -> float:
    value = config.number(key, default) if config.has(key) else default
    if not least <= value <= most:
        raise config.unsupported(key, f"a number within {least:g} and {most:g} is needed")
    return value


def _early(config: Config) -> bool | Literal["never"]:
    value = config.values.get("early_stopping")
    return "never" if value == "never" else config.flag("early_stopping", False)


def _words(config: Config) -> tuple[tuple[int, ...], ...]:
    value = config.values.get("bad_words_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, list) and word for word in value):
        raise config.unsupported("bad_words_ids", "a list of lists of token ids is needed")
    if len(value) > MAX_BAD_WORDS:
        raise config.unsupported(
            "bad_words_ids", f"it has {len(value):,} lists; at most {MAX_BAD_WORDS:,} are served"
        )
    return tuple(
        _ids(Config({"bad_words_ids": word}, file=FILE), "bad_words_ids", MAX_BAD_WORD_IDS)
        for word in value
    )
