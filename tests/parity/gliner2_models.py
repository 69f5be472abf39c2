"""Small random GLiNER2 checkpoints saved by the gliner2 package, and the package's answers."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from gliner2 import GLiNER2
from gliner2.configuration import ExtractorConfig
from shoal.schema import Schema as Asked
from shoal.schema import SchemaClassification, SchemaField, SchemaLabel, SchemaStructure

from tests.parity.checkpoints import write_checkpoint

TEXTS: Final = [
    "Programs such as the GPL, which naïve Überraschung-users in 東京 run 😀, are free_software",
    "a",
    "Write to Ada.Lovelace@example.org or see https://example.org/a?b=c, İstanbul. " * 2,
    "To protect your rights, we need to prevent others!",
]
SCHEMA: Final = Asked(
    entities=(
        SchemaLabel("person", threshold=0.4),
        SchemaLabel("licence name", "what it is called"),
        SchemaLabel("city"),
    ),
    classifications=(
        SchemaClassification(
            "tone",
            (SchemaLabel("calm", "with no haste"), SchemaLabel("angry"), SchemaLabel("neither")),
        ),
        SchemaClassification(
            "topics",
            tuple(map(SchemaLabel, ("law", "fish", "code"))),
            True,
            0.6,
            "what it is about",
        ),
    ),
    relations=(SchemaLabel("protects", "keeps safe"), SchemaLabel("runs", threshold=0.3)),
    structures=(
        SchemaStructure(
            "licence",
            (
                SchemaField("name", dtype="str"),
                SchemaField("right", description="what it lets one do", threshold=0.45),
                SchemaField(
                    "kind", dtype="str", choices=("free", "Not free", "unknown"), threshold=0.1
                ),
                SchemaField("tags", choices=("old", "free", "new"), threshold=0.3),
            ),
        ),
        SchemaStructure(
            "place", (SchemaField("city"), SchemaField("kind", dtype="str", choices=("old", "new")))
        ),
    ),
)
"""All parts of a schema, and choices that fields share. The package ignores the threshold of a
relation with a description.
"""


@dataclass(frozen=True)
class Reference:
    """A model of the package and its directory. With `records`, structures are read as by
    `extract_json`."""

    model: Any
    directory: Path
    records: bool = False

    def answers(self, texts: Sequence[str], schema: Asked) -> list[dict[str, Any]]:
        """Return the package's answers, one text at a time, with scores and places."""
        asked = package_schema(schema, self.records)
        threshold = 0.5 if schema.threshold is None else schema.threshold
        return [
            self.model.extract(
                text, asked, threshold=threshold, include_confidence=True, include_spans=True
            )
            for text in texts
        ]


def package_schema(schema: Asked, records: bool = False) -> Any:
    """Convert our schema to the package's. With `records`, it has the modes of records that the
    package's `extract_json` sets.
    """
    made = GLiNER2.create_schema(None)
    for structure in schema.structures:
        builder = made.structure(structure.name, mode="natural" if records else None)
        for one in structure.fields:
            kind, count = (
                ("str", "required_one") if one.dtype == "str" else ("list", "zero_or_more")
            )
            ways = {"cardinality": count, "exclusive": True} if records else {}
            builder.field(
                one.name,
                kind,
                list(one.choices) or None,
                one.description or None,
                one.threshold,
                **ways,
            )
    if schema.entities:
        made.entities({one.label: _config(one) for one in schema.entities})
    for question in schema.classifications:
        labels = {one.label: one.description for one in question.labels if one.description}
        made.classification(
            question.name,
            [one.label for one in question.labels],
            question.multi_label,
            0.5 if question.threshold is None else question.threshold,
            **({"prompt": question.description} if question.description else {}),
            **({"label_descriptions": labels} if labels else {}),
        )
    if schema.relations:
        made.relations({one.label: _config(one) for one in schema.relations})
    return made


def _config(label: SchemaLabel) -> dict[str, Any]:
    found = {"description": label.description, "threshold": label.threshold}
    return {key: value for key, value in found.items() if value}


def make_reference(
    directory: Path, config: Mapping[str, Any], *, encoder: str = "deberta-v2", seed: int = 0
) -> Reference:
    """Build a model. `config` overrides keys of config.json. Weights are random, and scaled to
    spread scores and counts of instances.
    """
    base = write_checkpoint(encoder, directory / "base", positions=512, vocabulary=600, seed=seed)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # the package's new tokens have random embeddings
        model: Any = GLiNER2(ExtractorConfig(model_name=str(base), **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("encoder."):
                spread = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter.normal_(
                    1.0 if "norm" in name and "weight" in name else 0.0, spread, generator=generator
                )
        model.classifier[2].weight.mul_(4)
        model.count_pred[2].bias.copy_(torch.tensor([0.0, 1.0, 1.0, 0.5] + [-9.0] * 16))
    reference = Reference(model.eval(), directory / "saved")
    _spread(reference)
    model.save_pretrained(reference.directory)
    return reference


def _spread(reference: Reference) -> None:
    """Logits of spans around 0, most of them within -2..2."""
    model = reference.model
    found: list[torch.Tensor] = []
    scored = model.compute_span_scores_batched

    def noted(*arguments: Any, **named: Any) -> list[torch.Tensor]:
        scores: list[torch.Tensor] = scored(*arguments, **named)
        found.extend(one[one.isfinite()] for one in scores)
        return scores

    model.compute_span_scores_batched = noted
    reference.answers(TEXTS[2:], SCHEMA)
    del model.compute_span_scores_batched
    last = model.span_rep.span_rep_layer.out_project[3]
    with torch.no_grad():
        scale = 2 / float(torch.cat(found).square().mean().sqrt())
        last.weight.mul_(scale)
        last.bias.mul_(scale)


def write_transformers_layout(made: Reference, directory: Path, **settings: object) -> Path:
    """Copy a checkpoint into the layout of transformers' Gliner2ForSchemaExtraction.

    The installed transformers lacks the class. Its convert_gliner2_to_hf.py copies tensors and
    tokenizer unchanged and writes one config.json, which has the encoder's configuration, and the
    settings of boundaries twice.

    Args:
        settings: Further keys of config.json.
    """
    shutil.copytree(made.directory, directory)
    package = json.loads((directory / "config.json").read_text())
    encoder = json.loads((directory / "encoder_config" / "config.json").read_text())
    shutil.rmtree(directory / "encoder_config")
    keys = ("architecture", "counting_layer", "token_pooling", "config_version")
    config = {key: package[key] for key in keys if key in package}
    config |= {
        "model_type": "gliner2",
        "architectures": ["Gliner2ForSchemaExtraction"],
        "encoder_config": encoder,
        "max_len": None,
        "span_mode": "markerV0",
    }
    if package.get("architecture") == "boundary":
        config |= dict.fromkeys(("boundary_config", "boundary_head"), package["boundary_head"])
    else:
        config["max_width"] = package.get("max_width", 8)
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory
