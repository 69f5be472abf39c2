"""Whole directories of CLIP and SigLIP with random weights and tokenizers, and transformers'
outputs for texts and images.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tests.parity.image_models import OPEN_CLIP, OPEN_CLIP_SIZE, processor, write_open_clip
from tests.support.texts import words

Family = Literal["clip", "siglip", "openclip"]
"""openclip: SigLIP in open_clip's layout."""

TEXT_LENGTH = 24
LONG = " ".join(words()[:60])
TEXTS = ["A cat, and a DOG!", "herring", LONG, "two  fishes; \t (one   red)", "a_red_herring"]

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_IMAGES = {**_SIZE, "hidden_size": 40, "image_size": 36, "patch_size": 8}


@dataclass(frozen=True)
class Reference:
    """A repository and its model in transformers."""

    directory: Path
    model: transformers.PreTrainedModel
    tokenizer: Any
    family: Family

    def texts(self, texts: list[str]) -> NDArray[np.float32]:
        """[texts, dimensions], not normalised."""
        if self.family == "openclip":
            texts = [text.replace("_", " ") for text in texts]
        texts = texts if self.family == "clip" else [canonical(text) for text in texts]
        return np.concatenate([self._text(text) for text in texts])

    def images(self, files: list[bytes]) -> NDArray[np.float32]:
        """[images, dimensions], not normalised."""
        opened = [Image.open(BytesIO(data)) for data in files]
        pixels = processor(self.family)(
            images=[_on_white(image) for image in opened], return_tensors="pt"
        ).pixel_values
        with torch.inference_mode():
            return cast(
                "NDArray[np.float32]",
                self.model.get_image_features(pixel_values=pixels.to(self.model.dtype))
                .pooler_output.float()
                .numpy(),
            )

    def labels(self, files: list[bytes], labels: list[str], *, alone: bool) -> NDArray[np.float32]:
        """[images, labels]: probabilities."""
        images, texts = self.images(files), self.texts(labels)
        unit = [rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in (images, texts)]
        logits = torch.from_numpy(unit[0] @ unit[1].T) * self.model.logit_scale.exp()
        if self.family != "clip":
            logits = logits + self.model.logit_bias
        found = logits.sigmoid() if alone else logits.softmax(-1)
        return cast("NDArray[np.float32]", found.detach().numpy())

    def _text(self, text: str) -> NDArray[np.float32]:
        padding = "do_not_pad" if self.family == "clip" else "max_length"
        ids = self.tokenizer(
            [text], padding=padding, truncation=True, max_length=TEXT_LENGTH, return_tensors="pt"
        ).input_ids
        with torch.inference_mode():
            return cast(
                "NDArray[np.float32]",
                self.model.get_text_features(input_ids=ids).pooler_output.numpy(),
            )


def canonical(text: str) -> str:
    """Write SigLIP's tokenizer (transformers' SiglipTokenizer needs sentencepiece, which is not
    installed)."""
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def write_repository(family: Family, directory: Path) -> Reference:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _clip_tokenizer() if family == "clip" else _siglip_tokenizer()
    tokenizer.save_pretrained(directory)
    model = _model(family, tokenizer).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    if family == "openclip":
        write_open_clip(model, directory, _open_clip_config(len(tokenizer)))
        return Reference(directory, model, tokenizer, family)
    model.save_pretrained(directory)
    processor(family).save_pretrained(directory)
    if family == "siglip":
        file = directory / "tokenizer_config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "SiglipTokenizer"})
        )
    return Reference(directory, model, tokenizer, family)


def _model(family: Family, tokenizer: Any) -> transformers.PreTrainedModel:
    texts = {
        **_SIZE,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": TEXT_LENGTH,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    if family == "clip":
        return transformers.CLIPModel(
            transformers.CLIPConfig(text_config=texts, vision_config=_IMAGES, projection_dim=24)
        )
    if family == "openclip":
        texts, images = ({**one, **OPEN_CLIP_SIZE} for one in (texts, _IMAGES))
        texts["intermediate_size"] = (
            192  # four times the width, which open_clip's configuration does not contain
        )
        return transformers.SiglipModel(
            transformers.SiglipConfig(text_config=texts, vision_config=images)
        )
    return transformers.SiglipModel(
        transformers.SiglipConfig(
            text_config={**texts, "projection_size": 40}, vision_config=_IMAGES
        )
    )


def _open_clip_config(words: int) -> dict[str, dict[str, Any]]:
    """Return a model with the sizes of `_model` and the texts of Marqo's models."""
    model = OPEN_CLIP["model_cfg"]
    texts = model["text_cfg"] | {
        "vocab_size": words,
        "context_length": TEXT_LENGTH,
        "tokenizer_kwargs": {"clean": "canonicalize"},
    }
    return OPEN_CLIP | {"model_cfg": model | {"text_cfg": texts}}


def _clip_tokenizer() -> Any:
    """Return a tokenizer of single bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e</w>"), ("a", "n"), ("an", "d</w>")]
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *("".join(pair) for pair in merges),
    ]
    names = dict.fromkeys([*tokens, "<|startoftext|>", "<|endoftext|>"])
    vocabulary = {name: number for number, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH)


def _siglip_tokenizer() -> Any:
    """Return a vocabulary of pieces with `</s>` after each text, which is also its padding."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([canonical(text) for text in (*words(), *TEXTS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=TEXT_LENGTH,
    )


def _on_white(image: Image.Image) -> Image.Image:
    """Blend transparency as Shoal does; transformers' conversion would drop it."""
    image = image.convert("RGBA")
    return Image.alpha_composite(
        Image.new("RGBA", image.size, (255, 255, 255, 255)), image
    ).convert("RGB")
