"""GritLM (arXiv 2402.09906): a Mistral that embeds with bidirectional attention, which only its
code says.

config.json is a Mistral's except for `auto_map`, which names the file of that code; the file is
never read or run. Its effect is implemented here: no causal mask and no window, and the mean of the
text's states without those of the instruction, scaled to length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from libs.catalog.card import Card

_CODE: Final = "gritlm"
_EMBED: Final = "<|embed|>\n"
"""The text before each text; an instruction precedes it, as `<|user|>`, the instruction and a line
feed.
"""


def is_gritlm(config: Mapping[str, object]) -> bool:
    """Return True if config.json names GritLM's code for a Mistral."""
    named = config.get("auto_map")
    if config.get("model_type") != "mistral" or not isinstance(named, Mapping):
        return False
    return any(isinstance(place, str) and _CODE in place.lower() for place in named.values())


def gritlm(card: Card) -> Card:
    """Return the card of a model with dense vectors, as GritLM makes them."""
    return replace(
        card,
        pooling=("mean",),
        pool_prompt=False,
        modules=(),
        normalize=True,
        prompts={"query": _EMBED, "document": _EMBED} | dict(card.prompts),
        default_prompt=card.default_prompt or "document",
    )
