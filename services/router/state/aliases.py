"""Resolution of the aliases that requests use as models."""

from __future__ import annotations

from shoal.v1 import inference_pb2 as pb

from libs.aliases import AliasStore
from libs.errors import NoCapacity
from libs.names import is_alias


async def resolve(store: AliasStore, model: str) -> pb.ResolvedAlias | None:
    """Return the models of an alias now, or None for a name that is not an alias of the mesh.

    A request is resolved once, before anything else is decided about it. Raises NoCapacity if the
    aliases are too old and Redis is unavailable, and for unknown names while lost aliases may be
    restored.
    """
    if not is_alias(model):
        return None
    await store.refresh_if_stale()
    alias = store.table.aliases.get(model)
    if alias is None:
        if store.is_settling:
            raise NoCapacity("the mesh has just started or lost its aliases: repeat the request")
        return None
    return pb.ResolvedAlias(
        model=alias.model,
        next_model=alias.next_model,
        previous_model=alias.previous_model,
        revision=alias.revision,
    )
