"""What the catalog says of models over what their files say. No YAML here: models run where PyYAML is not installed.

`cards.py` reads the files; `detect.read_card` applies what they say when a worker looks at a checkpoint or loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from libs.catalog.card import Activation, Card, Dtype, Kind, PoolingMode
from libs.errors import ModelBroken


@dataclass(frozen=True, slots=True)
class Hints:
    """What files alone cannot tell, in the Card's own words; None: they tell."""

    kind: Kind | None = None
    pooling: PoolingMode | None = None
    normalize: bool | None = None
    lowercase: bool | None = None
    score_activation: Activation | None = None
    answers: tuple[str, ...] | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True)
class Overrides:
    """Of one model; None or empty: as its files say.

    `prompts` go over those of the checkpoint, an empty text taking one away. `revision` is fetched where an id names none.
    `memory_bytes` is set aside for the model if its weights take less.
    """

    source: str  # the card's file and line, and those of cards it goes over
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools: tuple[str, ...] | None = None
    dtype: Dtype | None = None
    revision: str | None = None
    pinned: bool | None = None
    max_tokens: int | None = None
    memory_bytes: int | None = None
    detect: Hints = field(default_factory=Hints)

    def over(self, base: Overrides) -> Overrides:
        """This card where it says something, else `base`."""
        merged = replace(base, **_set(self))  # type: ignore[arg-type]  # its own fields
        detect = replace(base.detect, **_set(self.detect))  # type: ignore[arg-type]  # its own fields
        prompts = {**base.prompts, **self.prompts}
        return replace(merged, prompts=prompts, detect=detect, source=f"{self.source}, {base.source}")


class Catalog:
    """Cards by model id; one of `org/name@revision` goes over that of `org/name`, which counts for all revisions."""

    def __init__(self, cards: Mapping[str, Overrides] | None = None) -> None:
        self._cards = dict(cards or {})

    def __str__(self) -> str:
        return f"{len(self._cards)} cards"

    def of(self, model: str) -> Overrides | None:
        """What is said of a model; None if nothing is."""
        general, special = self._cards.get(model.partition("@")[0]), self._cards.get(model)
        if general is None or special is None or special is general:
            return special or general
        return special.over(general)

    def cards(self) -> Iterable[Overrides]:
        """Every card, in no order."""
        return self._cards.values()

    def pinned_id(self, model: str) -> str:
        """`org/name@revision` for a model whose card names the revision and whose id does not; else the id itself."""
        card = self.of(model)
        return model if "@" in model or card is None or not card.revision else f"{model}@{card.revision}"


def apply(card: Card, said: Overrides | None) -> Card:
    """The card with what the catalog says of it. Raises ModelBroken naming the catalog's file and line."""
    if said is None:
        return card
    prompts = {name: text for name, text in {**card.prompts, **said.prompts}.items() if text}
    default = card.default_prompt if said.default_prompt is None else said.default_prompt
    if said.default_prompt and default not in prompts:
        names = ", ".join(prompts) or "none"
        raise ModelBroken(f"{said.source}: `default_prompt` is {default!r}; the prompts of {card.model} are {names}")
    changed = {**_set(said), **_set(said.detect), "prompts": prompts, "default_prompt": default if default in prompts else ""}
    if said.detect.pooling is not None:
        if len(card.pooling) != 1:
            found = ", ".join(card.pooling) or "none"
            raise ModelBroken(f"{said.source}: `detect.pooling` can stand for one mode of the checkpoint's only; it has {found}")
        changed["pooling"] = (said.detect.pooling,)
    # The kind chose the reader of the files before, and a revision is known only of a directory that was fetched for it.
    own = {name: value for name, value in changed.items() if name not in ("kind", "revision")}
    return replace(card, **own)  # type: ignore[arg-type]  # fields of the Card by their names


def _set(said: Overrides | Hints) -> dict[str, object]:
    """What is not None, without the parts that are merged by themselves."""
    apart = ("source", "prompts", "detect")
    return {one.name: value for one in fields(said) if one.name not in apart and (value := getattr(said, one.name)) is not None}
