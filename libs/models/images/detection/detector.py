"""A loaded detector: the host's part before and after the forward of its one head, "regions"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Region

from libs.errors import InputTooLong, InvalidInput
from libs.models.images.decoding import LIMITS, ImageLimits, decoding, header_size
from libs.models.images.detection.regions import RegionOptions, select_regions
from libs.models.images.processing import ImageProcessing
from libs.models.interface.sequences import InputRows, InputSequence, Output
from libs.models.runtime.backbone import Backbone
from libs.models.text.heads.extraction.words import Label
from libs.models.text.processing.answers import sigmoid

HEAD: Final = "regions"
LABELS: Final = "regions.labels"


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector without its forward. Thread-safe except for the backbone.

    `field`, in its methods: the item's path in the job, for errors.

    Attributes:
        threshold: The model's default.
        read_label: Returns a label's tokens, of which `frame` occur in every label.
        most_each: Maximum tokens of a label.
        most: Maximum tokens of all labels, including `spare` further tokens.
        count: Returns an image's tokens by the height and width that the model sees.
        first: Number of tokens that are not patches.
        square: Boxes are fractions of the image padded to a square; otherwise of the image.
        maps: Maps of an image that keeps its proportions, each with half the rows of the previous
            one; 0 if images have one size.
        smallest: Pixels per side of a cell of the first map.
    """

    backbone: Backbone
    processing: ImageProcessing
    read_label: Callable[[str], NDArray[np.int32]]
    count: Callable[[int, int], int]
    threshold: float
    most: int
    most_each: int
    frame: int
    spare: int = 0
    first: int = 0
    square: bool = False
    maps: int = 0
    smallest: int = 0
    limits: ImageLimits = LIMITS

    def labels(self, labels: Sequence[str]) -> tuple[Label, ...]:
        """Tokenise the labels of a job, one time for all its items. Raises InvalidInput or
        InputTooLong with their path.
        """
        if not labels:
            raise InvalidInput("at least one label is needed", field=LABELS)
        read = tuple(Label(label, self.read_label(label)) for label in labels)
        for number, label in enumerate(read):
            field = f"{LABELS}[{number}]"
            if len(label.ids) <= self.frame:
                raise InvalidInput(
                    f"{field} has no text that the model's tokenizer knows", field=field
                )
            if len(label.ids) > self.most_each:
                raise InputTooLong(
                    f"{field} has {len(label.ids)} tokens; at most {self.most_each} are allowed",
                    field=field,
                )
        together = sum(len(label.ids) for label in read) + self.spare
        if together > self.most:
            message = (
                f"the labels have {together} tokens; at most {self.most} are allowed: send fewer"
            )
            raise InputTooLong(message, field=LABELS)
        return read

    def tokens(self, data: bytes, field: str) -> int:
        """Return the image's tokens from its header. Raises InvalidInput if it is unreadable or
        exceeds a limit.
        """
        height, width = header_size(data, field, self.limits)
        return self._tokens(height, width, field)

    def sequence(self, data: bytes, field: str, labels: tuple[Label, ...]) -> InputSequence:
        """Decode an image. `labels`: the result of `labels`. Raises InvalidInput as `tokens` before
        decoding, and for damaged files.
        """
        self.tokens(data, field)
        with decoding(data, field, self.limits) as image:
            height, width = image.height, image.width
            tokens = self._tokens(height, width, field)
            pixels = self.processing.apply(image, field)
        rows = InputRows(np.arange(self.first, tokens, dtype=np.int32), pixels)
        return InputSequence(
            np.zeros(tokens, np.int32), rows=rows, input=RegionOptions(labels, height, width)
        )

    def regions(
        self, sequence: InputSequence, output: Output, thresholds: Sequence[float] = ()
    ) -> tuple[Region, ...]:
        """Return an image's regions, best first.

        Args:
            output: The head's output for the sequence.
            thresholds: One for each label.
        """
        asked = sequence.input
        if not isinstance(asked, RegionOptions) or not isinstance(output, np.ndarray):
            raise TypeError("the sequence and output must be a detector's")
        scale = (
            (max(asked.height, asked.width),) * 2 if self.square else (asked.height, asked.width)
        )
        thresholds = thresholds or (self.threshold,) * len(asked.labels)
        return select_regions(sigmoid(output[:, 4:]), output[:, :4], scale, asked, thresholds)

    def _tokens(self, height: int, width: int, field: str) -> int:
        seen = self.processing.seen(height, width, field)
        return self.count(*seen)
