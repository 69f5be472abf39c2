"""Pages a second of the image towers of vision-language models, connectors included, against
transformers on the same weights.

Pages are photographs at the sizes of pages, since the contents do not change the time. Idefics3
(ColSmol) sees tiles of one size: all pages' tiles are one batch in either engine, where
transformers pads pages of fewer tiles and leaves the padding out. Qwen2-VL sees pages of any size,
in one batch in either engine. The text encoder is left out: `make bench-families` has those.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.images.encoders import ratio
from benchmarks.models.families import DTYPES, take_turns
from examples.random_models import write_tokenizer
from libs.models.images.vlm.heads import Use
from libs.models.images.vlm.loading import load_vision_language
from libs.models.images.vlm.tower import ImageTower

_SIZES = ((1100, 850), (850, 1100), (1056, 816), (960, 540), (1200, 700), (600, 800))
"""Height and width: upright, across, slides, receipts."""
_TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<|im_start|>",
    "<|im_end|>",
)
_QWEN_MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_end|>",
    "<|endoftext|>",
)


@dataclass(frozen=True, slots=True)
class MeasuredTower:
    """An image tower to measure.

    Attributes:
        make: Writes a checkpoint with this many layers in its tower; returns transformers' model
            and image processor.
        least: Minimum speed relative to transformers.
    """

    name: str
    make: Callable[[Path, int], tuple[Any, Any]]
    use: Use
    least: float


@dataclass(frozen=True, slots=True)
class Pages:
    tower: str
    dtype: str
    patches: int
    pages_per_second: float
    reference: float
    ratio: float
    least: float


def _colsmol(folder: Path, layers: int) -> tuple[Any, Any]:
    """Return colSmol-256M's tower; pages are scaled to 1,024 pixels in place of 2,048."""
    marks = [
        *_MARKS,
        *(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)),
    ]
    ids = write_tokenizer(folder, marks)
    images = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
    }
    config = transformers.Idefics3Config(
        vision_config=images | {"image_size": 512, "patch_size": 16},
        text_config={"model_type": "llama", **_TEXT, "vocab_size": len(ids), "pad_token_id": 0},
        image_token_id=ids["<image>"],
        scale_factor=4,
    )
    model = transformers.Idefics3Model(config).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"linear.weight": torch.zeros(128, 576), "linear.bias": torch.zeros(128)},
        folder / "model.safetensors",
    )
    processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 1024}, max_image_size={"longest_edge": 512}
    )
    processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    return model, processor


def _qwen2_vl(folder: Path, layers: int) -> tuple[Any, Any]:
    """Qwen2-VL's tower; at most 1,024 patches a page."""
    ids = write_tokenizer(folder, _QWEN_MARKS)
    mark = ids["<|image_pad|>"]
    rope = {"rope_theta": 10_000.0, "rope_type": "default", "mrope_section": [8, 12, 12]}
    config = transformers.Qwen2VLConfig(
        vision_config={
            "depth": layers,
            "embed_dim": 1280,
            "hidden_size": 576,
            "num_heads": 16,
            "patch_size": 14,
        },
        text_config=_TEXT
        | {"vocab_size": len(ids), "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 0},
        image_token_id=mark,
        vision_start_token_id=mark - 2,
        vision_end_token_id=mark - 1,
        video_token_id=mark + 1,
    )
    model = transformers.Qwen2VLModel(config).eval()
    model.save_pretrained(folder)
    processor = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 56**2, "longest_edge": 256 * 28**2}
    )
    processor.save_pretrained(folder)
    return model, processor


TOWERS = (
    MeasuredTower("Idefics3 (ColSmol)", _colsmol, "", 1.0),
    MeasuredTower("Qwen2-VL", _qwen2_vl, "dense", 1.5),
)


def measure_pages(
    towers: Sequence[MeasuredTower],
    types: Sequence[str],
    photographs: Sequence[bytes],
    rounds: int,
    layers: int,
    device: torch.device,
) -> list[Pages]:
    """Print each line when it is measured."""
    head = (
        f"{'pages, all threads':22} {'dtype':9} {'patches':>7} {'pages/s':>9} {'transf.':>8} "
        f"{'x':>6}"
    )
    print("", head, "-" * len(head), sep="\n", flush=True)
    found = []
    files = _pages(photographs)
    for tower in towers:
        for dtype in types:
            print(f"{tower.name} {dtype}", file=sys.stderr)
            found.append(one := pages(tower, files, rounds, layers, dtype, device))
            rates = f"{one.pages_per_second:9.2f} {one.reference:8.2f} {one.ratio:6.2f}"
            print(f"{one.tower:22} {one.dtype:9} {one.patches:7,} {rates}", flush=True)
    return found


@torch.inference_mode()
def pages(
    tower: MeasuredTower,
    files: Sequence[bytes],
    rounds: int,
    layers: int,
    dtype: str,
    device: torch.device,
) -> Pages:
    """Raise ValueError if both engines do not give the same rows."""
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model, processor = tower.make(Path(name), layers)
        ours = load_vision_language(Path(name), dtype=DTYPES[dtype], device=device, use=tower.use)
    own = ours.backbones[0].tower
    if not isinstance(own, ImageTower):
        raise ValueError(f"{tower.name} has no tower")
    rows = [ours.input.sequence(data, "page").rows for data in files]
    images = [image for one in rows if one is not None for image in one.inputs]
    model = model.to(device=device, dtype=DTYPES[dtype])
    opened = [Image.open(BytesIO(data)).convert("RGB") for data in files]
    batch = processor(
        [[one] for one in opened] if "Idefics3" in tower.name else opened, return_tensors="pt"
    )
    given = {key: value.to(device) for key, value in batch.items() if torch.is_tensor(value)}
    given["pixel_values"] = given["pixel_values"].to(DTYPES[dtype])
    engines: dict[str, Callable[[], torch.Tensor]] = {
        "shoal": lambda: own.forward(images).cpu(),
        "transformers": lambda: _theirs(model, given).cpu(),
    }
    got, wanted = (engine().float() for engine in engines.values())
    error = float((got - wanted).norm() / wanted.norm()) if got.shape == wanted.shape else 1.0
    if error > (1e-4 if dtype == "float32" else 0.05):
        raise ValueError(
            f"{tower.name}: rows {tuple(got.shape)} and {tuple(wanted.shape)} differ by {error:.2g}"
        )
    seconds = take_turns(engines, rounds, device)
    patches = sum(own.count_tokens(image) for image in images)
    mine, other = (len(files) / median(seconds[engine]) for engine in ("shoal", "transformers"))
    return Pages(tower.name, dtype, patches, mine, other, ratio(seconds), tower.least)


def _theirs(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model.get_image_features(**given)
    found = getattr(found, "pooler_output", found)
    found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return found.flatten(0, -2)


def _pages(photographs: Sequence[bytes]) -> list[bytes]:
    """The photographs at the sizes of pages."""
    found = []
    for number, data in enumerate(photographs):
        height, width = _SIZES[number % len(_SIZES)]
        out = BytesIO()
        Image.open(BytesIO(data)).convert("RGB").resize((width, height)).save(
            out, "JPEG", quality=90
        )
        found.append(out.getvalue())
    return found
