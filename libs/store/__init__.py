"""The model store: a model id to a directory on this node, fetched from the Hugging Face hub or an object store if need be.

Beside the way of a request: `services/worker/memory/residency.py` asks `Store.get`, in a thread of its own, for what no folder
holds.
Order of reading: `names.py`, `source.py`, `select.py`; `hub.py` and `objects.py`; `download.py`, `cache.py`, `store.py`.
"""

from libs.names import is_model_id
from libs.store.open import check_urls, default_root, open_store
from libs.store.source import Progress, Remote, RemoteFile, Source
from libs.store.store import Copy, Store

__all__ = [
    "Copy",
    "Progress",
    "Remote",
    "RemoteFile",
    "Source",
    "Store",
    "check_urls",
    "default_root",
    "is_model_id",
    "open_store",
]
