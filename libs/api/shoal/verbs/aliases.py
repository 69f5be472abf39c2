"""The verbs of aliases: names that stand for a model, and the steps of a change to another model.
See `shoal.verbs` for how clients get them.

Each step reads the alias and writes it with the revision that it read, so two callers cannot
overwrite each other's step (AliasChanged). A change is answered once all routers use it.
"""

from __future__ import annotations

from shoal.errors import InvalidInput, ModelNotFound
from shoal.requests import codec
from shoal.status import Alias
from shoal.transport.methods import GET_MODEL, LIST_ALIASES, LOAD_MODEL, REMOVE_ALIAS, SET_ALIAS
from shoal.v1 import aliases_pb2, models_pb2
from shoal.verbs.base import AliasesBase


async def list_aliases(aliases: AliasesBase, *, timeout: float | None = None) -> list[Alias]:
    """Return all aliases, ordered by name. Raises ShoalError."""
    response = await aliases._client._caller.unary(
        LIST_ALIASES, aliases_pb2.ListAliasesRequest(), timeout=timeout
    )
    return [codec.alias(entry) for entry in response.aliases]


async def get_alias(aliases: AliasesBase, name: str, *, timeout: float | None = None) -> Alias:
    """Return one alias. Raises InvalidInput if the mesh has none of this name."""
    found = {alias.name: alias for alias in await list_aliases(aliases, timeout=timeout)}
    if name not in found:
        others = ", ".join(found) or "none"
        raise InvalidInput(
            f"the mesh has no alias {name} (it has: {others}): set it with "
            f"`shoal alias set {name} MODEL`",
            field="alias",
        )
    return found[name]


async def set_alias(
    aliases: AliasesBase,
    name: str,
    model: str,
    *,
    expect_revision: int | None = None,
    timeout: float | None = None,
) -> Alias:
    """Create an alias or let it stand for another model at once, without a way back. A change that
    is in progress ends. Raises ShoalError.

    Use `start`, `switch` and `rollback` for an embedding model with an index.

    Args:
        expect_revision: Raise AliasChanged unless the alias has this revision; 0: unless it does
            not exist; None: set it in any case.
    """
    return await _set(aliases, Alias(name, model), expect_revision, timeout)


async def remove_alias(aliases: AliasesBase, name: str, *, timeout: float | None = None) -> bool:
    """Remove an alias: requests by it are refused from then on. Returns False if it did
    not exist. Raises ShoalError.
    """
    response = await aliases._client._caller.unary(
        REMOVE_ALIAS, aliases_pb2.RemoveAliasRequest(name=name), timeout=timeout
    )
    return response.removed


async def start(
    aliases: AliasesBase, name: str, model: str, *, output: str = "", timeout: float | None = None
) -> Alias:
    """Record that an alias will stand for another model. Requests are answered as before; calls
    with `both_models` get vectors of both. Raises ShoalError.

    Args:
        output: Where the vectors of the corpus by the new model are written, for operators.
    """
    found = await get_alias(aliases, name, timeout=timeout)
    return await _set(aliases, found.started(model, output), found.revision, timeout)


async def switch(aliases: AliasesBase, name: str, *, timeout: float | None = None) -> Alias:
    """Load the next model of an alias unless it is resident, and let it answer. Raises ShoalError.

    Requests that are sent after this call has returned are answered by it. If a call failed, repeat
    it: for an alias that was switched already, it waits until all routers use that.
    """
    found = await get_alias(aliases, name, timeout=timeout)
    switched = found.switched()
    await _load(aliases, switched.model, timeout)
    return await _set(aliases, switched, found.revision, timeout)


async def rollback(aliases: AliasesBase, name: str, *, timeout: float | None = None) -> Alias:
    """Let the model answer that an alias had before `switch`, loading it first unless it is
    resident. The change stays in progress, and the call may be repeated as `switch`. Raises
    ShoalError.
    """
    found = await get_alias(aliases, name, timeout=timeout)
    rolled_back = found.rolled_back()
    await _load(aliases, rolled_back.model, timeout)
    return await _set(aliases, rolled_back, found.revision, timeout)


async def finish(aliases: AliasesBase, name: str, *, timeout: float | None = None) -> Alias:
    """End a change: keep the model that answers now, and forget the other one. Raises
    ShoalError.
    """
    found = await get_alias(aliases, name, timeout=timeout)
    return await _set(aliases, found.finished(), found.revision, timeout)


async def _load(aliases: AliasesBase, model: str, timeout: float | None) -> None:
    """Load a model unless a worker has it resident."""
    caller = aliases._client._caller
    try:
        response = await caller.unary(
            GET_MODEL, models_pb2.GetModelRequest(model=model), timeout=timeout
        )
        if response.model.state == models_pb2.MODEL_STATE_RESIDENT:
            return
    except ModelNotFound:
        pass
    await caller.unary(LOAD_MODEL, models_pb2.LoadModelRequest(model=model), timeout=timeout)


async def _set(
    aliases: AliasesBase, alias: Alias, expect_revision: int | None, timeout: float | None
) -> Alias:
    message = aliases_pb2.Alias(
        name=alias.name,
        model=alias.model,
        next_model=alias.next_model,
        previous_model=alias.previous_model,
        output=alias.output,
    )
    response = await aliases._client._caller.unary(
        SET_ALIAS,
        aliases_pb2.SetAliasRequest(alias=message, expect_revision=expect_revision),
        timeout=timeout,
    )
    return codec.alias(response.alias)
