"""The part of this shell's environment that a child of `shoal up` gets: what its role needs, and no
other secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SYSTEM: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_", "LD_LIBRARY_PATH",
    "DYLD_", "VIRTUAL_ENV",
)  # fmt: skip
_SERVICE: Final = (*_SYSTEM, "SHOAL_", "PYTHON", "OTEL_", "SSL_CERT_", "MALLOC_", "COVERAGE_")
_WORKER: Final = (
    *_SERVICE,
    # Sources of models, and their credentials.
    "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "AWS_", "GOOGLE_", "GCLOUD_", "CLOUDSDK_", "BOTO_",
    "XDG_",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "all_proxy",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    # Compute: devices and threads.
    "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "HSA_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_",
    "OPENBLAS_", "KMP_", "GOMP_",
    "RAYON_", "TOKENIZERS_", "DNNL_", "ONEDNN_", "CC", "CXX",
)  # fmt: skip
_ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "redis": _SYSTEM,
    "edge": _SERVICE,
    "router": _SERVICE,
    "scheduler": _SERVICE,
    "worker": _WORKER,
}
"""Names of variables, and prefixes of names: those that end in `_` or denote families."""
_TRUST: Final = (
    "SHOAL_TLS",
    "SHOAL_TOKEN",
    "SHOAL_JWKS",
    "SHOAL_JWT_",
    "SHOAL_REDIS_",
    "SHOAL_ROUTERS_",
    "SHOAL_HEALTH_ADDRESS",
)
"""Trust and credentials of services: this shell's values belong to other meshes, so they are not
passed on.
"""
_FAMILIES: Final = ("PYTHON", "TORCH")


def child_environment(role: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` for a child of the role: redis, router, scheduler, worker
    or edge.
    """
    allowed = _ALLOWED[role]
    names = frozenset(allowed)
    beginnings = tuple(name for name in allowed if name.endswith("_") or name in _FAMILIES)
    return {
        name: value
        for name, value in environ.items()
        if (name in names or name.startswith(beginnings)) and not name.startswith(_TRUST)
    }
