"""Random LoRA adapters in PEFT's format, and the models that PEFT merges from them, as
references."""

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
"""Standard deviation of both factors, which gives the adapter about as much effect as the layer."""


def write_adapter(
    base: transformers.PreTrainedModel, directory: Path, *, seed: int, **settings: Any
) -> transformers.PreTrainedModel:
    """Write an adapter of `base`, with PEFT's `settings` (LoraConfig), and return the merged model.
    `base` is consumed.
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
    """Return the model with PEFT's untrained adapter of these `settings` (LoraConfig)."""
    with quietly():
        return cast("PeftModel", get_peft_model(base, LoraConfig(**settings)))


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warning that PEFT's use of transformers causes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def write_random_adapter(
    kind: Kind, directory: Path, *, seed: int, **settings: Any
) -> transformers.PreTrainedModel:
    """Write an adapter for the random model of a kind (`random_model`)."""
    return write_adapter(random_model(kind), directory, seed=seed, **settings)
