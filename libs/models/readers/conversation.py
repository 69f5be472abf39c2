"""Generative vision-language models (SmolVLM, SmolDocling, Qwen-VL and their derivatives): an image
is part of a conversation.

Retrieval uses the same tower, connector and text encoder (`libs/models/images/vlm`); here the text
encoder is the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer

from libs.catalog.card import Card, ImageSize
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.kernels.layout import to_device
from libs.models.generation.chat import ChatTemplate, Message
from libs.models.generation.decoding.language_model import LanguageHead, LanguageModel
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.grammars import Grammars
from libs.models.generation.reader import (
    INCOMPLETE,
    GenerationOptions,
    extraction,
    generation_options,
    refuse_chat,
    refuse_tools,
    token_text,
)
from libs.models.images.vlm import smart, tiles
from libs.models.images.vlm.families import glm, lighton, paddleocr
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language
from libs.models.images.vlm.parts import PartsInput, Prompts, TextFrame
from libs.models.images.vlm.prices import image_size
from libs.models.images.vlm.tower import ImageTower
from libs.models.interface.packed import GivenRows
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import GeneratedIds, InputSequence, YieldPoint
from libs.models.interface.work import (
    CancelCheck,
    GenerationWork,
    Part,
    TextWork,
    Turn,
    items_as_parts,
)
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.checks import need_work
from libs.models.text.tokenising.renderer import rendered, rendered_text, special_tokens
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile

MAX_TOKENS: Final = 8192
"""Maximum tokens of a prompt and its answer together."""

FIELD: Final = "text.instruction"
_MARKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("idefics3", "smolvlm"), tiles.MARK),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"),
        f"<|vision_start|>{smart.MARK}<|vision_end|>",
    ),
    "glm_ocr": glm.TEXT,
    "lighton_ocr": lighton.MARK,
    "paddleocr_vl": paddleocr.TEXT,
}
"""The placeholder of an image in a rendered template and in `ImageTokens.text`."""
_USUAL: Final[Mapping[str, str]] = {
    "caption": "Describe the image in one sentence.",
    "detailed_caption": "Describe the image in a paragraph.",
    "ocr": "Read the text in the image.",
}
"""The instruction for each kind if neither the request nor the card has one."""
_HEADS: Final = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
_DOCTAG: Final = "<doctag>"
# Placeholders are characters of Unicode's private use area. `_PLAIN` is a text that a template must
# insert unchanged.
_TEXT: Final = "\ue001"
_PLAIN: Final = "A <b>text</b>,\n  in \\lines\\ " + "and more " * 300 + "end"


@dataclass(frozen=True, slots=True)
class ConversationFrame:
    """The frame that a chat template puts around a user's message."""

    prompts: Prompts
    strips: bool
    """The template strips whitespace around texts."""
    mark: str
    """The placeholder of an image."""
    template: ChatTemplate | None
    """The template of conversations with turns; None if turns are not supported."""

    @staticmethod
    def from_card(card: Card, root: Path, mark: str) -> ConversationFrame:
        """Read the frame from the card's chat template.

        Raises ModelBroken for a template without a place for an image and a text, or that changes
        the text.

        Args:
            mark: The placeholder of an image.
        """
        fixed = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **special_tokens(root),
            **card.template_values,
        }
        texts = (_TEXT, _PLAIN, f"\n {_PLAIN} \n\n")
        asked = [
            {
                **fixed,
                "messages": [
                    {"role": "user", "content": [*before, {"type": "text", "text": text}]}
                ],
            }
            for before in ([{"type": "image"}], [])
            for text in texts
        ]
        found = [rendered_text(each) for each in rendered(card.template, asked)]
        before, after = _around(found[:3])
        plain, plain_after = _around(found[3:])
        if before.count(mark) != 1:
            raise ModelBroken("the chat template: it has no place for the image of a message")
        first, _, lead = before.partition(mark)
        words = TextFrame(plain, plain_after)
        strips = found[2] != found[0].replace(_TEXT, texts[2])
        try:
            template = ChatTemplate(replace(card, message_parts=True), root)
        except ModelBroken:  # the check of turns is stricter than this one
            template = None
        return ConversationFrame(
            Prompts(TextFrame(first, after), words, words, lead=lead), strips, mark, template
        )

    def after(
        self, turns: Sequence[Turn], last: Message, template_values: str, *, with_image: bool
    ) -> Prompts:
        """Return the frames of a message after these turns, by whether it has an image.

        Raises InvalidInput as `ChatTemplate.around` does.
        """
        if self.template is None:
            raise TypeError("turns should have been refused earlier")
        said = [
            Message(turn.role, turn.text, f"text.turns[{number}].text")
            for number, turn in enumerate(turns)
        ]
        before, after = self.template.around([*said, last], template_values, with_image=with_image)
        if not with_image:
            return replace(
                self.prompts, texts=TextFrame(before, after), queries=TextFrame(before, after)
            )
        first, mark, lead = before.rpartition(self.mark)
        if not mark or lead != self.prompts.lead:
            raise InvalidInput(
                "the model's chat template has no place for an image in such a conversation",
                field="text.turns",
            )
        return replace(self.prompts, images=TextFrame(first, after))


def _around(renderings: list[str]) -> tuple[str, str]:
    marked, plain, _ = renderings
    before, mark, after = marked.partition(_TEXT)
    if not mark or _TEXT in after or plain != before + _PLAIN + after:
        raise ModelBroken(
            "the chat template: it changes the text of a message or has no place for it"
        )
    return before, after


@dataclass(frozen=True, slots=True)
class ConversationModel:
    """A loaded conversation model. `language_model.tower` encodes images."""

    language_model: LanguageModel
    parts: VisionLanguageModel
    conversation: ConversationFrame
    tokenizer: Tokenizer

    @property
    def size(self) -> ImageSize:
        """Return the sizes with which images become tokens."""
        return image_size(self.parts.input, self.language_model.max_positions)


def load_conversation(
    directory: Path,
    card: Card,
    config: Config,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> ConversationModel:
    """Load the model. Raises ModelBroken with the file and the key or tensor at fault."""
    conversation = ConversationFrame.from_card(card, directory, _MARKS[card.family])
    loaded = load_vision_language(
        directory, dtype=dtype, device=device, use="generate", prompts=conversation.prompts
    )
    (backbone,) = loaded.backbones
    encoder = backbone.encoder
    if not encoder.causal:
        raise ModelBroken(
            "config.json: the text encoder is not causal, so the model cannot generate text"
        )
    language_model = LanguageModel(encoder, _head(directory, config, encoder, dtype), settings)
    language_model.max_positions = min(language_model.max_positions, MAX_TOKENS)
    language_model.tower = backbone.tower if isinstance(backbone.tower, ImageTower) else None
    loaded.input.text.limit = language_model.max_positions
    return ConversationModel(
        language_model, loaded, conversation, load_tokenizer(directory, lowercase=False)
    )


def _head(
    directory: Path, config: Config, encoder: PackedEncoder, dtype: torch.dtype
) -> LanguageHead:
    """Return the checkpoint's head, or the token table if the checkpoint has none or config.json
    ties them.
    """
    tensors = TensorFile.open(directory)
    name = next((each for each in _HEADS if each in tensors.names()), None)
    if name is None or config.flag("tie_word_embeddings", False):
        return LanguageHead(encoder.token_weight).eval()
    shape = tensors.shape(name)
    if len(shape) != 2 or shape[1] != encoder.hidden_size:
        raise ModelBroken(
            f"{tensors.tensor_file(name)}: tensor {name!r} has shape {list(shape)}, not the "
            "model's width"
        )
    return LanguageHead(tensors.read(name).to(device=encoder.device, dtype=dtype)).eval()


class ConversationReader:
    """Implements `Reader`. An item's images and texts keep their order and the instruction follows
    them; turns precede each item."""

    def __init__(self, card: Card, model: ConversationModel) -> None:
        self.language_model, self.tool_form = model.language_model, None
        self._card, self._input, self.tokenizer = card, model.parts.input, model.tokenizer
        settings = model.language_model.settings
        self._grammars = Grammars(
            model.tokenizer, settings.vocabulary or model.language_model.vocabulary, settings.stops
        )
        self._conversation = model.conversation
        # The tags of SmolDocling are special tokens.
        self._skips = model.tokenizer.token_to_id(_DOCTAG) is None

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        """Implement `Reader.prepare`. The `input` of a sequence is `Asked`."""
        work = need_work(work, TextWork, self._card)
        if work.region is not None:
            raise TaskNotSupported(f"{self._card.model} reads whole images", field="text.region")
        if work.text_kind == "ocr_regions":
            raise TaskNotSupported(f"{self._card.model} does not find regions", field="text.kind")
        refuse_tools(work, self._card)
        if work.raw_prompt:
            raise TaskNotSupported(
                f"{self._card.model} reads messages, not raw prompts",
                field="text.raw_prompt",
            )
        if self._conversation.template is None:
            refuse_chat(work, self._card)
        found, grammar = [], self._grammars.compile_schema(work.json_schema)
        every = generation_options(
            work, self._card, self.language_model.settings, self._decoded, grammar
        )
        for item, own in zip(items_as_parts(work), every, strict=True):
            check_cancelled()
            path = item[0].field if len(item) == 1 else item[0].field.rpartition(".parts")[0]
            parts = self._asked(item, work)
            sequence = self._input_for(parts, path, work).encode_parts(
                parts, path, check_cancelled=check_cancelled
            )
            longest = self.language_model.max_positions - max(work.max_tokens, 1)
            if sequence.tokens > longest:
                most = f"{self.language_model.max_positions:,} for it and the answer"
                message = (
                    f"the item has {sequence.tokens:,} tokens with its prompt; the maximum is "
                    f"{most}"
                )
                raise InputTooLong(f"{message}: send less, or ask for fewer tokens", field=path)
            ids = sequence.ids.copy()
            # Repetition rules count the image tokens of a prompt, as transformers does.
            if sequence.rows is not None:
                ids[sequence.rows.places] = self._input.mark
            found.append(replace(sequence, ids=ids, input=own))
        return found, None

    def plan(self, sequence: InputSequence) -> SequenceRequest:
        axes = None if sequence.axes is None else sequence.axes.astype(np.int32, copy=False)
        return GenerationOptions.from_sequence(sequence).request(sequence.ids, axes=axes)

    @torch.inference_mode()
    def requests(
        self, sequences: list[InputSequence], yield_point: YieldPoint
    ) -> list[SequenceRequest]:
        tower, rows = (
            self.language_model.tower,
            [each.rows for each in sequences if each.rows is not None],
        )
        given: list[GivenRows] = []
        if rows and isinstance(tower, ImageTower):
            values = tower.forward_preemptible(
                [one for each in rows for one in each.inputs], yield_point
            )
            size, counts = (
                self.language_model.decoder.embed.row_size,
                [len(each.places) for each in rows],
            )
            layers = [torch.split(each, counts) for each in torch.split(values, size, dim=1)]
            for number, each in enumerate(rows):
                first, *deeper = (layer[number] for layer in layers)
                given.append(
                    GivenRows(to_device(each.places, values.device).long(), first, tuple(deeper))
                )
        of_images = iter(given)
        return [
            replace(self.plan(each), given=None if each.rows is None else next(of_images))
            for each in sequences
        ]

    def can_stream(self, notes: object) -> bool:
        return True

    def text(self, ids: list[int]) -> str:
        return self._decoded(ids).rstrip(INCOMPLETE)

    def finish(
        self, work: GenerationWork, notes: object, generated: list[GeneratedIds]
    ) -> ExtractResult:
        items = [extraction(work, self._decoded, each, self._token_text) for each in generated]
        return ExtractResult(items, sum(len(each.ids) for each in generated))

    def _token_text(self, number: int) -> str:
        return token_text(self.tokenizer, number) if self._skips else self._decoded([number])

    def _decoded(self, ids: Sequence[int]) -> str:
        kept = (
            list(ids)
            if self._skips
            else [each for each in ids if each not in self.language_model.settings.stops]
        )
        return self.tokenizer.decode(kept, skip_special_tokens=self._skips)

    def _asked(self, item: tuple[Part, ...], work: TextWork) -> list[Part]:
        """Append the instruction to the item: the request's, the card's, or the usual one for the
        kind."""
        parts = [self._stripped(part) for part in item]
        has_text = any(isinstance(part.content, str) for part in parts)
        asked = work.instruction.strip()
        if not asked and not has_text:
            prompts = self._card.prompts
            asked = (
                prompts.get(work.text_kind)
                or prompts.get(self._card.default_prompt)
                or _USUAL[work.text_kind]
            )
        if not asked and not any(part.content.strip() for part in parts):
            raise InvalidInput("the item has no image and no text", field=item[0].field)
        return parts if not asked else [*parts, Part(f"\n{asked}" if has_text else asked, FIELD)]

    def _stripped(self, part: Part) -> Part:
        strips = self._conversation.strips
        return (
            replace(part, content=part.content.strip())
            if strips and isinstance(part.content, str)
            else part
        )

    def _input_for(self, parts: Sequence[Part], field: str, work: TextWork) -> PartsInput:
        if not work.turns and not work.template_values:
            return self._input
        texts = [part.content for part in parts if isinstance(part.content, str)]
        last = Message("user", "".join(texts), field)
        return replace(
            self._input,
            prompts=self._conversation.after(
                work.turns, last, work.template_values, with_image=len(texts) < len(parts)
            ),
        )
