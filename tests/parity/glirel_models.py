"""Small random GLiREL models of the glirel package, converted as docs/api.md says, and the
package's answers.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from glirel import GLiREL
from glirel.model import load_config_as_namespace
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.parity.checkpoints import write_checkpoint

Span = tuple[int, int]
"""Start and end of an entity in characters."""

Found = tuple[Span, Span, str]
"""Head, tail, label."""

HIDDEN = 32
WORDS = 60
LABELS = ["works for", "part", "lives in"]
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
"""The result of the package's `batch_predict_relations`."""


@dataclass(frozen=True)
class Reference:
    """A model of the package and the directory of its conversion."""

    model: Any
    directory: Path

    def relations(
        self, text: str, spans: Sequence[Span], labels: Sequence[str], threshold: float
    ) -> dict[Found, float]:
        """Spans must begin and end with a word."""
        ner = _in_words(text, spans)
        found = self.model.predict_relations(text, list(labels), threshold=threshold, ner=ner)
        place = {(first, last + 1): span for (first, last), span in zip(ner, spans, strict=True)}
        return {
            (place[tuple(one["head_pos"])], place[tuple(one["tail_pos"])], one["label"]): one[
                "score"
            ]
            for one in found
        }

    def logits(
        self, text: str, spans: Sequence[Span], labels: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return the logits, [pairs, labels]."""
        batch = self.model.collate_fn(
            [{"tokenized_text": _WORD.findall(text), "ner": _in_words(text, spans)}],
            relation_types=list(labels),
        )
        with torch.no_grad():
            scores = self.model.compute_score(batch)[0][0]
        found: NDArray[np.float32] = scores.float().numpy()
        return found


def spans_of(text: str, *phrases: str) -> list[Span]:
    """Return the first place of each phrase."""
    return [(text.index(phrase), text.index(phrase) + len(phrase)) for phrase in phrases]


def _in_words(text: str, spans: Sequence[Span]) -> list[list[int]]:
    """Return the first and last word of each entity."""
    words = list(_WORD.finditer(text))
    firsts, ends = [word.start() for word in words], [word.end() for word in words]
    return [[firsts.index(start), ends.index(end)] for start, end in spans]


def make_reference(
    directory: Path,
    config: Mapping[str, object],
    *,
    encoder: str = "bert",
    base: Path | None = None,
    seed: int = 0,
    positions: int = 256,
) -> Reference:
    """Build a model. The package's own files are in the folder `published` of `directory`.

    `config` overrides keys of the published glirel_config.json. `base` is the base model, by
    default a new one of the family `encoder`."""
    base = base or write_checkpoint(encoder, directory / "base", positions=positions, seed=seed)
    settings = {
        "model_name": str(base),
        "fine_tune": True,
        "subtoken_pooling": "first",
        "hidden_size": HIDDEN,
        "max_width": 12,
        "max_len": WORDS,
        "dropout": 0.4,
        "rel_mode": "marker",
        "span_marker_mode": "markerv1",
        "label_embed_strategy": "both",
        "refine_prompt": False,
        "refine_relation": False,
        "ffn_mul": 4,
        "scorer": "dot",
        "max_entity_pair_distance": None,
        "fixed_relation_types": True,
        "device": "cpu",
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the package's new tokens have random embeddings
        model = GLiREL(Namespace(**settings)).eval()
    reference = Reference(model, directory / "converted")
    _draw(reference, torch.Generator().manual_seed(seed))
    model.save_pretrained(directory / "published")
    _convert(directory / "published", reference.directory)
    return reference


def _convert(published: Path, directory: Path) -> None:
    config = load_config_as_namespace(published / "glirel_config.json")
    model = GLiREL(config)
    tensors = torch.load(published / "pytorch_model.bin", map_location="cpu")
    assert not model.load_state_dict(tensors, strict=False).missing_keys
    layer = model.token_rep_layer.bert_layer
    layer.tokenizer.save_pretrained(directory)
    save_file(model.state_dict(), directory / "model.safetensors")
    (directory / "glirel_config.json").write_text(
        json.dumps(vars(config) | {"encoder_config": layer.model.config.to_dict()})
    )


def _draw(reference: Reference, generator: torch.Generator) -> None:
    """Draw weights with logits centred at 0 with a deviation of 2, so that scores are spread over
    0..1.

    Weights are drawn repeatedly until they fit. Shifting logits would subtract large numbers and
    leave mostly rounding errors.
    """
    text = "The licensee conveys the source code of the work in London ."
    spans = [word.span() for word in _WORD.finditer(text)]
    model = reference.model
    while True:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bert_layer.model." not in name:
                    spread = 0.1 if parameter.dim() < 2 else 2 * parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, spread, generator=generator)
        logits = reference.logits(text, spans, LABELS)
        if abs(logits.mean()) < logits.std() / 2:
            break
    last = (
        model.scorer.proj[3]
        if hasattr(model.scorer, "proj")
        else model.span_rep_layer.rel_rep_layer.out_project[3]
    )
    with torch.no_grad():
        last.weight.mul_(2 / float(logits.std()))
        last.bias.mul_(2 / float(logits.std()))
