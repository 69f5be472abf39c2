"""Measure how fast images are prepared and how fast each image encoder is.

For every shape the same random weights and images go through Shoal and transformers: decoding and
resizing of files on one thread, and the forward alone. Where images have one size, transformers
gets them as one tensor; where they have many, padded to the largest (NaFlex), or one by one if the
model takes no padding (DINOv2). Engines take turns within a round; ratios are of neighbours in
time, so that the machine's drift cancels. Rescaling and normalising are part of Shoal's forward,
and of transformers' preparation.

The photographs are those of scikit-learn and matplotlib, cut to the proportions of cameras and
phones.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.models.families import DTYPES, take_turns
from libs.models.images.decoding import decode
from libs.models.images.loading import ImageModel, load_images
from libs.models.interface.sequences import InputSequence

_PHOTOS = (
    ("sklearn.datasets", "images/china.jpg"),
    ("sklearn.datasets", "images/flower.jpg"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
# Height and width, as photographs are sent: 3:2, 4:3, 16:9, square, upright.
_SIZES = (
    (427, 640),
    (640, 427),
    (768, 1024),
    (720, 1280),
    (600, 600),
    (1280, 960),
    (500, 1000),
    (333, 500),
)
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The shape of a published model."""

    name: str
    model: Callable[[int], transformers.PreTrainedModel]
    processor: transformers.BaseImageProcessor
    least: float
    """Minimum speed-up of its forward over transformers."""
    mixed: bool = False
    """Whether sizes of images differ."""
    pads: bool = False


def _clip(layers: int) -> transformers.PreTrainedModel:
    vision = {**_BASE, "num_hidden_layers": layers, "image_size": 224, "patch_size": 32}
    return transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision))


def _siglip(layers: int) -> transformers.PreTrainedModel:
    vision = {**_BASE, "num_hidden_layers": layers, "image_size": 224, "patch_size": 16}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision))


def _naflex(layers: int) -> transformers.PreTrainedModel:
    vision = {**_BASE, "num_hidden_layers": layers, "num_patches": 256, "patch_size": 16}
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**vision))


def _dinov2(layers: int) -> transformers.PreTrainedModel:
    vision = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": layers,
        "image_size": 518,
        "patch_size": 14,
    }
    return transformers.Dinov2Model(transformers.Dinov2Config(**vision))


SHAPES = (
    EncoderShape("CLIP B/32", _clip, transformers.CLIPImageProcessorPil(), 1.0),
    EncoderShape("SigLIP B/16", _siglip, transformers.SiglipImageProcessorPil(), 1.0),
    EncoderShape(
        "SigLIP 2 NaFlex",
        _naflex,
        transformers.Siglip2ImageProcessorPil(),
        1.5,
        mixed=True,
        pads=True,
    ),
    EncoderShape(
        "DINOv2 B/14",
        _dinov2,
        transformers.BitImageProcessorPil(size={"shortest_edge": 224}, do_center_crop=False),
        1.5,
        mixed=True,
    ),
)


@dataclass(frozen=True, slots=True)
class PreparationSpeed:
    """Results of one shape and one format: images a second on one thread, and `decoding`, its share
    of Shoal's time.
    """

    shape: str
    format: str
    images_per_second: float
    reference: float
    ratio: float
    decoding: float


@dataclass(frozen=True, slots=True)
class EncoderSpeed:
    """Results of one shape and data type.

    Attributes:
        tokens: Tokens of all images.
        decoding: Seconds to decode a JPEG on one thread, over those of its forward on all.
    """

    shape: str
    dtype: str
    tokens: int
    images_per_second: float
    reference: float
    ratio: float
    least: float
    decoding: float


def photographs(count: int) -> dict[str, list[bytes]]:
    """Return the same images in each format."""
    sources = [
        Image.open(BytesIO(files(package).joinpath(path).read_bytes())).convert("RGB")
        for package, path in _PHOTOS
    ]
    numbers = np.random.default_rng(0)
    found: dict[str, list[bytes]] = {"JPEG": [], "PNG": []}
    for number in range(count):
        source, (height, width) = sources[number % len(sources)], _SIZES[number % len(_SIZES)]
        scale = min(source.height / height, source.width / width)
        rows, columns = int(height * scale), int(width * scale)
        top, left = (
            int(numbers.integers(source.height - rows + 1)),
            int(numbers.integers(source.width - columns + 1)),
        )
        photo = source.crop((left, top, left + columns, top + rows)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        for kind, held in found.items():
            out = BytesIO()
            photo.save(out, kind, **({"quality": 90} if kind == "JPEG" else {}))
            held.append(out.getvalue())
    return found


def loaded(
    shape: EncoderShape, layers: int, dtype: str, device: torch.device
) -> tuple[ImageModel, transformers.PreTrainedModel]:
    """The same random weights in both."""
    torch.manual_seed(0)
    theirs = shape.model(layers).eval()
    with tempfile.TemporaryDirectory() as name:
        theirs.save_pretrained(name)
        shape.processor.save_pretrained(name)
        ours = load_images(Path(name), dtype=DTYPES[dtype], device=device)
    return ours, theirs.to(device=device, dtype=DTYPES[dtype])


def prepare(
    shape: EncoderShape, model: ImageModel, kind: str, photos: Sequence[bytes], rounds: int
) -> PreparationSpeed:
    def theirs() -> object:
        return [
            shape.processor(Image.open(BytesIO(data)).convert("RGB"), return_tensors="pt")
            for data in photos
        ]

    cpu = torch.device("cpu")
    seconds = take_turns(
        {"shoal": lambda: prepare_sequences(model, photos), "transformers": theirs}, rounds, cpu
    )
    decoding = decoding_seconds(photos)
    own, other = (len(photos) / median(seconds[name]) for name in ("shoal", "transformers"))
    return PreparationSpeed(shape.name, kind, own, other, ratio(seconds), decoding * own)


def decoding_seconds(photos: Sequence[bytes]) -> float:
    """Return the seconds of one image, on one thread."""
    started = time.perf_counter()
    for data in photos:
        decode(data, "image")
    return (time.perf_counter() - started) / len(photos)


def prepare_sequences(model: ImageModel, photos: Sequence[bytes]) -> list[InputSequence]:
    return [model.input.sequence(data, "image") for data in photos]


def forward(
    shape: EncoderShape,
    model: ImageModel,
    theirs: transformers.PreTrainedModel,
    photos: Sequence[bytes],
    rounds: int,
    dtype: str,
) -> EncoderSpeed:
    device = model.backbones[0].encoder.device
    sequences = prepare_sequences(model, photos)
    engines = {
        "shoal": packed_run(model, sequences),
        "transformers": reference_run(shape, theirs, photos, device, DTYPES[dtype]),
    }
    seconds = take_turns(engines, rounds, device)
    own, other = (len(photos) / median(seconds[name]) for name in ("shoal", "transformers"))
    tokens = sum(sequence.tokens for sequence in sequences)
    return EncoderSpeed(
        shape.name,
        dtype,
        tokens,
        own,
        other,
        ratio(seconds),
        shape.least,
        decoding_seconds(photos) * own,
    )


def packed_run(model: ImageModel, sequences: Sequence[InputSequence]) -> Callable[[], object]:
    """All images in one batch, sorted by length as the worker does."""
    backbone = next(backbone for backbone in model.backbones if "image" in backbone.heads)
    head = backbone.heads["image"]
    batch = sorted(sequences, key=lambda sequence: -sequence.tokens)

    @torch.inference_mode()
    def run() -> object:
        packed = backbone.pack(batch, [None] * len(batch))
        return [
            one.cpu()
            for one in head.forward(backbone.encoder.forward(packed, head.rows), packed, batch)
        ]

    return run


def reference_run(
    shape: EncoderShape,
    model: transformers.PreTrainedModel,
    photos: Sequence[bytes],
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """One tensor of all images, or one per image where sizes differ and the model takes no
    padding.
    """
    images = [Image.open(BytesIO(data)).convert("RGB") for data in photos]
    together = not shape.mixed or shape.pads
    batches = [
        dict(shape.processor(some, return_tensors="pt"))
        for some in ([images] if together else [[one] for one in images])
    ]
    for batch in batches:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)

    @torch.inference_mode()
    def run() -> object:
        return [
            model(**{name: value.to(device) for name, value in batch.items()})[0].cpu()
            for batch in batches
        ]

    return run


def ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    """Return Shoal's speed relative to transformers: the median of the rounds' ratios."""
    return median(
        other / own for own, other in zip(seconds["shoal"], seconds["transformers"], strict=True)
    )


def measure_forwards(
    shapes: Sequence[EncoderShape],
    types: Sequence[str],
    photos: Sequence[bytes],
    rounds: int,
    layers: int,
    device: torch.device,
) -> list[EncoderSpeed]:
    """Print each line when it is measured."""
    head = (
        f"{'forward, all threads':22} {'dtype':9} {'tokens':>7} {'images/s':>9} {'transf.':>8} "
        f"{'x':>6} {'decoding / forward':>19}"
    )
    print(head, "-" * len(head), sep="\n", flush=True)
    forwards = []
    for shape in shapes:
        for dtype in types:
            print(f"{shape.name} {dtype}", file=sys.stderr)
            model, theirs = loaded(shape, layers, dtype, device)
            forwards.append(one := forward(shape, model, theirs, photos, rounds, dtype))
            numbers = (
                f"{one.images_per_second:9.1f} {one.reference:8.1f} {one.ratio:6.2f} "
                f"{one.decoding:19.2f}"
            )
            print(f"{one.shape:22} {one.dtype:9} {one.tokens:7,} {numbers}", flush=True)
    return forwards


def measure_preparing(
    shapes: Sequence[EncoderShape], photos: Mapping[str, list[bytes]], rounds: int
) -> list[PreparationSpeed]:
    """Print each line when it is measured."""
    head = (
        f"{'prepare, one thread':22} {'format':9} {'images/s':>17} {'transf.':>8} {'x':>6} "
        f"{'of it decoding':>19}"
    )
    print("", head, "-" * len(head), sep="\n", flush=True)
    prepared = []
    for shape in shapes:
        model, _ = loaded(shape, 1, "float32", torch.device("cpu"))
        for kind, held in photos.items():
            prepared.append(each := prepare(shape, model, kind, held, rounds))
            numbers = (
                f"{each.images_per_second:17.1f} {each.reference:8.1f} {each.ratio:6.2f} "
                f"{each.decoding:19.0%}"
            )
            print(f"{each.shape:22} {each.format:9} {numbers}", flush=True)
    return prepared
