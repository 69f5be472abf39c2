"""Authorisation: which role may call which method. Methods that are not listed here are refused to
all roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from libs.errors import PermissionDenied
from libs.serving.security.identity import Identity, Role


def _methods(service: str, *names: str) -> frozenset[str]:
    return frozenset(f"/{service}/{name}" for name in names)


_USE: Final = (
    _methods(
        "shoal.v1.InferenceService",
        "Encode",
        "EncodeStream",
        "Score",
        "Extract",
        "ExtractStream",
        "Tokenize",
        "Detokenize",
        "Multiplex",
    )
    | _methods("shoal.v1.ModelService", "ListModels", "GetModel")
    | _methods("shoal.v1.CallerService", "GetCaller")
    | _methods("shoal.v1.AliasService", "ListAliases")
)
CHANGES: Final = _methods(
    "shoal.v1.ModelService", "LoadModel", "EvictModel", "PinModel"
) | _methods("shoal.v1.AliasService", "SetAlias", "RemoveAlias")
"""Methods that change the location of models, or aliases. Each call is recorded in the audit log.
"""
_LOOK: Final = _methods("shoal.v1.MeshService", "GetMesh", "WatchMesh", "ExplainPlacement")
_WORK: Final = _methods(
    "shoal.v1.WorkerService", "Heartbeat", "Connect", "Multiplex", "Pull", "Complete", "Deltas"
)
"""The last three are calls on the stream Multiplex."""
_SCALE: Final = _methods(
    "externalscaler.ExternalScaler",
    "IsActive",
    "StreamIsActive",
    "GetMetricSpec",
    "GetMetrics",
    "StreamMetricSpec",
)

METHODS: Final[Mapping[Role, frozenset[str]]] = MappingProxyType(
    {
        "client": _USE,
        "admin": _USE | CHANGES | _LOOK,
        "worker": _WORK,
        "scaler": _SCALE,
        "anonymous": _USE | CHANGES | _LOOK | _WORK | _SCALE,
    }
)


def is_allowed(role: Role, method: str) -> bool:
    """Return whether holders of the role may call `/package.Service/Method`."""
    return method in METHODS[role]


def check_allowed(identity: Identity, method: str) -> None:
    """Raise PermissionDenied, which names the allowed roles, if the identity may not call the
    method.
    """
    if is_allowed(identity.role, method):
        return
    allowed = [role for role in METHODS if role != "anonymous" and is_allowed(role, method)]
    needed = f"it needs role {' or '.join(allowed)}" if allowed else "no role may"
    raise PermissionDenied(f"role {identity.role} may not call {method}: {needed}")
