"""Small random GLiNER checkpoints saved by the gliner package, and the package's answers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gliner import GLiNER
from numpy.typing import NDArray

from tests.parity.checkpoints import write_checkpoint

Found = tuple[int, int, str]
"""An entity: start, end, label."""

HIDDEN = 32
WIDTH = 4
WORDS = 60
TEXTS = [
    "Programs such as the GPL, which naïve Überraschung-users in 東京 run 😀, are free_software.",
    "a",
    "The licensee conveys; the source code of the work must be conveyed too (see section 6). " * 2,
    "To protect your rights, we need to prevent others.",
]
LABELS = ["person", "licence name", "city"]


@dataclass(frozen=True)
class Reference:
    """A model of the package and its directory."""

    model: Any
    directory: Path

    def entities(
        self, texts: Sequence[str], labels: Sequence[str], threshold: float, *, flat: bool
    ) -> list[dict[Found, float]]:
        """Predict one text at a time, because markerV1 includes the batch's padding in its mean."""
        wishes = (
            {"relations": [], "return_relations": False}
            if hasattr(self.model.model, "pair_rep_layer")
            else {}
        )
        items = [
            self.model.inference(
                [text], list(labels), threshold=threshold, flat_ner=flat, **wishes
            )[0]
            for text in texts
        ]
        return [
            {(one["start"], one["end"], one["label"]): one["score"] for one in item}
            for item in items
        ]

    def relations(
        self, text: str, labels: Sequence[str], relations: Sequence[str], threshold: float
    ) -> dict[tuple[Found, Found, str], float]:
        """Drop relations of an entity with itself, which the package returns for a span with two
        labels."""
        _, found = self.model.inference(
            [text],
            list(labels),
            relations=list(relations),
            threshold=0.5,
            adjacency_threshold=0.5,
            relation_threshold=threshold,
        )
        pairs = {
            (_place(one["head"]), _place(one["tail"]), one["relation"]): one["score"]
            for one in found[0]
        }
        return {key: score for key, score in pairs.items() if key[0] != key[1]}

    def logits(self, text: str, labels: Sequence[str]) -> NDArray[np.float32]:
        """Return the logits of all valid spans [spans, labels], or of words [words, labels, 3]."""
        prepared = self.model.prepare_batch([text], list(labels))
        batch = self.model.collate_batch(prepared["input_x"], prepared["entity_types"])
        logits = self.model.run_batch(batch).logits[0].float()
        if self.model.config.span_mode != "token_level":
            logits = logits[batch["span_mask"][0].view(logits.shape[:2])]
        found: NDArray[np.float32] = logits.numpy()
        return found


def make_reference(
    directory: Path,
    config: Mapping[str, object],
    *,
    encoder: str = "bert",
    base: Path | None = None,
    labels_encoder: str | None = None,
    seed: int = 0,
) -> Reference:
    """Build a model with random weights, scaled to spread scores over 0..1.

    `config` overrides keys of gliner_config.json. `base` is the base model, by default a new one of
    the family `encoder`."""
    base = base or write_checkpoint(encoder, directory / "base", positions=256, seed=seed)
    settings = {
        "model_name": str(base),
        "hidden_size": HIDDEN,
        "max_width": WIDTH,
        "max_len": WORDS,
        **config,
    }
    if labels_encoder is not None:
        settings["labels_encoder"] = str(
            write_checkpoint(labels_encoder, directory / "labels", hidden=48, seed=seed + 1)
        )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # the package's new tokens have random embeddings
        model: Any = GLiNER.from_config(settings, backbone_from_pretrained=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "layer.model." not in name and "labels_encoder.model." not in name:
                spread = 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, spread, generator=generator)
    reference = Reference(model.eval(), directory / "saved")
    _spread(reference)
    model.save_pretrained(reference.directory, safe_serialization=True)
    return reference


def _spread(reference: Reference) -> None:
    """Scale logits to a deviation of 2. Those of words are not centred at 0, because three of them
    must be high together.
    """
    model = reference.model.model
    last = model.scorer.out_mlp[3] if hasattr(model, "scorer") else model.prompt_rep_layer[3]
    logits = reference.logits(TEXTS[3], LABELS)
    with torch.no_grad():
        last.weight.mul_(2 / float(logits.std()))
        last.bias.mul_(2 / float(logits.std()))
        if hasattr(model, "scorer"):
            # Relations are scored for all pairs of spans, so their number must be limited.
            middle = 0.0 if hasattr(model, "pair_rep_layer") else 0.5
            last.bias.add_(
                middle - torch.from_numpy(reference.logits(TEXTS[3], LABELS)).mean(dim=(0, 1))
            )


def _place(entity: Mapping[str, Any]) -> Found:
    return entity["start"], entity["end"], entity["type"]


def slug(config: Mapping[str, object]) -> str:
    """Return a test's id."""
    return (
        re.sub(r"\W+", "-", ",".join(f"{key}={value}" for key, value in config.items())) or "plain"
    )
