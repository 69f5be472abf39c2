"""Tiny checkpoints with random weights and a real tokenizer, in the formats of transformers and
sentence-transformers.

All tests that need a model directory use this module, so nothing is downloaded. Weights are drawn
wide (standard deviation 0.2, biases too), because transformers' initialisation is too flat to test
attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import transformers
from safetensors.torch import save_file

from tests.parity.recipes import RECIPES, Size
from tests.parity.tokenizers import ROLES, train_tokenizer

transformers.logging.disable_progress_bar()

Kind = str
"""A key of RECIPES."""

Pooling = Literal["cls_token", "mean_tokens", "max_tokens", "lasttoken", "weightedmean_tokens"]
Head = Literal["base", "masked_lm", "causal_lm", "sequence_classification", "token_classification"]

_AUTO_CLASSES = {
    "base": transformers.AutoModel,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "causal_lm": transformers.AutoModelForCausalLM,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
}


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The files that sentence-transformers adds to a directory. `pooling` and `activation` have the
    names used in its configurations.
    """

    pooling: Pooling = "mean_tokens"
    dense: int | None = None
    activation: str = "torch.nn.modules.activation.Tanh"
    normalize: bool = True
    max_seq_length: int | None = 64
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str | None = "cosine"


def write_checkpoint(
    kind: Kind,
    directory: Path,
    *,
    head: Head = "base",
    labels: Sequence[str] = ("LABEL_0",),
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    positions: int = 128,
    vocabulary: int = 400,
    sentence: SentenceFiles | None = None,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a whole model directory and return it. `config` overrides keys of config.json by
    transformers' names.
    """
    model = random_model(
        kind,
        head=head,
        labels=labels,
        seed=seed,
        hidden=hidden,
        layers=layers,
        heads=heads,
        positions=positions,
        vocabulary=vocabulary,
        config=config,
    )
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    if RECIPES[kind].like:
        settings = json.loads((directory / "config.json").read_text())
        _write_json(directory / "config.json", settings | {"model_type": kind})
    write_tokenizer(kind, directory, vocabulary, positions)
    if sentence is not None:
        write_sentence_files(directory, sentence, hidden=hidden, seed=seed)
    return directory


def random_model(
    kind: Kind,
    *,
    head: Head = "base",
    labels: Sequence[str] = ("LABEL_0",),
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    positions: int = 128,
    vocabulary: int = 400,
    config: Mapping[str, object] | None = None,
) -> transformers.PreTrainedModel:
    """Return the transformers model of `kind`, float32, in evaluation mode, with every parameter
    drawn from `seed`.
    """
    recipe = RECIPES[kind]
    size = Size(
        len(train_tokenizer(recipe.tokenizer, vocabulary).get_vocab()),
        hidden,
        layers,
        heads,
        positions,
    )
    settings = transformers.AutoConfig.for_model(recipe.like or kind, **recipe.config(size))
    if head in ("sequence_classification", "token_classification"):
        settings.id2label = dict(enumerate(labels))
        settings.label2id = {name: number for number, name in enumerate(labels)}
    for name, value in (config or {}).items():
        setattr(settings, name, value)
    own = recipe.encoder if head == "base" else None
    # The sdpa attention of transformers 5.17 ignores the cap of scores.
    exact = (
        {"attn_implementation": "eager"}
        if getattr(settings, "attn_logit_softcapping", None)
        else {}
    )
    model = (
        own(settings) if own is not None else _AUTO_CLASSES[head].from_config(settings, **exact)
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def write_tokenizer(
    kind: Kind, directory: Path, vocabulary: int = 400, positions: int = 128
) -> None:
    """Return the tokenizer of `kind`, as transformers saves it."""
    tokenizer = train_tokenizer(RECIPES[kind].tokenizer, vocabulary)
    names = tokenizer.get_vocab()
    roles = {
        "cls_token": ("[CLS]", "<s>"),
        "sep_token": ("[SEP]", "</s>"),
        "pad_token": ("[PAD]", "<pad>"),
        "unk_token": ("[UNK]", "<unk>"),
        "mask_token": ("[MASK]", "<mask>"),
    }
    special = ROLES.get(RECIPES[kind].tokenizer) or {
        role: next(token for token in candidates if token in names)
        for role, candidates in roles.items()
    }
    inputs = ["input_ids", "attention_mask"] + (
        ["token_type_ids"] if RECIPES[kind].segmented else []
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=positions, model_input_names=inputs, **special
    )
    fast.save_pretrained(directory)


def write_sentence_files(
    directory: Path, files: SentenceFiles, *, hidden: int, seed: int = 0
) -> None:
    """Convert a transformers directory to a sentence-transformers one."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = {
        f"pooling_mode_{mode}": mode == files.pooling
        for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    modes["pooling_mode_weightedmean_tokens"] = files.pooling == "weightedmean_tokens"
    _write_json(directory / "1_Pooling/config.json", {"word_embedding_dimension": hidden, **modes})
    if files.dense is not None:
        modules.append(("2_Dense", "Dense"))
        _write_dense(directory / "2_Dense", hidden, files.dense, files.activation, seed)
    if files.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _write_json(
        directory / "modules.json",
        [_module(number, *module) for number, module in enumerate(modules)],
    )
    _write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": files.max_seq_length, "do_lower_case": files.lower},
    )
    prompts = {
        "prompts": dict(files.prompts),
        "default_prompt_name": files.default_prompt,
        "similarity_fn_name": files.similarity,
    }
    _write_json(directory / "config_sentence_transformers.json", prompts)


def _module(number: int, path: str, kind: str) -> dict[str, object]:
    return {
        "idx": number,
        "name": str(number),
        "path": path,
        "type": f"sentence_transformers.models.{kind}",
    }


def _write_dense(directory: Path, inputs: int, outputs: int, activation: str, seed: int) -> None:
    settings = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": True,
        "activation_function": activation,
    }
    _write_json(directory / "config.json", settings)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.2
    save_file(
        {"linear.weight": weight, "linear.bias": torch.randn(outputs, generator=generator)},
        directory / "model.safetensors",
    )


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))
