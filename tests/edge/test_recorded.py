"""The edge understands the recorded requests of unmodified clients (`make interop` records them),
in front of a fake router.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.serving.watched import Watched
from services.edge.dialects.generation.choices import MAX_ANSWERS
from services.edge.messages.names import AliasNames, AliasTarget
from services.local.settings import MINILM
from tests.edge.parts import Script, card, edge
from tests.interop.environments import CLIENTS

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "interop/recorded.json").read_text()
)
REFUSED = (b'"gpt-4o"', b'"nobody"', b'"input": [[', b'"input":[[')
"""Parts of bodies that the edge refuses: unknown models, and token ids."""
ALIASES = AliasNames(
    {
        name: AliasTarget(MINILM)
        for name in ("text-embedding-3-small", "embed-english-v3.0", "embed", "rerank")
    }
)
MODELS = [
    card(MINILM),
    card("random/bert-embed"),
    card("random/bert-classes", tasks=[models_pb2.TASK_CLASSIFY], representations=[], dimensions=0),
    card("random/qwen3-chat", tasks=[models_pb2.TASK_TEXT], representations=[], dimensions=0),
    card(
        "random/bert-entities", tasks=[models_pb2.TASK_ENTITIES], representations=[], dimensions=0
    ),
]


def is_refused(path: str, body: bytes) -> bool:
    """Return whether the edge refuses the request: by its model or input, or because the last chat
    message is an assistant's, or because it wants too many choices.
    """
    if "/chat/completions" in path:
        asked = json.loads(body)
        is_unfinished = asked["messages"][-1]["role"] not in ("user", "tool")
        return is_unfinished or asked.get("n", 1) > MAX_ANSWERS or b"gpt-4o" in body
    return "/gpt-4o" in path or "/tei/nobody/" in path or any(part in body for part in REFUSED)


def extracted(request: pb.ExtractRequest) -> pb.ExtractResponse:
    """Return the requested labels and an entity for each item."""
    labels = [
        pb.LabelScore(label=label, score=0.5) for label in request.classify.labels or ("yes", "no")
    ]
    result = pb.Extraction(
        labels=labels, entities=[pb.Entity(start=0, end=1, label="PER", score=0.5, text="a")]
    )
    return pb.ExtractResponse(results=[result] * len(request.items))


async def written(request: pb.ExtractRequest) -> AsyncIterator[pb.ExtractStreamResponse]:
    yield pb.ExtractStreamResponse(
        response=pb.ExtractResponse(results=[pb.Extraction(text="a text")])
    )


def test_recording_contains_all_clients() -> None:
    assert {one["client"] for one in RECORDED} == {client.name for client in CLIENTS}


@pytest.mark.parametrize("number", range(len(RECORDED)))
async def test_recorded_request_is_understood(number: int) -> None:
    one = RECORDED[number]
    body = base64.b64decode(one["body"])
    script = Script(models=MODELS, extract=extracted, write=written)
    async with edge(script, aliases=Watched.fixed(ALIASES)) as http:
        reply = await http.send(
            one["method"], one["path"], body, {**one["headers"], "content-length": str(len(body))}
        )
    if one["path"].startswith("/v2/health") or one["path"] in ("/v2", "/health"):
        assert reply.status == 200
    elif is_refused(one["path"], body):
        assert 400 <= reply.status < 500
        assert not script.requests
    else:
        assert reply.status == 200, reply.body
        assert len(script.requests) in (1, 2, 3)
