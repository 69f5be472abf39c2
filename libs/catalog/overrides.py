"""The catalog's overrides of what models' files say. No YAML here: models run where PyYAML is not
installed.

`cards.py` reads them from files; `detect.read_card` applies them when a worker reads the card of a
checkpoint or loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from libs.catalog.card import Activation, Card, Dtype, PoolingMode, kept_prompts
from libs.errors import ModelBroken


@dataclass(frozen=True, slots=True)
class Hints:
    """Fields of the Card that files alone may not determine; None: as detected."""

    kind: str | None = None
    pooling: PoolingMode | None = None
    normalize: bool | None = None
    lowercase: bool | None = None
    score_activation: Activation | None = None
    answers: tuple[str, ...] | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True)
class Overrides:
    """The overrides of one model; None or empty: as its files say.

    `prompts` override those of the checkpoint by name; an empty text removes one. `revision` is
    fetched where an id names none. `memory_bytes` is reserved for the model if its weights take
    less.
    """

    source: str  # the card's file and line, then those of the cards that it overrides
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
        """This card where it sets a field, else `base`; prompts are merged by name."""
        merged = replace(base, **_given(self))  # type: ignore[arg-type]  # its own fields
        detect = replace(base.detect, **_given(self.detect))  # type: ignore[arg-type]  # its own fields
        prompts = {**base.prompts, **self.prompts}
        return replace(
            merged, prompts=prompts, detect=detect, source=f"{self.source}, {base.source}"
        )


class Catalog:
    """Overrides by model id; those of `org/name@revision` override those of `org/name`, which apply
    to all revisions.
    """

    def __init__(
        self,
        cards: Mapping[str, Overrides] | None = None,
        unserved: Mapping[str, str] | None = None,
    ) -> None:
        """Create a catalog. `unserved`: the reasons why published models are not served."""
        self._cards, self._unserved = dict(cards or {}), dict(unserved or {})

    def __str__(self) -> str:
        return f"{len(self._cards)} cards"

    def overrides(self, model: str) -> Overrides | None:
        """Return the overrides of a model; None if no YAML card describes it."""
        general, special = self._cards.get(model.partition("@")[0]), self._cards.get(model)
        if general is None or special is None or special is general:
            return special or general
        return special.over(general)

    def refuse_unserved(self, model: str) -> None:
        """Raise ModelBroken, with the reason and often another model, for a published model that is
        not served. A card allows it.
        """
        reason = self._unserved.get(model.partition("@")[0])
        if reason is not None and self.overrides(model) is None:
            raise ModelBroken(f"{model} is not served: {reason}")

    def cards(self) -> Iterable[Overrides]:
        """Return every card, in no order."""
        return self._cards.values()

    def pinned_id(self, model: str) -> str:
        """Return the id with the revision of the model's card, `org/name@revision`; the id itself
        if it names one or the card does not.
        """
        card = self.overrides(model)
        return (
            model
            if "@" in model or card is None or not card.revision
            else f"{model}@{card.revision}"
        )


def apply(card: Card, overrides: Overrides | None) -> Card:
    """Return the card with the catalog's overrides. Raises ModelBroken naming the catalog's file
    and line if they do not fit the card.
    """
    if overrides is None:
        return card
    prompts = kept_prompts({**card.prompts, **overrides.prompts})
    default = card.default_prompt if overrides.default_prompt is None else overrides.default_prompt
    if overrides.default_prompt and default not in prompts:
        names = ", ".join(prompts) or "none"
        raise ModelBroken(
            f"{overrides.source}: `default_prompt` is {default!r}, which is not a prompt of "
            f"{card.model}; its prompts are: {names}"
        )
    changed = {**_given(overrides), **_given(overrides.detect), "prompts": prompts}
    changed["default_prompt"] = default if default in prompts else ""
    if overrides.detect.pooling is not None:
        if len(card.pooling) != 1:
            found = ", ".join(card.pooling) or "none"
            raise ModelBroken(
                f"{overrides.source}: `detect.pooling` can only replace a single pooling mode; "
                f"the checkpoint's are: {found}"
            )
        changed["pooling"] = (overrides.detect.pooling,)
    # The kind has chosen the reader already; the revision is that of the directory, whatever a card
    # would have fetched.
    own = {name: value for name, value in changed.items() if name not in ("kind", "revision")}
    return replace(card, **own)  # type: ignore[arg-type]  # fields of the Card by their names


def _given(overrides: Overrides | Hints) -> dict[str, object]:
    """Return the fields that are not None, without those that callers merge in their own way."""
    values = {one.name: getattr(overrides, one.name) for one in fields(overrides)}
    return {
        name: value
        for name, value in values.items()
        if value is not None and name not in ("source", "prompts", "detect")
    }
