"""The versions of what processes of different ages share: constants only, because every process has a use for them.

`libs/fleet/versions.py` says what follows from them.
"""

from __future__ import annotations

from typing import Final

WIRE_VERSION: Final = 3
"""Of the contract between workers and routers: it rises with every change of `worker.proto` or of its meaning.

0: before versions were told. 1: Job.tenant and .weight, PullResponse.now_unix_ms, device seconds; a drain ends waiting pulls.
2: PullRequest.batch_id and .asked_again. 3: Connect; WorkerModel.data_type and .tokens_per_byte.
"""

OLDEST_WIRE_VERSION: Final = 0
"""The oldest worker that a router still works with."""

LAYOUT_VERSION: Final = 1
"""Of everything in Redis: it rises when a process of the one before could misread what it finds. What is only added leaves it."""
