"""Random LoRA adapters as PEFT writes them, and the models that PEFT makes of them by merging: the
references.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.parity.checkpoints import Kind, random_model

STRENGTH = 0.1
"""Standard deviation of both factors: as much of a layer's answer as the layer itself, about."""


def write_adapter(
    base: transformers.PreTrainedModel, directory: Path, *, seed: int, **settings: Any
) -> transformers.PreTrainedModel:
    """Write an adapter of `base`, with PEFT's `settings` (LoraConfig), and return the merged model.
    `base` itself is used up.
    """
    adapted = with_adapter(base, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, STRENGTH, generator=generator)
    adapted.save_pretrained(str(directory))
    return cast("transformers.PreTrainedModel", copy.deepcopy(adapted).merge_and_unload().eval())


def with_adapter(base: transformers.PreTrainedModel, **settings: Any) -> PeftModel:
    """The model with PEFT's untrained adapter of these `settings` (LoraConfig)."""
    with quietly():
        return cast("PeftModel", get_peft_model(base, LoraConfig(**settings)))


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warning that PEFT's own use of transformers causes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def write_random_adapter(
    kind: Kind, directory: Path, *, seed: int, **settings: Any
) -> transformers.PreTrainedModel:
    """The same of the random model of a kind (`random_model`)."""
    return write_adapter(random_model(kind), directory, seed=seed, **settings)
