"""Florence-2 (arXiv 2311.06242): DaViT in front of BART. Prompts in words caption an image, read
its text and find objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from shoal.extractions import Extraction, Region
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from libs.catalog.card import Card, ImageSize
from libs.catalog.checkpoint.files import read_config
from libs.errors import InputTooLong, ModelBroken
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.families import bart
from libs.models.generation.reader import (
    INCOMPLETE,
    empty_states,
    refuse_chat,
    refuse_sampling,
    refuse_schema,
)
from libs.models.images.detection.building import fill, processor_values
from libs.models.images.processing import ImageProcessing
from libs.models.interface.packed import Packed
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import GeneratedIds, InputRows, InputSequence, YieldPoint
from libs.models.interface.work import CancelCheck, GenerationWork, RegionsWork, items_as_parts
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config
from libs.models.readers.davit import Davit, DavitProjector, DavitSpec, rename
from libs.models.readers.florence_tasks import (
    BANNED,
    BINS,
    DETECTION,
    FIELD,
    Form,
    build_prompt,
    parse_regions,
)
from libs.models.readers.pixels import PixelTower, read_input_image
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile

_FRAME: Final = ("<s>", "</s>", "<pad>")
_WORDS: Final = (
    "cap", "/cap", "ncap", "/ncap", "dcap", "/dcap", "grounding", "/grounding", "seg", "/seg",
    "sep", "region_cap", "/region_cap", "region_to_desciption", "/region_to_desciption", "proposal",
    "/proposal", "poly", "/poly", "and",
)  # fmt: skip
_ADDED: Final = ("od", "/od", "ocr", "/ocr", *(f"loc_{place}" for place in range(BINS)), *_WORDS)
"""The tokens that Microsoft's processor adds to BART's tokenizer, in the order of their ids."""


class _Images(nn.Module):
    """The image encoder and the connector. `_name` returns the names of its parts."""

    def __init__(self, spec: DavitSpec, hidden: int, places: int, frames: int) -> None:
        super().__init__()
        self.tower = Davit(spec)
        self.projector = DavitProjector(spec.width, hidden, places, frames)

    def forward(self, pixels: Tensor, yield_point: YieldPoint) -> Tensor:
        """Map normalised [images, 3, height, width] to [images, tokens, hidden]."""
        return self.projector.forward(self.tower.forward(pixels, yield_point))


@dataclass(frozen=True, slots=True)
class Florence:
    """A loaded Florence-2 model."""

    language_model: LanguageModel
    images: PixelTower
    processing: ImageProcessing
    tokenizer: Tokenizer
    tokens: int
    """Number of encoder input rows of an image."""
    banned: frozenset[str]
    """Phrases of a caption that are not grounded."""

    @property
    def size(self) -> ImageSize:
        """Return the sizes with which images become tokens."""
        height, width = _pixels(self.processing)
        return ImageSize(height, width, 0, max(height, width), self.tokens - 1, self.tokens)


def load_florence(
    directory: Path,
    config: Config,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> Florence:
    """Load a checkpoint of Microsoft's layout or of transformers'.

    Raises ModelBroken with the file and the key or tensor at fault.
    """
    vision, texts = config.part("vision_config"), config.part("text_config")
    spec = DavitSpec.from_config(vision)
    processing = _processing(directory)
    tensors = TensorFile.open(directory).renamed(_name)
    language, rest = tensors.split("language.")
    is_microsoft = vision.has("dim_embed")
    places = (
        _part(vision, "image_pos_embed").size("max_pos_embeddings", 50)
        if is_microsoft
        else vision.size("max_position_embeddings", 50)
    )
    frames = (
        _part(vision, "visual_temporal_embedding").size("max_temporal_embeddings", 100)
        if is_microsoft
        else vision.size("max_temporal_embeddings", 100)
    )
    rows, columns = spec.map_size(*_pixels(processing))
    if not 0 < max(rows, columns) <= places:
        raise config.unsupported(
            "vision_config", f"it has {places} positions a side, but images have {rows} x {columns}"
        )
    hidden = texts.size("d_model")
    images = on_meta(lambda: _Images(spec, hidden, places, frames))
    if is_microsoft:  # stored as [inputs, outputs]
        images.projector.projection = on_meta(lambda: nn.Linear(hidden, spec.width, bias=False))
    fill(images, rest, dtype, device)
    if is_microsoft:
        weight = images.projector.projection.weight.T.contiguous()
        images.projector.projection.weight = nn.Parameter(weight, requires_grad=False)
    tokenizer = _tokenizer(directory)
    if settings.start is None:
        settings = replace(settings, start=texts.integer("decoder_start_token_id", 2))
    # The image states do not limit the length of the answer.
    if settings.max_new is None and settings.max_length is None:
        settings = replace(settings, max_new=texts.size("max_position_embeddings", 1024))
    language_model = bart.load(
        texts, language, settings, dtype, device, embedding=bart.BartInputEmbedding
    )
    language_model.tower = PixelTower(images, processing).to(device)
    banned = BANNED if is_microsoft else _banned(directory)
    return Florence(
        language_model, language_model.tower, processing, tokenizer, rows * columns + 1, banned
    )


def _part(config: Config, key: str) -> Config:
    return config.part(key) if config.has(key) else Config({})


def _pixels(processing: ImageProcessing) -> tuple[int, int]:
    seen = processing.crop or processing.size
    if not isinstance(seen, tuple):
        raise ModelBroken("preprocessor_config.json: `size` must have a height and a width")
    return seen


def _processing(directory: Path) -> ImageProcessing:
    values, file = processor_values(directory)
    plain = {key: value for key, value in values.items() if value is not None}
    key = "image_processor_type"
    if str(plain.get(key, "")).startswith("Florence"):
        plain[key] = "CLIPImageProcessor"
    return ImageProcessing.from_config(
        Config({"do_center_crop": False} | plain, file=file), "CLIPImageProcessor"
    )


def _banned(directory: Path) -> frozenset[str]:
    """Read the phrases that transformers' processor bans; none if no file lists them."""
    found = read_config(directory, "processor_config.json")
    values: object = {} if found is None else found.values
    for key in ("post_processor_config", "phrase_grounding", "banned_grounding_tokens"):
        values = values.get(key) if isinstance(values, Mapping) else None
    return (
        frozenset(word for word in values if isinstance(word, str))
        if isinstance(values, list)
        else frozenset()
    )


def _tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer and add the location tokens, which Microsoft's repositories define only in
    code."""
    tokenizer = load_tokenizer(directory, lowercase=False)
    if tokenizer.token_to_id("<loc_0>") is None:
        tokenizer.add_special_tokens(
            [AddedToken(f"<{each}>", special=True, normalized=False) for each in _ADDED]
        )
    return tokenizer


def _name(name: str) -> str:
    """Return our name of a tensor in either layout."""
    name = name.removeprefix("model.")
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    return "tower." + rename(name.removeprefix("tower.")) if name.startswith("tower.") else name


_CONNECTOR: Final = (
    ("image_projection.", "projector.projection."),
    ("image_proj_norm.", "projector.norm."),
    ("image_position_embed.row_embeddings.weight", "projector.row"),
    ("image_position_embed.column_embeddings.weight", "projector.column"),
    ("visual_temporal_embed.pos_idx_to_embed", "projector.frames"),
)
_PREFIXES: Final = (
    ("vision_tower.", "tower."),
    ("language_model.", "language."),
    ("lm_head.", "language.lm_head."),
    *((f"multi_modal_projector.{theirs}", ours) for theirs, ours in _CONNECTOR),
    *((f"vision_projector.{theirs}", ours) for theirs, ours in _CONNECTOR),
    ("image_projection", "projector.projection.weight"),
    ("image_proj_norm.", "projector.norm."),
    ("image_pos_embed.row_embeddings.weight", "projector.row"),
    ("image_pos_embed.column_embeddings.weight", "projector.column"),
    ("visual_temporal_embed.pos_idx_to_embed", "projector.frames"),
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parsed prompt of a sequence."""

    item: int
    """Index of the item with the image."""
    form: Form
    width: int
    height: int
    label: str = ""
    """The label that a RegionsWork asks for; empty for the model's own words."""


class FlorenceReader:
    """Implements `Reader`. `TextWork.instruction` may be a task, by the name in Florence-2's
    processors, followed by its text.
    """

    def __init__(self, card: Card, model: Florence) -> None:
        self.language_model, self.tool_form = model.language_model, None
        self._card, self._model, self.tokenizer = card, model, model.tokenizer
        self._ends = [self._special(each) for each in _FRAME[:2]]

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        refuse_schema(work, self._card)
        refuse_chat(work, self._card)
        refuse_sampling(work, self._card)
        found: list[InputSequence] = []
        notes: list[_Asked] = []
        for item, parts in enumerate(items_as_parts(work)):
            check_cancelled()
            image = read_input_image(parts, self._model.processing, self._card.model)
            if isinstance(work, RegionsWork):
                for label in work.labels:
                    found.append(
                        self._sequence(
                            DETECTION.prompt.format(label), image.pixels, 0, "regions.labels"
                        )
                    )
                    notes.append(_Asked(item, DETECTION.form, image.width, image.height, label))
                continue
            prompt, form = build_prompt(work, image.width, image.height)
            found.append(self._sequence(prompt, image.pixels, work.max_tokens, FIELD))
            notes.append(_Asked(item, form, image.width, image.height))
        return found, notes

    def plan(self, sequence: InputSequence) -> SequenceRequest:
        return SequenceRequest(states=empty_states(sequence), most=_most(sequence))

    @torch.inference_mode()
    def requests(
        self, sequences: list[InputSequence], yield_point: YieldPoint
    ) -> list[SequenceRequest]:
        encoder = self.language_model.encoder
        if encoder is None:
            raise TypeError("Florence-2 has an encoder")
        rows = [each.rows for each in sequences if each.rows is not None]
        states = torch.cat(self._model.images.states([each.values for each in rows], yield_point))
        batch = Packed.from_sequences(
            [each.ids for each in sequences],
            device=self.language_model.device,
            places=[each.places for each in rows],
            values=states,
        )
        made = encoder.forward(batch, yield_point=yield_point).split_with_sizes(batch.lengths)
        return [
            replace(self.plan(sequence), states=each)
            for each, sequence in zip(made, sequences, strict=True)
        ]

    def can_stream(self, notes: object) -> bool:
        # Regions are known only at the end.
        return isinstance(notes, list) and all(one.form == "text" for one in notes)

    def text(self, ids: list[int]) -> str:
        text = self._plain(ids).rstrip(INCOMPLETE)
        begun = text[
            text.rfind("<") :
        ]  # possibly the beginning of a location token, which is removed
        return (
            text.removesuffix(begun) if any(token.startswith(begun) for token in _FRAME) else text
        )

    def finish(
        self, work: GenerationWork, notes: object, generated: list[GeneratedIds]
    ) -> ExtractResult:
        if not isinstance(notes, list):
            raise TypeError("`notes` must be those of `prepare`")
        tokens = sum(len(each.ids) for each in generated)
        if isinstance(work, RegionsWork):
            regions: list[list[Region]] = [[] for _ in work.texts]
            for one, each in zip(notes, generated, strict=True):
                found = parse_regions(
                    self._plain(each.ids.tolist()), one.form, one.width, one.height
                )
                regions[one.item] += [replace(region, label=one.label) for region in found]
            kept = [
                each if work.threshold is None or work.threshold < 1 else [] for each in regions
            ]
            return ExtractResult([Extraction(regions=tuple(each)) for each in kept], tokens)
        return ExtractResult(
            [self._extraction(one, each) for one, each in zip(notes, generated, strict=True)],
            tokens,
        )

    def _extraction(self, one: _Asked, generated: GeneratedIds) -> Extraction:
        text = self._plain(generated.ids.tolist())
        if one.form == "text":
            return Extraction(text=text.strip(), finish_reason=generated.finish)
        regions = tuple(parse_regions(text, one.form, one.width, one.height, self._model.banned))
        lines = "\n".join(each.label for each in regions) if one.form == "lines" else ""
        return Extraction(regions=regions, text=lines, finish_reason=generated.finish)

    def _plain(self, ids: list[int]) -> str:
        """Decode the text with its locations, without the tokens that frame it."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        for token in _FRAME:
            text = text.replace(token, "")
        return text

    def _sequence(
        self,
        prompt: str,
        pixels: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        most: int,
        field: str,
    ) -> InputSequence:
        tokens = self._model.tokens
        own = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if tokens + len(own) + 2 > self._card.max_tokens:
            left = self._card.max_tokens - tokens - 2
            raise InputTooLong(
                f"the prompt has {len(own):,} tokens; the maximum is {left:,} with an image",
                field=field,
            )
        ids: Ids = np.array([0] * tokens + [self._ends[0], *own, self._ends[1]], np.int32)
        rows = InputRows(np.arange(tokens, dtype=np.int32), pixels)
        return InputSequence(ids, rows=rows, input=np.array([most], np.int32))

    def _special(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ModelBroken(
                f"tokenizer.json: token {token!r}, which frames Florence-2's prompts, is missing"
            )
        return number


def _most(sequence: InputSequence) -> int | None:
    return int(sequence.input[0]) or None if isinstance(sequence.input, np.ndarray) else None
