"""Checks the locations (paths and URLs) that clients name for jobs: they must be below one of the
roots that the operator configures.

Without this check, clients could read and write any file of the edge's machine, and of object
stores for which the edge has credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from shoal.bulk.failures import JobError
from shoal.bulk.places import local_path

TENANT: Final = "{tenant}"
"""Replaced by the name of the tenant in a root."""
_TENANT_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_IN_URLS: Final = ("::", "?", "#", "@", "\\")
"""Parts of URLs that fsspec interprets: chained URLs, query, fragment, credentials."""


def is_root(root: str) -> bool:
    """Return whether a location is valid as a root: an absolute path or a URL."""
    path = local_path(root)
    named = root.replace(TENANT, "tenant")
    if path is None:
        scheme, _, rest = named.partition("://")
        return bool(scheme and rest.strip("/")) and not _is_ambiguous(named)
    return path.is_absolute() and not _is_ambiguous(named)


def overlap(root: str, other: str) -> bool:
    """Return whether one of the locations is the other one or below it."""
    base = root.partition(TENANT)[0].rstrip("/")  # the part that all tenants share
    return _is_below(base, other) or _is_below(other, base)


def tenant_roots(roots: Iterable[str], tenant: str) -> list[str]:
    """Return the roots of a tenant. Raises JobError if its name is not valid as a folder name."""
    found = list(roots)
    if any(TENANT in root for root in found) and not _TENANT_NAME.fullmatch(tenant):
        raise JobError(
            f"the tenant {tenant[:100]!r} cannot submit jobs: a folder is named after it, so its "
            "name may only have letters, digits, '.', '_' and '-'"
        )
    return [root.replace(TENANT, tenant) for root in found]


def check_location(uri: str, roots: Sequence[str], field: str) -> None:
    """Check a location that a client names in `field`. Raises JobError if it is not below a
    root.
    """
    path = local_path(uri)
    if path is not None and not path.is_absolute():
        raise JobError(f"{field} must be an absolute path or a URL, not {uri[:200]!r}")
    if not _is_ambiguous(uri) and any(_is_below(uri, root) for root in roots):
        return
    raise JobError(
        f"{field} is {uri[:200]!r}; it must be below one of {', '.join(roots)}, without '..' and "
        f"any of {', '.join(_IN_URLS)}"
    )


def check_files(uris: Iterable[str], roots: Sequence[str]) -> None:
    """Check that the files of an input are below the roots, because local files may be symbolic
    links to other folders. Raises JobError.
    """
    resolved = _resolved(roots)
    for path in filter(None, map(local_path, uris)):
        try:
            parents = path.resolve().parents
        except (OSError, RuntimeError):
            parents = ()
        if not any(root in parents for root in resolved):
            raise JobError(f"{path} is not a file below {', '.join(roots)}: is it a link?")


def _is_ambiguous(uri: str) -> bool:
    """Return whether a location may be resolved to another one than its text says."""
    parts = uri.split("/")
    has_other = local_path(uri) is None and any(mark in uri for mark in _IN_URLS)
    return has_other or ".." in parts or "\0" in uri or "\n" in uri


def _is_below(uri: str, root: str) -> bool:
    """Return whether a location is a root or below it. Links in local paths are followed."""
    path, base = local_path(uri), local_path(root)
    if path is None or base is None:
        root = root.rstrip("/")
        return (path is None) == (base is None) and (uri == root or uri.startswith(f"{root}/"))
    try:
        target, allowed = path.resolve(), base.resolve()
    except (OSError, RuntimeError):  # symbolic links that form a cycle
        return False
    return target == allowed or allowed in target.parents


def _resolved(roots: Iterable[str]) -> list[Path]:
    return [path.resolve() for root in roots if (path := local_path(root)) is not None]
