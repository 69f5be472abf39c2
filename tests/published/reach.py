"""Whether the published models can be had on this machine, asked once before a run that wants
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from huggingface_hub import constants

from libs.errors import ModelBroken, ModelNotFound, NoCapacity
from libs.store import default_root
from libs.store.cache import Cache
from libs.store.hub import Hub
from tests.published.table import MODELS

ADVICE: Final = """\
--published runs published weights, and they cannot be had: {error}.
  A proxy: HTTPS_PROXY=http://… ; a mirror: HF_ENDPOINT=https://… ; gated models: HF_TOKEN=hf_…
  Without a network: a Hugging Face cache that has them (HF_HOME=/folder), \
or copies of Shoal's store (SHOAL_STORE_DIR={root}).
  HF_HUB_OFFLINE forbids to ask the hub; it is {offline}."""


def store_dir() -> Path:
    """Return the directory in which a worker keeps fetched models."""
    return Path(os.environ.get("SHOAL_STORE_DIR") or default_root(os.environ))


def need_models() -> None:
    """`need` for the models of the table, where the product would look for them."""
    need(MODELS, store_dir(), Hub(token=os.environ.get("HF_TOKEN", "")))


def need(models: Iterable[str], root: Path, hub: Hub) -> None:
    """Raises UsageError, which ends the run, if a model is not on this machine and the hub cannot
    be reached.
    """
    cache = Cache(root)
    for model in models:
        if cache.directory(model) is not None:
            continue
        try:
            found = hub.find(model)
        except (ModelNotFound, ModelBroken) as error:
            if not constants.HF_HUB_OFFLINE:
                return  # the hub has answered; the model's test shows the rest
            raise pytest.UsageError(
                ADVICE.format(error=error.message, root=root, offline="set")
            ) from None
        except NoCapacity as error:
            raise pytest.UsageError(
                ADVICE.format(error=error.message, root=root, offline="not set")
            ) from None
        if not isinstance(found, Path):
            return
