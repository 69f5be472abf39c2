"""The modules that the children of `shoal up` import, checked before the start, so that missing
ones are named in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from libs.errors import NoCapacity

NEEDED: Final = (
    *("redis", "yaml", "jwt", "cryptography", "numpy"),  # router and scheduler
    *("uvicorn", "httptools", "python_multipart", "msgspec", "orjson", "pyarrow"),  # edge
    *(
        "torch",
        "safetensors",
        "tokenizers",
        "jinja2",
        "fsspec",
        "huggingface_hub",
        "PIL",
        "pypdfium2",
        "html_to_markdown",
        "mammoth",
        "python_calamine",
        "re2",
    ),  # worker
)


def check_installed(needed: Sequence[str] = NEEDED) -> None:
    """Raise NoCapacity if modules are missing. The message names them and the extra that installs
    them.
    """
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise NoCapacity(
            f"these Python modules are missing: {', '.join(missing)}. Install them with pip "
            "install 'shoal-mesh[local]'"
        )
