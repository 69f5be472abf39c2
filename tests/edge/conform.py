"""`make edge-fuzz`: run schemathesis, in a separate environment, against an edge in front of a
FakeRouter that answers immediately.

It sends valid and invalid requests of the edge's OpenAPI document. No answer may be a 500, and each
must conform to the document.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput
from libs.serving.watched import Watched
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, Script, card, dense, edge, ragged, sparse, vectors

CHECKS: Final = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


def encoded(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """Return every requested representation. Routers refuse a request for none."""
    if not request.items:
        raise InvalidInput("items must have at least one item", field="items")
    count = len(request.items)
    wanted = set(request.representations) or {pb.REPRESENTATION_DENSE}
    made = pb.EncodeResponse(usage=pb.Usage(input_tokens=5), model_revision="r")
    if pb.REPRESENTATION_DENSE in wanted:
        made.dense.CopyFrom(dense(vectors(count)))
    if pb.REPRESENTATION_SPARSE in wanted:
        made.sparse.CopyFrom(sparse(*({1: 0.5, 7: 1.0} for _ in range(count))))
    if pb.REPRESENTATION_MULTI_VECTOR in wanted:
        made.multi_vector.CopyFrom(ragged(*(vectors(2) for _ in range(count))))
    return made


class Everything(dict[str, AliasTarget]):
    """Aliases that resolve almost any generated name to a model; otherwise most requests would end
    with 404.
    """

    def get(self, name: str, default: Any = None) -> Any:
        return default if name.startswith("0") else AliasTarget(MODEL)


def extracted(request: pb.ExtractRequest) -> pb.ExtractResponse:
    return pb.ExtractResponse(
        results=[
            pb.Extraction(labels=[pb.LabelScore(label="a", score=0.5)]) for _ in request.items
        ],
        usage=pb.Usage(input_tokens=5),
    )


async def written(request: pb.ExtractRequest) -> AsyncIterator[pb.ExtractStreamResponse]:
    yield pb.ExtractStreamResponse(deltas=[pb.ExtractDelta(text="a shoal")])
    yield pb.ExtractStreamResponse(
        response=pb.ExtractResponse(results=[pb.Extraction(text="a shoal of fish")])
    )


async def main(schemathesis: str, examples: int, seed: int, more: list[str]) -> int:
    tasks: list[Any] = [models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE, models_pb2.TASK_CLASSIFY]
    script = Script(
        encode=encoded, extract=extracted, write=written, models=[card(MODEL, tasks=tasks)]
    )
    async with edge(script, aliases=Watched.fixed(AliasNames(Everything()))) as http:
        command = [
            schemathesis,
            "run",
            f"http://{http.address}/openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            str(examples),
        ]
        command += [
            "--seed",
            str(seed),
            "--workers",
            "1",
            "--no-color",
            "--request-timeout",
            "20",
            *more,
        ]
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemathesis", help="the command in its environment")
    parser.add_argument("--examples", type=int, default=100, help="for each operation")
    parser.add_argument("--seed", type=int, default=0)
    arguments, others = parser.parse_known_args()
    sys.exit(asyncio.run(main(arguments.schemathesis, arguments.examples, arguments.seed, others)))
