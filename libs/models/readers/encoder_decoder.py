"""Models of transformers' type vision-encoder-decoder: TrOCR reads a line of text, Donut reads a
page as a form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from shoal.extractions import Extraction
from tokenizers import Tokenizer
from torch import Tensor, nn

from libs.catalog.card import Card, ImageSize
from libs.errors import InputTooLong, ModelBroken, TaskNotSupported
from libs.models import weights
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.families import bart
from libs.models.generation.grammars import fits
from libs.models.generation.reader import (
    empty_states,
    refuse_chat,
    refuse_sampling,
    refuse_schema,
)
from libs.models.images.detection.building import fill
from libs.models.images.detection.swin import Swin, SwinSpec, map_sizes, rename
from libs.models.images.families import deit, vit
from libs.models.images.families.family import TowerSpec
from libs.models.images.loading import read_processing as read_patch_processing
from libs.models.images.patches import PatchEmbedding, PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.interface.packed import Packed
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import GeneratedIds, InputRows, InputSequence, YieldPoint
from libs.models.interface.work import CancelCheck, GenerationWork, TextWork, items_as_parts
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config
from libs.models.readers import donut
from libs.models.readers.pixels import PixelTower, read_input_image
from libs.models.text.checks import need_work
from libs.models.text.registry import prepare
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile

MODEL_TYPE: Final = "vision-encoder-decoder"
_KEYS: Final = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")


class ImageStates(Protocol):
    """An image encoder; an nn.Module."""

    def states(
        self, images: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> list[Tensor]:
        """Map images, uint8 [height, width, 3] each, to the states that a decoder attends to,
        [tokens, width] each.
        """


class _Family(Protocol):
    """A module of `libs/models/images/families`."""

    @property
    def PROCESSOR(self) -> str: ...

    def towers(self, config: Config) -> dict[str, TowerSpec]: ...


_PATCHES: Final[Mapping[str, _Family]] = {"vit": vit, "deit": deit}


class _Swin(nn.Module):
    """Donut's encoder. Its states are the last map, without a norm."""

    def __init__(self, spec: SwinSpec) -> None:
        super().__init__()
        self.swin = Swin(spec, normed=False)

    def forward(self, pixels: Tensor, yield_point: YieldPoint) -> Tensor:
        """Map [images, 3, height, width] to [images, places, width], one image at a time because
        windows belong to one image.
        """
        return torch.cat(
            [list(self.swin.maps(one[None], yield_point))[-1].flatten(1, 2) for one in pixels]
        )


class _Patches(nn.Module):
    """TrOCR's encoder: a packed ViT or DeiT with normalised states."""

    def __init__(self, encoder: PackedEncoder, embed: PatchEmbedding) -> None:
        super().__init__()
        self.encoder = encoder
        self._embed = embed.embed
        self._spec = embed.spec

    @torch.inference_mode()
    def states(
        self, images: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> list[Tensor]:
        """Implement `ImageStates.states`. A repeated image is computed once."""
        alone = list({id(each): each for each in images}.values())
        counts = [self._spec.count_tokens(*each.shape[:2]) for each in alone]
        batch = Packed.from_sequences(
            [np.zeros(count, np.int32) for count in counts],
            device=self.encoder.device,
            places=[np.arange(self._spec.before, count, dtype=np.int32) for count in counts],
            values=self._embed(alone),
        )
        made = self.encoder.forward(batch, yield_point=yield_point).split_with_sizes(counts)
        found = dict(zip(map(id, alone), made, strict=True))
        return [found[id(each)] for each in images]


@dataclass(frozen=True, slots=True)
class VisionEncoderDecoder:
    """A loaded vision-encoder-decoder model."""

    language_model: LanguageModel
    images: ImageStates
    processing: ImageProcessing
    tokenizer: Tokenizer
    tokens: int
    """Number of states of an image."""
    project: nn.Linear | None
    """Projection of states to the decoder's width, where the widths differ."""
    prompt: donut.DonutPrompt | None
    """None for TrOCR, which has no prompt."""

    @property
    def size(self) -> ImageSize:
        """Return the sizes with which images become tokens."""
        height, width = _pixels(self.processing)
        return ImageSize(height, width, 0, max(height, width), self.tokens - 1, self.tokens)


def load_encoder_decoder(
    directory: Path,
    config: Config,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> VisionEncoderDecoder:
    """Load the model. Raises ModelBroken with the file and the key or tensor at fault."""
    encoder, decoder = config.part("encoder"), config.part("decoder")
    kind = encoder.text("model_type")
    tokenizer = load_tokenizer(directory, lowercase=False)
    tensors = TensorFile.open(directory)
    image_tensors, rest = tensors.split("encoder.")
    text_tensors, rest = rest.split("decoder.")
    if kind == "donut-swin":
        images, processing, tokens, width = _donut(directory, encoder, image_tensors, dtype, device)
        prompt: donut.DonutPrompt | None = donut.DonutPrompt.from_tokenizer(tokenizer)
    elif kind in _PATCHES:
        images, processing, tokens, width = _patches(
            directory, encoder, _PATCHES[kind], image_tensors, dtype, device
        )
        prompt = None
    else:
        raise encoder.unsupported(
            "model_type",
            "supported image encoders are vit and deit (TrOCR), and donut-swin",
        )
    own = decoder.size("d_model")
    project = None
    if any(name.startswith("enc_to_dec_proj.") for name in rest.names()):
        project = on_meta(lambda: nn.Linear(width, own))
        fill(project, rest.split("enc_to_dec_proj.")[0], dtype, device)
        width = own
    language_model = bart.load_decoder(
        decoder,
        text_tensors.renamed(lambda name: name.replace("output_projection.", "lm_head.")),
        _settings(settings, config, decoder, tokenizer),
        dtype,
        device,
        table=bart.DECODER_ALONE
        if decoder.flag("use_learned_position_embeddings", True)
        else bart.SINUSOIDAL,
        source=width,
    )
    modules = [each for each in (images, project) if isinstance(each, nn.Module)]
    language_model.tower = nn.ModuleList(modules)
    return VisionEncoderDecoder(
        language_model, images, processing, tokenizer, tokens, project, prompt
    )


def _settings(
    settings: DecodeSettings, config: Config, decoder: Config, tokenizer: Tokenizer
) -> DecodeSettings:
    """Read generation_config.json. The model's or the decoder's configuration supplies missing
    settings.
    """

    def number(key: str) -> int | None:
        return next((part.integer(key) for part in (config, decoder) if part.has(key)), None)

    stop, unknown = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<unk>")
    stops = (
        settings.stops
        or tuple(each for each in (number("eos_token_id"), stop) if each is not None)[:1]
    )
    start = settings.start if settings.start is not None else number("decoder_start_token_id")
    if settings.max_new is None and settings.max_length is None:
        settings = replace(settings, max_new=decoder.size("max_position_embeddings", 1024))
    banned = () if unknown is None else (unknown,)
    return replace(
        settings, stops=stops, start=start, suppressed=tuple({*settings.suppressed, *banned})
    )


def _donut(
    directory: Path, config: Config, tensors: TensorFile, dtype: torch.dtype, device: torch.device
) -> tuple[ImageStates, ImageProcessing, int, int]:
    spec, processing = SwinSpec.from_config(config, "donut-swin"), donut.read_processing(directory)
    height, width = _pixels(processing)
    sizes = map_sizes(height, width)
    if min(sizes[-1]) <= spec.window:
        rows, columns = sizes[-1]
        raise config.unsupported(
            "window_size",
            f"the last map has {rows} x {columns} places, which must be more than a window's",
        )
    module = on_meta(lambda: _Swin(spec))
    fill(module.swin, tensors, dtype, device, rename)
    return (
        PixelTower(module, processing).to(device),
        processing,
        sizes[-1][0] * sizes[-1][1],
        spec.widths[-1],
    )


def _patches(
    directory: Path,
    config: Config,
    family: _Family,
    tensors: TensorFile,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[ImageStates, ImageProcessing, int, int]:
    tower = family.towers(config)["image"]
    if not isinstance(tower.input, PatchSpec):
        raise TypeError("TrOCR's encoders read patches")
    patches = tower.input
    processing = read_patch_processing(directory, Path(), family.PROCESSOR)
    if patches.patch_grid(*_pixels(processing)) != patches.grid:
        wanted = " x ".join(str(count * patches.patch) for count in patches.grid)
        raise ModelBroken(
            f"preprocessor_config.json: makes images of size {processing.size}; config.json asks "
            f"for {wanted} pixels"
        )
    embed = on_meta(lambda: PatchEmbedding(patches, processing))
    encoder = on_meta(lambda: PackedEncoder(tower.encoder, embed))
    weights.load(
        encoder,
        tensors,
        table=tower.weights,
        prefixes=("",),
        head_table={},
        dtype=dtype,
        device=device,
    )
    prepare(encoder)
    return (
        _Patches(encoder.requires_grad_(False).eval(), embed),
        processing,
        patches.count_tokens(*_pixels(processing)),
        patches.hidden,
    )


def _pixels(processing: ImageProcessing) -> tuple[int, int]:
    seen = processing.crop or processing.size
    if not isinstance(seen, tuple):
        raise ModelBroken("preprocessor_config.json: `size` has no height and width")
    return seen


class EncoderDecoderReader:
    """Implements `Reader`. The cross attention attends to an image's states; a sequence has one id
    for each state.
    """

    def __init__(self, card: Card, model: VisionEncoderDecoder) -> None:
        self.language_model, self.tool_form = model.language_model, None
        self._card, self._model, self.tokenizer = card, model, model.tokenizer
        added = [token.content for token in model.tokenizer.get_added_tokens_decoder().values()]
        self._categories = frozenset(
            token for token in added if token.startswith("<") and token.endswith("/>")
        )

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        work = need_work(work, TextWork, self._card)
        refuse_schema(work, self._card)
        refuse_chat(work, self._card)
        refuse_sampling(work, self._card)
        if work.region is not None:
            raise TaskNotSupported(f"{self._card.model} reads whole images", field="text.region")
        if work.text_kind == "ocr_regions":
            raise TaskNotSupported(f"{self._card.model} does not find regions", field="text.kind")
        if work.instruction.strip() and self._model.prompt is None:
            raise TaskNotSupported(
                f"{self._card.model} reads the text of an image and takes no instruction",
                field=donut.FIELD,
            )
        prompt = "" if self._model.prompt is None else self._model.prompt.text(work.instruction)
        asked = _Asked(
            tuple(self.tokenizer.encode(prompt, add_special_tokens=False).ids), work.max_tokens
        )
        if len(asked.prompt) >= self.language_model.max_positions:
            most = self.language_model.max_positions - 1
            raise InputTooLong(
                f"the question has {len(asked.prompt):,} tokens with its tags; the maximum is "
                f"{most:,}",
                field=donut.FIELD,
            )
        found = []
        for parts in items_as_parts(work):
            check_cancelled()
            image = read_input_image(parts, self._model.processing, self._card.model)
            places = np.arange(self._model.tokens, dtype=np.int32)
            found.append(
                InputSequence(
                    np.zeros(self._model.tokens, np.int32),
                    rows=InputRows(places, image.pixels),
                    input=asked,
                )
            )
        return found, prompt

    def plan(self, sequence: InputSequence) -> SequenceRequest:
        return _request(empty_states(sequence), sequence)

    def requests(
        self, sequences: list[InputSequence], yield_point: YieldPoint
    ) -> list[SequenceRequest]:
        states = self._model.images.states(
            [each.rows.values for each in sequences if each.rows is not None], yield_point
        )
        if (project := self._model.project) is not None:
            with torch.inference_mode():
                states = [F.linear(each, project.weight, project.bias) for each in states]
        return [_request(own, each) for own, each in zip(states, sequences, strict=True)]

    def can_stream(self, notes: object) -> bool:
        return True

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self._model.prompt is None).rstrip(
            "�"
        )

    def finish(
        self, work: GenerationWork, notes: object, generated: list[GeneratedIds]
    ) -> ExtractResult:
        if not isinstance(notes, str):
            raise TypeError("`notes` must be those of `prepare`")
        items = [self._extraction(notes, each) for each in generated]
        return ExtractResult(items, sum(len(each.ids) for each in generated))

    def _extraction(self, prompt: str, generated: GeneratedIds) -> Extraction:
        if self._model.prompt is None:
            return Extraction(
                text=self.tokenizer.decode(generated.ids.tolist()).strip(),
                finish_reason=generated.finish,
            )
        own = self.tokenizer.decode(generated.ids.tolist(), skip_special_tokens=False)
        for token in ("<s>", "</s>", "<pad>"):
            own = own.replace(token, "")
        whole = re.sub(r"<.*?>", "", prompt + own, count=1).strip()  # the tag of the task
        form = donut.parse_form(whole, self._categories)
        return Extraction(
            text=own.strip(), finish_reason=generated.finish, form=form if fits(form) else None
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parsed prompt of a sequence."""

    prompt: tuple[int, ...]
    """Token ids; empty for the decoder's start token."""
    most: int
    """Maximum tokens of the answer; 0 for the checkpoint's maximum."""


def _request(states: Tensor, sequence: InputSequence) -> SequenceRequest:
    asked = sequence.input
    if not isinstance(asked, _Asked):
        raise TypeError("`input` must be that of `prepare`")
    return SequenceRequest(
        np.array(asked.prompt, np.int32) if asked.prompt else None, states, asked.most or None
    )
