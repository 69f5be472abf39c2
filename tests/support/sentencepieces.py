"""Train small SentencePiece models in a separate process: the package crashes in one with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

DEBERTA: Final = {
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "pad_piece": "[PAD]",
    "bos_piece": "[CLS]",
    "eos_piece": "[SEP]",
    "unk_piece": "[UNK]",
}
"""Options with which the vocabulary begins as that of DeBERTa-v3."""

_TRAIN: Final = """
import json, sentencepiece, sys
options = json.load(sys.stdin)
texts, prefix = iter(options.pop("texts")), options.pop("prefix")
sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_prefix=prefix, **options)
"""


def trained(directory: Path, texts: Iterable[str], **options: Any) -> Path:
    """Train a model of 500 pieces and return its file."""
    common = {
        "vocab_size": 500,
        "minloglevel": 2,
        "hard_vocab_limit": False,
        "num_threads": 1,
        "prefix": str(directory / "spm"),
    }
    given = json.dumps({"texts": [text.replace("\n", " ") for text in texts], **common, **options})
    subprocess.run([sys.executable, "-c", _TRAIN], input=given, text=True, check=True, timeout=120)
    return directory / "spm.model"
