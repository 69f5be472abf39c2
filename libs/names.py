"""Validation of model ids, for routers, stores and logs alike. Only a valid id ever becomes part of
a path, a URL or a key.
"""

from __future__ import annotations

import re

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL = re.compile(rf"{_PART}/{_PART}(@{_PART})?")


def is_model_id(model: str) -> bool:
    """Whether this is `org/name` or `org/name@revision` of plain characters; never true for `..`,
    absolute or deeper paths.
    """
    return bool(_MODEL.fullmatch(model))


def is_adapter_name(name: str) -> bool:
    """Whether this is the id of a LoRA adapter, or the name of one that a model has of its own:
    plain characters and no slash.
    """
    return is_model_id(name) or is_own_adapter(name)


def is_own_adapter(name: str) -> bool:
    """Whether this can be the name of a LoRA adapter that a model has of its own, such as
    `text-matching`.
    """
    return bool(re.fullmatch(_PART, name))


def split_revision(model: str) -> tuple[str, str]:
    """`org/name` and the revision, which is empty if the id has none."""
    name, _, revision = model.partition("@")
    return name, revision
