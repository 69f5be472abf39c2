"""Vision-language models that retrieve: how they are recognised, and their Card.

Their `model_type` says which family it is, and a card in the catalog or modules.json what a language model without a projection is
used for (`detect.kind`). What an image costs is read when a model is loaded (`libs/models/images/vlm`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from libs.catalog.card import Card, Kind
from libs.catalog.checkpoint.adapter import FILE as ADAPTER
from libs.catalog.checkpoint.adapter import WEIGHTS as ADAPTER_WEIGHTS
from libs.catalog.checkpoint.adapter import base_of
from libs.catalog.checkpoint.files import Config, digest, need_config, read_config, read_json, tensor_files
from libs.errors import ModelBroken

MODEL_TYPES: Final = (
    "colpali", "idefics3", "smolvlm", "modernvbert", "colmodernvbert", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "colqwen2", "colqwen3",
    "qwen3_vl_nemotron_embed", "glm_ocr", "lighton_ocr", "paddleocr_vl",
)  # fmt: skip

_FILES: Final = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "modules.json")
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_POSITIONS: Final = {"colpali": 8192, "idefics3": 2048, "smolvlm": 2048, "modernvbert": 8192, "colmodernvbert": 8192}

Form = Literal["multi_vector", "dense", "score"]


def is_vision_language(directory: Path) -> bool:
    """Whether a checkpoint is a model of texts and images in one sequence."""
    config = read_config(directory, "config.json")
    return config is not None and config.values.get("model_type") in MODEL_TYPES


def is_merged(directory: Path, base: Path | None) -> bool:
    """Whether an adapter is a model under its own name, merged into its base when it is loaded: one of a vision-language model.

    `base`: the base model's directory. Where that is not known yet, a processor of images beside the adapter tells it.
    """
    return any((directory / name).is_file() for name in _PROCESSORS) if base is None else is_vision_language(base)


def vision_language_card(directory: Path, model: str, kind: Kind | None = None, base: Path | None = None) -> Card:
    """`kind`: "multi_vector", "dense" or "yes_no", as the catalog says. `base`: of an adapter, the directory of the model that it
    is merged into. Raises ModelBroken naming the file and the key at fault."""
    name, home = base_of(directory), directory if base is None else base
    if name and base is None:
        raise ModelBroken(f"{ADAPTER}: the model {name!r} is needed, of which this is an adapter")
    if name and not is_vision_language(home):
        raise ModelBroken(f"{ADAPTER}: an adapter of {name!r}, a model of texts: ask for that one, with this as its `adapter`")
    config = need_config(home, "config.json")
    if not any((one / "tokenizer.json").exists() for one in (directory, home)):
        raise ModelBroken(f"tokenizer.json: missing from {home}. transformers' AutoTokenizer writes it with save_pretrained")
    family, form = config.text("model_type"), _form(home, kind)
    whole = config.part("vlm_config") if "vlm_config" in config.values else config
    texts = whole.part("text_config") if "text_config" in whole.values else whole
    return Card(
        model=model,
        revision=model.partition("@")[2] or directory.name.partition("@")[2] or _digest(directory, base),
        family=family,
        kind="images",
        tasks=("score",) if form == "score" else ("encode", "score"),
        representations=() if form == "score" else (form,),
        max_tokens=texts.number("max_position_embeddings", _POSITIONS.get(family, 32_768)),
        dimensions=_width(texts) if form == "dense" else 0,
        multi_vector_dimensions=_vector_width(config, texts, family) if form == "multi_vector" else 0,
        normalize=True,
        inputs=("text", "image"),
        scoring="yes_no" if form == "score" else "cosine" if form == "dense" else "maxsim",
        score_activation="sigmoid" if form == "score" else "identity",
    )


def _digest(directory: Path, base: Path | None) -> str:
    if base is None:
        return digest(directory, list(_FILES), tensor_files(directory, ""))
    own = digest(directory, [ADAPTER, *_FILES], [ADAPTER_WEIGHTS])
    return own[:6] + digest(base, list(_FILES), tensor_files(base, ""))[:6]


def _width(texts: Config) -> int:
    return texts.number("hidden_size", 0)


def _vector_width(config: Config, texts: Config, family: str) -> int:
    if family == "qwen3_vl_nemotron_embed":
        return _width(texts)
    return config.number("embed_dim", 320) if family == "colqwen3" else config.number("embedding_dim", 128)


def _form(directory: Path, kind: Kind | None) -> Form:
    """sentence-transformers' modules.json has a pooling of models with one vector for an item."""
    if kind == "yes_no":
        return "score"
    if kind in ("dense", "multi_vector"):
        return "dense" if kind == "dense" else "multi_vector"
    modules = read_json(directory, "modules.json")
    kinds = [str(one.get("type")) for one in modules if isinstance(one, dict)] if isinstance(modules, list) else []
    return "dense" if any(name.endswith(".Pooling") for name in kinds) else "multi_vector"
