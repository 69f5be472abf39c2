"""Vision-language models that retrieve: how they are recognised, and their Card.

`model_type` determines the family, and a card in the catalog or modules.json the use of a language
model without a projection (`detect.kind`); V-SPLADE, which has sparse vectors, is recognised by its
tensors. The price of an image is read when a model is loaded (`libs/models/images/vlm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from libs.catalog.card import Card, Scoring, SparseOutput, StaticQueries
from libs.catalog.checkpoint.adapter import FILE as ADAPTER
from libs.catalog.checkpoint.adapter import WEIGHTS as ADAPTER_WEIGHTS
from libs.catalog.checkpoint.adapter import read_base_model
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    digest,
    need_config,
    read_config,
    read_json,
    tensor_files,
    tensor_shape,
)
from libs.errors import ModelBroken
from libs.kinds.kind import CheckpointPlace, Kind

MODEL_TYPES: Final = (
    "colpali", "idefics3", "smolvlm", "modernvbert", "colmodernvbert", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "qwen3_5", "colqwen2", "colqwen3",
    "qwen3_vl_nemotron_embed", "glm_ocr", "lighton_ocr", "paddleocr_vl",
)  # fmt: skip

_FILES: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "modules.json",
)
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_POSITIONS: Final = {
    "colpali": 8192,
    "idefics3": 2048,
    "smolvlm": 2048,
    "modernvbert": 8192,
    "colmodernvbert": 8192,
}

_WEIGHTS: Final = "model.safetensors"
_SENTENCE: Final = "config_sentence_transformers.json"
_SPARSE_FILES: Final = (_SENTENCE, "chat_template.jinja")
_DECODER: Final = "encoder.mlm_head.decoder.weight"
"""V-SPLADE's, [columns of its sparse vectors, hidden]. By its configuration alone it is
ModernVBERT.
"""

_JINA_RERANKER: Final = "JinaVLForRanking"

Form = Literal["multi_vector", "dense", "sparse", "score"]


def is_vision_language(directory: Path) -> bool:
    """Return True if a checkpoint is a model that reads texts and images in one sequence."""
    config = read_config(directory, "config.json")
    known = config is not None and config.values.get("model_type") in MODEL_TYPES
    return known or sparse_columns(directory) > 0


def sparse_columns(directory: Path) -> int:
    """Return the width of V-SPLADE's sparse vectors, from the tensors' header; 0: it is another
    model.
    """
    config = read_config(directory, "config.json")
    if (
        config is None
        or "vision_config" not in config.values
        or not (directory / _WEIGHTS).is_file()
    ):
        return 0
    shape = tensor_shape(directory, [_WEIGHTS], _DECODER)
    return shape[0] if shape else 0


def is_jina_reranker(config: Mapping[str, object]) -> bool:
    """Return True for jina-reranker-m0's config.json: a Qwen2-VL that scores pairs."""
    named = config.get("architectures")
    return isinstance(named, list) and _JINA_RERANKER in named


def is_merged(directory: Path, base: Path | None) -> bool:
    """Return True if an adapter is served as a model under its name, merged into its base when it
    is loaded: an adapter of a vision-language model.

    Args:
        base: The base model's directory; if it is not known yet, an image processor next to the
            adapter identifies one.
    """
    return (
        any((directory / name).is_file() for name in _PROCESSORS)
        if base is None
        else is_vision_language(base)
    )


def vision_language_card(place: CheckpointPlace) -> Card:
    """The catalog may name the kind "multi_vector", "dense" or "yes_no". Raises ModelBroken naming
    the file and the key at fault.
    """
    directory, model, base = place.directory, place.model, place.base
    name, home = read_base_model(directory), directory if base is None else base
    if name and base is None:
        raise ModelBroken(f"{ADAPTER}: the model {name!r} is needed, of which this is an adapter")
    if name and not is_vision_language(home):
        raise ModelBroken(
            f"{ADAPTER}: an adapter of {name!r}, a text model: ask for that one, with this "
            "as its `adapter`"
        )
    config = need_config(home, "config.json")
    if not any((one / "tokenizer.json").exists() for one in (directory, home)):
        raise ModelBroken(
            f"tokenizer.json: missing from {home}. transformers' AutoTokenizer writes it with "
            "save_pretrained"
        )
    family, columns = config.text("model_type"), sparse_columns(home)
    form = _form(home, place.named, columns)
    whole = config.part("vlm_config") if "vlm_config" in config.values else config
    texts = whole.part("text_config") if "text_config" in whole.values else whole
    card = Card(
        model=model,
        revision=place.named_revision or _digest(directory, base, form),
        family=family,
        kind="images",
        tasks=("score",) if form == "score" else ("encode", "score"),
        representations=() if form == "score" else (form,),
        max_tokens=texts.number("max_position_embeddings", _POSITIONS.get(family, 32_768)),
        dimensions=_width(texts) if form == "dense" else 0,
        multi_vector_dimensions=_vector_width(config, texts, family)
        if form == "multi_vector"
        else 0,
        normalize=True,
        inputs=("text", "image"),
        scoring="yes_no" if form == "score" else "cosine" if form == "dense" else "maxsim",
        score_activation="sigmoid" if form == "score" else "identity",
    )
    return _sparse(home, card, columns) if form == "sparse" else card


def _sparse(directory: Path, card: Card, columns: int) -> Card:
    """V-SPLADE's: pages are its documents, and texts its queries."""
    top = read_config(directory, _SENTENCE) or CheckpointConfig(_SENTENCE, {})
    queries = StaticQueries(folder="", file=_WEIGHTS, default=True)
    found = SparseOutput(columns, strongest=top.number("max_active_dims"), queries=queries)
    scoring: Scoring = "sparse_cosine" if top.text("similarity_fn_name") == "cosine" else "dot"
    return replace(card, sparse=found, scoring=scoring, normalize=False)


def _digest(directory: Path, base: Path | None, form: Form) -> str:
    files = [*_FILES, *(_SPARSE_FILES if form == "sparse" else ())]
    if base is None:
        return digest(directory, files, tensor_files(directory, ""))
    own = digest(directory, [ADAPTER, *files], [ADAPTER_WEIGHTS])
    return own[:6] + digest(base, files, tensor_files(base, ""))[:6]


def _width(texts: CheckpointConfig) -> int:
    return texts.number("hidden_size", 0)


def _vector_width(config: CheckpointConfig, texts: CheckpointConfig, family: str) -> int:
    if family == "qwen3_vl_nemotron_embed":
        return _width(texts)
    return (
        config.number("embed_dim", 320)
        if family == "colqwen3"
        else config.number("embedding_dim", 128)
    )


def _form(directory: Path, kind: str | None, columns: int) -> Form:
    """Return the form of the vectors. sentence-transformers' modules.json has a pooling of models
    with one vector for an item.

    Args:
        columns: Columns of sparse vectors.
    """
    if columns and kind in ("dense", "multi_vector", "yes_no"):
        raise ModelBroken(
            f"{_WEIGHTS}: is V-SPLADE's, which has sparse vectors alone: a card of the kind "
            f"{kind!r} cannot be served"
        )
    if columns:
        return "sparse"
    if kind == "sparse":
        raise ModelBroken(
            f"{_WEIGHTS}: has no tensor {_DECODER!r}: of models of images V-SPLADE alone has "
            "sparse vectors"
        )
    config = need_config(directory, "config.json")
    if is_jina_reranker(config.values):
        if kind in ("dense", "multi_vector"):
            raise config.broken("architectures", f"is {_JINA_RERANKER}, which has no vectors")
        return "score"
    if kind == "yes_no":
        return "score"
    if kind in ("dense", "multi_vector"):
        return "dense" if kind == "dense" else "multi_vector"
    modules = read_json(directory, "modules.json")
    kinds = (
        [str(one.get("type")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    return "dense" if any(name.endswith(".Pooling") for name in kinds) else "multi_vector"


KIND: Final = Kind(
    "images",
    "vision_language",
    lambda place: is_vision_language(place.directory),
    vision_language_card,
)
MERGED: Final = replace(KIND, claims=lambda place: bool(read_base_model(place.directory)))
"""Adapters that are served as models, merged into their base. Those of other models are refused."""
