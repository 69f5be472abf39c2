"""The plan of `score`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.options import LongTextOptions
from shoal.requests import codec, words
from shoal.requests.items import enum_value, item_list, item_message
from shoal.requests.merging import merge_score, with_skipped_scores
from shoal.requests.plan import ItemPlan, SingleReply, request_frame
from shoal.results import ScoreResult, Skipped
from shoal.tasks import Item, Items, Scale
from shoal.transport.methods import SCORE
from shoal.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Scoring:
    """The arguments that only `score` has, except its documents."""

    query: Item
    instruction: str
    scale: Scale | None
    top_n: int


class ScorePlan(ItemPlan[pb.ScoreRequest, pb.ScoreResponse, ScoreResult]):
    """A call of `score`. Raises InvalidInput for arguments that no request can hold."""

    method, name = SCORE, "documents"

    def __init__(
        self, documents: Items, scoring: Scoring, model: str, options: LongTextOptions
    ) -> None:
        self._top_n = scoring.top_n
        frame = request_frame(
            pb.ScoreRequest,
            model,
            options,
            query=item_message("query", scoring.query),
            instruction=scoring.instruction,
            scale=enum_value("scale", scoring.scale, words.SCALES),
            top_n=scoring.top_n,
        )
        super().__init__(frame, item_list(documents, "documents"), options)

    def sink(self, places: Sequence[int]) -> SingleReply[pb.ScoreResponse, ScoreResult]:
        return SingleReply(codec.score_result)

    def merge(self, results: Sequence[ScoreResult]) -> ScoreResult:
        return merge_score(results, top_n=self._top_n)

    def insert_skipped(
        self, result: ScoreResult, kept: Sequence[int], skipped: Sequence[Skipped]
    ) -> ScoreResult:
        return with_skipped_scores(result, kept, skipped)
