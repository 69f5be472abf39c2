"""Names of models as callers send them: ids, aliases, and ids with a role. Pure.

Many clients refuse names that they do not know, and OpenAI's API cannot express whether a text is a
query or a document, without which E5 models lose accuracy. So an alias maps a name to a model and
may fix its role, dimensions and adapter; `model:query` and `model:document` fix the role of any
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from libs.names import is_model_id

Role = Literal["", "query", "document"]
ROLES: Final[tuple[Role, ...]] = ("query", "document")


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """The model and options that a name resolves to. `dimensions` 0 means all."""

    model: str
    role: Role = ""
    dimensions: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class AliasNames:
    """A snapshot of the aliases."""

    aliases: Mapping[str, AliasTarget]

    def find(self, name: str) -> AliasTarget | None:
        """Return the target of a name, or None if it is neither an alias nor a valid model id."""
        known = self._whole(name)
        if known is not None:
            return known
        start, _, end = name.rpartition(":")
        for role in ROLES:
            if end == role and (found := self._whole(start)) is not None:
                return AliasTarget(found.model, role, found.dimensions, found.adapter)
        return None

    def _whole(self, name: str) -> AliasTarget | None:
        return self.aliases.get(name) or (AliasTarget(name) if is_model_id(name) else None)
