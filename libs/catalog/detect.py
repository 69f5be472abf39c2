"""A checkpoint directory -> its Card: family, what it can do, limits, prompts, and the layers after the encoder.

Read by workers before a model is loaded, so that a mesh knows its cold models. Only JSON and tensor headers are read. Remote code
(`auto_map`) is never run; it is only a hint for other libraries and is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from libs.catalog import late
from libs.catalog.card import MOST_PROMPT_CHARACTERS, MOST_PROMPTS, Card, DenseModule, Kind
from libs.catalog.chat import refuse_messages, takes_messages, template_files, with_template
from libs.catalog.checkpoint import Checkpoint
from libs.catalog.files import Config, digest, need_config, read_config, shortened, tensor_files, tensor_shape
from libs.catalog.gliclass import gliclass_card, is_gliclass
from libs.catalog.gliner import gliner_card, is_gliner
from libs.catalog.glirel import glirel_card, is_glirel
from libs.catalog.hybrid import hybrid, layer_files, pickled_layers
from libs.catalog.labels import sequence_labels, token_labels
from libs.catalog.modules import read_modules, sentence_settings
from libs.catalog.overrides import Overrides, apply
from libs.catalog.reranker import need_answers, refuse_bare, yes_no
from libs.catalog.sparse import is_sparse, sparse
from libs.errors import ModelBroken
from libs.text import control_character

# Families whose position table begins with rows for padding (transformers: create_position_ids_from_input_ids).
_OFFSET_POSITIONS = ("roberta", "roberta-prelayernorm", "xlm-roberta", "camembert", "mpnet")
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_UNLIMITED = 1 << 31  # tokens; tokenizers write a huge number for "no limit"
_LONGEST = 1 << 15  # tokens, where positions have no end and no file names one: T5
_HIDDEN_KEYS = ("hidden_size", "dim", "d_model", "n_embd")
_STANFORD = "HF_ColBERT"
_SERVED_TYPES = ("", "SentenceTransformer", "CrossEncoder", "MultiVectorEncoder", "ColBERT", "SparseEncoder")
_MASKED = "ForMaskedLM"


def read_card(directory: Path, model: str, said: Overrides | None = None) -> Card:
    """The card of the checkpoint in `directory`, under the id `model` (`org/name` or `org/name@revision`).

    `said`: what the catalog says of the model over its files. Raises ModelBroken naming the file and the key at fault.
    """
    card = _card(directory, model, said)
    _refuse_controls(card)
    _refuse_many_prompts(card.prompts)
    return card


def _card(directory: Path, model: str, said: Overrides | None) -> Card:
    if is_gliner(directory):
        return apply(gliner_card(directory, model), said)
    if is_glirel(directory):
        return apply(glirel_card(directory, model), said)
    if is_gliclass(directory):
        return apply(gliclass_card(directory, model), said)
    files = _read(directory)
    kind = (said.detect.kind if said is not None else None) or _kind(files)
    if kind not in ("yes_no", "sequence_labels"):
        refuse_messages(files)
    card = apply(_READERS[kind](files, _common(files, model, kind)), said)
    return need_answers(card) if kind == "yes_no" else card


def _refuse_controls(card: Card) -> None:
    """Names are shown on terminals and stand in logs and metrics: none may steer those."""
    places = {"model_type": (card.family,), "revision": (card.revision,), "id2label": (*card.labels, *card.classes)}
    for key, names in {**places, "prompts": (*card.prompts, card.default_prompt)}.items():
        for name in names:
            if found := control_character(name):
                raise ModelBroken(
                    f"`{key}` has the control character {found} in {shortened(repr(name), 100)}: names are plain text"
                )


def _refuse_many_prompts(prompts: Mapping[str, str]) -> None:
    """One of them comes before each text, and their names are in each heartbeat: more than routers take would end the worker's."""
    if len(prompts) > MOST_PROMPTS:
        raise ModelBroken(f"`prompts` has {len(prompts):,} entries; at most {MOST_PROMPTS:,} are served")
    if sum(len(name) + len(text) for name, text in prompts.items()) > MOST_PROMPT_CHARACTERS:
        raise ModelBroken(f"`prompts` has more than {MOST_PROMPT_CHARACTERS:,} characters, names included")


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
    native = files.top.text("model_type") == "MultiVectorEncoder" or files.modules.token_level
    if native or files.architecture == _STANFORD or (late.is_pylate(files.top) and not files.modules.pooling):
        return "multi_vector"
    if is_sparse(files):
        return "sparse"
    if files.modules.pooling:
        return "hybrid" if layer_files(files) else "dense"
    if files.modules.answers is not None:
        return "yes_no"
    if files.architecture.endswith("ForTokenClassification"):
        return "token_labels"
    refuse_bare(files)
    return "sequence_labels" if files.architecture.endswith("ForSequenceClassification") else "dense"


def _common(files: Checkpoint, model: str, kind: Kind) -> Card:
    """What every kind of card has."""
    prompts = {name: text for name, text in files.top.part("prompts").values.items() if isinstance(text, str) and text}
    default = files.top.text("default_prompt_name")
    if default and default not in files.top.part("prompts").values:
        raise files.top.broken("default_prompt_name", f"is {default!r}, which is not one of `prompts`")
    return Card(
        model=model,
        revision=model.partition("@")[2] or files.directory.name.partition("@")[2] or _revision(files),
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
        "idf.json",
        "router_config.json",
    ]
    tensors = [name for folder in parts for name in tensor_files(files.directory, folder)]
    tensors += layer_files(files)
    configs += template_files(files)
    if files.modules.answers is not None:
        configs.append(files.modules.answers.file)
    if files.modules.splade is not None:
        configs.append(files.modules.splade.file)
    if files.modules.static is not None and files.modules.static.file.endswith(".safetensors"):
        tensors += tensor_files(files.directory, files.modules.static.folder)
    return digest(files.directory, configs, files.tensors + tensors)


def _max_tokens(files: Checkpoint) -> int:
    """sentence-transformers' limit, else the tokenizer's, but never more than there are positions."""
    name = str(Path(files.modules.encoder_folder) / "tokenizer_config.json")
    tokenizer = read_config(files.directory, name) or Config(name, {})
    wanted = files.sentence.number("max_seq_length", most=math.inf) or tokenizer.number("model_max_length", most=math.inf)
    found = (wanted, files.config.number("model_max_length", most=math.inf), _positions(files.config))
    limits = [limit for limit in found if 0 < limit < _UNLIMITED]
    if not limits and wanted:
        return _LONGEST
    if not limits:
        raise files.config.broken("max_position_embeddings", "is missing, and no other file limits the length of a text")
    return min(limits)


def _positions(config: Config) -> int:
    """Positions that a text's tokens may have; 0: as many as they like."""
    positions = next((count for key in _POSITION_KEYS if (count := config.number(key))), 0)
    if positions and config.text("model_type") in _OFFSET_POSITIONS:
        positions -= config.number("pad_token_id", 1) + 1
    if config.values.get("rotary_scaling_factor") is not None:  # Nomic BERT changes its rotation beyond the trained length.
        positions = min(positions, config.number("max_trained_positions", 2048))
    return positions


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
        notes=_left_out(files),
    )


def _left_out(files: Checkpoint) -> tuple[str, ...]:
    """What a dense model's files hint at besides."""
    if files.architecture.endswith(_MASKED) and not files.modules.listed:
        return (
            f"config.json: `architectures` is {files.architecture} and there is no modules.json: taken for dense vectors by the "
            "mean, as sentence-transformers does. If it is SPLADE, a card with `detect: {kind: sparse}` says so",
        )
    return pickled_layers(files)


def _hybrid(files: Checkpoint, card: Card) -> Card:
    return replace(hybrid(files, _dense(files, card)), notes=pickled_layers(files))


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


def _sequence_labels(files: Checkpoint, card: Card) -> Card:
    card = sequence_labels(files, card)
    return with_template(files, card) if takes_messages(files) else card


_READERS: dict[Kind, Callable[[Checkpoint, Card], Card]] = {
    "dense": _dense,
    "sparse": sparse,
    "hybrid": _hybrid,
    "multi_vector": _multi_vector,
    "sequence_labels": _sequence_labels,
    "token_labels": token_labels,
    "yes_no": yes_no,
}
