"""Late interaction (ColBERT): how queries and documents are framed, from the three formats in use.

sentence-transformers 6 keeps it in sentence_bert_config.json and the MultiVectorMask module, PyLate at the top of
config_sentence_transformers.json, Stanford's ColBERT in artifact.metadata. Defaults are those of each format's own loader.
"""

from __future__ import annotations

import string
from pathlib import Path

from libs.catalog.card import Expansion, LateInteraction
from libs.catalog.files import Config, read_config

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


def is_pylate(top: Config) -> bool:
    """Whether config_sentence_transformers.json is PyLate's, which did not always write its model_type."""
    return top.text("model_type") == "ColBERT" or any(key in top.values for key in _PYLATE_KEYS)


def stanford(directory: Path) -> tuple[LateInteraction, dict[str, str]]:
    """Settings and prompts of a checkpoint whose architecture is HF_ColBERT."""
    found = read_config(directory, "artifact.metadata") or Config("artifact.metadata", {})
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


def pylate(top: Config) -> tuple[LateInteraction, dict[str, str]]:
    """Settings and prompts of a PyLate checkpoint: prefixes become the beginnings of the prompts."""
    prompts = {name: text for name, text in top.part("prompts").values.items() if isinstance(text, str)}
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
        skip_words=top.texts("skiplist_words") if top.values.get("skiplist_words") is not None else _PUNCTUATION,
        markers=tuple(markers),
    )
    return late, prompts


def native(sentence: Config, mask: Config | None) -> LateInteraction:
    """Settings of a checkpoint that sentence-transformers 6 wrote."""
    if mask is not None and mask.values.get("keep_only_token_ids"):
        raise mask.broken("keep_only_token_ids", "is for pictures, which are not served")
    return LateInteraction(
        query_tokens=sentence.number("query_length"),
        document_tokens=sentence.number("document_length"),
        expansion=_native_expansion(sentence),
        skip_words=mask.texts("skiplist_words") if mask is not None else (),
        skip_roles=(mask.texts("skiplist_tasks") if mask is not None else ()) or ("document",),
    )


def _native_expansion(sentence: Config) -> Expansion | None:
    if sentence.values.get("query_expansion") is None:
        return None
    found = sentence.part("query_expansion")
    strategy, length = found.text("strategy"), found.number("length")
    if strategy not in ("fixed", "min"):
        raise found.broken("strategy", f"is {strategy!r}, not fixed or min")
    if length < 1:
        raise found.broken("length", "must be at least 1")
    return Expansion(length, attend=found.flag("attend"), fixed=strategy == "fixed", token=found.text("token"))
