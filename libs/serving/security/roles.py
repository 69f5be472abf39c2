"""Authorisation: which role may call which method. A method that is not listed here is refused to
everybody.
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
)
CHANGES: Final = _methods("shoal.v1.ModelService", "LoadModel", "EvictModel", "PinModel")
"""Methods that change where models are: each call is recorded in the audit log."""
_LOOK: Final = _methods("shoal.v1.MeshService", "GetMesh", "WatchMesh", "ExplainPlacement")
_WORK: Final = _methods(
    "shoal.v1.WorkerService", "Pull", "Complete", "Heartbeat", "Connect", "Exchange"
)
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


def may(role: Role, method: str) -> bool:
    """Whether the role's holders may call `/package.Service/Method`."""
    return method in METHODS[role]


def check_may(identity: Identity, method: str) -> None:
    """Raises PermissionDenied, naming the roles that may."""
    if may(identity.role, method):
        return
    allowed = [role for role in METHODS if role != "anonymous" and may(role, method)]
    needed = f"it needs role {' or '.join(allowed)}" if allowed else "nobody may"
    raise PermissionDenied(f"role {identity.role} may not call {method}: {needed}")
