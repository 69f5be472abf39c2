"""The interface of a kind to detection and to the store: the checkpoints that it claims, their card
and their files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from libs.catalog.card import Card
from libs.catalog.checkpoint.chat import refuse_messages
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import digest, read_config, tensor_files
from libs.catalog.checkpoint.layout import common_card, read_checkpoint


@dataclass(frozen=True)
class CheckpointPlace:
    """A checkpoint directory, of an unknown kind.

    Attributes:
        model: The id of its card, `org/name` or `org/name@revision`.
        named: The kind that the catalog's card names (`detect.kind`).
        base: Of an adapter, the directory of the model that it is merged into.
    """

    directory: Path
    model: str = ""
    named: str | None = None
    base: Path | None = None

    @cached_property
    def files(self) -> Checkpoint:
        """The files of a directory in the layout of transformers. Raises ModelBroken for another
        layout.
        """
        return read_checkpoint(self.directory)

    @property
    def model_type(self) -> object:
        """The model_type in config.json; None without."""
        config = read_config(self.directory, "config.json")
        return None if config is None else config.values.get("model_type")

    def has(self, file: str) -> bool:
        """Return True if the directory has a file of this name."""
        return (self.directory / file).is_file()

    @property
    def named_revision(self) -> str:
        """The revision that the model's id or the folder names; may be empty."""
        return self.model.partition("@")[2] or self.directory.name.partition("@")[2]

    def revision(self, configs: list[str]) -> str:
        """Return the named revision, else a digest of these files and of the root's tensors."""
        return self.named_revision or digest(
            self.directory, configs, tensor_files(self.directory, "")
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of models.

    `claims` and `card` raise ModelBroken, naming the file and the key at fault, for a directory
    that is of the kind but cannot be served.

    Attributes:
        name: `Card.kind`. Several kinds may have the same, if requests and routers treat their
            models alike.
        folder: The folder of the kind in this package.
        configs: Files of settings, one of which makes a directory a checkpoint.
        folders: Folders of settings and vocabularies that are fetched with the root.
        check: Raises ModelBroken if the card lacks something even with the catalog's overrides.
    """

    name: str
    folder: str
    claims: Callable[[CheckpointPlace], bool]
    card: Callable[[CheckpointPlace], Card]
    configs: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    check: Callable[[Card], None] | None = None


def in_layout(
    name: str,
    claims: Callable[[Checkpoint], bool],
    reader: Callable[[Checkpoint, Card], Card],
    *,
    has_template: bool = False,
    check: Callable[[Card], None] | None = None,
) -> Kind:
    """Return a kind of models in the layout of transformers and sentence-transformers, which are
    also of this kind if the catalog's card says so.

    Args:
        reader: Completes the card, which has the fields that all kinds have.
        has_template: Whether inputs can be rendered with a chat template.
    """

    def is_claimed(place: CheckpointPlace) -> bool:
        return claims(place.files) if place.named is None else place.named == name

    def card(place: CheckpointPlace) -> Card:
        if not has_template:
            refuse_messages(place.files)
        return reader(place.files, common_card(place.files, place.model, name))

    return Kind(name, name, is_claimed, card, check=check)
