"""Late-interaction models (ColBERT): prompts, lengths, query expansion and skip lists, from the
three formats in use.

sentence-transformers 6 stores them in sentence_bert_config.json and the MultiVectorMask module,
PyLate at the top of config_sentence_transformers.json, Stanford's ColBERT in artifact.metadata.
Defaults are those of each format's own loader.
"""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Final

from libs.catalog.card import Card, DenseModule, Expansion, LateInteraction
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import CheckpointConfig, read_config, tensor_shape
from libs.catalog.checkpoint.vectors import dimensions, hidden_size
from libs.errors import ModelBroken
from libs.kinds.kind import in_layout

_STANFORD = "HF_ColBERT"
_PYLATE_KEYS = (
    "query_length",
    "document_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)
_DEFAULT_QUERY_TOKENS = 32
_PUNCTUATION = tuple(string.punctuation)


def is_multi_vector(files: Checkpoint) -> bool:
    """Return True if the checkpoint is in one of the three formats."""
    native = files.top.text("model_type") == "MultiVectorEncoder" or files.modules.token_level
    return files.modules.queries is None and (
        native
        or files.architecture == _STANFORD
        or (_is_pylate(files.top) and not files.modules.pooling)
    )


def multi_vector(files: Checkpoint, card: Card) -> Card:
    """Return the card of a late-interaction model. Token vectors are always normalised in the
    formats of PyLate and Stanford; in that of sentence-transformers 6 only if modules.json has a
    Normalize.
    """
    prompts, normalize, modules = dict(card.prompts), True, files.modules.dense
    if files.architecture == _STANFORD and not modules:
        found, own = _stanford(files.directory)
        prompts, modules = own | prompts, (_stanford_projection(files),)
    elif files.top.text("model_type") == "MultiVectorEncoder":
        found, normalize = _native(files.sentence, files.modules.mask), files.modules.normalize
    else:
        found, own = _pylate(files.top)
        prompts |= own
    mean = files.top.text("similarity_fn_name") == "meanmaxsim"
    return replace(
        card,
        tasks=("encode", "score"),
        representations=("multi_vector",),
        multi_vector_dimensions=dimensions(modules, hidden_size(files.config)),
        prompts=prompts,
        modules=modules,
        normalize=normalize,
        late=found,
        scoring="mean_maxsim" if mean else "maxsim",
    )


def _is_pylate(top: CheckpointConfig) -> bool:
    """Return True if config_sentence_transformers.json is PyLate's; early versions of PyLate wrote
    no model_type.
    """
    return top.text("model_type") == "ColBERT" or any(key in top.values for key in _PYLATE_KEYS)


def _stanford(directory: Path) -> tuple[LateInteraction, dict[str, str]]:
    """Return settings and prompts of a checkpoint of Stanford's ColBERT (HF_ColBERT)."""
    found = read_config(directory, "artifact.metadata") or CheckpointConfig("artifact.metadata", {})
    prompts = {
        "query": f"{found.text('query_token_id') or '[unused0]'} ",
        "document": f"{found.text('doc_token_id') or '[unused1]'} ",
    }
    length = found.number("query_maxlen") or _DEFAULT_QUERY_TOKENS
    late = LateInteraction(
        document_tokens=found.number("doc_maxlen"),
        expansion=Expansion(length, attend=found.flag("attend_to_mask_tokens"), fixed=True),
        skip_words=_PUNCTUATION if found.flag("mask_punctuation", True) else (),
        markers=tuple(prompts.values()),
    )
    return late, prompts


def _stanford_projection(files: Checkpoint) -> DenseModule:
    """Return the projection of such a checkpoint, which has no modules.json that describes it."""
    shape = tensor_shape(files.directory, files.tensors, "linear.weight")
    if shape is None or len(shape) != 2:
        raise ModelBroken(
            f"{files.tensors[0]}: has no matrix `linear.weight`, which the architecture "
            f"{_STANFORD} needs"
        )
    return DenseModule(
        "", in_features=shape[1], out_features=shape[0], bias=False, activation="identity"
    )


def _pylate(top: CheckpointConfig) -> tuple[LateInteraction, dict[str, str]]:
    """Settings and prompts of a PyLate checkpoint: prefixes are put before the prompts."""
    prompts = {
        name: text for name, text in top.part("prompts").values.items() if isinstance(text, str)
    }
    markers = []
    for key, name in (("query_prefix", "query"), ("document_prefix", "document")):
        if prefix := top.text(key):
            markers.append(prefix)
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    expansion = None
    if top.flag("do_query_expansion", True) and any(key in top.values for key in _PYLATE_KEYS):
        length = top.number("query_length") or _DEFAULT_QUERY_TOKENS
        expansion = Expansion(length, attend=top.flag("attend_to_expansion_tokens"), fixed=True)
    late = LateInteraction(
        query_tokens=0 if expansion else top.number("query_length"),
        document_tokens=top.number("document_length"),
        expansion=expansion,
        skip_words=top.texts("skiplist_words")
        if top.values.get("skiplist_words") is not None
        else _PUNCTUATION,
        markers=tuple(markers),
    )
    return late, prompts


def _native(sentence: CheckpointConfig, mask: CheckpointConfig | None) -> LateInteraction:
    """Settings of a checkpoint that sentence-transformers 6 wrote."""
    if mask is not None and mask.values.get("keep_only_token_ids"):
        raise mask.broken(
            "keep_only_token_ids", "is set, which is for images; these are not served"
        )
    return LateInteraction(
        query_tokens=sentence.number("query_length"),
        document_tokens=sentence.number("document_length"),
        expansion=_native_expansion(sentence),
        skip_words=mask.texts("skiplist_words") if mask is not None else (),
        skip_roles=(mask.texts("skiplist_tasks") if mask is not None else ()) or ("document",),
    )


def _native_expansion(sentence: CheckpointConfig) -> Expansion | None:
    if sentence.values.get("query_expansion") is None:
        return None
    found = sentence.part("query_expansion")
    strategy, length = found.text("strategy"), found.number("length")
    if strategy not in ("fixed", "min"):
        raise found.broken("strategy", f"is {strategy!r}, which is not one of fixed, min")
    if length < 1:
        raise found.broken("length", "must be at least 1")
    return Expansion(
        length, attend=found.flag("attend"), fixed=strategy == "fixed", token=found.text("token")
    )


KIND: Final = in_layout("multi_vector", is_multi_vector, multi_vector)
