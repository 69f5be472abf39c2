"""The versions of the interfaces between processes of different releases: constants only, because
every process imports them.

`libs/fleet/versions.py` explains their compatibility.

Until the first release, both versions stay 1 and mean the interfaces of the newest commit. A commit
that breaks one then moves `OLD` of `tests/mesh/test_versions.py` instead.
"""

from __future__ import annotations

from typing import Final

WIRE_VERSION: Final = 1
"""The version of the protocol between workers and routers: it rises with every change of
`worker.proto` or of its meaning.

1: the first release.
"""

OLDEST_WIRE_VERSION: Final = 1
"""The oldest worker that a router still works with."""

LAYOUT_VERSION: Final = 1
"""The version of all data in Redis: it rises when a process of the version before could misread it.
Mere additions leave it.
"""
