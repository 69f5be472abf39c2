"""Jobs of a detector: each item is one image; labels belong to the job."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.extractions import Extraction, Region

from libs.catalog.card import Card
from libs.errors import TaskNotSupported
from libs.models.images.detection.detector import HEAD, Detector
from libs.models.images.detection.regions import MAX_REGIONS
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    Parts,
    RegionsWork,
    Work,
    items_as_parts,
    never_cancelled,
    without_images,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import need_task, need_work
from libs.models.text.heads.extraction.words import Label


class RegionsProcessor:
    """The processor of one model. It decodes images on the threads that prepare jobs."""

    def __init__(self, card: Card, detector: Detector) -> None:
        self._card, self._detector = card, detector

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        work = need_work(work, RegionsWork, self._card)
        labels = self._detector.labels(work.labels)
        items = items_as_parts(work)
        sequences = [self._sequence(parts, labels, check_cancelled) for parts in items]
        return Prepared(
            without_images(work),
            HEAD,
            sequences,
            fields=tuple(parts[0].field for parts in items),
            image_tokens=sum(sequence.tokens for sequence in sequences),
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = need_work(prepared.work, RegionsWork, self._card)
        thresholds = () if work.threshold is None else (work.threshold,) * len(work.labels)
        found = zip(prepared.sequences, outputs, strict=True)
        items = (_extraction(self._detector.regions(*one, thresholds)) for one in found)
        return build_result(items, prepared.answer_bytes, check_cancelled)

    def _sequence(
        self, parts: Parts, labels: tuple[Label, ...], check_cancelled: CancelCheck
    ) -> InputSequence:
        check_cancelled()
        content, field = parts[0].content, parts[0].field
        if len(parts) > 1 or not isinstance(content, bytes):
            raise TaskNotSupported(
                f"{self._card.model} detects regions in one image per item", field=field
            )
        return self._detector.sequence(content, field, labels)


def _extraction(regions: Sequence[Region]) -> Extraction:
    return Extraction(regions=tuple(regions[:MAX_REGIONS]), truncated=len(regions) > MAX_REGIONS)
