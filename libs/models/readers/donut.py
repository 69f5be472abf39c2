"""Donut (arXiv 2111.15664): a page becomes a form, generated as nested tags and read as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.detection.building import processor_values
from libs.models.images.processing import ImageProcessing
from libs.models.images.resizing import height_and_width, resized
from libs.models.layers.spec import Config

FIELD: Final = "text.instruction"
_TAG: Final = re.compile(r"<s_([^>]*)>", re.IGNORECASE)
_PRETRAINED: Final = frozenset({"<s_iitcdip>", "<s_synthdog>"})
"""Tasks of the pretraining, which every tokenizer has."""
_QUESTION, _ANSWER = "<s_question>", "<s_answer>"
_SEPARATOR: Final = "<sep/>"
_DEEPEST: Final = 64


@dataclass(frozen=True, slots=True)
class DonutProcessing(ImageProcessing):
    """Fit an image into `size` with its proportions kept, and fill the rest with black edges."""

    turns: bool = False
    """First rotate an image by 90 degrees if its longer side is not the longer side of `size`."""
    fits: bool = True
    """Reduce an image larger than `size`."""

    def apply(self, given: Pixels | Image.Image, field: str) -> NDArray[np.generic]:
        """Resize [height, width, 3], or an image of mode RGB, to uint8 of size `seen`.

        Raises InvalidInput for an image that is too thin.
        """
        image = given if isinstance(given, Image.Image) else Image.fromarray(given)
        height, width = self._resized(image.height, image.width, field)
        if (
            self.turns
            and (width < height) != (image.width < image.height)
            and image.width != image.height
            and width != height
        ):
            image = image.transpose(Image.Transpose.ROTATE_270)
        short = min(height, width)
        pixels = resized(
            image, _by_short_side(image.height, image.width, short, field), self.resample
        )
        if self.fits:
            pixels = resized(
                pixels, _fitted(*height_and_width(pixels), height, width), self.resample
            )
        down, across = height_and_width(pixels)
        if down > height or across > width:
            raise InvalidInput(f"the image is too thin: {across:,} x {down:,} pixels", field=field)
        page: Pixels = np.zeros((height, width, 3), np.uint8)
        top, left = (height - down) // 2, (width - across) // 2
        page[top : top + down, left : left + across] = pixels
        return page


def _by_short_side(height: int, width: int, side: int, field: str) -> tuple[int, int]:
    long = int(side * max(height, width) / min(height, width))
    if long * side > _MAX_PIXELS:
        raise InvalidInput(f"the image is too thin: {width:,} x {height:,} pixels", field=field)
    return (long, side) if width <= height else (side, long)


_MAX_PIXELS: Final = 50_000_000


def _fitted(height: int, width: int, most_down: int, most_across: int) -> tuple[int, int]:
    """Return the size of transformers' thumbnail."""
    down, across = min(height, most_down), min(width, most_across)
    if (down, across) == (height, width):
        return height, width
    if height > width:
        across = int(width * down / height)
    elif width > height:
        down = int(height * across / width)
    return max(1, down), max(1, across)


def read_processing(directory: Path) -> DonutProcessing:
    """Read the image processor. Raises ModelBroken with the key that cannot be served."""
    written, file = processor_values(directory)
    values = {key: value for key, value in written.items() if value is not None}
    config = Config(values, file=file)
    keys = ("image_processor_type", "feature_extractor_type")
    names = [
        str(values[key]).removesuffix("Fast").removesuffix("Pil") for key in keys if key in values
    ]
    if any(name not in ("DonutImageProcessor", "DonutFeatureExtractor") for name in names):
        raise config.unsupported(keys[0], "DonutImageProcessor is needed")
    config.require("do_resize", True)
    config.require("do_pad", True)
    size = values.get("size", {"height": 2560, "width": 1920})
    if isinstance(size, list) and len(size) == 2:  # early files list width, height
        size = {"height": size[1], "width": size[0]}
    own = (*keys, "do_pad", "do_thumbnail", "do_align_long_axis")
    plain: dict[str, object] = {"resample": 2} | {
        key: value for key, value in values.items() if key not in own
    }
    read = ImageProcessing.from_config(
        Config({**plain, "size": size, "do_center_crop": False}, file=file), "SiglipImageProcessor"
    )
    return DonutProcessing(
        read.size, read.resample, None, read.scale, read.mean, read.std,
        turns=config.flag("do_align_long_axis", False), fits=config.flag("do_thumbnail", True),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DonutPrompt:
    """The prompt format of a fine-tuned model."""

    start: str
    """The tag of the model's task; empty if the vocabulary does not identify it."""
    asks: bool
    """The model answers questions."""

    @staticmethod
    def from_tokenizer(tokenizer: Tokenizer) -> DonutPrompt:
        """Find the task's tag in the vocabulary: the opening tag without a closing one."""
        tags = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.content.startswith("<s_")
        }
        ends = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.content.startswith("</s_")
        }
        open_tags = {tag for tag in tags if f"</{tag[1:]}" not in ends} - _PRETRAINED
        asks = {_QUESTION, _ANSWER} <= tags
        start = open_tags - {_QUESTION, _ANSWER}
        return DonutPrompt(start.pop() if len(start) == 1 else "", asks)

    def text(self, instruction: str) -> str:
        """Return the prompt. Raises InvalidInput for a missing or unsupported instruction."""
        instruction = instruction.strip()
        if instruction.startswith("<s_"):
            return instruction
        if not self.start:
            raise InvalidInput(
                "the model's task is unknown: begin the instruction with the task's tag",
                field=FIELD,
            )
        if self.asks:
            if not instruction:
                raise InvalidInput(
                    "the model answers questions: the instruction has none", field=FIELD
                )
            return f"{self.start}{_QUESTION}{instruction}</{_QUESTION[1:]}{_ANSWER}"
        if instruction:
            raise InvalidInput(
                f"the model has one task, {self.start}, and takes no instruction", field=FIELD
            )
        return self.start


def parse_form(written: str, categories: frozenset[str] = frozenset()) -> Mapping[str, object]:
    """Parse generated tags into an object, as DonutProcessor.token2json does.

    1. `<s_k>v</s_k>` becomes {"k": "v"}.
    2. `<sep/>` separates the entries of a list.
    3. Tags without an end are dropped.
    4. A list of forms becomes {"items": [...]}.
    5. A text without tags becomes {"text_sequence": text}.

    Args:
        categories: Tokens such as `<paid/>`, which stand for their names.
    """
    forms, rest = _forms(written, categories, _DEEPEST)
    if not forms or forms == [{}]:
        return {"text_sequence": rest}
    return forms[0] if len(forms) == 1 else {"items": forms}


def _forms(
    written: str, categories: frozenset[str], deepest: int
) -> tuple[list[dict[str, object]], str]:
    """Return the forms between `<sep/>`, and the rest of the text."""
    forms: list[dict[str, object]] = []
    form: dict[str, object] = {}
    while found := _TAG.search(written):
        tag, key = found.group(0), found.group(1)
        end = re.search(re.escape(f"</s_{key}>"), written, re.IGNORECASE)
        if end is None:
            written = written.replace(tag, "")
            continue
        inside = re.search(
            f"{re.escape(tag)}(.*?){re.escape(end.group(0))}", written, re.IGNORECASE | re.DOTALL
        )
        if inside is not None:
            value = _value(inside.group(1).strip(), categories, deepest)
            if value:
                form[key] = value if len(value) > 1 else value[0]
        written = written[written.find(end.group(0)) + len(end.group(0)) :].strip()
        if written.startswith(_SEPARATOR):
            forms.append(form)
            form, written = {}, written.removeprefix(_SEPARATOR)
    return ([*forms, form] if form else forms), written


def _value(inside: str, categories: frozenset[str], deepest: int) -> list[object]:
    if "<s_" in inside and "</s_" in inside and deepest:
        return [*_forms(inside, categories, deepest - 1)[0]]
    leaves = (leaf.strip() for leaf in inside.split(_SEPARATOR))
    return [leaf[1:-2] if leaf in categories else leaf for leaf in leaves]
