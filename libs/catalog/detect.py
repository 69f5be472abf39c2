"""Reads the Card of a checkpoint directory: family, kind, tasks, limits, prompts, and the layers
after the encoder.

Workers read the cards of all models on their disk before they load any, so that the mesh knows its
cold models. Only JSON and tensor headers are read. Code of the checkpoint (`auto_map`) is ignored
and never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from libs.catalog.card import MAX_PROMPT_CHARACTERS, MAX_PROMPTS, Card, Kind, Truncation
from libs.catalog.checkpoint.adapter import FILE as ADAPTER
from libs.catalog.checkpoint.adapter import WEIGHTS as ADAPTER_WEIGHTS
from libs.catalog.checkpoint.adapter import base_of
from libs.catalog.checkpoint.chat import refuse_messages, template_files
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import (
    Config,
    digest,
    locate,
    need_config,
    read_config,
    shortened,
    tensor_files,
)
from libs.catalog.checkpoint.modules import Modules, prompts_of, read_modules, sentence_settings
from libs.catalog.checkpoint.tasks import read_own_adapters, refuse_unserved
from libs.catalog.kinds.embedding.dense import dense
from libs.catalog.kinds.embedding.gritlm import is_gritlm
from libs.catalog.kinds.embedding.hybrid import hybrid, layer_files, pickled_layers
from libs.catalog.kinds.embedding.late import is_multi_vector, multi_vector
from libs.catalog.kinds.embedding.nvembed import is_nvembed, nvembed_card
from libs.catalog.kinds.embedding.sparse import is_sparse, sparse
from libs.catalog.kinds.embedding.static import is_static, static_card, static_embedding_card
from libs.catalog.kinds.extraction.gliner import gliner_card, is_gliner
from libs.catalog.kinds.extraction.gliner2 import gliner2_card, is_gliner2
from libs.catalog.kinds.extraction.glirel import glirel_card, is_glirel
from libs.catalog.kinds.scoring.gliclass import gliclass_card, is_gliclass
from libs.catalog.kinds.scoring.labels import sequence_labels, token_labels
from libs.catalog.kinds.scoring.laya import is_laya, laya_card
from libs.catalog.kinds.scoring.reranker import need_answers, refuse_bare, yes_no
from libs.catalog.kinds.vision.images import images_card, images_folder
from libs.catalog.kinds.vision.vision_language import is_vision_language, vision_language_card
from libs.catalog.kinds.writing.image_writer import image_writer_card, is_image_writer
from libs.catalog.kinds.writing.writer import FILE as GENERATION
from libs.catalog.kinds.writing.writer import is_writer, refuse_other_writer, writer
from libs.catalog.overrides import Overrides, apply
from libs.errors import ModelBroken
from libs.text import control_character

# Families with a position table that begins with rows for padding (transformers:
# create_position_ids_from_input_ids).
_OFFSET_POSITIONS = (
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "longformer",
)
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_NOT_SERVED: dict[str, str] = {
    "qwen3_5": "which reads images and is not served: its text model alone (qwen3_5_text) is",
    "cost_wise_gemma": (
        "Gemma 2 with layers that merge tokens and a score after each layer, which exist only as "
        "code in the checkpoint: use BAAI/bge-reranker-v2-gemma or BAAI/bge-reranker-v2-m3"
    ),
    "big_bird": (
        "with sparse attention, which is not served: long texts are read by Longformer (model_type "
        "'longformer'), by ModernBERT (model_type 'modernbert', 8,192 tokens) and by "
        "GTE (model_type 'new', such as Alibaba-NLP/gte-multilingual-base)"
    ),
}
"""Families that users ask for and that are not served: what to use instead."""
_TOKENIZER_HEAD_BYTES = 1 << 12
_SAVED_SIDE = re.compile(rb'"truncation"\s*:\s*\{[^{}]*"direction"\s*:\s*"(Left|Right)"')
_SIDES: dict[str, Truncation] = {"right": "end", "left": "start"}
_UNLIMITED = 1 << 31  # tokens; tokenizers write a huge number for "no limit"
_DEFAULT_MAX_TOKENS = (
    1 << 15
)  # tokens, for models with unlimited positions and no limit in any file: T5
_SERVED_TYPES = (
    "",
    "SentenceTransformer",
    "CrossEncoder",
    "MultiVectorEncoder",
    "ColBERT",
    "SparseEncoder",
)


_DIRECTORIES: tuple[tuple[Callable[[Path], bool], Callable[[Path, str], Card]], ...] = (
    (is_gliner, gliner_card),
    (is_glirel, glirel_card),
    (is_gliner2, gliner2_card),
    (is_gliclass, gliclass_card),
    (is_laya, laya_card),
    (is_nvembed, nvembed_card),
    (is_static, static_card),
)
"""Directories with special layouts, in the order in which they are recognised."""


def read_card(
    directory: Path, model: str, overrides: Overrides | None = None, base: Path | None = None
) -> Card:
    """Return the card of the checkpoint in `directory`, under the id `model` (`org/name` or
    `org/name@revision`).

    `overrides`: those of the catalog for the model. `base`: of an adapter, the directory of the
    model that it is merged into. Raises ModelBroken naming the file and the key at fault.
    """
    card = replace(
        _card(directory, model, overrides, base),
        created_unix_seconds=_newest_file_seconds(directory),
    )
    _refuse_controls(card)
    _refuse_many_prompts(card.prompts)
    return card


def _card(directory: Path, model: str, overrides: Overrides | None, base: Path | None) -> Card:
    if base_of(directory):
        named = None if overrides is None else overrides.detect.kind
        return apply(vision_language_card(directory, model, named, base), overrides)
    refuse_unserved(directory)
    for is_own, card_of in _DIRECTORIES:
        if is_own(directory):
            return apply(card_of(directory, model), overrides)
    if is_image_writer(directory, None if overrides is None else overrides.detect.kind):
        return apply(image_writer_card(directory, model), overrides)
    folder = images_folder(directory)
    if folder is not None:
        return apply(images_card(directory, folder, model), overrides)
    if is_vision_language(directory):
        named = None if overrides is None else overrides.detect.kind
        return apply(vision_language_card(directory, model, named), overrides)
    files = _read_checkpoint(directory)
    kind = (overrides.detect.kind if overrides is not None else None) or _kind(files)
    if kind not in ("yes_no", "sequence_labels", "writer"):
        refuse_messages(files)
    card = apply(_READERS[kind](files, _common_card(files, model, kind)), overrides)
    return need_answers(card) if kind == "yes_no" else card


def _newest_file_seconds(directory: Path) -> int:
    """Return the Unix time at which the newest file of the directory itself was written; 0 if none
    can be read.
    """
    try:
        return max(
            (int(path.stat().st_mtime) for path in directory.iterdir() if path.is_file()), default=0
        )
    except OSError:
        return 0


def _refuse_controls(card: Card) -> None:
    """Names reach terminals, logs and metrics, where control characters could be interpreted."""
    places = {
        "model_type": (card.family,),
        "revision": (card.revision,),
        "id2label": (*card.labels, *card.classes),
    }
    for key, names in {**places, "prompts": (*card.prompts, card.default_prompt)}.items():
        for name in names:
            if found := control_character(name):
                raise ModelBroken(
                    f"`{key}` has the control character {found} in "
                    f"{shortened(repr(name), 100)}: "
                    "names are plain text"
                )


def _refuse_many_prompts(prompts: Mapping[str, str]) -> None:
    """Raise ModelBroken for more prompts than a heartbeat may have (libs/catalog/card.py), because
    each heartbeat contains the card.
    """
    if len(prompts) > MAX_PROMPTS:
        raise ModelBroken(
            f"`prompts` has {len(prompts):,} entries; at most {MAX_PROMPTS:,} are served"
        )
    if sum(len(name) + len(text) for name, text in prompts.items()) > MAX_PROMPT_CHARACTERS:
        raise ModelBroken(
            f"`prompts` has more than {MAX_PROMPT_CHARACTERS:,} characters, names included"
        )


def _read_checkpoint(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise ModelBroken(f"{directory}: not a directory")
    return _modules_checkpoint(directory, read_modules(directory))


def _modules_checkpoint(directory: Path, modules: Modules) -> Checkpoint:
    folder = modules.encoder_folder
    config = need_config(directory, str(Path(folder) / "config.json"))
    if not config.text("model_type"):
        raise config.broken("model_type", "is missing: it names the family")
    if config.text("model_type") in _NOT_SERVED:
        kind = config.text("model_type")
        raise config.broken("model_type", f"is {kind!r}, {_NOT_SERVED[kind]}")
    if not (directory / folder / "tokenizer.json").exists():
        raise ModelBroken(
            f"tokenizer.json: missing from {directory / folder}. transformers' AutoTokenizer "
            "writes it with save_pretrained"
        )
    top = read_config(directory, "config_sentence_transformers.json") or Config(
        "config_sentence_transformers.json", {}
    )
    if top.text("model_type") not in _SERVED_TYPES:
        raise top.broken(
            "model_type",
            (
                f"is {top.text('model_type')!r}, which is not served: "
                f"{', '.join(_SERVED_TYPES[1:])} "
                "are"
            ),
        )
    return Checkpoint(
        directory,
        config,
        top,
        modules,
        sentence_settings(directory, folder),
        tensor_files(directory, folder),
    )


def _kind(files: Checkpoint) -> Kind:
    """Return the kind: what follows the encoder. modules.json and sentence-transformers' model_type
    take precedence over the architecture.
    """
    if files.modules.queries is not None:
        return _kind_of_routes(files)
    if is_multi_vector(files):
        return "multi_vector"
    if is_sparse(files):
        return "sparse"
    if files.modules.pooling:
        return "hybrid" if layer_files(files) else "dense"
    if files.modules.answers is not None:
        return "yes_no"
    if is_gritlm(files.config.values):
        return "dense"
    if files.architecture.endswith("ForTokenClassification"):
        return "token_labels"
    if is_writer(files):
        return "writer"
    refuse_other_writer(files)
    refuse_bare(files)
    return (
        "sequence_labels" if files.architecture.endswith("ForSequenceClassification") else "dense"
    )


def _kind_of_routes(files: Checkpoint) -> Kind:
    """Return the kind of a Router with separate modules for queries."""
    queries = files.modules.queries
    is_dense = queries is not None and (queries.pooling or queries.static_embedding)
    if not files.modules.pooling or not is_dense:
        raise ModelBroken(
            "modules.json: its Router has separate modules for queries, which is served for "
            "dense vectors of two encoders, or of a StaticEmbedding for queries and an encoder for "
            "documents, and for sparse vectors with a SparseStaticEmbedding for queries"
        )
    return "dense"


def _common_card(files: Checkpoint, model: str, kind: Kind) -> Card:
    """Return a card with the fields that every kind has; a reader of `_READERS` fills in the
    others.
    """
    prompts, default = prompts_of(files.top)
    return Card(
        model=model,
        revision=model.partition("@")[2]
        or files.directory.name.partition("@")[2]
        or _revision(files),
        family=files.config.text("model_type"),
        kind=kind,
        tasks=(),
        representations=(),
        max_tokens=_max_tokens(files),
        prompts=prompts,
        default_prompt=default,
        encoder_folder=files.modules.encoder_folder,
        truncation=_truncation(files),
        lowercase=files.sentence.flag("do_lower_case"),
    )


def _revision(files: Checkpoint) -> str:
    """Return the revision of a checkpoint that neither its id nor its folder names: a digest of
    configurations and tensor headers.
    """
    parts = [module.folder for module in files.modules.dense]
    configs = [f"{folder}/config.json" for folder in parts]
    configs += [
        files.config.file,
        files.sentence.file,
        files.top.file,
        "modules.json",
        "1_Pooling/config.json",
        "artifact.metadata",
        "idf.json",
        "router_config.json",
        GENERATION,
    ]
    tensors = [name for folder in parts for name in tensor_files(files.directory, folder)]
    own = read_own_adapters(files.config)
    if own.folder:
        configs += [f"{own.folder}/{name}/{ADAPTER}" for name in own.names]
        tensors += [f"{own.folder}/{name}/{ADAPTER_WEIGHTS}" for name in own.names]
    tensors += layer_files(files)
    if files.modules.queries is not None:
        of_queries = [
            files.modules.queries.encoder_folder,
            *(module.folder for module in files.modules.queries.dense),
        ]
        configs += [str(Path(folder) / "config.json") for folder in of_queries]
        tensors += [name for folder in of_queries for name in tensor_files(files.directory, folder)]
    configs += template_files(files)
    if files.modules.answers is not None:
        configs.append(files.modules.answers.file)
    if files.modules.splade is not None:
        configs.append(files.modules.splade.file)
    if files.modules.static is not None and files.modules.static.file.endswith(".safetensors"):
        tensors += tensor_files(files.directory, files.modules.static.folder)
    return digest(files.directory, configs, files.tensors + tensors)


def _max_tokens(files: Checkpoint) -> int:
    """Return sentence-transformers' limit, else the tokenizer's, at most the number of
    positions.
    """
    tokenizer = _tokenizer_config(files)
    wanted = files.sentence.number("max_seq_length", most=math.inf) or tokenizer.number(
        "model_max_length", most=math.inf
    )
    found = (
        wanted,
        files.config.number("model_max_length", most=math.inf),
        _positions(files.config),
    )
    limits = [limit for limit in found if 0 < limit < _UNLIMITED]
    if not limits and wanted:
        return _DEFAULT_MAX_TOKENS
    if not limits:
        raise files.config.broken(
            "max_position_embeddings", "is missing, and no other file limits the length of a text"
        )
    return min(limits)


def _tokenizer_config(files: Checkpoint) -> Config:
    name = str(Path(files.modules.encoder_folder) / "tokenizer_config.json")
    return read_config(files.directory, name) or Config(name, {})


def _truncation(files: Checkpoint) -> Truncation:
    config = _tokenizer_config(files)
    side = config.text("truncation_side") or _saved_side(files) or "right"
    if side not in _SIDES:
        raise config.broken(
            "truncation_side", f"is {side!r}, which is not one of {', '.join(_SIDES)}"
        )
    return _SIDES[side]


def _saved_side(files: Checkpoint) -> str:
    """Return the side that tokenizer.json truncates; empty if the file has no truncation.

    Only the head of the file is read, where the `tokenizers` library writes its settings: the
    vocabulary has many megabytes.
    """
    path = locate(files.directory, str(Path(files.modules.encoder_folder) / "tokenizer.json"))
    if path is None:
        return ""
    with path.open("rb") as file:
        found = _SAVED_SIDE.search(file.read(_TOKENIZER_HEAD_BYTES))
    return "" if found is None else found[1].decode().lower()


def _positions(config: Config) -> int:
    """Return the number of positions for a text's tokens; 0: unlimited."""
    positions = next((count for key in _POSITION_KEYS if (count := config.number(key))), 0)
    if positions and config.text("model_type") in _OFFSET_POSITIONS:
        positions -= config.number("pad_token_id", 1) + 1
    if (
        config.values.get("rotary_scaling_factor") is not None
    ):  # Nomic BERT rotates otherwise beyond the trained length.
        positions = min(positions, config.number("max_trained_positions", 2048))
    return positions


def _dense(files: Checkpoint, card: Card) -> Card:
    """Return a card with dense vectors alone; its note says if a hybrid model's other layers are
    there as pickles only.
    """
    card = dense(files, card)
    if files.modules.queries is not None:
        card = replace(
            card, queries=_query_card(files, card), query_default=files.modules.query_default
        )
    return card if card.notes else replace(card, notes=pickled_layers(files))


def _query_card(files: Checkpoint, card: Card) -> Card:
    """Return the card of a Router's encoder for queries. Raises ModelBroken if its vectors cannot
    be compared with those of documents.
    """
    if files.modules.queries is None:
        raise TypeError("queries have no separate modules")
    if files.modules.queries.static_embedding:
        found = static_embedding_card(files.directory, card.model, files.modules.queries, files.top)
    else:
        own = _modules_checkpoint(files.directory, files.modules.queries)
        found = dense(own, _common_card(own, card.model, "dense"))
    found = replace(found, revision=card.revision)
    if found.dimensions != card.dimensions:
        sizes = f"{found.dimensions} numbers of queries and of {card.dimensions} of documents"
        raise ModelBroken(
            f"modules.json: its Router makes vectors of {sizes}, which cannot be compared"
        )
    if found.normalize != card.normalize:
        raise ModelBroken(
            "modules.json: its Router has a Normalize for queries or for documents alone, "
            "which "
            "is not served"
        )
    return found


_READERS: dict[Kind, Callable[[Checkpoint, Card], Card]] = {
    "dense": _dense,
    "sparse": sparse,
    "hybrid": hybrid,
    "multi_vector": multi_vector,
    "sequence_labels": sequence_labels,
    "token_labels": token_labels,
    "yes_no": yes_no,
    "writer": writer,
}
