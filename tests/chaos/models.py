"""`python -m tests.chaos.models DIR`: write the models of a run. A separate process, so that the
driver need not import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

DENSE: Final = "random/bert-embed"
OTHER_DENSE: Final = "random/distilbert-embed"
RANKER: Final = "random/bert-rank"
CLASSIFIER: Final = "random/bert-classes"
IMAGES: Final = "random/siglip-images"
GENERATIVE: Final = "random/qwen3-generates"
CLASSES: Final = ("contradiction", "neutral", "entailment")


def write(root: Path) -> None:
    """Small random checkpoints `<root>/<model>`."""
    from tests.generation import served
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint
    from tests.parity.image_repositories import write_repository

    write_checkpoint("bert", root / DENSE, sentence=SentenceFiles(prompts={"query": "find: "}))
    write_checkpoint("distilbert", root / OTHER_DENSE, sentence=SentenceFiles())
    write_checkpoint("bert", root / RANKER, head="sequence_classification")
    write_checkpoint("bert", root / CLASSIFIER, head="sequence_classification", labels=CLASSES)
    write_repository("siglip", root / IMAGES)
    served.write("qwen3", root / GENERATIVE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
