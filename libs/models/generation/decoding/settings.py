"""How a checkpoint's answers are chosen: its generation_config.json, in transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from libs.catalog.checkpoint.files import need_config, read_config
from libs.models.layers.spec import Config

FILE: Final = "generation_config.json"
_MOST_NEW: Final = 256  # tokens of an answer, where neither the request nor the checkpoint says
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
"""Settings that change greedy answers and are not served, with the values that mean nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Token ids and lengths; lengths count the prompt of the decoder, but for those of new tokens.

    `stops`: end an answer. `start`: what the decoder of an encoder-decoder model begins with. `vocabulary`: ids from here on are
    never chosen; None: all may be. `bad_words`: token sequences that are never completed. `forced_first`: the token after a prompt
    of one; `forced_last`: the last token of an answer that reaches its longest.
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

    def longest(self, prompt: int, most: int | None, positions: int) -> int:
        """How many new tokens an answer to a prompt of so many tokens may have: `most` (the request's), or the checkpoint's number.
        At most what the model's positions leave."""
        if most is None:
            most = self.max_new if self.max_new is not None else None if self.max_length is None else self.max_length - prompt
        return max(0, min(_MOST_NEW if most is None else most, positions - prompt))


def read_settings(directory: Path) -> Settings:
    """From generation_config.json or, where there is none, config.json and what it says of the decoder (Donut, Florence-2).

    A decoder's `max_length` is not read: early versions of transformers wrote its default, 20 tokens, into every part of a file.
    Sampling is not served: answers are greedy.

    Raises ModelBroken, naming the file and key, for settings that are not served.
    """
    own = read_config(directory, FILE)
    if own is not None:
        return settings_of(Config(own.values, file=FILE))
    config = need_config(directory, "config.json")
    parts = [{**config.part(key).values, "max_length": None} for key in ("text_config", "decoder")]
    said = [(key, value) for part in (*parts, config.values) for key, value in part.items() if value is not None]
    return settings_of(Config(dict(said)))


def settings_of(config: Config) -> Settings:
    """As `read_settings`, of one object."""
    for key, neutral in _NEUTRAL.items():
        if config.has(key) and config.values[key] not in neutral:
            raise config.unsupported(key, "this setting is not served")
    beams = config.size("num_beams", 1)
    if beams > 1 and config.flag("renormalize_logits", False):
        raise config.unsupported("renormalize_logits", "it is not served with beams")
    return Settings(
        stops=_ids(config, "eos_token_id"),
        start=_first(config, "decoder_start_token_id", "bos_token_id"),
        max_new=_size(config, "max_new_tokens"),
        max_length=_size(config, "max_length"),
        min_new=config.integer("min_new_tokens", 0),
        min_length=config.integer("min_length", 0),
        beams=beams,
        length_penalty=config.number("length_penalty", 1.0),
        early_stopping=_early(config),
        repetition_penalty=_penalty(config),
        no_repeat_ngram=config.integer("no_repeat_ngram_size", 0),
        bad_words=_words(config),
        suppressed=_ids(config, "suppress_tokens"),
        suppressed_first=_ids(config, "begin_suppress_tokens"),
        forced_first=_first(config, "forced_bos_token_id"),
        forced_last=_first(config, "forced_eos_token_id"),
    )


def _size(config: Config, key: str) -> int | None:
    return config.size(key) if config.has(key) else None


def _ids(config: Config, key: str) -> tuple[int, ...]:
    """One id or a list of them."""
    if not config.has(key):
        return ()
    value = config.values[key]
    values = value if isinstance(value, list) else [value]
    found = Config({f"{key}[{place}]": each for place, each in enumerate(values)}, file=FILE)
    return tuple(found.integer(f"{key}[{place}]") for place in range(len(values)))


def _first(config: Config, *keys: str) -> int | None:
    return next((ids[0] for key in keys if (ids := _ids(config, key))), None)


def _penalty(config: Config) -> float:
    penalty = config.number("repetition_penalty", 1.0)
    if penalty <= 0:
        raise config.unsupported("repetition_penalty", "a number above 0 is needed")
    return penalty


def _early(config: Config) -> bool | Literal["never"]:
    value = config.values.get("early_stopping")
    return "never" if value == "never" else config.flag("early_stopping", False)


def _words(config: Config) -> tuple[tuple[int, ...], ...]:
    value = config.values.get("bad_words_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, list) and word for word in value):
        raise config.unsupported("bad_words_ids", "a list of lists of token ids is needed")
    return tuple(_ids(Config({"bad_words_ids": word}, file=FILE), "bad_words_ids") for word in value)
