"""A small V-SPLADE with random weights in the layout of NAVER's export, and its vectors,
implemented after the release.

No library has a class for it: transformers' ModernVBERT computes the states; head and queries are
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.parity.vlm_models import colmodernvbert, draw

Layout = Literal["export", "whole"]
"""NAVER's export; and a variant with one table of tokens, a head without biases, and upstream's
names of the tower and the connector.
"""

SILENT: Final = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")

TEMPLATE: Final = (
    "<|begin_of_text|>{% for turn in messages %}{{ turn.role | capitalize }}:"
    "{% for part in turn.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor "
    "%}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class _Head(nn.Module):
    def __init__(self, hidden: int, columns: int, *, biased: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden, bias=biased)
        self.norm = nn.LayerNorm(hidden, bias=biased)
        self.decoder = nn.Linear(hidden, columns)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        return logits * hidden.shape[-1] ** -0.25


class _Queries(nn.Module):
    def __init__(self, hidden: int, columns: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(columns, hidden)
        self.projection = nn.Linear(hidden, 1)


class _Whole(nn.Module):
    def __init__(
        self, backbone: transformers.PreTrainedModel, hidden: int, columns: int, *, biased: bool
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head, self.queries = _Head(hidden, columns, biased=biased), _Queries(hidden, columns)


@dataclass(frozen=True)
class VSplade:
    """`columns` is the number of tokens without those of images and turns, which follow them."""

    model: _Whole
    processor: transformers.ProcessorMixin
    columns: int
    layout: Layout

    @torch.inference_mode()
    def pages(self, images: Sequence[Image.Image], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [images, columns], each image alone."""
        return torch.stack([self._page(image, dtype) for image in images])

    @torch.inference_mode()
    def queries(self, texts: Sequence[str]) -> Tensor:
        """Return [texts, columns]."""
        found = torch.zeros(len(texts), self.columns)
        own = self.model.queries
        for row, text in zip(found, texts, strict=True):
            ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")[
                "input_ids"
            ][0]
            ids = ids[ids < self.columns]
            row.scatter_add_(0, ids, F.softplus(own.projection(own.embeddings(ids))).squeeze(-1))
        return found * self.mask()

    def _page(self, image: Image.Image, dtype: torch.dtype) -> Tensor:
        content = [{"type": "image"}, {"type": "text", "text": ""}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        batch = self.processor(text=text, images=[image], return_tensors="pt")
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
        logits = self.model.head(self.model.backbone(**batch).last_hidden_state[0])
        return torch.log1p(torch.relu(logits)).max(0).values.float() * self.mask()

    def mask(self) -> Tensor:
        mask = torch.ones(self.columns)
        mask[self.processor.tokenizer.convert_tokens_to_ids(list(SILENT))] = 0
        return mask

    def save(self, directory: Path) -> None:
        self.processor.save_pretrained(directory)
        self.model.backbone.config.save_pretrained(directory)
        file = directory / "config.json"
        own: dict[str, object] = {"architectures": ["VSpladeForMaskedLM"]}
        if self.layout == "export":
            own["auto_map"] = {"AutoModelForMaskedLM": "modeling_vsplade.VSpladeForMaskedLM"}
            own["additional_vocab_size"] = len(self.processor.tokenizer) - self.columns
            _write_sentence_files(directory, self._weights())
        file.write_text(json.dumps(json.loads(file.read_text()) | own))
        save_file(
            {name: tensor.contiguous() for name, tensor in self._tensors().items()},
            directory / "model.safetensors",
        )

    def _weights(self) -> Tensor:
        own = self.model.queries
        return F.softplus(own.projection(own.embeddings.weight)).squeeze(-1).detach() * self.mask()

    def _tensors(self) -> dict[str, Tensor]:
        begin, naming = (
            "encoder.encoder.model.",
            _as_exported if self.layout == "export" else _as_upstream,
        )
        found = {
            f"{begin}{naming(name)}": tensor
            for name, tensor in self.model.backbone.state_dict().items()
        }
        found |= {
            f"encoder.mlm_head.{name}": tensor
            for name, tensor in self.model.head.state_dict().items()
        }
        found |= {
            f"query_encoder.{name}": tensor
            for name, tensor in self.model.queries.state_dict().items()
        }
        if self.layout == "export":  # with SigLIP's pooling, which is not used
            found |= _apart(found, f"{begin}text_model.", self.columns)
            found |= {
                f"{begin}vision_model.head.{name}": torch.ones(3)
                for name in ("probe", "layernorm.weight", "mlp.fc1.bias")
            }
        return found


def _as_exported(name: str) -> str:
    return name.replace("modality_projection.", "modality_projection.proj.")


def _as_upstream(name: str) -> str:
    return name.replace("vision_model.", "vision_model.vision_model.")


def _apart(tensors: Mapping[str, Tensor], begin: str, columns: int) -> dict[str, Tensor]:
    """Write the table in two parts, and the first layer's norm, which is unused."""
    place = f"{begin}embeddings.tok_embeddings."
    table = tensors[f"{place}weight"]
    return {
        f"{place}weight": table[:columns],
        f"{place}additional_embedding.weight": table[columns:],
        f"{begin}layers.0.attn_norm.weight": torch.full((table.shape[1],), 3.0),
    }


def _write_sentence_files(directory: Path, weights: Tensor) -> None:
    """Write sentence-transformers' layout with modules in the checkpoint's code."""
    static = "query_0_VSPLADEStaticEmbedding"
    types = {
        static: f"modeling_st_vsplade.{static[8:]}",
        "": "modeling_st_vsplade.VSPLADETransformer",
    }
    files: dict[str, object] = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
        ],
        "router_config.json": {
            "types": types,
            "structure": {"query": [static], "document": [""]},
            "parameters": {},
        },
        "config_sentence_transformers.json": {
            "model_type": "SparseEncoder",
            "similarity_fn_name": "dot",
        },
    }
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values))
    (directory / static).mkdir()
    save_file({"weight": weights}, directory / static / "model.safetensors")


@cache
def v_splade(layout: Layout = "export") -> VSplade:
    theirs = colmodernvbert()
    tokenizer, images = theirs.processor.tokenizer, theirs.processor.image_processor
    columns = len(tokenizer) - len(tokenizer.get_added_vocab()) + len(SILENT)
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=TEMPLATE
    )
    model = _Whole(
        theirs.model.vlm,
        theirs.model.config.vlm_config.text_config.hidden_size,
        columns,
        biased=layout == "export",
    )
    draw(model)
    model.head.decoder.bias.data -= 2.5  # about half of a page's weights are 0
    return VSplade(model, processor, columns, layout)
