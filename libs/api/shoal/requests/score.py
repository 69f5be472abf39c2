"""The plan of `score`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.requests import codec
from shoal.requests.arguments import (
    Options,
    SharedFiles,
    enum_value,
    item_lengths,
    item_list,
    item_message,
    item_messages,
    most_items,
)
from shoal.requests.merging import merge_score
from shoal.requests.plan import Plan, SingleReply
from shoal.requests.skipping import with_skipped_scores
from shoal.results import ScoreResult, Skipped
from shoal.tasks import Item, Items, Scale
from shoal.transport.methods import SCORE
from shoal.v1 import inference_pb2 as pb

_SCALES = {"logit": pb.SCORE_SCALE_LOGIT, "probability": pb.SCORE_SCALE_PROBABILITY}


@dataclass(slots=True)
class Scoring:
    """The arguments that only `score` has, except its documents."""

    query: Item
    instruction: str
    scale: Scale | None
    top_n: int


class ScorePlan(Plan[pb.ScoreRequest, pb.ScoreResponse, ScoreResult]):
    """Raises InvalidInput for arguments that no request can hold."""

    method, name = SCORE, "documents"

    def __init__(self, documents: Items, scoring: Scoring, options: Options) -> None:
        self._top_n = scoring.top_n
        self._frame = options.message(
            pb.ScoreRequest,
            query=item_message("query", scoring.query),
            instruction=scoring.instruction,
            scale=enum_value("scale", scoring.scale, _SCALES),
            top_n=scoring.top_n,
        )
        self._documents = item_list(documents, "documents")
        self.most_items = most_items(self._documents)
        invalid = options.invalid("documents", self._documents)
        super().__init__(
            item_lengths(self._documents), invalid, repeated_bytes=self._frame.ByteSize()
        )

    def build(self, places: Sequence[int]) -> pb.ScoreRequest:
        request = pb.ScoreRequest()
        request.CopyFrom(self._frame)
        files = SharedFiles(self._documents, places)
        request.documents.extend(item_messages("documents", self._documents, places, files))
        request.files.extend(files.data())
        return request

    def sink(self, places: Sequence[int]) -> SingleReply[pb.ScoreResponse, ScoreResult]:
        return SingleReply(codec.score_result)

    def merge(self, results: Sequence[ScoreResult]) -> ScoreResult:
        return merge_score(results, top_n=self._top_n)

    def insert_skipped(
        self, result: ScoreResult, kept: Sequence[int], skipped: Sequence[Skipped]
    ) -> ScoreResult:
        return with_skipped_scores(result, kept, skipped)
