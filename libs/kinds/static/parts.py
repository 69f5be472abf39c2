"""The parts of static embedding models: an encoder without layers that looks up a vector for each
token, the mean over a text's tokens, and the processor of texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer, processors
from torch import Tensor, nn

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import read_file
from libs.errors import ModelBroken
from libs.kinds.static.card import MODEL2VEC, TABLES
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import CancelCheck, Role, Truncation
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import EmbeddingSpec, EncoderSpec
from libs.models.text.heads.modules import dense_layers
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.processing.embedding import EmbeddingProcessor, EncodedTexts
from libs.models.text.tokenising.text import TextProcessor, Where, too_long
from libs.models.text.tokenising.tokenizer import FILE, MAX_BYTES, largest_id, load_tokenizer
from libs.models.weights import TensorFile

_MAPPING: Final = "mapping"
_WEIGHTS: Final = "weights"


@dataclass(frozen=True, slots=True)
class StaticParts:
    """The parts of a loaded static embedder."""

    encoder: PackedEncoder
    head: PooledHead
    processor: StaticProcessor
    tokenizer: Tokenizer
    limit: int
    """Maximum tokens of a text."""


def load_static_parts(
    directory: Path, card: Card, device: torch.device, dtype: torch.dtype
) -> StaticParts:
    """Load the tokenizer and the table, in `dtype`, of a static embedder. Raises ModelBroken for
    tensors that do not fit the tokenizer or each other.
    """
    root = directory / card.encoder_folder
    tokenizer = load_tokenizer(root, lowercase=card.lowercase)
    table = _table(TensorFile.open(directory, card.encoder_folder), largest_id(tokenizer) + 1)
    # A text without tokens has the vector zero, which is in an additional row.
    table = torch.cat((table, table.new_zeros(1, table.shape[1]))).to(device, dtype)
    encoder = _encoder(table, card.max_tokens)
    # Model2Vec's limit replaces that of tokenizer.json.
    limit = 0 if card.family == MODEL2VEC else _truncation(root)
    return StaticParts(
        encoder,
        PooledHead(card.pooling, dense_layers(card, directory, {}, device)),
        StaticProcessor(card, tokenizer, limit, empty=len(table) - 1),
        tokenizer,
        min(card.max_tokens, limit or card.max_tokens),
    )


def _encoder(table: Tensor, max_tokens: int) -> PackedEncoder:
    """Return an encoder without layers over a table [rows, dimensions]."""
    spec = EncoderSpec(
        hidden=table.shape[1],
        heads=1,
        head_size=1,
        ffn=1,
        layers=(),
        norm="post",
        norm_eps=0.0,
        activation="gelu",
    )
    with torch.device("meta"):
        embed = TokenEmbedding(
            EmbeddingSpec(
                len(table), table.shape[1], positions=max_tokens, norm_eps=None, table=False
            )
        )
        encoder = PackedEncoder(spec, embed)
    embed.token.weight = nn.Parameter(table, requires_grad=False)
    encoder.prepare()
    return encoder.requires_grad_(False).eval()


class StaticProcessor(EmbeddingProcessor):
    """The processor of texts without special tokens; for Model2Vec also without unknown tokens, and
    first truncated to a number of characters.

    Args:
        limit: The truncation in tokenizer.json, 0 if it has none.
        empty: The id of a text without tokens.
    """

    def __init__(self, card: Card, tokenizer: Tokenizer, limit: int, *, empty: int) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A", pair="$A $B", special_tokens=[]
        )
        self._limit = min(card.max_tokens, limit or card.max_tokens)
        text = TextProcessor(tokenizer, limit=self._limit, segments=False)
        super().__init__(card, text)
        self._texts = text
        self._empty = np.array([empty], dtype=np.int32)
        self._unknown: int | None = None
        self._max_characters = 0
        if card.family == MODEL2VEC:
            unknown = getattr(tokenizer.model, "unk_token", None)
            self._unknown = tokenizer.token_to_id(unknown) if unknown else None
            self._max_characters = card.max_tokens * int(median(map(len, tokenizer.get_vocab())))

    def encode_texts(
        self,
        texts: list[str],
        prompt: str,
        role: Role,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck,
    ) -> EncodedTexts:
        """Return the sequences of texts. `where` returns the path of each in the job."""
        is_cut = [False] * len(texts)
        if self._max_characters and truncation == "end":
            is_cut = [len(prompt) + len(text) > self._max_characters for text in texts]
            texts = [(prompt + text)[: self._max_characters] for text in texts]
            prompt = ""
        sequences = []
        for number, (ids, is_whole) in enumerate(
            self._texts.encode_plain(texts, truncation, check_cancelled, before=prompt)
        ):
            if len(ids) > self._limit:
                if truncation == "none":
                    raise too_long(
                        where(number),
                        len(ids),
                        self._limit,
                        "without special tokens",
                        more=not is_whole,
                    )
                ids = ids[: self._limit] if truncation == "end" else ids[-self._limit :]
                is_cut[number] = True
            if self._unknown is not None:
                ids = ids[ids != self._unknown]
            cut = where(number) if is_cut[number] else ""
            sequences.append(InputSequence(ids if len(ids) else self._empty, cut=cut))
        return EncodedTexts(sequences, [None] * len(sequences))


def _table(tensors: TensorFile, tokens: int) -> Tensor:
    """Return a float32 vector for each token id.

    Raises ModelBroken for tensors that do not fit the tokenizer or each other.
    """
    names = set(tensors.names())
    name = next((name for name in TABLES if name in names), "")
    if not name or names - {name, _MAPPING, _WEIGHTS}:
        found = ", ".join(sorted(names)[:5])
        raise ModelBroken(
            f"{tensors.source}: must contain {' or '.join(TABLES)}, and may contain {_MAPPING} and "
            f"{_WEIGHTS}; it contains {found}"
        )
    table = tensors.read(name).to(torch.float32)
    if _MAPPING in names:
        mapping = tensors.read(_MAPPING)
        if mapping.dim() != 1 or mapping.is_floating_point() or not len(mapping):
            raise ModelBroken(f"{tensors.source}: tensor 'mapping' must be a list of whole numbers")
        mapping = mapping.long()
        if int(mapping.min()) < 0 or int(mapping.max()) >= len(table):
            raise ModelBroken(
                f"{tensors.source}: tensor 'mapping' names a row that {name!r} does not have"
            )
        table = table.index_select(0, mapping)
    if _WEIGHTS in names:
        weights = tensors.read(_WEIGHTS).to(torch.float32)
        if weights.shape != table.shape[:1]:
            raise ModelBroken(
                f"{tensors.source}: tensor 'weights' must have {len(table)} numbers, one for each "
                "token"
            )
        table = table * weights[:, None]
    if len(table) < tokens:
        raise ModelBroken(
            f"{tensors.source}: vectors exist for {len(table)} tokens; the tokenizer has {tokens}"
        )
    return table


def _truncation(root: Path) -> int:
    """Return the truncation in tokenizer.json in tokens, 0 if it has none. The file was validated
    when it was loaded.
    """
    settings = json.loads(read_file(root, FILE, MAX_BYTES) or b"{}").get("truncation")
    found = settings.get("max_length") if isinstance(settings, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
