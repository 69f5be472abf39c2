"""Every family of detectors against transformers on random weights: pixels, logits, boxes, regions;
the same alone as packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from shoal.extractions import Region
from torch import Tensor

from libs.models import load_model
from libs.models.images.decoding import decode
from libs.models.images.detection.detector import HEAD, Detector
from libs.models.images.detection.loading import load_detector, model_types
from libs.models.interface.sequences import InputSequence
from tests.parity.detection_models import LABELS, MODELS, PROCESSORS, tokenizer, write_checkpoint
from tests.parity.image_models import pictures

CPU = torch.device("cpu")
FLOAT_BOUND = 1e-5

Floats = NDArray[np.float32]


class Written(NamedTuple):
    kind: str
    directory: Path
    theirs: transformers.PreTrainedModel
    ours: Detector


@pytest.fixture(scope="module", params=sorted(MODELS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(request.param, directory)
    return Written(
        request.param, directory, theirs, load_detector(directory, dtype=torch.float32, device=CPU)
    )


def images(kind: str) -> list[bytes]:
    """Grounding DINO's reference fails for an image with fewer places than queries."""
    return [
        data
        for data in pictures()
        if kind != "grounding-dino" or min(Image.open(BytesIO(data)).size) > 1
    ]


@torch.inference_mode()
def outputs(model: Detector, sequences: Sequence[InputSequence]) -> list[Floats]:
    backbone = model.backbone
    batch = backbone.pack(sequences, [None] * len(sequences))
    hidden = backbone.encoder.forward(batch)
    head = backbone.heads[HEAD]
    return head.split(
        tuple(one.numpy() for one in head.forward(hidden, batch, sequences)), sequences
    )  # type: ignore[return-value]


def prepare_sequences(written: Written, labels: Sequence[str] = LABELS) -> list[InputSequence]:
    read = written.ours.labels(labels)
    return [
        written.ours.sequence(data, f"items[{number}]", read)
        for number, data in enumerate(images(written.kind))
    ]


def prompt(kind: str, labels: Sequence[str]) -> dict[str, Tensor]:
    """Tokenise labels as transformers' processors do."""
    own = tokenizer(kind)
    if kind == "grounding-dino":
        ids = own.encode(". ".join(label.strip().lower() for label in labels) + ".").ids
        return {"input_ids": torch.tensor([ids])}
    found = [own.encode(label).ids for label in labels]
    rows = torch.tensor([ids + [0] * (16 - len(ids)) for ids in found])
    return {
        "input_ids": rows,
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (16 - len(ids)) for ids in found]),
    }


@torch.inference_mode()
def reference(
    written: Written, data: bytes, labels: Sequence[str] = LABELS
) -> transformers.utils.ModelOutput:
    theirs = written.theirs
    pixels = PROCESSORS[written.kind](
        Image.open(BytesIO(data)), do_convert_rgb=True, return_tensors="pt"
    )["pixel_values"]
    return theirs(
        pixel_values=pixels.to(next(theirs.parameters()).dtype), **prompt(written.kind, labels)
    )


def columns(kind: str, labels: Sequence[str], number: int) -> list[int]:
    """Select the reference's logits of a label."""
    if kind != "grounding-dino":
        return [number]
    lengths = [len(tokenizer(kind).encode(label, add_special_tokens=False).ids) for label in labels]
    start = 1 + sum(length + 1 for length in lengths[:number])
    return list(range(start, start + lengths[number]))


def as_ours(
    kind: str, output: transformers.utils.ModelOutput, labels: Sequence[str] = LABELS
) -> Floats:
    logits = [
        output.logits[0][:, columns(kind, labels, number)].amax(1) for number in range(len(labels))
    ]
    return torch.cat([output.pred_boxes[0].float(), torch.stack(logits, 1).float()], 1).numpy()


def worst(got: Floats, wanted: Floats) -> float:
    """Return the largest error of boxes, and of logits relative to the largest."""
    boxes = np.abs(got[:, :4] - wanted[:, :4]).max()
    return max(boxes, np.abs(got[:, 4:] - wanted[:, 4:]).max() / np.abs(wanted[:, 4:]).max())


def test_every_family_is_in_the_table() -> None:
    assert sorted(MODELS) == sorted(model_types())


def test_pixels_equal_transformers(written: Written) -> None:
    processing = written.ours.processing
    for data in images(written.kind):
        pixels = decode(data, "items[0]")
        got = processing.apply(pixels, "items[0]")
        assert got.shape[:2] == processing.seen(pixels.shape[0], pixels.shape[1], "items[0]")
        values = (got.astype(np.float64) * processing.scale).astype(np.float32)
        mean, std = np.array(processing.mean, np.float32), np.array(processing.std, np.float32)
        wanted = PROCESSORS[written.kind](Image.open(BytesIO(data)), do_convert_rgb=True)[
            "pixel_values"
        ][0]
        np.testing.assert_array_equal(((values - mean) / std).transpose(2, 0, 1), wanted)


def test_boxes_and_logits_equal_transformers(written: Written) -> None:
    sequences = prepare_sequences(written)
    together = outputs(written.ours, sequences)
    for data, got, one in zip(images(written.kind), together, sequences, strict=True):
        assert worst(got, as_ours(written.kind, reference(written, data))) <= FLOAT_BOUND
        assert worst(outputs(written.ours, [one])[0], got) <= 2e-6
        assert written.ours.tokens(data, "items[0]") == one.tokens


def test_bfloat16_is_as_good_as_the_reference(written: Written) -> None:
    ours = load_detector(written.directory, dtype=torch.bfloat16, device=CPU)
    halved = Written(
        written.kind,
        written.directory,
        write_checkpoint(written.kind, written.directory).to(torch.bfloat16),
        ours,
    )
    own = theirs = 0.0
    for data, got in zip(
        images(written.kind), outputs(ours, prepare_sequences(halved)), strict=True
    ):
        exact = as_ours(written.kind, reference(written, data))
        own += float(np.square(got - exact).sum())
        theirs += float(np.square(as_ours(written.kind, reference(halved, data)) - exact).sum())
    assert own <= 9 * theirs


def reference_regions(written: Written, data: bytes, label: int, threshold: float) -> list[Region]:
    """Run transformers' post-processing on one label's logits alone, and clip boxes to the
    image."""
    output = reference(written, data)
    logits = output.logits[:, :, columns(written.kind, LABELS, label)]
    height, width = decode(data, "").shape[:2]
    found = PROCESSORS[written.kind].post_process_object_detection(
        SimpleNamespace(logits=logits, pred_boxes=output.pred_boxes),
        threshold=threshold,
        target_sizes=[(height, width)],
    )[0]
    boxes = found["boxes"].clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    return [
        Region(left, top, right, bottom, LABELS[label], score)
        for score, (left, top, right, bottom) in zip(
            found["scores"].tolist(), boxes.tolist(), strict=True
        )
        if right > left and bottom > top
    ]


def test_regions_equal_transformers(written: Written) -> None:
    """Each label is compared as if it were requested alone, by its own threshold, which some boxes
    exceed.
    """
    found = 0
    for data, sequence in zip(images(written.kind), prepare_sequences(written), strict=True):
        output = outputs(written.ours, [sequence])[0]
        scores = np.sort(1 / (1 + np.exp(-output[:, 4:])), axis=0)[::-1]
        thresholds = [
            float(scores[place : place + 2, number].mean())
            for number, place in enumerate((0, 2, 5, 8))
        ]
        regions = written.ours.regions(sequence, output, thresholds)
        assert [one.score for one in regions] == sorted(
            (one.score for one in regions), reverse=True
        )
        for number, threshold in enumerate(thresholds):
            wanted = sorted(
                reference_regions(written, data, number, threshold), key=lambda one: -one.score
            )
            got = [one for one in regions if one.label == LABELS[number]]
            assert len(got) == len(wanted)
            np.testing.assert_allclose(
                _numbers(got), _numbers(wanted), rtol=2e-5, atol=2e-3
            )  # a pixel's 500th
            found += len(got)
    assert found > 20


def _numbers(regions: Sequence[Region]) -> Floats:
    """Return scores and edges. Regions of nearly equal scores may be swapped, so they are ordered
    by their edges.
    """
    rows = [(one.left, one.top, one.right, one.bottom, one.score) for one in regions]
    return np.array(
        sorted(rows, key=lambda row: [round(edge, 1) for edge in row]), np.float32
    ).reshape(-1, 5)


def test_is_preempted_between_layers(written: Written) -> None:
    """Backbone, encoder and decoder call `yield_point`, which may run a forward of the same model;
    the outputs are unchanged.
    """
    model = load_model(written.directory, "random/detector", CPU, torch.float32)
    sequences = prepare_sequences(written)
    some, others = sequences[:2], sequences[2:4]
    alone = [model.forward(HEAD, some), model.forward(HEAD, others)]
    calls: list[int] = []

    def yield_point() -> None:
        calls.append(len(calls))
        if len(calls) in (2, 9, 17):
            for got, wanted in zip(model.forward(HEAD, others), alone[1], strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]

    for got, wanted in zip(model.forward(HEAD, some, yield_point), alone[0], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    config = written.theirs.config
    layers = sum(config.backbone_config.depths) + 4 if written.kind == "grounding-dino" else 0
    assert len(calls) >= (len(some) * layers or config.vision_config.num_hidden_layers)
