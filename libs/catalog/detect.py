"""Reads the Card of a checkpoint directory: family, kind, tasks, limits, prompts, and the layers
after the encoder.

Workers read the cards of all models on their disk before they load any, so that the mesh knows its
cold models. Only JSON and tensor headers are read. Code of the checkpoint (`auto_map`) is ignored
and never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from libs.catalog.card import MAX_PROMPT_CHARACTERS, MAX_PROMPTS, Card
from libs.catalog.checkpoint.files import shortened
from libs.catalog.checkpoint.tasks import refuse_unserved
from libs.catalog.overrides import Overrides, apply
from libs.errors import ModelBroken
from libs.kinds.kind import CheckpointPlace, Kind
from libs.kinds.registry import detect_kind
from libs.text import control_character


def detect(
    directory: Path, model: str, overrides: Overrides | None = None, base: Path | None = None
) -> tuple[CheckpointPlace, Kind]:
    """Return the kind of the checkpoint in `directory`; the arguments are those of `read_card`."""
    refuse_unserved(directory)
    place = CheckpointPlace(directory, model, overrides.detect.kind if overrides else None, base)
    return place, detect_kind(place)


def read_card(
    directory: Path, model: str, overrides: Overrides | None = None, base: Path | None = None
) -> Card:
    """Return the card of the checkpoint in `directory`, under the id `model` (`org/name` or
    `org/name@revision`).

    Raises ModelBroken that names the file and the invalid key.

    Args:
        overrides: The overrides of the catalog for the model.
        base: The directory of the model into which an adapter is merged.
    """
    place, kind = detect(directory, model, overrides, base)
    card = replace(
        apply(kind.card(place), overrides), created_unix_seconds=_newest_file_seconds(directory)
    )
    if kind.check is not None:
        kind.check(card)
    _refuse_controls(card)
    _refuse_many_prompts(card.prompts)
    return card


def _newest_file_seconds(directory: Path) -> int:
    """Return the Unix time at which the newest file of the directory itself was written; 0 if none
    can be read.
    """
    try:
        return max(
            (int(path.stat().st_mtime) for path in directory.iterdir() if path.is_file()), default=0
        )
    except OSError:
        return 0


def _refuse_controls(card: Card) -> None:
    """Names reach terminals, logs and metrics, where control characters could be interpreted."""
    places = {
        "model_type": (card.family,),
        "revision": (card.revision,),
        "id2label": (*card.labels, *card.classes),
    }
    for key, names in {**places, "prompts": (*card.prompts, card.default_prompt)}.items():
        for name in names:
            if found := control_character(name):
                raise ModelBroken(
                    f"`{key}` has the control character {found} in "
                    f"{shortened(repr(name), 100)}: "
                    "names are plain text"
                )


def _refuse_many_prompts(prompts: Mapping[str, str]) -> None:
    """Raise ModelBroken for more prompts than a heartbeat may have (libs/catalog/card.py), because
    each heartbeat contains the card.
    """
    if len(prompts) > MAX_PROMPTS:
        raise ModelBroken(
            f"`prompts` has {len(prompts):,} entries; at most {MAX_PROMPTS:,} are served"
        )
    if sum(len(name) + len(text) for name, text in prompts.items()) > MAX_PROMPT_CHARACTERS:
        raise ModelBroken(
            f"`prompts` has more than {MAX_PROMPT_CHARACTERS:,} characters, names included"
        )
