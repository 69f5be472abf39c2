"""The model store: from a model id to a directory on this node, fetched from the Hugging Face hub
or an object store if needed, and converted if its weights are torch checkpoints.

Not on the request path: `services/worker/memory/residency.py` calls `ModelStore.get` in a
separate thread, for models that no folder holds. Order of reading: `libs/names.py`, `source.py`,
`select.py`; `hub.py` and `objects.py`; `download.py`, `cache.py`, `local.py`, `store.py`.
"""

from libs.conversion import TorchCheckpoints
from libs.names import is_model_id
from libs.store.cache import Copy
from libs.store.local import LocalCopies, write_converted
from libs.store.open import check_urls, default_root, open_copies, open_store
from libs.store.source import DownloadProgress, ModelSource, Remote, RemoteFile
from libs.store.store import ModelStore

__all__ = [
    "Copy",
    "DownloadProgress",
    "LocalCopies",
    "ModelSource",
    "ModelStore",
    "Remote",
    "RemoteFile",
    "TorchCheckpoints",
    "check_urls",
    "default_root",
    "is_model_id",
    "open_copies",
    "open_store",
    "write_converted",
]
