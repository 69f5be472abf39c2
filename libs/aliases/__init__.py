"""The aliases of the mesh: names that requests use for models, which operators move to others.

Order of reading: `store.py` (one router's view), `scripts.py` and `lua/` (its changes in Redis).
"""

from libs.aliases.store import MAX_ALIASES, AliasStore, AliasTable

__all__ = ["MAX_ALIASES", "AliasStore", "AliasTable"]
