"""Small checkpoints of the kinds whose answers multiply, made by the packages that define them: relations, structures, generation.

Their packages take seconds to import, so they are apart from `tiny_kinds.py`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.fuzz.products import GENERATION, RELATIONS, STRUCTURES
from tests.generation import served
from tests.parity import gliner2_models, glirel_models


def write_package_kinds(root: Path) -> None:
    """Write `<root>/tiny/<kind>` for GLiREL, GLiNER2 and a random chat model."""
    with tempfile.TemporaryDirectory() as folder:
        relations = glirel_models.make_reference(Path(folder) / "relations", {})
        structures = gliner2_models.make_reference(Path(folder) / "structures", {"counting_layer": "count_lstm", "max_width": 5})
        shutil.copytree(relations.directory, root / RELATIONS)
        shutil.copytree(structures.directory, root / STRUCTURES)
    served.write("qwen3", root / GENERATION)
