"""Small random GLiNER2.5 checkpoints (the gliner2 package's architecture `boundary`), saved by the
package.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from gliner2.configuration import ExtractorConfig
from gliner2.inference.engine import BoundaryExtractor
from shoal.schema import Schema

from tests.parity.checkpoints import write_checkpoint
from tests.parity.gliner2_models import SCHEMA, TEXTS, Reference

PUBLISHED: Final[dict[str, Any]] = {
    "candidate_pool": "shared",
    "boundary_dim": 32,
    "pair_dim": 48,
    "content_dim": 24,
    "boundary_attention_layers": 2,
    "boundary_attention_heads": 4,
    "boundary_attention_window": 6,
    "pool_boundary_top_k": 32,
    "pool_size": 120,
    "min_pool_per_query": 2,
    "candidate_attention_layers": 0,
    "query_attention_layers": 0,
    "enable_span_content": True,
    "record_dim": 16,
    "relation_heads_per_type": 50,
    "relation_tails_per_type": 40,
    "relation_pair_cap": 800,
    "directional_relation_states": True,
    "relation_biaffine_content": True,
}
"""The settings of fastino/gliner2.5-base-v1 with smaller sizes."""


def make_boundary(
    directory: Path, head: Mapping[str, Any], *, encoder: str = "deberta-v2", seed: int = 0
) -> Reference:
    """Build a model. `head` overrides `PUBLISHED`. Weights are random, then scaled to spread the
    scores."""
    base = write_checkpoint(encoder, directory / "base", positions=512, vocabulary=600, seed=seed)
    config = ExtractorConfig(
        model_name=str(base), architecture="boundary", boundary_head=PUBLISHED | dict(head)
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # the package's new tokens have random embeddings
        model: Any = BoundaryExtractor(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("encoder."):
                spread = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
                parameter.normal_(
                    1.0 if "norm" in name and "weight" in name else 0.0, spread, generator=generator
                )
        model.classifier[-1].weight.mul_(4)
        model.boundary_head.null_projection.weight.mul_(0.2)
        model.boundary_head.null_projection.bias.fill_(-0.5)
        # The package assigns spans to records without distinguishing spans with a probability
        # below float32's resolution near 1.
        model.record_decoder.cand_proj.weight.mul_(0.25)
        model.relation_scorer.mlp[3].bias.fill_(1.5)
    reference = Reference(model.eval(), directory / "saved", records=True)
    _spread(reference)
    model.save_pretrained(reference.directory)
    return reference


def _spread(reference: Reference) -> None:
    """One in eight logits of spans is above 0."""
    scorer = reference.model.boundary_head.shared_pool_scorer
    found: list[torch.Tensor] = []
    hook = scorer.register_forward_hook(
        lambda _, __, output: found.append(output[0][output[0] > -1e3])
    )
    reference.answers(TEXTS[2:], Schema(SCHEMA.entities, relations=SCHEMA.relations))
    hook.remove()
    with torch.no_grad():
        scorer.film_output[3].bias.sub_(torch.cat(found).quantile(7 / 8))
