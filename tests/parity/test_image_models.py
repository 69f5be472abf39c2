"""Every family of image models against transformers on random weights: equal, and the same alone as
among others.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    get_image_size_for_max_num_patches,
)

from libs.errors import ModelBroken
from libs.models.images.loading import ImageModel, load_images, model_types
from libs.models.images.processing import PatchBudget
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from tests.parity.image_models import (
    MODELS,
    OPEN_CLIP,
    TEXT_LENGTH,
    awkward_pictures,
    pictures,
    processor,
    write_checkpoint,
)

CPU = torch.device("cpu")
FLOAT_BOUND = 1e-5


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ImageModel:
    return load_images(directory, dtype=dtype, device=CPU)


@torch.inference_mode()
def vectors(model: ImageModel, name: str, sequences: Sequence[InputSequence]) -> Tensor:
    """Return the head's outputs for sequences in one packed batch."""
    backbone = next(backbone for backbone in model.backbones if name in backbone.heads)
    head = backbone.heads[name]
    batch: Packed = backbone.pack(sequences, [None] * len(sequences))
    hidden = backbone.encoder.forward(batch, head.rows)
    outputs = head.split(
        tuple(one.cpu().numpy() for one in head.forward(hidden, batch, sequences)), sequences
    )
    return torch.stack([torch.from_numpy(np.asarray(output)) for output in outputs])


def prepare_images(model: ImageModel, files: Sequence[bytes] = ()) -> list[InputSequence]:
    return [
        model.input.sequence(data, f"items[{number}]")
        for number, data in enumerate(files or pictures())
    ]


def reference_input(
    kind: str, data: bytes, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    found = dict(processor(kind)(upright, do_convert_rgb=True, return_tensors="pt"))
    return found | {"pixel_values": found["pixel_values"].to(dtype)}


@torch.inference_mode()
def reference(
    kind: str,
    model: transformers.PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    files: Sequence[bytes] = (),
) -> Tensor:
    """Return the outputs of each image alone."""
    found = []
    for data in files or pictures():
        given = reference_input(kind, data, dtype)
        if hasattr(model, "get_image_features"):
            output = model.get_image_features(**given).pooler_output
        elif kind == "clip-projected":
            output = model(**given).image_embeds
        elif kind.startswith(("clip", "dinov3", "siglip")):
            output = model(**given).pooler_output
        elif kind == "vit-classifier":
            output = model.vit(**given).last_hidden_state[:, 0]
        else:
            output = model(**given).last_hidden_state[:, 0]
        found.append(output[0].float())
    return torch.stack(found)


def worst(got: Tensor, wanted: Tensor) -> float:
    """Return the largest error of a vector, relative to its largest value."""
    return ((got - wanted).abs().amax(1) / wanted.abs().amax(1)).max().item()


def test_every_family_is_in_the_table() -> None:
    assert {MODELS[kind]().config.model_type for kind in MODELS} == set(model_types())


@pytest.mark.parametrize("kind", MODELS)
def test_images_equal_transformers(kind: str, tmp_path: Path) -> None:
    wanted = reference(kind, write_checkpoint(kind, tmp_path))
    model = load(tmp_path)
    sequences = prepare_images(model)
    together = vectors(model, "image", sequences)
    assert worst(together, wanted) <= FLOAT_BOUND
    alone = torch.cat([vectors(model, "image", [one]) for one in sequences])
    assert worst(alone, together) <= 2e-6
    for data, one in zip(pictures(), sequences, strict=True):
        assert model.input.tokens(data, "items[0]") == one.tokens


@pytest.mark.parametrize("kind", MODELS)
def test_awkward_images_equal_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images have 1 x 300 pixels, palettes, EXIF 1 to 8 and others, together and alone."""
    theirs = write_checkpoint(kind, tmp_path)
    if kind.startswith("dino"):
        # A thin image becomes long if its short side is fixed.
        edit(tmp_path, "preprocessor_config.json", size={"shortest_edge": 15})
        monkeypatch.setattr(processor(kind), "size", {"shortest_edge": 15})
    files = awkward_pictures()
    model = load(tmp_path)
    sequences = prepare_images(model, list(files.values()))
    together = vectors(model, "image", sequences)
    wanted = reference(kind, theirs, files=list(files.values()))
    errors = {
        name: worst(got[None], row[None])
        for name, got, row in zip(files, together, wanted, strict=True)
    }
    assert max(errors.values()) <= FLOAT_BOUND, errors
    alone = torch.cat([vectors(model, "image", [one]) for one in sequences])
    exact = reference(
        kind, copy.deepcopy(theirs).double(), torch.float64, files=list(files.values())
    )
    # Products of other shapes round differently: each is as near to the exact values as
    # transformers in float32.
    assert worst(alone, together) <= max(2e-6, 2 * worst(wanted, exact))


@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_is_as_good_as_the_reference(kind: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(kind, tmp_path)
    exact = reference(kind, theirs)
    model = load(tmp_path, torch.bfloat16)
    own = vectors(model, "image", prepare_images(model))
    halved = reference(kind, theirs.to(torch.bfloat16), torch.bfloat16)
    assert (own - exact).norm() <= 3 * (halved - exact).norm()


def texts(kind: str) -> list[NDArray[np.int32]]:
    """Return token ids as the tokenizers of these families frame them: CLIP's end with 199,
    SigLIP's are padded with 1.
    """
    numbers = np.random.default_rng(4)
    if kind == "clip":
        lengths = (2, 5, 5, TEXT_LENGTH)
        return [
            np.array([198, *numbers.integers(3, 190, length - 2), 199], np.int32)
            for length in lengths
        ]
    rows = [numbers.integers(3, 190, length) for length in (1, 7, TEXT_LENGTH - 1)]
    return [
        np.concatenate([row, np.ones(TEXT_LENGTH - len(row), np.int64)]).astype(np.int32)
        for row in rows
    ]


@pytest.mark.parametrize("kind", ["clip", "openclip", "siglip", "siglip2"])
def test_texts_and_images_of_one_space_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Both sides are compared, and the logits of all pairs, from the loaded scale and bias."""
    theirs = write_checkpoint(kind, tmp_path)
    model = load(tmp_path)
    rows = texts(kind)
    with torch.inference_mode():
        wanted = torch.cat(
            [
                theirs.get_text_features(torch.from_numpy(row)[None].long()).pooler_output
                for row in rows
            ]
        )
    text = vectors(model, "dense", [InputSequence(row) for row in rows])
    assert worst(text, wanted) <= FLOAT_BOUND
    image = vectors(model, "image", prepare_images(model))
    assert text.shape[1] == image.shape[1]
    data = pictures()[1]
    with torch.inference_mode():
        output = theirs(
            input_ids=torch.from_numpy(rows[-1])[None].long(), **reference_input(kind, data)
        )
    cosine = torch.nn.functional.cosine_similarity(text[-1], image[1], dim=0)
    logit = cosine * model.state["logit_scale"].exp() + model.state.get(
        "logit_bias", torch.zeros(())
    )
    torch.testing.assert_close(logit.view(1, 1), output.logits_per_image, rtol=1e-5, atol=1e-5)


def test_images_of_many_sizes_share_a_batch(tmp_path: Path) -> None:
    write_checkpoint("dinov2", tmp_path)
    model = load(tmp_path)
    lengths = [one.tokens for one in prepare_images(model)]
    assert len(set(lengths)) > 3
    assert lengths[0] == 1 + 5 * 5


def edit(directory: Path, file: str, **values: object) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_both_forms_of_old_configurations_are_read(tmp_path: Path) -> None:
    """If `vision_config_dict` exists, transformers prefers it."""
    write_checkpoint("clip", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    wanted = vectors(load(tmp_path), "image", prepare_images(load(tmp_path)))
    edit(
        tmp_path,
        "config.json",
        vision_config={},
        vision_config_dict=written["vision_config"],
        text_config_dict=None,
    )
    torch.testing.assert_close(
        vectors(load(tmp_path), "image", prepare_images(load(tmp_path))), wanted
    )


def test_processor_of_transformers_5_is_read(tmp_path: Path) -> None:
    """One processor_config.json takes precedence over preprocessor_config.json."""
    write_checkpoint("clip", tmp_path)
    wanted = load(tmp_path).input
    old = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": old, "processor_class": "CLIPProcessor"})
    )
    edit(tmp_path, "preprocessor_config.json", crop_size=20)
    assert load(tmp_path).input == wanted


def test_layout_of_sentence_transformers_is_read(tmp_path: Path) -> None:
    """`clip-ViT-B-32` has all of the model in the folder of its only module."""
    write_checkpoint("clip", tmp_path / "0_CLIPModel")
    module = {
        "idx": 0,
        "name": "0",
        "path": "0_CLIPModel",
        "type": "sentence_transformers.models.CLIPModel",
    }
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    wanted = load(tmp_path / "0_CLIPModel")
    torch.testing.assert_close(
        vectors(load(tmp_path), "image", prepare_images(wanted)),
        vectors(wanted, "image", prepare_images(wanted)),
    )
    (tmp_path / "modules.json").write_text(json.dumps([{**module, "path": "../elsewhere"}]))
    with pytest.raises(ModelBroken):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("clip", {"projection_dim": 25}, "`text_projection.weight` has the shape"),
        (
            "clip",
            {"vision_config": {"hidden_size": 40, "image_size": 0, "num_attention_heads": 4}},
            "image_size is 0",
        ),
        ("vit", {"patch_size": 64}, "patch_size is 64: it is larger than image_size"),
        ("vit", {"num_channels": 1}, "num_channels is 1: only 3 is supported"),
        (
            "vit",
            {"image_size": 64},
            "images have size .32, 32.; config.json needs 64 x 64 pixels",
        ),
        ("vit", {"model_type": "levit"}, "model_type is 'levit': supported are clip"),
        ("vit", {"num_hidden_layers": 1}, "has no place in the model that config.json describes"),
        ("dinov2", {"use_swiglu_ffn": True}, "is missing|has shape"),
        ("dinov3", {"key_bias": True}, "is missing"),
        ("dinov3", {"num_attention_heads": 16}, "num_attention_heads is 16: heads of 2 numbers"),
        ("dinov3", {"rope_theta": 0}, "rope_theta is 0: a number from 1e-30"),
        (
            "dinov3-biased",
            {"key_bias": False},
            "'layer.0.attention.k_proj.bias' has no place in the model",
        ),
        ("siglip-vision", {"vision_use_head": False}, "vision_use_head is False"),
        ("dinov2", {"num_hidden_layers": 3}, "is missing"),
    ],
)
def test_unsupported_settings_are_named(
    kind: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path)
    edit(tmp_path, "config.json", **settings)
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path)


@pytest.mark.parametrize("name", ["head.probe", "head.mlp.fc2.bias"])
def test_missing_and_unknown_tensors_are_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint("siglip", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if key != f"vision_model.{name}"},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelBroken):
        load(tmp_path)
    save_file({**tensors, "extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelBroken, match=r"tensor 'extra\.weight' is unknown"):
        load(tmp_path)


def test_encoder_config_precedes_remote_code_layout(tmp_path: Path) -> None:
    """A config.json that describes encoders takes precedence; one that names code of the repository
    is ignored.
    """
    write_checkpoint("openclip", tmp_path)
    wanted = load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "siglip", "auto_map": {"AutoModel": "marqo.Model"}})
    )
    torch.testing.assert_close(
        vectors(load(tmp_path), "image", prepare_images(wanted)),
        vectors(wanted, "image", prepare_images(wanted)),
    )
    write_checkpoint("clip", tmp_path)
    assert "text_projection.weight" in load(tmp_path).state


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (
            "vision_cfg",
            {"timm_model_name": "convnext_base"},
            "timm_model_name is 'convnext_base': supported are SigLIP's",
        ),
        (
            "vision_cfg",
            {"timm_model_name": "vit_huge_patch14_siglip"},
            "timm_model_name is 'vit_huge",
        ),
        ("vision_cfg", {"timm_pool": "avg"}, "timm_pool is 'avg'"),
        ("text_cfg", {"no_causal_mask": False}, "no_causal_mask is False"),
        ("text_cfg", {"heads": 7}, "heads is 7: it does not divide"),
        ("text_cfg", {"width": 36}, "has shape"),
    ],
)
def test_unsupported_open_clip_models_are_refused(
    part: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_checkpoint("openclip", tmp_path)
    model = OPEN_CLIP["model_cfg"]
    edit(tmp_path, "open_clip_config.json", model_cfg=model | {part: model[part] | settings})
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path)


def test_open_clip_resizes_by_its_file(tmp_path: Path) -> None:
    write_checkpoint("openclip", tmp_path)
    edit(
        tmp_path,
        "open_clip_config.json",
        preprocess_cfg={"size": 36, "resize_mode": "shortest", "interpolation": "bilinear"},
    )
    found = load(tmp_path).input.processing
    assert (found.size, found.crop, found.resample) == (36, (36, 36), Image.Resampling.BILINEAR)
    edit(tmp_path, "open_clip_config.json", preprocess_cfg={"size": 36, "resize_mode": "longest"})
    with pytest.raises(ModelBroken, match=r"resize_mode is 'longest': supported are squash"):
        load(tmp_path)


def test_size_of_naflex_equals_transformers() -> None:
    numbers = np.random.default_rng(6)
    for most in (1, 16, 256, 1024):
        for height, width in [
            (1, 3000),
            (3000, 1),
            (1, 1),
            (16, 16),
            *numbers.integers(1, 4000, (40, 2)).tolist(),
        ]:
            wanted = get_image_size_for_max_num_patches(height, width, 16, most)
            assert PatchBudget(16, most).fit_size(height, width) == wanted, (height, width, most)
