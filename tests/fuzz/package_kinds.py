"""Small checkpoints of kinds with multiplying answers, made by the packages that define them:
relations, structures, generation.

Importing these packages takes seconds, so they are separate from `tiny_kinds.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.fuzz.products import GENERATION, RELATIONS, STRUCTURES
from tests.generation import served
from tests.parity import gliner2_models, glirel_models

POSITIONS: Final = 8192
"""The positions of the chat model, which are rotary: more than the longest answer."""


def write_package_kinds(root: Path) -> None:
    """Write `<root>/tiny/<kind>` for GLiREL, GLiNER2 and a random chat model."""
    with tempfile.TemporaryDirectory() as folder:
        relations = glirel_models.make_reference(Path(folder) / "relations", {})
        structures = gliner2_models.make_reference(
            Path(folder) / "structures", {"counting_layer": "count_lstm", "max_width": 5}
        )
        shutil.copytree(relations.directory, root / RELATIONS)
        shutil.copytree(structures.directory, root / STRUCTURES)
    served.write("qwen3", root / GENERATION)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = root / GENERATION / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: POSITIONS}))
