"""AliasService: lists and moves the aliases of the mesh."""

from __future__ import annotations

import logging

import grpc
from shoal.v1 import aliases_pb2 as pb
from shoal.v1 import aliases_pb2_grpc

from libs.aliases import AliasStore
from libs.errors import InvalidInput
from libs.names import is_alias
from libs.telemetry.logs import MODEL, fields
from services.router.admission.validation import limits
from services.router.admission.validation.requests import check_model

log = logging.getLogger(__name__)


class AliasService(aliases_pb2_grpc.AliasServiceServicer):
    """Changes are answered once all routers use them."""

    def __init__(self, store: AliasStore) -> None:
        self._store = store

    async def ListAliases(
        self,
        request: pb.ListAliasesRequest,
        context: grpc.aio.ServicerContext[pb.ListAliasesRequest, pb.ListAliasesResponse],
    ) -> pb.ListAliasesResponse:
        await self._store.refresh_if_stale()
        return pb.ListAliasesResponse(aliases=self._store.table.aliases.values())

    async def SetAlias(
        self,
        request: pb.SetAliasRequest,
        context: grpc.aio.ServicerContext[pb.SetAliasRequest, pb.SetAliasResponse],
    ) -> pb.SetAliasResponse:
        alias = request.alias
        check_alias(alias)
        MODEL.set(alias.model)
        expected = request.expect_revision if request.HasField("expect_revision") else None
        alias.revision = await self._store.set(alias, expected)
        names = {"alias": alias.name, "next_model": alias.next_model}
        log.info("alias set", extra=fields({**names, "revision": alias.revision}))
        await self._store.wait_until_used(alias.revision)
        return pb.SetAliasResponse(alias=alias)

    async def RemoveAlias(
        self,
        request: pb.RemoveAliasRequest,
        context: grpc.aio.ServicerContext[pb.RemoveAliasRequest, pb.RemoveAliasResponse],
    ) -> pb.RemoveAliasResponse:
        _check_name(request.name, "name")
        expected = request.expect_revision if request.HasField("expect_revision") else None
        revision = await self._store.remove(request.name, expected)
        if revision:
            log.info("alias removed", extra=fields({"alias": request.name, "revision": revision}))
            await self._store.wait_until_used(revision)
        return pb.RemoveAliasResponse(removed=revision > 0)


def check_alias(alias: pb.Alias) -> None:
    """Raise InvalidInput for an invalid alias."""
    _check_name(alias.name, "alias.name")
    for field in ("model", "next_model", "previous_model"):
        model = getattr(alias, field)
        if model or field == "model":
            check_model(model, f"alias.{field}")
    if alias.model in (alias.next_model, alias.previous_model):
        raise InvalidInput(
            f"alias.model is {alias.model}, which its next and previous model must not be",
            field="alias.model",
        )
    limits.ALIAS_OUTPUT.check(len(alias.output), "alias.output")


def _check_name(name: str, field: str) -> None:
    if not is_alias(name):
        raise InvalidInput(
            f"{field} must be 1 to 128 of A-Z a-z 0-9 . _ -, the first one not . or -, and no "
            "slash: a name with a slash is a model id",
            field=field,
        )
