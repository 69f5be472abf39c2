"""Detectors except parity: OWLv2's pixels, labels, hostile images, boxes in the original image, and
unsupported input.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from libs.errors import InputTooLong, InvalidInput, ModelBroken
from libs.models import PackedModel
from libs.models.images.detection.detector import HEAD, Detector
from libs.models.images.detection.loading import load_detector
from libs.models.images.detection.padded import padded_and_resized
from libs.models.images.detection.regions import RegionOptions, select_regions
from libs.models.interface.sequences import InputSequence, Output, is_finite
from libs.models.text.heads.extraction.label_vectors import LabelVectors
from libs.models.text.heads.extraction.words import Label
from tests.models.test_backbones import joined
from tests.parity.detection_models import LABELS, MODELS, write_checkpoint

CPU = torch.device("cpu")
FIELD = "items[3].image"


def load(directory: Path) -> Detector:
    return load_detector(directory, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, directory in found.items():
        write_checkpoint(kind, directory)
    return found


@pytest.fixture(scope="module", params=sorted(MODELS))
def detector(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Detector:
    return load(directories[request.param])


@torch.inference_mode()
def outputs(model: Detector, *sequences: InputSequence) -> list[Output]:
    batch = model.backbone.pack(sequences, [None] * len(sequences))
    head = model.backbone.heads[HEAD]
    found = head.forward(model.backbone.encoder.forward(batch), batch, sequences)
    return head.split(tuple(one.numpy() for one in found), sequences)


def make_image_file(height: int, width: int, orientation: int = 1) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)
    out = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(out, "PNG", exif=exif)
    return out.getvalue()


@pytest.mark.parametrize(
    "size",
    [(1, 300), (300, 1), (1, 1), (200, 100), (97, 131), (500, 333), (48, 48), (64, 63), (40, 2)],
)
@pytest.mark.parametrize("wanted", [(48, 48), (16, 40)])
def test_padded_pixels_are_those_of_scipy(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Bit for bit, blurred by any factor."""
    pixels = np.random.default_rng(5).integers(0, 256, (*size, 3), np.uint8)
    theirs = transformers.Owlv2ImageProcessorPil(
        size={"height": wanted[0], "width": wanted[1]}, do_normalize=False
    )
    values = (np.arange(256) * (1 / 255)).astype(np.float32)
    got = padded_and_resized(pixels, values, *wanted)
    expected = theirs(pixels, input_data_format="channels_last")["pixel_values"][0]
    np.testing.assert_array_equal(got.transpose(2, 0, 1), expected)


def test_labels_are_encoded_once(detector: Detector) -> None:
    read = detector.labels(LABELS)
    sequences = [
        detector.sequence(make_image_file(40, 60), FIELD, read),
        detector.sequence(make_image_file(60, 40), FIELD, read[:2]),
    ]
    head = detector.backbone.heads[HEAD].labels  # type: ignore[attr-defined]
    assert isinstance(head, LabelVectors)
    head.forget()
    with patch.object(
        type(head), "_encode", autospec=True, side_effect=type(head)._encode
    ) as encode:
        first = outputs(detector, *sequences)
        again = outputs(detector, sequences[1])
    asked = [len(ids) for call in encode.call_args_list for ids in call.args[1]]
    assert len(asked) == len(read) + detector.spare
    alone, among = (np.asarray(output, np.float32) for output in (again[0], first[1]))
    np.testing.assert_allclose(alone, among, rtol=0, atol=2e-6)


def test_labels_that_cannot_be_asked_for(detector: Detector) -> None:
    with pytest.raises(InvalidInput, match="at least one label") as caught:
        detector.labels([])
    assert caught.value.field == "regions.labels"
    with pytest.raises(InvalidInput, match="no text that the model's tokenizer knows") as caught:
        detector.labels(["cat", " "])
    assert caught.value.field == "regions.labels[1]"
    with pytest.raises(InputTooLong, match=r"regions.labels\[0\] has .* tokens"):
        detector.labels(["cat " * 70])


def test_prompt_of_too_many_labels(directories: dict[str, Path]) -> None:
    """Grounding DINO reads all labels at once."""
    detector = load(directories["grounding-dino"])
    assert len(detector.labels(["cat"] * 31)) == 31
    with pytest.raises(InputTooLong, match="66 tokens; at most 64 are allowed") as caught:
        detector.labels(["cat"] * 32)
    assert caught.value.field == "regions.labels"


def test_boxes_are_in_pixels_of_the_upright_image(detector: Detector) -> None:
    read = detector.labels(["cat"])
    turned = detector.sequence(make_image_file(40, 60, orientation=6), FIELD, read)
    assert turned.input == RegionOptions(read, 60, 40)
    for sequence in (turned, detector.sequence(make_image_file(40, 60), FIELD, read)):
        output = outputs(detector, sequence)[0]
        assert isinstance(sequence.input, RegionOptions)
        found = detector.regions(sequence, output, (0.0,))
        assert found
        assert all(0 <= one.left < one.right <= sequence.input.width for one in found)
        assert all(0 <= one.top < one.bottom <= sequence.input.height for one in found)
        assert len(detector.regions(sequence, output)) <= len(found)


def test_fewer_places_than_queries(directories: dict[str, Path]) -> None:
    detector = load(directories["grounding-dino"])
    sequence = detector.sequence(make_image_file(2, 40), FIELD, detector.labels(LABELS))
    assert sequence.tokens < 30
    assert np.asarray(outputs(detector, sequence)[0]).shape == (sequence.tokens, 4 + len(LABELS))


def test_hostile_images_are_refused_before_they_are_decoded(detector: Detector) -> None:
    read = detector.labels(["cat"])
    out = BytesIO()
    Image.new("1", (20_000, 20_000)).save(out, "PNG")
    thin = BytesIO()
    Image.new("1", (16_500, 1)).save(thin, "PNG")
    files = [out.getvalue(), b"<svg/>", make_image_file(40, 60)[:-200]]
    files += (
        [] if detector.processing.size == (48, 48) and not detector.square else [thin.getvalue()]
    )
    for data in files:
        with pytest.raises(InvalidInput) as caught:
            detector.sequence(data, FIELD, read)
        assert caught.value.field == FIELD


def test_regions_are_clipped_ordered_and_bounded() -> None:
    asked = RegionOptions(
        (Label("a", np.zeros(1, np.int32)), Label("b", np.zeros(1, np.int32))), 10, 20
    )
    boxes = np.array([[0.5, 0.5, 2, 2], [0.25, 0.75, 0.1, 0.2], [0.9, 2.5, 0.1, 0.1]], np.float32)
    scores = np.array([[0.5, 0.9], [0.6, 0.1], [0.99, 0.99]], np.float32)
    found = select_regions(scores, boxes, (10, 20), asked, (0.55, 0.2))
    assert [(one.label, round(one.score, 2)) for one in found] == [("b", 0.9), ("a", 0.6)]
    assert (found[0].left, found[0].top, found[0].right, found[0].bottom) == (0, 0, 20, 10)
    assert (found[1].left, found[1].top, found[1].right, found[1].bottom) == pytest.approx(
        (4, 6.5, 6, 8.5)
    )
    many = np.tile(boxes[:1], (5000, 1))
    assert (
        len(select_regions(np.full((5000, 2), 0.5, np.float32), many, (10, 20), asked, (0.0, 0.0)))
        == 4097
    )


def edit(directory: Path, file: str, **values: object) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("kind", "file", "settings", "message"),
    [
        (
            "owlv2",
            "config.json",
            {"model_type": "detr"},
            "model_type is 'detr': supported are grounding-dino, owlvit, owlv2",
        ),
        ("owlv2", "config.json", {"projection_dim": 31}, "`text_projection.weight` has the shape"),
        ("owlv2", "preprocessor_config.json", {"do_pad": False}, "do_pad is False"),
        (
            "owlv2",
            "preprocessor_config.json",
            {"size": {"height": 64, "width": 48}},
            "images have size",
        ),
        (
            "owlv2",
            "preprocessor_config.json",
            {"image_processor_type": "CLIPImageProcessor"},
            "it must be Owlv2ImageProcessor",
        ),
        ("grounding-dino", "config.json", {"two_stage": False}, "two_stage is False"),
        (
            "grounding-dino",
            "config.json",
            {"d_model": 48},
            "d_model is 48: it must be a multiple of 32",
        ),
        (
            "grounding-dino",
            "config.json",
            {"num_queries": 29},
            "query_position_embeddings.weight.* has shape",
        ),
        ("grounding-dino", "config.json", {"decoder_layers": 3}, "decoder.layers.2.* is missing"),
        ("grounding-dino", "config.json", {"encoder_layers": 1}, "unknown to this family"),
        (
            "grounding-dino",
            "config.json",
            {"backbone_config": {"model_type": "resnet"}},
            "backbone_config.model_type is 'resnet'",
        ),
        (
            "grounding-dino",
            "preprocessor_config.json",
            {"size": {"shortest_edge": 9000, "longest_edge": 9001}},
            "size is",
        ),
    ],
)
def test_unsupported_detectors_are_named(
    kind: str, file: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path)
    edit(tmp_path, file, **settings)
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_missing_and_unknown_tensors(
    kind: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = (
        "class_head.dense0.weight" if kind != "grounding-dino" else "bbox_embed.0.layers.1.weight"
    )
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != missing},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelBroken):
        load(tmp_path)
    save_file({**tensors, "extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelBroken, match="extra"):
        load(tmp_path)


def test_copies_in_old_checkpoints_are_left_out(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """Grounding DINO's on the hub have every head of boxes twice, and the indices of Swin's
    windows.
    """
    write_checkpoint("grounding-dino", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith("bbox_embed.0.")}
    copies = {f"model.decoder.{name}": tensor.clone() for name, tensor in heads.items()}
    copies |= {name.replace(".0.", ".1.", 1): tensor.clone() for name, tensor in heads.items()}
    layer = "model.backbone.conv_encoder.model.encoder.layers.0.blocks.0"
    block = f"{layer}.attention.self.relative_position_index"
    save_file(
        {**tensors, **copies, block: torch.zeros(9, 9, dtype=torch.int64)},
        tmp_path / "model.safetensors",
    )
    load(tmp_path)


def test_detector_is_served_as_every_model(detector: Detector, embedder: PackedModel) -> None:
    """An image has the same result alone and in any batch; encoders within its head are counted;
    its memory is measured.
    """
    model = joined(embedder, detector.backbone)
    assert model.bytes > embedder.bytes + detector.backbone.encoder.bytes
    assert model.probe() >= embedder.probe()
    read = detector.labels(LABELS)
    sequences = [
        detector.sequence(make_image_file(*size), FIELD, read)
        for size in ((40, 60), (60, 40), (33, 34))
    ]
    together = model.forward(HEAD, sequences)
    for one, alone, backwards in zip(
        sequences, together, model.forward(HEAD, sequences[::-1])[::-1], strict=True
    ):
        np.testing.assert_allclose(np.asarray(backwards), np.asarray(alone), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            np.asarray(model.forward(HEAD, [one])[0]), np.asarray(alone), rtol=1e-4, atol=1e-5
        )
        assert is_finite(alone)
