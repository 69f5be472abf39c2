"""The versions of the interfaces between processes of different releases: constants only, because
every process imports them.

`libs/fleet/versions.py` explains their compatibility.
"""

from __future__ import annotations

from typing import Final

WIRE_VERSION: Final = 7
"""The version of the protocol between workers and routers: it rises with every change of
`worker.proto` or of its meaning.

0: before workers sent a version. 1: Job.tenant and .weight, PullResponse.now_unix_ms, device
seconds; a drain ends waiting pulls. 2: PullRequest.batch_id and .asked_again. 3: Connect;
WorkerModel.data_type and .tokens_per_byte. 4: Exchange. 5: Job.written_to, WorkerCall.written. 6:
Job.item_answer_bytes. 7: Job.tokenize, Job.detokenize.
"""

OLDEST_WIRE_VERSION: Final = 0
"""The oldest worker that a router still works with."""

LAYOUT_VERSION: Final = 1
"""The version of all data in Redis: it rises when a process of the version before could misread it.
Mere additions leave it.
"""
