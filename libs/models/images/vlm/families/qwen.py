"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL (arXiv 2409.12191, 2502.13923, 2511.21631) and Qwen3.5 for
retrieval, and ColQwen2 (2407.01449) based on them.

Towers have positions in two dimensions and merge squares of patches to rows; Qwen2 or Qwen3 has
positions in three (M-RoPE). Qwen2.5's tower has windows in most layers. Qwen3's also has mergers
after some layers (DeepStack). Qwen3.5 has Qwen3's tower without these, and gated delta nets in most
layers of its text encoder. Three wrappers with code in their repositories are supported:
TomoroAI's ColQwen3 (a projection), NVIDIA's Nemotron ColEmbed V2 (arXiv 2602.03992; bidirectional,
no projection), and Jina's reranker m0 (Qwen2-VL and two layers that score the last token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from libs.errors import ModelBroken
from libs.kinds.vision_language.card import is_jina_reranker
from libs.models.images.patches import PatchSpec
from libs.models.images.vlm.blocks import BlockSpec
from libs.models.images.vlm.connectors import Merger, Mergers, read_linear
from libs.models.images.vlm.families.family import State, VisionLanguageSpec, VlmFiles, plane_rope
from libs.models.images.vlm.heads import (
    Use,
    answers,
    judged,
    last_state,
    states_of_tokens,
    vectors_of_tokens,
)
from libs.models.images.vlm.parts import INSTRUCTION, Pair, Prompts, TextFrame
from libs.models.images.vlm.smart import MARK, SmartResize
from libs.models.interface.head import ModelHead
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.heads.linear import check_shape
from libs.models.text.tokenising.text import special_token
from libs.models.weights import SINGLE, HeadRule, InFile, Maybe, Rule

MODEL_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "colqwen2",
    "colqwen3",
    "qwen3_vl_nemotron_embed",
)

NAMES = {
    "visual.merger.ln_q.": "tower.norm.",
    "visual.merger.norm.": "tower.norm.",
    "visual.merger.mlp.0.": "connector.up.",
    "visual.merger.mlp.2.": "connector.down.",
    "visual.merger.linear_fc1.": "connector.up.",
    "visual.merger.linear_fc2.": "connector.down.",
    "visual.deepstack_merger_list.": "connector.deep.",
    "visual.": "tower.",
    "language_model.model.": "text.",
    "language_model.": "text.",
    "embed_tokens.": "text.embed_tokens.",
    "layers.": "text.layers.",
    "norm.": "text.norm.",
    "mtp.": "text.mtp.",
    "lm_head.": "head.words.",
    "embedding_proj_layer.": "head.projection.",
    "custom_text_proj.": "head.projection.",
    "score.": "head.score.",
}

TOWER: dict[str, Rule] = {
    "patch_embed.proj": "embed.project",
    "pos_embed.weight": "embed.position",
    "blocks.{}.norm1": "layers.{}.attn_norm",
    "blocks.{}.norm2": "layers.{}.ffn_norm",
    "blocks.{}.attn.qkv": "layers.{}.attn.qkv",
    "blocks.{}.attn.proj": "layers.{}.attn.out",
    "blocks.{}.mlp.fc1": "layers.{}.ffn.up",
    "blocks.{}.mlp.fc2": "layers.{}.ffn.down",
    "blocks.{}.mlp.linear_fc1": "layers.{}.ffn.up",
    "blocks.{}.mlp.linear_fc2": "layers.{}.ffn.down",
    "blocks.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "blocks.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
    "blocks.{}.mlp.down_proj": "layers.{}.ffn.down",
    "norm": "norm",
}

CONNECTOR: dict[str, HeadRule] = {
    "up": "up",
    "down": "down",
    "deep.{}.norm": Maybe("deep.{}.norm"),
    "deep.{}.linear_fc1": Maybe("deep.{}.up"),
    "deep.{}.linear_fc2": Maybe("deep.{}.down"),
}

HEADS: dict[str, HeadRule] = {
    "projection": Maybe("projection"),
    "words": InFile("words"),
    "score.0": Maybe("score.0"),
    "score.2": Maybe("score.2"),
}

_TOMORO, _NEMOTRON = "colqwen3", "qwen3_vl_nemotron_embed"
_MAX_TOKENS = 1280  # of a TomoroAI image: fixed in its code, whatever its files contain
_EPS = 1e-6
_SECTIONS = {
    "qwen2_vl": (16, 24, 24),
    "qwen2_5_vl": (16, 24, 24),
    "qwen3_vl": (24, 20, 20),
    "qwen3_5": (11, 11, 10),
}
_TEXTS = {"qwen3_vl": "qwen3", "qwen3_5": "qwen3_5_text"}
"""The model_type of the text encoder, "qwen2" for others; these have the third tower."""
_IMAGE = f"<|vision_start|>{MARK}<|vision_end|>"
_INSTRUCTION = f"<|im_start|>user\n{_IMAGE}Describe the image.<|im_end|><|endoftext|>"
_INSTRUCTION_END = "<|im_end|><|endoftext|>"
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_JUDGED = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".'
)
_JINA_BIAS = 2.65  # of the logit, in the code of jina-reranker-m0
_JINA_END = 100  # the id of the token that its scores are read from
_JINA_PIXELS = (3136, 602_112)  # of an image, fixed in its code, whatever its files contain
_AUGMENTED = 10  # padding tokens after a query, which the model attends to and returns vectors for


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    config = files.config.part("vlm_config") if files.config.has("vlm_config") else files.config
    named = config.text("model_type", "qwen2_vl")
    kind = "qwen3_vl" if named in (_TOMORO, _NEMOTRON) else named
    if kind not in _SECTIONS:
        raise config.unsupported("model_type", f"supported are {', '.join(_SECTIONS)}")
    # Files from before transformers 4.52 mix the text encoder's keys with the others.
    texts = config.part("text_config") if config.has("text_config") else config
    images = config.part("vision_config")
    encoder, block, taps = _tower(images, kind)
    width = texts.size("hidden_size")
    is_hf = files.config.text("model_type") == "colqwen2"
    image_converter = SmartResize.from_config(files.images, block.patches, block.side, plain=is_hf)
    if files.config.text("model_type") == _TOMORO:
        image_converter = replace(image_converter, most=_MAX_TOKENS * image_converter.square**2)
    if is_jina_reranker(files.config.values):
        least, most = _JINA_PIXELS
        image_converter = replace(image_converter, least=least, most=most)
    return VisionLanguageSpec(
        text={**_text(texts, kind), **({"is_causal": False} if named == _NEMOTRON else {})},
        encoder=encoder,
        patches=block,
        processing=image_converter.processing,
        connector=partial(_mergers, encoder.hidden * block.side**2, width, taps),
        heads=_heads(files),
        image_converter=image_converter,
        prompts=_used_prompts(files, kind, is_hf),
        mark=MARK,
    )


def _used_prompts(files: VlmFiles, kind: str, is_hf: bool) -> Prompts:
    if files.use == "score" and is_jina_reranker(files.config.values):
        pair = Pair("\n**Query**:\n", "**Document**:\n", "", document_first=True)
        return Prompts(TextFrame(), TextFrame(), TextFrame(), pair=pair, last=_JINA_END)
    if files.use in ("dense", "score"):
        return _conversation(files.use, kind)
    return _prompts(files, is_hf)


def _text(texts: Config, kind: str) -> Mapping[str, object]:
    """Convert to the config.json of the text encoder, with default sections of M-RoPE if the files
    omit them.
    """
    old = texts.has("rope_scaling")
    rope = {
        "mrope_section": list(_SECTIONS[kind]),
        **texts.part("rope_scaling" if old else "rope_parameters").values,
    }
    rope["mrope_interleaved"] = kind in _TEXTS
    values = {
        key: value
        for key, value in texts.values.items()
        if key not in ("rope_scaling", "rope_parameters")
    }
    return values | {
        "model_type": _TEXTS.get(kind, "qwen2"),
        "rope_parameters": rope,
    }


def _tower(config: Config, kind: str) -> tuple[EncoderSpec, BlockSpec, tuple[int, ...]]:
    """Return the encoder, its patches, and the layers followed by mergers."""
    config.require("in_channels", 3)
    config.require("in_chans", 3)
    first, second, third = kind == "qwen2_vl", kind == "qwen2_5_vl", kind in _TEXTS
    hidden = config.size("embed_dim" if first else "hidden_size", 1152 if third else 1280)
    heads = config.head_count("num_heads", hidden, 16)
    size = hidden // heads
    rope = plane_rope(config, "num_heads", size)
    layers, patch, side = (
        config.layers("depth", 27 if third else 32),
        config.size("patch_size", 16 if third else 14),
        0,
    )
    side = config.size("spatial_merge_size", 2)
    window = config.size("window_size", 112) // side // patch if second else 0
    if second and not window:
        raise config.unsupported("window_size", "a window is smaller than a square of patches")
    whole = (
        set(_numbers(config, "fullatt_block_indexes", (7, 15, 23, 31)))
        if second
        else set(range(layers))
    )
    plain = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=size,
        ffn=int(hidden * config.ratio("mlp_ratio", 4))
        if first
        else config.size("intermediate_size", 3420 if second else 4304),
        # A layer's window size only marks it as windowed.
        layers=tuple(
            LayerSpec(rope=rope, window=None if number in whole else window)
            for number in range(layers)
        ),
        norm="pre",
        norm_eps=_EPS,
        activation=config.activation(
            "hidden_act", "quick_gelu" if first else "silu" if second else "gelu_pytorch_tanh"
        ),
    )
    table = round(config.size("num_position_embeddings", 2304) ** 0.5) if third else 0
    patches = PatchSpec(hidden, patch, (0, 0), class_token=False, bias=third, resampled=True)
    block = BlockSpec(patches, side, window, config.size("temporal_patch_size", 2), table)
    deep = kind == "qwen3_vl"
    taps = _numbers(config, "deepstack_visual_indexes", (8, 16, 24)) if deep else ()
    return replace(plain, norm_kind="rms", gated=True) if second else plain, block, taps


def _numbers(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    found = config.values.get(key)
    if found is None:
        return default
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise config.unsupported(key, "a list of integers is needed")
    return tuple(sorted(found))


def _mergers(
    inputs: int, outputs: int, taps: tuple[int, ...], state: State, dtype: torch.dtype
) -> Mergers:
    """Build the mergers. `inputs`: numbers of a square's states."""

    def merger(stem: str) -> Merger:
        up = read_linear(state, f"{stem}up", inputs, inputs, dtype, SINGLE, bias=True, gelu=True)
        down = read_linear(state, f"{stem}down", inputs, outputs, dtype, SINGLE, bias=True)
        if not stem:
            return Merger(up, down)
        norm = nn.LayerNorm(inputs, eps=_EPS, device="meta")
        for ending in ("weight", "bias"):
            check_shape(state, f"{stem}norm.{ending}", (inputs,), SINGLE)
        norm.load_state_dict(
            {ending: state[f"{stem}norm.{ending}"].to(dtype) for ending in ("weight", "bias")},
            assign=True,
        )
        return Merger(up, down, norm.requires_grad_(False))

    return Mergers(merger(""), [merger(f"deep.{number}.") for number in range(len(taps))], taps)


def _heads(files: VlmFiles) -> Callable[[State, PackedEncoder], Mapping[str, ModelHead]]:
    if files.use == "dense":
        return last_state
    if files.use != "score":
        return (
            states_of_tokens if files.config.text("model_type") == _NEMOTRON else vectors_of_tokens
        )
    if is_jina_reranker(files.config.values):
        return partial(judged, _JINA_BIAS)
    yes, no = (files.tokenizer.token_to_id(answer) for answer in ("yes", "no"))
    if yes is None or no is None:
        raise ModelBroken('tokenizer.json: "yes" and "no" must be one token each')
    return partial(answers, (yes, no))


def _conversation(use: Use, kind: str) -> Prompts:
    """Build prompts of one turn with the answer begun, as the chat templates of GME,
    Qwen3-VL-Embedding and Qwen3-VL-Reranker.
    """
    reported = _JUDGED if use == "score" else INSTRUCTION
    end = _ANSWER + ("<|endoftext|>" if kind == "qwen2_vl" else "")
    frame = TextFrame(f"<|im_start|>system\n{reported}<|im_end|>\n<|im_start|>user\n", end)
    if use == "score":
        pair = Pair(f"<Instruct>: {INSTRUCTION}<Query>:", "\n<Document>:", "NULL")
        return Prompts(
            frame, frame, frame, instruction="Retrieve relevant documents for the query.", pair=pair
        )
    usual = "Represent the user's input." if kind in _TEXTS else "You are a helpful assistant."
    return Prompts(frame, frame, frame, instruction=usual)


def _prompts(files: VlmFiles, is_hf: bool) -> Prompts:
    """Build the prompts of transformers' ColQwen2Processor, or of colpali-engine, which adds no
    text before a query and no newline after it.
    """
    if files.config.text("model_type") == _NEMOTRON:
        return _nemotron(files.processor)
    fill = special_token(files.directory, "pad_token") or "<|endoftext|>"
    reported = files.processor.text("visual_prompt_prefix", _INSTRUCTION)
    if files.config.text("model_type") == _TOMORO:  # its files may split the prompt in two
        reported = reported.removesuffix(_INSTRUCTION_END) + files.processor.text(
            "visual_prompt_suffix", _INSTRUCTION_END
        )
    before, mark, after = reported.partition(_IMAGE)
    if not mark:
        raise files.processor.unsupported("visual_prompt_prefix", f"it has no {_IMAGE}")
    asked = files.processor.text("query_prefix", "Query: " if is_hf else "")
    return Prompts(
        TextFrame(before, after),
        TextFrame(),
        TextFrame(asked, fill * _AUGMENTED + ("\n" if is_hf else "")),
    )


def _nemotron(processor: Config) -> Prompts:
    """Build the prompts of one turn of Qwen3-VL's chat template with the answer begun. A document's
    text follows its image and a prefix.
    """

    def after(name: str, default: str) -> str:
        found = processor.text(name, default)
        return f"{found} " if found else ""

    begin, passage = "<|im_start|>user\n", after("passage_prefix", "passage:")
    return Prompts(
        images=TextFrame(begin, _ANSWER),
        texts=TextFrame(f"{begin}{passage}", _ANSWER),
        queries=TextFrame(f"{begin}Query: {after('query_prefix', 'query:')}", _ANSWER),
        default="document",
        lead=passage,
    )
