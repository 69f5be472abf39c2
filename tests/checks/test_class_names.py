"""A public class name stands for one thing: a search for it finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.checks.test_constants import ROOT, modules

FOLDERS = ("libs", "services", "tools", "benchmarks")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
SHARED = {
    "the same message on both sides of the wire: the client's, and the models' or the worker's": {
        "Chunking", "Chunks", "DetokenizeResult", "EncodeResult", "ExtractResult", "ScoreResult",
        "Timings", "TokenizeResult",
    },
    "a model as the mesh reports it, and the loaded model that a worker runs": {"Model"},
    "the configuration of a service, one class for each": {"Settings"},
}  # fmt: skip
"""Names of two classes, by the reason."""


def test_public_class_name_stands_for_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in (file for folder in FOLDERS for file in modules(ROOT / folder)):
        if not file.name.endswith(GENERATED):
            for node in ast.parse(file.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(file.relative_to(ROOT)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    allowed = set[str]().union(*SHARED.values())
    assert {name: files for name, files in repeated.items() if name not in allowed} == {}
    assert allowed - repeated.keys() == set()
