"""Validation of model ids, for routers, stores and logs alike. Only a valid id ever becomes part of
a path, a URL or a key.
"""

from __future__ import annotations

import re

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL = re.compile(rf"{_PART}/{_PART}(@{_PART})?")


def is_model_id(model: str) -> bool:
    """Return True for `org/name` or `org/name@revision` of plain characters; never for `..`,
    absolute or deeper paths.
    """
    return bool(_MODEL.fullmatch(model))


def is_alias(name: str) -> bool:
    """Return True if this can be the name of an alias of the mesh: plain characters and no slash,
    so it is never a model id.
    """
    return bool(re.fullmatch(_PART, name))


def is_adapter_name(name: str) -> bool:
    """Return True for the id of a LoRA adapter, or the name of an adapter in the model's
    checkpoint: plain characters and no slash.
    """
    return is_model_id(name) or is_own_adapter(name)


def is_own_adapter(name: str) -> bool:
    """Return True if this can be the name of a LoRA adapter in the model's checkpoint, such as
    `text-matching`.
    """
    return bool(re.fullmatch(_PART, name))


def split_revision(model: str) -> tuple[str, str]:
    """`org/name` and the revision, which is empty if the id has none."""
    name, _, revision = model.partition("@")
    return name, revision
