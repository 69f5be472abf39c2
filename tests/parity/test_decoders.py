"""Language models against transformers and sentence-transformers: difficult shapes, embedding
models, classifiers and rerankers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, processors

from libs.catalog.cards import read_catalog
from libs.catalog.detect import read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import InputTooLong, InvalidInput, ModelBroken
from libs.models import (
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    ExtractResult,
    PackedModel,
    Result,
    Role,
    ScoreResult,
    ScoreWork,
    Work,
    load_model,
)
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import Truncation
from tests.models.restoring import restore
from tests.parity.checkpoints import Kind, random_model, write_checkpoint
from tests.parity.test_families import load as load_encoder
from tests.parity.test_families import packed, random_ids, reference, worst

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

DECODERS: tuple[Kind, ...] = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
)
TEXTS = [
    'Each licensee is addressed as "you".',
    "a",
    "To protect your rights, we need to prevent others from denying you these rights or asking you "
    "to surrender the rights. " * 6,
    "Überraschung — naïve café, 東京 and so on",
]
SHORT = [text for text in TEXTS if len(text) < 100]
QUERY = "What must a licensee do?"

# Qwen3-Reranker's template: a default instruction, and the beginning of an answer.
TEMPLATE = """<|im_start|>system
Judge whether the Document meets the requirements.<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Given a web query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path, overrides: Overrides | None = None) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), torch.float32, overrides)


def run(model: PackedModel, work: Work) -> Result:
    prepared = model.prepare(work)
    return model.finish(prepared, model.forward(prepared.head, prepared.sequences))


def dense(
    model: PackedModel, texts: list[str], role: Role = "", dimensions: int = 0
) -> NDArray[np.float32]:
    result = run(model, EncodeWork(texts, role=role, dimensions=dimensions))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return restore(result.dense)


def scores(model: PackedModel, work: ScoreWork) -> NDArray[np.float32]:
    result = run(model, work)
    assert isinstance(result, ScoreResult)
    return result.scores


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def reconfigure(directory: Path, values: Mapping[str, object], drop: Sequence[str] = ()) -> Path:
    path = directory / "config.json"
    config = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in drop
    }
    path.write_text(json.dumps(config | dict(values)))
    return directory


SLIDING = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "seven queries a key": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "one head": ("qwen3", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "as many keys as queries": ("llama", {"num_key_value_heads": 4}),
    "a window smaller than the text": ("qwen2", {**SLIDING, "sliding_window": 5}),
    "a window of one": ("qwen3", {**SLIDING, "sliding_window": 1}),
    "a window larger than the text": ("qwen3", {**SLIDING, "sliding_window": 500}),
    "both sides": ("qwen2", {"is_causal": False}),
    "both sides of a window": ("qwen3", {**SLIDING, "sliding_window": 5, "is_causal": False}),
    "no window": ("mistral", {"sliding_window": None}),
    "a window in all layers, both sides": ("mistral", {"sliding_window": 7, "is_causal": False}),
    "biases": ("qwen3", {"attention_bias": True}),
    "biases of the feed-forward": ("llama", {"attention_bias": False, "mlp_bias": True}),
    "rotation of llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "rotation of yarn": ("qwen3", {"rope_parameters": YARN}),
    "linear rotation": (
        "mistral",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "queries that grow, of both sides": ("ministral3", {"is_causal": False}),
    "a window over queries that grow": ("ministral3", {"sliding_window": 9}),
    "a causal gemma": ("gemma3_text", {"use_bidirectional_attention": False}),
    "a stretched gemma": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "rows that no token has": ("qwen3", {"vocab_size": 448}),
    "delta nets beside attention of both sides": ("qwen3_5_text", {"is_causal": False}),
    "a key head for each value head, a wider convolution": (
        "qwen3_5_text",
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 6, "attention_bias": True},
    ),
    "causal convolutions beside attention of both sides": ("lfm2", {"is_causal": False}),
    "a wider convolution with biases": ("lfm2", {"conv_L_cache": 5, "conv_bias": True}),
    "the width of the feed-forward as given": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "a multiple of that width": ("lfm2", {"block_ffn_dim_multiplier": 1.7}),
    "few buckets": (
        "t5",
        {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "another function": ("t5", {"dense_act_fn": "silu", "feed_forward_proj": "silu"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_difficult_shapes_equal_transformers(shape: str, tmp_path: Path) -> None:
    kind, config = SHAPES[shape]
    encoder = load_encoder(write_checkpoint(kind, tmp_path, config=config))
    ids = random_ids()
    theirs = reference(random_model(kind, config=config), ids)
    assert worst(packed(encoder, ids), theirs) <= 1e-5
    assert worst([packed(encoder, [sequence])[0] for sequence in ids], theirs) <= 1e-5


OLDER: dict[str, tuple[Kind, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "scaling apart from the base": (
        "llama",
        {"rope_parameters": LLAMA3},
        {
            "rope_theta": 5000.0,
            "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
        },
        ("rope_parameters",),
    ),
    "windows by the number of a layer": (
        "qwen2",
        {**SLIDING, "sliding_window": 5},
        {"max_window_layers": 1, "rope_theta": 10000.0},
        ("layer_types", "rope_parameters"),
    ),
    "no window is used": (
        "qwen2",
        {},
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
        ("layer_types",),
    ),
    "mistral's own window": (
        "mistral",
        {"sliding_window": 4096},
        {},
        ("sliding_window", "rope_parameters"),
    ),
    "two bases apart": (
        "gemma3_text",
        {},
        {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2},
        ("layer_types", "rope_parameters", "_sliding_window_pattern"),
    ),
    "attention by the number of a layer": (
        "qwen3_5_text",
        {},
        {"full_attention_interval": 2},
        ("layer_types",),
    ),
    "convolutions by the numbers of the others": (
        "lfm2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"full_attn_idxs": [1], "rope_theta": 500.0, "block_ff_dim": 128},
        ("layer_types", "rope_parameters", "intermediate_size", "conv_L_cache", "conv_bias"),
    ),
    "ministral's own settings": (
        "ministral3",
        {
            "head_dim": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": transformers.Ministral3Config().rope_parameters,
        },
        {"rope_parameters": None},
        ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    ),
    "no size of a head": ("llama", {"head_dim": 16}, {}, ("head_dim",)),
}


@pytest.mark.parametrize("name", OLDER)
def test_configurations_of_older_versions_are_read(name: str, tmp_path: Path) -> None:
    kind, config, values, drop = OLDER[name]
    encoder = load_encoder(
        reconfigure(write_checkpoint(kind, tmp_path, config=config), values, drop)
    )
    ids = random_ids()
    assert worst(packed(encoder, ids), reference(random_model(kind, config=config), ids)) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads is 3: it does not divide"),
        (
            "qwen2",
            {"layer_types": ["full_attention"]},
            "layer_types is .* is needed for each of the 2 layers",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is .*use_sliding_window is false",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention"]},
            "layer_types is .* is needed for each of the 2 layers",
        ),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3},
            "linear_num_value_heads is 4: it is not a multiple of the 3 key heads",
        ),
        (
            "qwen3_5_text",
            {"attn_output_gate": False},
            "attn_output_gate is False: only True is supported",
        ),
        ("qwen3_5_text", {"scoring_skip_ids": [7]}, "scoring_skip_ids is .7.: topk-embed"),
        (
            "lfm2",
            {"layer_types": ["conv", "linear_attention"]},
            "layer_types is .* is needed for each of the 2 layers",
        ),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs is 3: a list"),
        ("lfm2", {"conv_L_cache": 65}, "conv_L_cache is 65: at most 64 is served"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish'"),
        (
            "t5",
            {"relative_attention_num_buckets": 3},
            "relative_attention_num_buckets is 3: at least 4",
        ),
        (
            "t5",
            {"relative_attention_max_distance": 4},
            "relative_attention_num_buckets is 16: .* four times the distance 4",
        ),
    ],
)
def test_unsupported_configurations_are_refused(
    kind: Kind, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    directory = reconfigure(write_checkpoint(kind, tmp_path), values)
    with pytest.raises(ModelBroken, match=message):
        load_encoder(directory)


@pytest.mark.parametrize("kind", [*DECODERS, "lfm2", "ministral3", "qwen3_5_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_language_model_heads_are_dropped(kind: Kind, tied: bool, tmp_path: Path) -> None:
    """The checkpoint is sharded, in half precision, and has the prefix of transformers' class."""
    config = {"tie_word_embeddings": tied}
    directory = write_checkpoint(
        kind,
        tmp_path,
        head="causal_lm",
        config=config,
        dtype=torch.bfloat16,
        max_shard_size="50KB",
    )
    assert len(list(directory.glob("*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = random_ids((1, 20, 33))
    assert (
        worst(packed(load_encoder(directory), ids), reference(cast(Any, model).model, ids)) <= 1e-5
    )


def test_whole_qwen3_5_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Nothing is read of the layer that predicts a second token. A tower's tensors are refused."""
    directory = write_checkpoint("qwen3_5_text", tmp_path)
    stored = load_file(directory / "model.safetensors")
    named = {f"model.language_model.{name}": tensor for name, tensor in stored.items()}
    mtp = {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
    }
    save_file(named | {name: torch.ones(4) for name in mtp}, directory / "model.safetensors")
    ids = random_ids((1, 20, 33))
    assert (
        worst(packed(load_encoder(directory), ids), reference(random_model("qwen3_5_text"), ids))
        <= 1e-5
    )
    save_file(
        named | {"model.visual.pos_embed.weight": torch.ones(4)}, directory / "model.safetensors"
    )
    with pytest.raises(
        ModelBroken, match=r"'model.visual.pos_embed.weight' is unknown to this family"
    ):
        load_encoder(directory)


def test_decoder_of_a_whole_t5_is_dropped(tmp_path: Path) -> None:
    directory = write_checkpoint("t5", tmp_path)
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**json.loads((directory / "config.json").read_text()))
    )
    whole.eval().save_pretrained(directory)
    ids = random_ids((1, 20, 33))
    assert (
        worst(packed(load_encoder(directory), ids), reference(cast(Any, whole).encoder, ids))
        <= 1e-5
    )


def test_embedding_scale_has_the_weights_type(tmp_path: Path) -> None:
    encoder = load_encoder(write_checkpoint("gemma3_text", tmp_path, hidden=96), torch.bfloat16)
    model = random_model("gemma3_text", hidden=96).to(torch.bfloat16)
    ids = random_ids((40,))
    theirs = cast(Any, model).embed_tokens(torch.from_numpy(ids[0])[None].long())[0]
    assert torch.equal(encoder.embed(Packed.from_sequences(ids)), theirs)


def end_with(directory: Path, token: str) -> None:
    """Make the tokenizer append a token to every text, as Qwen3-Embedding's does."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = [(token, tokenizer.token_to_id(token))]
    frame = processors.TemplateProcessing(
        single=f"$A {token}", pair=f"$A {token} $B {token}", special_tokens=end
    )
    tokenizer.post_processor = (
        processors.Sequence([tokenizer.post_processor, frame])
        if "<|im_end|>" in tokenizer.get_vocab()
        else frame
    )
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("qwen3", "<|endoftext|>"),
        ("qwen2", "<|endoftext|>"),
        ("qwen3_5_text", "<|endoftext|>"),
        ("mistral", "</s>"),
    ],
)
def test_last_token_embeddings_equal_sentence_transformers(
    kind: Kind, token: str, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path / "base")
    end_with(tmp_path / "base", token)
    layers = [
        Transformer(str(tmp_path / "base"), max_seq_length=60),
        Pooling(64, "lasttoken"),
        Normalize(),
    ]
    prompts = {
        "query": "Instruct: Given a web search query, retrieve passages\nQuery:",
        "document": "",
    }
    SentenceTransformer(modules=layers, device="cpu", prompts=prompts).save(str(tmp_path / "saved"))
    model, theirs = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    assert_close(dense(model, TEXTS, "query"), theirs.encode_query(TEXTS))
    assert_close(dense(model, TEXTS, "document"), theirs.encode_document(TEXTS))
    short = theirs.encode(TEXTS, truncate_dim=20, normalize_embeddings=True)
    assert_close(dense(model, TEXTS, dimensions=20), short)


def test_embedding_model_with_chat_messages_is_refused(tmp_path: Path) -> None:
    """Its texts pass through the chat template in sentence-transformers."""
    write_checkpoint("qwen3", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages[0].content }}")
    layers = [Transformer(str(tmp_path / "base")), Pooling(64, "lasttoken")]
    SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(
        ModelBroken, match=r"sentence_bert_config.json: `modality_config` has `message`"
    ):
        load(tmp_path / "saved")


def test_model_without_length_limit_accepts_long_texts(tmp_path: Path) -> None:
    """T5's positions are unlimited, and some tokenizers have a huge number as limit."""
    write_checkpoint("t5", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 10**30}))
    assert load(tmp_path).max_tokens == 32768


@pytest.mark.parametrize("kind", ["gemma3_text", "t5", "llama_bidirec"])
def test_mean_embeddings_with_dense_layers_equal_the_reference(kind: Kind, tmp_path: Path) -> None:
    """Use the modules of embeddinggemma and sentence-t5. transformers does not support NVIDIA's
    model_type, only its computation.
    """
    write_checkpoint(kind, tmp_path / "base")
    if kind == "llama_bidirec":
        reconfigure(tmp_path / "base", {"model_type": "llama"})
    identity = torch.nn.Identity()
    layers = [Transformer(str(tmp_path / "base")), Pooling(64, "mean")]
    layers += [
        Dense(64, 96, bias=False, activation_function=identity),
        Dense(96, 64, bias=False, activation_function=identity),
    ]
    SentenceTransformer(modules=[*layers, Normalize()], device="cpu").save(str(tmp_path / "saved"))
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(TEXTS)
    if kind == "llama_bidirec":
        reconfigure(tmp_path / "saved", {"model_type": kind}, ("is_causal",))
    assert_close(dense(load(tmp_path / "saved"), TEXTS), theirs)


@pytest.mark.parametrize("kind", DECODERS)
def test_last_token_classifiers_equal_transformers(kind: Kind, tmp_path: Path) -> None:
    config = {"pad_token_id": 2 if kind in ("llama", "mistral", "phi3") else 0}
    write_checkpoint(kind, tmp_path / "pairs", head="sequence_classification", config=config)
    model, theirs = load(tmp_path / "pairs"), CrossEncoder(str(tmp_path / "pairs"), device="cpu")
    # Each pair alone: in a batch, the longest decides the rotary positions of Phi-3's others.
    logits = theirs.predict(
        [(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Identity(), batch_size=1
    )
    assert_close(scores(model, ScoreWork(QUERY, TEXTS)), logits)
    labels = ("sport", "law", "weather")
    write_checkpoint(
        kind, tmp_path / "texts", head="sequence_classification", labels=labels, config=config
    )
    result = run(load(tmp_path / "texts"), ClassifyWork(TEXTS[:2]))
    assert isinstance(result, ExtractResult)
    pipeline = cast(Any, transformers.pipeline)(
        "text-classification", str(tmp_path / "texts"), device="cpu"
    )
    for ours, expected in zip(result.items, pipeline(TEXTS[:2], top_k=None), strict=True):
        assert [item.label for item in ours.labels] == [item["label"] for item in expected]
        # A relative error of a score is an absolute one of its logit. Measured for Gemma 1: 1.4e-5.
        bound = 3e-5 if kind == "gemma" else 1e-5
        assert [item.score for item in ours.labels] == pytest.approx(
            [item["score"] for item in expected], rel=bound, abs=1e-7
        )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_classifiers_skip_padding_tokens_at_the_end(kind: Kind, tmp_path: Path) -> None:
    """The padding token ends the first text, so an earlier token is classified."""
    write_checkpoint(kind, tmp_path, head="sequence_classification")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = {text: tokenizer(text, truncation=True)["input_ids"] for text in TEXTS}
    padding = ids[TEXTS[0]][-1]
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"pad_token_id": padding, "id2label": {"0": "a", "1": "b"}})
    )
    save_file(_two_labels(tmp_path), tmp_path / "model.safetensors", {"format": "pt"})
    result = run(load(tmp_path), ClassifyWork(TEXTS, multi_label=True))
    assert isinstance(result, ExtractResult)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for item, text in zip(result.items, TEXTS, strict=True):
        with torch.inference_mode():
            expected = theirs(input_ids=torch.tensor([ids[text]])).logits[0].sigmoid().tolist()
        found = {label.label: label.score for label in item.labels}
        assert [found["a"], found["b"]] == pytest.approx(expected, rel=3e-5, abs=1e-7)
    last = theirs.base_model(input_ids=torch.tensor([ids[TEXTS[0]]])).last_hidden_state[0, -1]
    assert theirs.score(last).sigmoid()[0].item() != pytest.approx(
        result.items[0].labels[0].score, rel=1e-2
    )


def _two_labels(directory: Path) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors with a random classifier of two labels."""
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    tensors["score.weight"] = (
        torch.randn(2, tensors["score.weight"].shape[1], generator=generator) * 0.05
    )
    return tensors


def write_language_model(
    directory: Path, kind: Kind = "qwen3", template: str = TEMPLATE, **config: object
) -> Path:
    write_checkpoint(kind, directory, head="causal_lm", positions=256, config=config)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def save_reranker(
    directory: Path, *, no: bool = True, words: tuple[str, str] = ("yes", "no"), **settings: Any
) -> CrossEncoder:
    """Write the modules as sentence-transformers does.

    Args:
        no: A token for no exists.
        words: The tokens for yes and no.
    """
    base = Transformer(
        str(directory),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    ids = [cast(Any, base.tokenizer).convert_tokens_to_ids(word) for word in words]
    assert ids[0] != ids[1]
    layers = [base, LogitScore(ids[0], ids[1] if no else None)]
    CrossEncoder(modules=layers, device="cpu", **settings).save(str(directory / "saved"))
    return CrossEncoder(str(directory / "saved"), device="cpu")


def pairs(texts: Sequence[str] = TEXTS) -> list[tuple[str, str]]:
    return [(QUERY, text) for text in texts]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("no", [True, False])
def test_yes_no_rerankers_equal_sentence_transformers(
    kind: Kind, tied: bool, no: bool, tmp_path: Path
) -> None:
    theirs = save_reranker(write_language_model(tmp_path, kind, tie_word_embeddings=tied), no=no)
    model = load(tmp_path / "saved")
    assert_close(scores(model, ScoreWork(QUERY, TEXTS)), theirs.predict(pairs()))
    logits = theirs.predict(pairs(), activation_fn=torch.nn.Identity())
    assert_close(scores(model, ScoreWork(QUERY, TEXTS, scale="logit")), logits)


@pytest.mark.parametrize("no", [True, False])
def test_rerankers_cap_their_logits(no: bool, tmp_path: Path) -> None:
    """Gemma 2 caps each logit, not their difference."""
    write_language_model(tmp_path, "gemma2", final_logit_softcapping=2.0)
    theirs, model = save_reranker(tmp_path, no=no, words=("▁the", "▁of")), load(tmp_path / "saved")
    logits = theirs.predict(pairs(), activation_fn=torch.nn.Identity())
    assert_close(scores(model, ScoreWork(QUERY, TEXTS, scale="logit")), logits)
    assert np.abs(logits).max() < (4.0 if no else 2.0)


def test_checkpoint_sets_scale_and_default_instruction(tmp_path: Path) -> None:
    prompts = {"judge": "Find what a lawyer would cite", "other": "Find jokes"}
    identity = torch.nn.Identity()
    write_language_model(tmp_path)
    theirs = save_reranker(
        tmp_path, prompts=prompts, default_prompt_name="judge", activation_fn=identity
    )
    model = load(tmp_path / "saved")
    assert_close(scores(model, ScoreWork(QUERY, TEXTS)), theirs.predict(pairs()))
    instructed = scores(model, ScoreWork(QUERY, TEXTS, instruction="Find jokes"))
    assert_close(instructed, theirs.predict(pairs(), prompt_name="other"))
    assert np.abs(instructed - scores(model, ScoreWork(QUERY, TEXTS))).min() > 1e-3


def test_long_documents_are_truncated_within_the_template(tmp_path: Path) -> None:
    texts = [*TEXTS, "copy " * 400, "東京" * 300]
    theirs = save_reranker(write_language_model(tmp_path))
    model = load(tmp_path / "saved")
    assert (
        max(len(model.prepare(ScoreWork(QUERY, [text])).sequences[0].ids) for text in texts)
        == model.max_tokens
    )
    assert_close(scores(model, ScoreWork(QUERY, texts)), theirs.predict(pairs(texts)))


@pytest.mark.parametrize("truncation", ["end", "start"])
def test_truncation_keeps_one_end_of_a_long_document(
    truncation: Truncation, tmp_path: Path
) -> None:
    save_reranker(write_language_model(tmp_path))
    model = load(tmp_path / "saved")
    tokenizer = Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json"))
    document = "first " + "copy " * 400 + "last"
    text = tokenizer.decode(
        model.prepare(ScoreWork(QUERY, [document], truncation=truncation))
        .sequences[0]
        .ids.tolist(),
        False,
    )
    assert text.startswith("<|im_start|>system")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert f"<Query>: {QUERY}\n<Document>: " in text
    assert ("first copy" in text, "copy last" in text) == (
        truncation == "end",
        truncation == "start",
    )


def test_untruncatable_inputs_are_refused_with_path(tmp_path: Path) -> None:
    save_reranker(write_language_model(tmp_path))
    model = load(tmp_path / "saved")
    with pytest.raises(
        InputTooLong, match=r"documents\[1\].text has 512 tokens, with the chat template"
    ):
        model.prepare(ScoreWork(QUERY, ["a", "copy " * 400], truncation="none"))
    with pytest.raises(InputTooLong, match=r"query.text has \d+ tokens, with the chat template"):
        model.prepare(ScoreWork("copy " * 400, ["a", "b"]))


def whole(sequence: InputSequence) -> InputSequence:
    return InputSequence(
        sequence.ids if sequence.before is None else np.concatenate([sequence.before, sequence.ids])
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("window", [0, 20])
def test_common_prefix_of_documents_is_computed_once(
    kind: Kind, window: int, tmp_path: Path
) -> None:
    config: dict[str, Any] = {**SLIDING, "sliding_window": window} if window else {}
    save_reranker(write_language_model(tmp_path, kind, **config))
    model = load(tmp_path / "saved")
    texts = [*TEXTS, "a", "copy " * 400]
    prepared = model.prepare(ScoreWork(QUERY, texts))
    shared = prepared.sequences[0].before
    assert shared is not None
    assert all(sequence.before is shared for sequence in prepared.sequences)
    tokenizer = Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json"))
    assert tokenizer.decode(shared.tolist(), False).endswith(f"<Query>: {QUERY}\n<Document>:")
    alone = [model.prepare(ScoreWork(QUERY, [text])).sequences for text in texts]
    assert all(len(sequences) == 1 and sequences[0].before is None for sequences in alone)
    together = [whole(sequence) for sequence in prepared.sequences]
    for (single,), sequence in zip(alone, together, strict=True):
        assert np.array_equal(single.ids, sequence.ids)
    assert prepared.tokens == sum(sequence.tokens for sequence in together) - (
        len(texts) - 1
    ) * len(shared)
    ours = np.stack(cast(Any, model.forward("logits", prepared.sequences)))
    assert_close(ours, np.stack(cast(Any, model.forward("logits", together))))
    assert_close(
        ours, np.stack([cast(Any, model.forward("logits", [sequence]))[0] for sequence in together])
    )


def test_bidirectional_model_shares_no_prefix(tmp_path: Path) -> None:
    theirs = save_reranker(write_language_model(tmp_path, is_causal=False))
    model = load(tmp_path / "saved")
    assert all(
        sequence.before is None for sequence in model.prepare(ScoreWork(QUERY, TEXTS)).sequences
    )
    assert_close(scores(model, ScoreWork(QUERY, TEXTS)), theirs.predict(pairs()))


def test_bfloat16_is_as_good_as_the_reference_in_bfloat16(tmp_path: Path) -> None:
    theirs = save_reranker(write_language_model(tmp_path))
    exact = theirs.predict(pairs(), activation_fn=torch.nn.Identity())
    half = CrossEncoder(
        str(tmp_path / "saved"), device="cpu", model_kwargs={"dtype": torch.bfloat16}
    )
    own = np.abs(half.predict(pairs(), activation_fn=torch.nn.Identity()) - exact).max()
    model = load_model(tmp_path / "saved", "test/model", torch.device("cpu"), torch.bfloat16)
    assert np.abs(scores(model, ScoreWork(QUERY, TEXTS, scale="logit")) - exact).max() < 3 * own


STRUCTURED = """{% for message in messages %}[{{ message.role }}]
{{ message.content[0].text }}
{% endfor %}{{ eos_token }}"""
PLACES: dict[str, str] = {
    "chat_template.jinja": TEMPLATE,
    "parts of a message": STRUCTURED,
    "the query "
    "last": "{{ messages[-1].content }}\n{{ messages[-2].content }}\n{{ eos_token }}answers?",
}


@pytest.mark.parametrize("name", PLACES)
def test_templates_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_reranker(write_language_model(tmp_path, template=PLACES[name]))
    assert_close(
        scores(load(tmp_path / "saved"), ScoreWork(QUERY, SHORT)), theirs.predict(pairs(SHORT))
    )


def test_template_in_tokenizer_config_is_used(tmp_path: Path) -> None:
    theirs = save_reranker(write_language_model(tmp_path))
    (tmp_path / "saved/chat_template.jinja").unlink()
    path = tmp_path / "saved/tokenizer_config.json"
    settings = json.loads(path.read_text())
    for value in (
        TEMPLATE,
        [{"name": "tool_use", "template": "no pair"}, {"name": "default", "template": TEMPLATE}],
    ):
        path.write_text(json.dumps(settings | {"chat_template": value}))
        assert_close(
            scores(load(tmp_path / "saved"), ScoreWork(QUERY, TEXTS)), theirs.predict(pairs())
        )


def test_template_is_selected_by_name(tmp_path: Path) -> None:
    save_reranker(write_language_model(tmp_path))
    saved = tmp_path / "saved"
    (saved / "additional_chat_templates").mkdir()
    (saved / "chat_template.jinja").rename(saved / "additional_chat_templates/rerank.jinja")
    (saved / "chat_template.jinja").write_text("for talking")
    settings = json.loads((saved / "sentence_bert_config.json").read_text())
    settings["processing_kwargs"]["chat_template"]["chat_template"] = "rerank"
    (saved / "sentence_bert_config.json").write_text(json.dumps(settings))
    theirs = CrossEncoder(str(saved), device="cpu")
    assert_close(scores(load(saved), ScoreWork(QUERY, TEXTS)), theirs.predict(pairs()))
    settings["processing_kwargs"]["chat_template"]["chat_template"] = "rank"
    (saved / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ModelBroken,
        match=r"`chat_template` is 'rank', which is not a template .* "
        r"templates are: default, rerank",
    ):
        load(saved)


def test_classifier_renders_pairs_with_its_template(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, head="sequence_classification", positions=256)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    logits = theirs.predict(pairs(), activation_fn=torch.nn.Identity())
    assert_close(scores(load(tmp_path), ScoreWork(QUERY, TEXTS)), logits)


def test_classifier_without_pair_template_reads_plain_pairs(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, head="sequence_classification", positions=256)
    plain = scores(load(tmp_path), ScoreWork(QUERY, TEXTS))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content if messages[0].role == 'user' }}"
    )
    assert_close(scores(load(tmp_path), ScoreWork(QUERY, TEXTS)), plain)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("lfm2_moe", "Lfm2MoeForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("pegasus", "PegasusForConditionalGeneration"),
    ],
)
def test_unsupported_generative_model_is_refused(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    write_language_model(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"model_type": kind, "architectures": [architecture]})
    )
    with pytest.raises(
        ModelBroken,
        match=rf"`model_type` is '{kind}' and the model generates texts \({architecture}\)",
    ):
        read_card(tmp_path, "test/model")


BROKEN: dict[str, str] = {
    r"it has no place for a message of the role 'document'": "{{ messages[0].content }}",
    r"it has no place for a message of the role 'query'": "{{ messages[-1].content }}",
    r"it changes the texts of messages": "{{ messages[0].content | upper }} {{ messages[1].content "
    "| trim }}",
    r"invalid Jinja": "{% for %}",
    r"rendering fails: only users speak": "{{ raise_exception('only users speak') }}",
    r"rendering fails: access to attribute '__class__'": "{{ messages.__class__.__mro__ }}",
    r"rendering fails": "{{ messages[7].content }}{{ messages[8].content.x }}",
}


@pytest.mark.parametrize("message", BROKEN)
def test_unsupported_templates_are_refused(message: str, tmp_path: Path) -> None:
    save_reranker(write_language_model(tmp_path))
    (tmp_path / "saved/chat_template.jinja").write_text(BROKEN[message])
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path / "saved")


@pytest.mark.parametrize(
    "start", ["", "{{ raise_exception('no system') if messages[0].role == 'system' }}"]
)
def test_instruction_needs_a_place_in_the_template(start: str, tmp_path: Path) -> None:
    save_reranker(
        write_language_model(
            tmp_path, template=start + "{{ messages[-2].content }}: {{ messages[-1].content }}"
        )
    )
    with pytest.raises(InvalidInput, match="no place for an instruction"):
        load(tmp_path / "saved").prepare(ScoreWork(QUERY, TEXTS, instruction="Find jokes"))


def test_language_model_without_card_is_classified_by_its_files(tmp_path: Path) -> None:
    """A card of the catalog decides; otherwise it generates text if it has a chat template and
    generation settings.
    """
    write_language_model(tmp_path)
    assert read_card(tmp_path, "test/model").kind == "generative"
    with pytest.raises(ModelBroken, match="'generative'"):
        load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(
        ModelBroken,
        match=r"config.json: `architectures` is Qwen3ForCausalLM, a language model.*`answers",
    ):
        load(tmp_path)
    with pytest.raises(ModelBroken, match=r"no LogitScore.*`answers`"):
        load(tmp_path, Overrides("card.yaml:1", detect=Hints(kind="yes_no")))
    with pytest.raises(ModelBroken, match=r"the answer 'of course' must be one token"):
        load(
            tmp_path,
            Overrides("card.yaml:1", detect=Hints(kind="yes_no", answers=("of course", "no"))),
        )
    template = (
        "<|im_start|>{{ instruction or 'Given a web query' }}\n{{ query }}\n{{ document "
        "}}<|im_end|>\n"
    )
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelBroken, match=r"no chat template for pairs.*`template`"):
        load(tmp_path, Overrides("card.yaml:1", detect=Hints(kind="yes_no", answers=("yes", "no"))))
    model = load(
        tmp_path,
        Overrides(
            "card.yaml:1", detect=Hints(kind="yes_no", answers=("yes", "no"), template=template)
        ),
    )
    assert_close(scores(model, ScoreWork(QUERY, SHORT)), by_hand(tmp_path, template))
    embedder = load(
        tmp_path, Overrides("card.yaml:1", detect=Hints(kind="dense", pooling="lasttoken"))
    )
    assert embedder.card.pooling == ("lasttoken",)
    assert dense(embedder, SHORT).shape == (len(SHORT), 64)


def by_hand(directory: Path, template: str) -> NDArray[np.float32]:
    """Return the share of yes among yes and no after each text, as in Qwen3-Reranker's model
    card."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    found = []
    for text in SHORT:
        filled = template.replace("{{ instruction or 'Given a web query' }}", "Given a web query")
        filled = (
            filled.removesuffix("\n").replace("{{ query }}", QUERY).replace("{{ document }}", text)
        )
        with torch.inference_mode():
            logits = model(**tokenizer(filled, return_tensors="pt")).logits[0, -1]
        found.append(
            torch.softmax(
                logits[
                    [tokenizer.convert_tokens_to_ids("no"), tokenizer.convert_tokens_to_ids("yes")]
                ],
                0,
            )[1]
        )
    return torch.stack(found).numpy()


def test_head_too_small_for_answer_tokens_is_refused(tmp_path: Path) -> None:
    save_reranker(write_language_model(tmp_path))
    path = tmp_path / "saved/1_LogitScore/config.json"
    path.write_text(json.dumps({"true_token_id": 100_000, "false_token_id": 3}))
    with pytest.raises(
        ModelBroken, match=r"head is \[\d+, 64\], too small for the tokens \[100000, 3\]"
    ):
        load(tmp_path / "saved")
    path.write_text(json.dumps({"false_token_id": 3}))
    with pytest.raises(ModelBroken, match=r"1_LogitScore/config.json: `true_token_id` is missing"):
        load(tmp_path / "saved")


def test_stored_head_of_a_tied_model_is_dropped(tmp_path: Path) -> None:
    """The head is tied in transformers even if a file contains one."""
    theirs = save_reranker(write_language_model(tmp_path, tie_word_embeddings=True))
    path = tmp_path / "saved/model.safetensors"
    tensors = dict(load_file(path))
    save_file(
        tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])},
        path,
        metadata={"format": "pt"},
    )
    assert_close(scores(load(tmp_path / "saved"), ScoreWork(QUERY, TEXTS)), theirs.predict(pairs()))


SHIPPED: dict[str, tuple[str, str]] = {
    "Qwen/Qwen3-Reranker-0.6B": (
        """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: a query
<Document>: a document<|im_end|>
<|im_start|>assistant
<think>

</think>

""",
        "<Instruct>: Find jokes\n<Query>: a query\n",
    ),
    "mixedbread-ai/mxbai-rerank-base-v2": (
        """<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
<|im_start|>user
query: a query
document: a document
You are a search relevance expert who evaluates how well documents match search queries. \
For each query-document pair, carefully analyze the semantic relationship between them, \
then provide your binary relevance judgment (0 for not relevant, 1 for relevant).
Relevance:<|im_end|>
<|im_start|>assistant
""",
        "<|im_start|>user\ninstruction: Find jokes\nquery: a query\n",
    ),
    "zeroentropy/zerank-2-reranker": (
        """<|im_start|>system
a query<|im_end|>
<|im_start|>user
a document<|im_end|>
<|im_start|>assistant
""",
        "",
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_templates_of_shipped_cards_render_pairs(name: str, tmp_path: Path) -> None:
    """Templates write a pair as the models' cards and packages do."""
    write_checkpoint("qwen3", tmp_path, head="causal_lm", positions=1024)
    model = load(tmp_path, read_catalog().overrides(name))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain, instructed = SHIPPED[name]
    sequences = model.prepare(ScoreWork("a query", ["a document"])).sequences
    assert tokenizer.decode(sequences[0].ids.tolist(), False) == plain
    asked = ScoreWork("a query", ["a document"], instruction="Find jokes")
    if not instructed:
        with pytest.raises(InvalidInput, match="no place for an instruction"):
            model.prepare(asked)
        return
    sequences = model.prepare(asked).sequences
    assert instructed in tokenizer.decode(sequences[0].ids.tolist(), False)
