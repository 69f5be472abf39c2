"""Regions through the mesh: detector directories without specific code, equal to transformers'
post-processing.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import grpc
import numpy as np
import pytest
import shoal
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from shoal import errors
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, models_pb2_grpc

from tests.parity.detection_models import LABELS, PROCESSORS, tokenizer, write_checkpoint
from tests.support.cluster import Cluster

KINDS = ("owlv2", "grounding-dino")
BOUND = 1e-3
"""Bound on box errors in pixels; scores are 100 times as close."""


def saved(height: int, width: int) -> bytes:
    out = BytesIO()
    noise = np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


IMAGES = [saved(60, 90), saved(70, 50), saved(90, 90)]


@pytest.fixture(scope="module")
def references(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, transformers.PreTrainedModel]:
    """Complete each directory before moving it to where the mesh looks for models."""
    found = {}
    for kind in KINDS:
        made = tmp_path_factory.mktemp(kind) / "made"
        found[kind] = write_checkpoint(kind, made)
        made.rename(checkpoints / "random" / f"{kind}-regions")
    return found


@torch.inference_mode()
def expected(
    kind: str, model: transformers.PreTrainedModel, image: bytes, label: str, threshold: float
) -> NDArray[np.float64]:
    """Return [regions, score and four edges] of a single requested label, best first, clipped to
    the image.
    """
    opened = Image.open(BytesIO(image))
    text = tokenizer(kind).encode(f"{label.lower()}." if kind == "grounding-dino" else label)
    prompt = {
        "input_ids": torch.tensor([text.ids]),
        "attention_mask": torch.ones(1, len(text.ids), dtype=torch.int64),
    }
    output = model(
        pixel_values=PROCESSORS[kind](opened, return_tensors="pt")["pixel_values"], **prompt
    )
    if kind == "grounding-dino":  # the label's own tokens, between [CLS] and the full stop
        output.logits = output.logits[:, :, 1 : len(text.ids) - 2]
    size = (opened.height, opened.width)
    boxes = PROCESSORS[kind].post_process_object_detection(
        output, threshold=threshold, target_sizes=[size]
    )[0]
    edges = boxes["boxes"].clamp(min=0).minimum(torch.tensor([size[1], size[0]] * 2))
    rows = torch.cat([boxes["scores"][:, None], edges], 1).numpy().astype(np.float64)
    rows = rows[(rows[:, 3] > rows[:, 1]) & (rows[:, 4] > rows[:, 2])]
    return rows[np.argsort(-rows[:, 0], kind="stable")]


def region_rows(extraction: shoal.Extraction, label: str) -> NDArray[np.float64]:
    regions = [one for one in extraction.regions if one.label == label]
    return np.array(
        [(one.score, one.left, one.top, one.right, one.bottom) for one in regions]
    ).reshape(-1, 5)


def assert_same(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> None:
    """Compare regions. Those of nearly equal score may be in either order."""
    assert ours.shape == theirs.shape
    assert np.abs(ours[:, 0] - theirs[:, 0]).max(initial=0.0) <= BOUND / 100
    for row in ours:
        assert np.abs(theirs - row).max(1).min() <= BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", LABELS[:2])
def test_regions_equal_the_reference(
    client: shoal.Client, references: dict[str, transformers.PreTrainedModel], kind: str, label: str
) -> None:
    """Request one label for images of several sizes."""
    wanted = [expected(kind, references[kind], image, label, 0.0) for image in IMAGES]
    scores = np.sort(np.concatenate(wanted)[:, 0])
    middle = (
        len(scores) // 2
        + int(np.argmax(np.diff(scores)[len(scores) // 2 - 3 : len(scores) // 2 + 3]))
        - 3
    )
    between = (
        float(scores[middle] + scores[middle + 1]) / 2
    )  # no score is close enough for rounding to matter
    for threshold in (0.0, between):
        answer = client.extract(
            f"random/{kind}-regions", IMAGES, shoal.Regions(labels=[label], threshold=threshold)
        )
        for extraction, theirs in zip(answer, wanted, strict=True):
            assert_same(region_rows(extraction, label), theirs[theirs[:, 0] > threshold])
    assert 0 < answer.usage.image_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_several_labels(
    client: shoal.Client, references: dict[str, transformers.PreTrainedModel], kind: str
) -> None:
    """Regions are best first, whatever their label. OWL's scores of a label do not depend on other
    labels.
    """
    model = f"random/{kind}-regions"
    answer = client.extract(model, IMAGES, shoal.Regions(labels=LABELS, threshold=0.0))
    for image, extraction in zip(IMAGES, answer, strict=True):
        scores = [one.score for one in extraction.regions]
        assert scores == sorted(scores, reverse=True)
        assert {one.label for one in extraction.regions} == set(LABELS)
        if kind == "owlv2":
            for label in LABELS:
                assert_same(
                    region_rows(extraction, label),
                    expected(kind, references[kind], image, label, 0.0),
                )
    assert len(client.extract(model, IMAGES, shoal.Regions(labels=LABELS))) == len(
        IMAGES
    )  # by the model's default threshold


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("item", "error", "field"),
    [
        ("a text", errors.TaskNotSupported, "items[1].text"),
        (IMAGES[0][:200], errors.InvalidInput, "items[1].image"),
        (b"<svg/>", errors.InvalidInput, "items[1].image"),
    ],
    ids=["a text", "truncated", "no image"],
)
def test_invalid_image_is_refused_with_its_path(
    client: shoal.Client,
    references: dict[str, transformers.PreTrainedModel],
    kind: str,
    item: str | bytes,
    error: type[errors.ShoalError],
    field: str,
) -> None:
    """The next good request is answered."""
    model, cats = f"random/{kind}-regions", shoal.Regions(labels=["cat"], threshold=0.0)
    with pytest.raises(error) as caught:
        client.extract(model, [IMAGES[0], item], cats)
    assert caught.value.field == field
    [found] = client.extract(model, IMAGES[:1], cats)
    assert_same(region_rows(found, "cat"), expected(kind, references[kind], IMAGES[0], "cat", 0.0))


def test_invalid_requests_are_refused(
    client: shoal.Client, references: dict[str, transformers.PreTrainedModel]
) -> None:
    del references
    model = "random/owlv2-regions"
    for task, field in (
        (shoal.Regions(labels=[]), "regions.labels"),
        (shoal.Regions(labels=["cat"] * 257), "regions.labels"),
        (shoal.Regions(labels=["cat", ""]), "regions.labels[1]"),
        (shoal.Regions(labels=["cat"], threshold=1.5), "regions.threshold"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            client.extract(model, IMAGES[:1], task)
        assert caught.value.field == field
    with pytest.raises(errors.TaskNotSupported):
        client.encode(model, IMAGES[:1])
    with pytest.raises(errors.TaskNotSupported):
        client.extract("random/bert-embed", ["a"], shoal.Regions(labels=["cat"]))


def test_by_grpc(mesh: Cluster, references: dict[str, transformers.PreTrainedModel]) -> None:
    """Use plain gRPC, and check the card."""
    del references
    with grpc.insecure_channel(mesh.address) as channel:
        task = pb.RegionsTask(labels=["cat"], threshold=0.0)
        request = pb.ExtractRequest(
            model="random/owlv2-regions",
            items=[pb.Item(image=pb.Image(data=IMAGES[0]))],
            regions=task,
        )
        [found] = inference_pb2_grpc.InferenceServiceStub(channel).Extract(request).results
        assert found.regions
        assert not found.entities
        assert not found.labels
        for one in found.regions:
            assert 0 <= one.left < one.right <= 90
            assert 0 <= one.top < one.bottom <= 60
            assert one.label == "cat"
        asked = models_pb2.GetModelRequest(model="random/owlv2-regions")
        card = models_pb2_grpc.ModelServiceStub(channel).GetModel(asked).model.card
    assert list(card.tasks) == [models_pb2.TASK_REGIONS]
    assert list(card.inputs) == [models_pb2.INPUT_KIND_IMAGE, models_pb2.INPUT_KIND_DOCUMENT]
