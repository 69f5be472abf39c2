"""A checkpoint directory -> its Card: family, what it can do, limits, prompts, and the layers after the encoder.

Read by workers before a model is loaded, so that a mesh knows its cold models. Only JSON and tensor headers are read. Remote code
(`auto_map`) is never run; it is only a hint for other libraries and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from libs.catalog import late
from libs.catalog.card import Card, DenseModule, Kind
from libs.catalog.checkpoint import Checkpoint
from libs.catalog.files import Config, digest, need_config, read_config, tensor_files, tensor_shape
from libs.catalog.labels import sequence_labels, token_labels
from libs.catalog.modules import read_modules, sentence_settings
from libs.errors import ModelBroken

# Families whose position table begins with rows for padding (transformers: create_position_ids_from_input_ids).
_OFFSET_POSITIONS = ("roberta", "roberta-prelayernorm", "xlm-roberta", "camembert", "mpnet")
_HIDDEN_KEYS = ("hidden_size", "dim", "d_model")
_STANFORD = "HF_ColBERT"
_SERVED_TYPES = ("", "SentenceTransformer", "CrossEncoder", "MultiVectorEncoder", "ColBERT")


def read_card(directory: Path, model: str) -> Card:
    """The card of the checkpoint in `directory`, under the id `model` (`org/name` or `org/name@revision`).

    Raises ModelBroken naming the file and the key at fault.
    """
    files = _read(directory)
    kind = _kind(files)
    return _READERS[kind](files, _common(files, model, kind))


def _read(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise ModelBroken(f"{directory}: not a directory")
    modules = read_modules(directory)
    folder = modules.encoder_folder
    config = need_config(directory, str(Path(folder) / "config.json"))
    if not config.text("model_type"):
        raise config.broken("model_type", "is missing: it names the family")
    if not (directory / folder / "tokenizer.json").exists():
        raise ModelBroken(
            f"tokenizer.json: missing from {directory / folder}. transformers' AutoTokenizer writes it with save_pretrained"
        )
    top = read_config(directory, "config_sentence_transformers.json") or Config("config_sentence_transformers.json", {})
    if top.text("model_type") not in _SERVED_TYPES:
        raise top.broken("model_type", f"is {top.text('model_type')!r}, which is not served: {', '.join(_SERVED_TYPES[1:])} are")
    return Checkpoint(directory, config, top, modules, sentence_settings(directory, folder), tensor_files(directory, folder))


def _kind(files: Checkpoint) -> Kind:
    """What stands after the encoder. modules.json and sentence-transformers' model_type speak before the architecture."""
    if files.top.text("model_type") in ("MultiVectorEncoder", "ColBERT") or files.modules.token_level:
        return "multi_vector"
    if files.architecture == _STANFORD:
        return "multi_vector"
    if files.modules.pooling:
        return "dense"
    if files.architecture.endswith("ForTokenClassification"):
        return "token_labels"
    return "sequence_labels" if files.architecture.endswith("ForSequenceClassification") else "dense"


def _common(files: Checkpoint, model: str, kind: Kind) -> Card:
    """What every kind of card has."""
    prompts = {name: text for name, text in files.top.part("prompts").values.items() if isinstance(text, str) and text}
    default = files.top.text("default_prompt_name")
    if default and default not in files.top.part("prompts").values:
        raise files.top.broken("default_prompt_name", f"is {default!r}, which is not one of `prompts`")
    return Card(
        model=model,
        revision=model.partition("@")[2] or _revision(files),
        family=files.config.text("model_type"),
        kind=kind,
        tasks=(),
        representations=(),
        max_tokens=_max_tokens(files),
        prompts=prompts,
        default_prompt=default if default in prompts else "",
        encoder_folder=files.modules.encoder_folder,
        lowercase=files.sentence.flag("do_lower_case"),
    )


def _revision(files: Checkpoint) -> str:
    parts = [module.folder for module in files.modules.dense]
    configs = [f"{folder}/config.json" for folder in parts]
    configs += [
        files.config.file,
        files.sentence.file,
        files.top.file,
        "modules.json",
        "1_Pooling/config.json",
        "artifact.metadata",
    ]
    tensors = [name for folder in parts for name in tensor_files(files.directory, folder)]
    return digest(files.directory, configs, files.tensors + tensors)


def _max_tokens(files: Checkpoint) -> int:
    """sentence-transformers' limit, else the tokenizer's, but never more than there are positions."""
    name = str(Path(files.modules.encoder_folder) / "tokenizer_config.json")
    tokenizer = read_config(files.directory, name) or Config(name, {})
    wanted = files.sentence.number("max_seq_length") or tokenizer.number("model_max_length")
    positions = files.config.number("max_position_embeddings")
    if positions and files.config.text("model_type") in _OFFSET_POSITIONS:
        positions -= files.config.number("pad_token_id", 1) + 1
    limits = [limit for limit in (wanted, positions) if limit > 0]
    if not limits:
        raise files.config.broken("max_position_embeddings", "is missing, and no other file limits the length of a text")
    return min(limits)


def _hidden_size(config: Config) -> int:
    for key in _HIDDEN_KEYS:
        if size := config.number(key):
            return size
    raise config.broken("hidden_size", "is missing")


def _dimensions(modules: Sequence[DenseModule], size: int) -> int:
    """The width after the dense layers, each of which must fit the one before."""
    for module in modules:
        if module.in_features != size:
            raise ModelBroken(f"{module.folder}/config.json: `in_features` is {module.in_features}, but {size} numbers come in")
        size = module.out_features
    return size


def _dense(files: Checkpoint, card: Card) -> Card:
    if files.modules.listed and not files.modules.pooling:
        raise ModelBroken("modules.json: names no Pooling, without which there is no vector of a text")
    pooling = files.modules.pooling or ("mean",)
    return replace(
        card,
        tasks=("encode", "score", "classify"),
        representations=("dense",),
        dimensions=_dimensions(files.modules.dense, _hidden_size(files.config) * len(pooling)),
        pooling=pooling,
        pool_prompt=files.modules.pool_prompt,
        modules=files.modules.dense,
        normalize=files.modules.normalize,
        scoring="cosine",
    )


def _multi_vector(files: Checkpoint, card: Card) -> Card:
    """Token vectors are always normalised but in native checkpoints, which say it by a Normalize module."""
    prompts, normalize, modules = dict(card.prompts), True, files.modules.dense
    if files.architecture == _STANFORD and not modules:
        found, own = late.stanford(files.directory)
        prompts, modules = own | prompts, (_stanford_projection(files),)
    elif files.top.text("model_type") == "MultiVectorEncoder":
        found, normalize = late.native(files.sentence, files.modules.mask), files.modules.normalize
    else:
        found, own = late.pylate(files.top)
        prompts |= own
    mean = files.top.text("similarity_fn_name") == "meanmaxsim"
    return replace(
        card,
        tasks=("encode", "score"),
        representations=("multi_vector",),
        multi_vector_dimensions=_dimensions(modules, _hidden_size(files.config)),
        prompts=prompts,
        modules=modules,
        normalize=normalize,
        late=found,
        scoring="mean_maxsim" if mean else "maxsim",
    )


def _stanford_projection(files: Checkpoint) -> DenseModule:
    shape = tensor_shape(files.directory, files.tensors, "linear.weight")
    if shape is None or len(shape) != 2:
        raise ModelBroken(f"{files.tensors[0]}: has no matrix `linear.weight`, which the architecture {_STANFORD} needs")
    return DenseModule("", in_features=shape[1], out_features=shape[0], bias=False, activation="identity")


_READERS: dict[Kind, Callable[[Checkpoint, Card], Card]] = {
    "dense": _dense,
    "multi_vector": _multi_vector,
    "sequence_labels": sequence_labels,
    "token_labels": token_labels,
}
