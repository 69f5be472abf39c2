"""GLiNER2: the entities, classes, relations and structures of a schema in one forward, of either
architecture.
"""

from __future__ import annotations

from libs.errors import ModelBroken
from libs.kinds.gliner2.boundary.head import UNUSED, BoundaryHead
from libs.kinds.gliner2.boundary.places import MAX_WORDS
from libs.kinds.gliner2.boundary.processor import BoundaryProcessor
from libs.kinds.gliner2.card import ADVICE, Boundary, read_gliner2
from libs.kinds.gliner2.schemas import MARKERS, word_pattern
from libs.kinds.gliner2.spans.head import StructureHead
from libs.kinds.gliner2.spans.processor import StructureProcessor
from libs.models.text.heads.state import HeadState
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.extraction.words import WordFrame
from libs.models.text.tokenising.tokenizer import load_tokenizer, need_tokens


def build(parts: EncoderParts) -> Built:
    settings = read_gliner2(parts.directory)
    tokenizer = load_tokenizer(parts.root, lowercase=False)
    need_tokens(tokenizer, MARKERS, ADVICE)
    limit = parts.card.max_tokens
    frame = WordFrame(
        tokenizer,
        limit=limit,
        max_words=limit,
        pooling="first",
        word=word_pattern(),
        lowercase=True,
        adds_special_tokens=False,
    )
    state = HeadState(parts.rest, parts.device, "config.json")
    if isinstance(settings, Boundary):
        if limit > MAX_WORDS:
            raise ModelBroken(
                f"tokenizer_config.json: `model_max_length` is {limit:,}; the maximum is "
                f"{MAX_WORDS:,}"
            )
        head = BoundaryHead(state, settings, size=parts.encoder.hidden_size, file=parts.file)
        for prefix in UNUSED:
            state.drop(prefix)
        state.check_all_used()
        return Built({"structure": head}, BoundaryProcessor(parts.card, frame, settings), tokenizer)
    spans = StructureHead(
        state,
        settings.counting,
        size=parts.encoder.hidden_size,
        width=settings.max_width,
        file=parts.file,
    )
    state.check_all_used()
    return Built({"structure": spans}, StructureProcessor(parts.card, frame, settings), tokenizer)


load = text_loader(build)
