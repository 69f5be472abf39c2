"""Small checkpoints of detectors with random weights, in transformers' format, and their
tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LABELS = ("cat", "a remote control", "Dog", "cup tree")
_WORDS = ("cat", "a", "remote", "control", "dog", "cup", "tree", "s", "photo", "of")


def _owl(kind: str) -> transformers.PreTrainedModel:
    texts = {
        **_SIZE,
        "vocab_size": 200,
        "max_position_embeddings": 16,
        "eos_token_id": 199,
        "bos_token_id": 198,
    }
    images = {**_SIZE, "hidden_size": 40, "image_size": 48, "patch_size": 8}
    if kind == "owlv2":
        config = transformers.Owlv2Config(
            text_config=texts, vision_config=images, projection_dim=32
        )
        return transformers.Owlv2ForObjectDetection(config)
    return transformers.OwlViTForObjectDetection(
        transformers.OwlViTConfig(text_config=texts, vision_config=images, projection_dim=32)
    )


def _dino() -> transformers.PreTrainedModel:
    backbone = transformers.SwinConfig(
        embed_dim=16,
        depths=[2, 1, 2, 1],
        num_heads=[1, 2, 2, 4],
        window_size=3,
        image_size=64,
        out_indices=[2, 3, 4],
    )
    return transformers.GroundingDinoForObjectDetection(
        transformers.GroundingDinoConfig(
            text_config={
                "model_type": "bert",
                **_SIZE,
                "vocab_size": 1100,
                "max_position_embeddings": 64,
            },
            backbone_config=backbone,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=40,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            num_queries=30,
            max_text_len=64,
        )
    )


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "grounding-dino": _dino,
    "owlv2": lambda: _owl("owlv2"),
    "owlvit": lambda: _owl("owlvit"),
}

_SQUARE = {"height": 48, "width": 48}
PROCESSORS: dict[str, transformers.BaseImageProcessor] = {
    "grounding-dino": transformers.GroundingDinoImageProcessorPil(
        size={"shortest_edge": 60, "longest_edge": 100}
    ),
    "owlv2": transformers.Owlv2ImageProcessorPil(size=_SQUARE),
    "owlvit": transformers.OwlViTImageProcessorPil(size=_SQUARE),
}


def tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer of whole words: those of LABELS, between the tokens that frame a text of
    the kind."""
    if kind == "grounding-dino":
        names = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029}
        names |= {word: 200 + number for number, word in enumerate(_WORDS)}
        frame, unknown = ("[CLS]", "[SEP]"), "[UNK]"
    else:
        names = {"!": 0, "<|startoftext|>": 198, "<|endoftext|>": 199}
        names |= {word: 20 + number for number, word in enumerate(_WORDS)}
        frame, unknown = ("<|startoftext|>", "<|endoftext|>"), "!"
    found = Tokenizer(models.WordLevel(names, unk_token=unknown))
    found.normalizer = normalizers.Lowercase()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.TemplateProcessing(
        single=f"{frame[0]} $A {frame[1]}",
        special_tokens=[(token, names[token]) for token in frame],
    )
    return found


def random_model(kind: str) -> transformers.PreTrainedModel:
    """Return a model in evaluation mode, float32, with every parameter drawn wide, because
    transformers' initialisation hardly tests attention.

    Grounding DINO's are drawn half as wide: a box close to an edge, with a repeatedly computed
    logit, has few digits left.
    """
    width = 0.1 if kind == "grounding-dino" else 0.2
    model = MODELS[kind]().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, width, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def write_checkpoint(kind: str, directory: Path) -> transformers.PreTrainedModel:
    model = random_model(kind)
    model.save_pretrained(directory)
    PROCESSORS[kind].save_pretrained(directory)
    tokenizer(kind).save(str(directory / "tokenizer.json"))
    return model
