"""Build modules without weights, for a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from libs.catalog.checkpoint.files import shortened
from libs.errors import ModelBroken

T = TypeVar("T")


def on_meta(build: Callable[[], T], name: str = "model") -> T:
    """Build modules on the meta device. Raises ModelBroken for impossible sizes."""
    try:
        with torch.device("meta"):
            return build()
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelBroken(shortened(f"config.json: the {name} cannot be built: {error}")) from error
