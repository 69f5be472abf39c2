"""The published models that are run, each with what its answers are compared with: small ones,
every family that reads or writes.

Left out, because the smallest published model needs more memory or a licence: gemma, gemma3_text,
mistral, mbart, mt5. Also left out: models with files missing in their repositories (GLiNER).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import shoal

from tests.published import encoders, generation

Comparison = Callable[[shoal.Client, str, Path], None]
"""Asks the mesh for a model by its id, and asserts that the results equal those of the model's
package on the files in a directory.
"""

_READ: Final = partial(generation.conversation, instruction="Read the text in the image.")
_DOCLING: Final = partial(generation.conversation, instruction="Convert this page to docling.")
_TEXT: Final = partial(generation.texts, instruction="Summarise the text in one sentence.")

MODELS: Final[Mapping[str, Comparison]] = {
    # Images to texts.
    "florence-community/Florence-2-base": generation.florence,
    "microsoft/Florence-2-base": generation.florence,
    "microsoft/trocr-base-printed": generation.page,
    "naver-clova-ix/donut-base-finetuned-cord-v2": partial(generation.page, prompt="<s_cord-v2>"),
    "ds4sd/SmolDocling-256M-preview": _DOCLING,
    "ibm-granite/granite-docling-258M": _DOCLING,
    "HuggingFaceTB/SmolVLM-256M-Instruct": _READ,
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": _READ,
    "zai-org/GLM-OCR": partial(generation.conversation, instruction="Text Recognition:"),
    "PaddlePaddle/PaddleOCR-VL": partial(generation.conversation, instruction="OCR:"),
    "lightonai/LightOnOCR-2-1B": _READ,
    "opendatalab/MinerU2.5-2509-1.2B": partial(
        generation.conversation, instruction="Text Recognition:"
    ),
    "Qwen/Qwen3-VL-2B-Instruct": _READ,
    "Qwen/Qwen2.5-VL-3B-Instruct": _READ,
    # Texts to texts.
    "facebook/bart-large-cnn": generation.texts,
    "google/flan-t5-small": partial(generation.texts, instruction="summarize:"),
    "Qwen/Qwen3-0.6B": _TEXT,
    "Qwen/Qwen2.5-0.5B-Instruct": _TEXT,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _TEXT,
    # Labels and schemas.
    "facebook/bart-large-mnli": encoders.zero_shot,
    "MoritzLaurer/deberta-v3-base-zeroshot-v2.0": encoders.zero_shot,
    "knowledgator/gliclass-small-v1.0": encoders.labels,
    "fastino/gliner2-base-v1": encoders.gliner2,
    "fastino/gliner2.5-small-v1": encoders.gliner25,
    # Vectors and scores.
    "sentence-transformers/all-MiniLM-L6-v2": encoders.dense,
    "BAAI/bge-small-en-v1.5": encoders.dense,
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": encoders.sparse,
    "cross-encoder/ms-marco-MiniLM-L-6-v2": encoders.reranker,
    "lightonai/GTE-ModernColBERT-v1": encoders.multi_vector,
    "openai/clip-vit-large-patch14": encoders.images,
    "google/siglip-base-patch16-256": encoders.images,
}
