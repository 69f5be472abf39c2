"""terraform/ as python-hcl2 reads it: blocks as dictionaries, expressions as their text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import hcl2
from hcl2.utils import SerializationOptions

ROOT: Final = Path(__file__).parents[2]
TERRAFORM: Final = ROOT / "terraform"
MODULES: Final = ("eks", "gke")
EXAMPLES: Final = tuple(sorted(path.name for path in (TERRAFORM / "examples").iterdir()))
FILES: Final = tuple(
    sorted(
        str(path.relative_to(TERRAFORM))
        for path in (*TERRAFORM.rglob("*.tf"), *TERRAFORM.rglob("*.hcl"))
    )
)
PLAIN: Final = SerializationOptions(
    with_comments=False, explicit_blocks=False, strip_string_quotes=True
)

Block = dict[str, Any]


@cache
def read(file: str) -> Block:
    """One of FILES."""
    with open(TERRAFORM / file, encoding="utf-8") as opened:
        loaded: Block = hcl2.load(opened, serialization_options=PLAIN)
    return loaded


def blocks(folder: str, kind: str) -> dict[str, Block]:
    """The variables, outputs, modules … of a folder of terraform/, by name."""
    files = [file for file in FILES if str(Path(file).parent) == folder]
    return {
        name: body
        for file in files
        for one in read(file).get(kind, [])
        for name, body in one.items()
    }


def values(folder: str) -> Block:
    """Its `locals`."""
    files = [file for file in FILES if str(Path(file).parent) == folder]
    return {
        name: value
        for file in files
        for one in read(file).get("locals", [])
        for name, value in one.items()
    }
