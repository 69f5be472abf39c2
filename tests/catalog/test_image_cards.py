"""Cards of the catalogue's image models, from configurations of the shape in which they are
published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from libs.catalog import coverage
from libs.catalog.card import Card, SparseOutput, StaticQueries
from libs.catalog.cards import read_catalog
from libs.catalog.detect import read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import ModelBroken
from tests.catalog.test_detect import Files, modules, write, write_tensors

BOTH = ("encode", "score", "classify")
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2048,
        "max_position_embeddings": 262_144,
        "num_hidden_layers": 28,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "out_hidden_size": 2048,
    },
}
V_SPLADE = {
    "architectures": ["VSpladeForMaskedLM"],
    "model_type": "modernvbert",
    "additional_vocab_size": 40,
    "text_config": {
        "model_type": "modernbert",
        "hidden_size": 768,
        "max_position_embeddings": 7999,
        "vocab_size": 50_408,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 768,
        "image_size": 512,
        "patch_size": 16,
    },
}
SPARSE = {"model_type": "SparseEncoder", "similarity_fn_name": "dot"}
OPEN_CLIP = {
    "model_cfg": {
        "embed_dim": 768,
        "vision_cfg": {
            "image_size": 224,
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
        },
        "text_cfg": {
            "context_length": 64,
            "vocab_size": 32_000,
            "tokenizer_kwargs": {"clean": "canonicalize"},
        },
    }
}


@dataclass(frozen=True)
class Wanted:
    """Expected fields of a card. `max_tokens` counts texts, or images if no texts are read."""

    family: str
    tasks: tuple[str, ...]
    max_tokens: int
    dimensions: int = 0
    multi_vector: int = 0


def towers(kind: str, **texts: object) -> dict[str, object]:
    return {
        "model_type": kind,
        "text_config": texts,
        "vision_config": {"model_type": f"{kind}_vision_model"},
    }


CARDS: dict[str, tuple[Files, Wanted]] = {
    "openai/clip-vit-base-patch32": (
        {
            "config.json": {
                "model_type": "clip",
                "projection_dim": 512,
                "text_config": {"model_type": "clip_text_model"},
                "vision_config": {"model_type": "clip_vision_model", "patch_size": 32},
            }
        },
        Wanted("clip", BOTH, 77, 512),
    ),
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": (
        {
            "config.json": {
                **towers("clip", hidden_size=1024, projection_dim=1024),
                "projection_dim": 1024,
            },
            "open_clip_config.json": {
                "model_cfg": {
                    "embed_dim": 1024,
                    "vision_cfg": {"layers": 32},
                    "text_cfg": {"width": 1024},
                }
            },
        },
        Wanted("clip", BOTH, 77, 1024),
    ),
    "google/siglip-so400m-patch14-224": (
        {"config.json": towers("siglip", hidden_size=1152, max_position_embeddings=16)},
        Wanted("siglip", BOTH, 16, 1152),
    ),
    "facebook/dinov2-small": (
        {
            "config.json": {
                "model_type": "dinov2",
                "hidden_size": 384,
                "image_size": 518,
                "patch_size": 14,
            }
        },
        Wanted("dinov2", ("encode", "score"), 1370, 384),
    ),
    "google/siglip2-base-patch16-224": (
        {"config.json": towers("siglip", vocab_size=256_000)},
        Wanted("siglip", BOTH, 64, 768),
    ),
    "Marqo/marqo-fashionSigLIP": (
        {
            "config.json": {"model_type": "siglip", "auto_map": {"AutoModel": "x.Y"}},
            "open_clip_config.json": OPEN_CLIP,
        },
        Wanted("siglip", BOTH, 64, 768),
    ),
    "Marqo/marqo-ecommerce-embeddings-B": (
        {"config.json": None, "open_clip_config.json": OPEN_CLIP},
        Wanted("siglip", BOTH, 64, 768),
    ),
    "google/owlv2-base-patch16-ensemble": (
        {
            "config.json": {
                "model_type": "owlv2",
                "vision_config": {"image_size": 960, "patch_size": 16},
                "text_config": {},
            }
        },
        Wanted("owlv2", ("regions",), 3601),
    ),
    "IDEA-Research/grounding-dino-tiny": (
        {
            "config.json": {
                "model_type": "grounding-dino",
                "backbone_config": {"model_type": "swin"},
                "d_model": 256,
            }
        },
        Wanted("grounding-dino", ("regions",), 37_295),
    ),
    "vidore/colpali-v1.3-hf": (
        {
            "config.json": {
                "model_type": "colpali",
                "embedding_dim": 128,
                "vlm_config": {
                    "model_type": "paligemma",
                    "text_config": {"model_type": "gemma", "hidden_size": 2048},
                },
            }
        },
        Wanted("colpali", ("encode", "score"), 8192, multi_vector=128),
    ),
    "Qwen/Qwen3-VL-Embedding-2B": (
        {"config.json": QWEN3_VL},
        Wanted("qwen3_vl", ("encode", "score"), 262_144, 2048),
    ),
    "TomoroAI/tomoro-colqwen3-embed-4b": (
        {"config.json": {**QWEN3_VL, "model_type": "colqwen3", "embed_dim": 320}},
        Wanted("colqwen3", ("encode", "score"), 262_144, multi_vector=320),
    ),
    "nvidia/nemotron-colembed-vl-4b-v2": (
        {
            "config.json": {
                **QWEN3_VL,
                "model_type": "qwen3_vl_nemotron_embed",
                "pooling": "colbert",
            }
        },
        Wanted("qwen3_vl_nemotron_embed", ("encode", "score"), 262_144, multi_vector=2048),
    ),
    "Qwen/Qwen3-VL-Reranker-2B": (
        {"config.json": QWEN3_VL},
        Wanted("qwen3_vl", ("score",), 262_144),
    ),
    "jinaai/jina-reranker-m0": (
        {
            "config.json": {
                "architectures": ["JinaVLForRanking"],
                "model_type": "qwen2_vl",
                "hidden_size": 1536,
                "max_position_embeddings": 32_768,
                "vision_config": {"model_type": "qwen2_vl", "hidden_size": 1536},
            }
        },
        Wanted("qwen2_vl", ("score",), 10_240),
    ),
    "athrael-soju/colqwen3.5-4.5B-v3": (
        {
            "config.json": {
                "architectures": ["ColQwen3_5"],
                "model_type": "qwen3_5",
                "dim": 128,
                "text_config": {
                    "model_type": "qwen3_5_text",
                    "hidden_size": 2560,
                    "max_position_embeddings": 262_144,
                },
                "vision_config": {"model_type": "qwen3_5", "hidden_size": 1024},
            }
        },
        Wanted("qwen3_5", ("encode", "score"), 262_144, multi_vector=128),
    ),
    "naver/v-splade-quality": (
        {"config.json": V_SPLADE, "config_sentence_transformers.json": SPARSE},
        Wanted("modernvbert", ("encode", "score"), 7999),
    ),
}
TENSORS = {"naver/v-splade-quality": {"encoder.mlm_head.decoder.weight": [50_368, 1]}}
"""Checkpoints recognised by one of their tensors."""


def make_card(model: str, directory: Path, files: Files) -> Card:
    write(directory, files, TENSORS.get(model))
    if "open_clip_config.json" in files:
        write_tensors(directory / "open_clip_model.safetensors", {"a": [1]})
    return read_card(directory, model, read_catalog().overrides(model))


@pytest.mark.parametrize("model", CARDS)
def test_card_is_as_published(model: str, tmp_path: Path) -> None:
    files, wanted = CARDS[model]
    card = make_card(model, tmp_path, files)
    assert card.kind == "images"
    assert (
        Wanted(
            card.family, card.tasks, card.max_tokens, card.dimensions, card.multi_vector_dimensions
        )
        == wanted
    )


def test_v_splade_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    """Its configuration alone is ModernVBERT's, and sentence-transformers' files name modules that
    are code of the checkpoint.
    """
    files, _ = CARDS["naver/v-splade-quality"]
    routes = {
        "types": {"query_0_A": "modeling_st.A", "": "modeling_st.B"},
        "structure": {"query": ["query_0_A"], "document": [""]},
    }
    listed: Files = {
        "modules.json": modules(("", "sentence_transformers.models.Router")),
        "router_config.json": routes,
    }
    card = make_card("naver/v-splade-quality", tmp_path / "a", files | listed)
    assert (card.representations, card.scoring, card.multi_vector_dimensions) == (
        ("sparse",),
        "dot",
        0,
    )
    assert card.sparse == SparseOutput(
        50_368, queries=StaticQueries("", "model.safetensors", default=True)
    )
    assert card.inputs == ("text", "image")
    settings = SPARSE | {"similarity_fn_name": "cosine", "max_active_dims": 256}
    other = make_card(
        "naver/v-splade-quality",
        tmp_path / "b",
        files | {"config_sentence_transformers.json": settings},
    )
    assert other.sparse is not None
    assert (other.scoring, other.sparse.strongest) == ("sparse_cosine", 256)
    assert other.revision != card.revision
    plain = make_card("org/modernvbert", tmp_path / "c", files)
    assert (plain.representations, plain.sparse) == (("multi_vector",), None)


def test_kinds_that_v_splade_and_other_models_are_not(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", {"config.json": V_SPLADE}, TENSORS["naver/v-splade-quality"])
    for hints in (Hints(kind="dense"), Hints(kind="multi_vector"), Hints(kind="yes_no")):
        with pytest.raises(ModelBroken, match="sparse vectors alone"):
            read_card(directory, "org/model", Overrides("here", detect=hints))
    assert read_card(
        directory, "org/model", Overrides("here", detect=Hints(kind="sparse"))
    ).representations == ("sparse",)
    other = write(tmp_path / "b", {"config.json": QWEN3_VL})
    with pytest.raises(ModelBroken, match=r"has no tensor 'encoder\.mlm_head\.decoder\.weight'"):
        read_card(other, "org/model", Overrides("here", detect=Hints(kind="sparse")))


def test_models_that_no_catalogue_lists(tmp_path: Path) -> None:
    """Read DINOv3, with transformers' default sizes where the file has none."""
    card = make_card(
        "facebook/dinov3-vits16-pretrain-lvd1689m",
        tmp_path,
        {"config.json": {"model_type": "dinov3_vit"}},
    )
    assert Wanted(card.family, card.tasks, card.max_tokens, card.dimensions) == Wanted(
        "dinov3_vit", ("encode", "score"), 197, 384
    )


def test_documented_families_and_kinds_are_detected(tmp_path: Path) -> None:
    rows = {row.model: row for row in coverage.rows()}
    for number, (model, (files, _)) in enumerate(CARDS.items()):
        card = make_card(model, tmp_path / str(number), files)
        assert (rows[model].family, rows[model].kind) == (card.family, card.kind)


ADAPTERS: dict[str, dict[str, object]] = {
    "vidore/colqwen2.5-v0.2": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 2048,
        "max_position_embeddings": 128_000,
    },
    "vidore/colSmol-256M": {
        "model_type": "idefics3",
        "text_config": {"model_type": "llama", "max_position_embeddings": 8192},
    },
}
"""And the configuration of their bases."""


@pytest.mark.parametrize("model", ADAPTERS)
def test_card_of_an_adapter_is_that_of_its_base(model: str, tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"config.json": ADAPTERS[model]})
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "vidore/a-base"}'
    )
    write_tensors(own / "adapter_model.safetensors", {"a": [1]})
    with pytest.raises(ModelBroken, match="the model 'vidore/a-base' is needed"):
        read_card(own, model)
    card, other = (
        read_card(own, model, read_catalog().overrides(model), base),
        read_card(base, "vidore/a-base"),
    )
    assert replace(card, model=other.model, revision=other.revision) == other
    assert card.revision != other.revision
    assert (card.family, card.representations) == (ADAPTERS[model]["model_type"], ("multi_vector",))


def test_every_family_of_images_with_a_card_is_detected() -> None:
    rows = [row for row in coverage.rows() if row.kind == "images"]
    tried = {wanted.family for _, wanted in CARDS.values()} | {
        str(config["model_type"]) for config in ADAPTERS.values()
    }
    assert {row.family for row in rows} == tried


def test_open_clip_layout_is_recognised_by_its_digest_and_needs_a_tokenizer(tmp_path: Path) -> None:
    files, _ = CARDS["Marqo/marqo-ecommerce-embeddings-B"]
    before = make_card("org/model", tmp_path / "a", files).revision
    write_tensors(tmp_path / "a" / "open_clip_model.safetensors", {"a": [2]})
    assert read_card(tmp_path / "a", "org/model").revision != before
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: missing"):
        make_card("org/model", tmp_path / "b", {**files, "tokenizer.json": None})
