"""Layouts of models carded in 2026, small and random, with their cards, against transformers,
sentence-transformers, or a reimplementation of the checkpoint's code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer
from torch import Tensor

from libs.catalog.cards import read_catalog
from libs.catalog.detect import read_card
from libs.models import ClassifyWork, ExtractResult, PackedModel, ScoreWork, load_model
from tests.parity.checkpoints import SentenceFiles, random_model, write_checkpoint
from tests.parity.test_decoders import QUERY, reconfigure
from tests.parity.test_heads import TEXTS, assert_close, dense, run, scores

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

HARRIER = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path, model: str) -> PackedModel:
    """The model in a directory with the card that is shipped for `model`."""
    card = read_catalog().overrides(model)
    assert card is not None
    return load_model(directory, model, torch.device("cpu"), torch.float32, card)


@torch.inference_mode()
def both_sides(directory: Path, ids: list[int]) -> Tensor:
    """Return states of a decoder without its causal mask."""
    model = transformers.AutoModel.from_pretrained(directory).eval()
    seen = torch.zeros(1, 1, len(ids), len(ids))
    return cast(
        Tensor, model(input_ids=torch.tensor([ids]), attention_mask=seen).last_hidden_state[0]
    )


def token_ids(directory: Path, text: str, *, special: bool = True) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return found


@pytest.mark.parametrize(("kind", "model"), [("gemma3_text", "270m"), ("qwen3", "0.6b")])
def test_harrier_reads_the_last_token_of_a_causal_model(
    kind: str, model: str, tmp_path: Path
) -> None:
    write_checkpoint(
        kind,
        tmp_path,
        positions=1024,
        sentence=SentenceFiles(pooling="lasttoken", normalize=True, max_seq_length=1024),
    )
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    ours = load(tmp_path, f"microsoft/harrier-oss-v1-{model}")
    assert_close(dense(ours, TEXTS, "document"), theirs.encode(TEXTS))
    assert_close(dense(ours, TEXTS, "query"), theirs.encode(TEXTS, prompt=HARRIER))


def test_voyage_projects_bidirectional_states(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, positions=1024)
    matrix = torch.randn(128, 64, generator=torch.Generator().manual_seed(3)) * 0.2
    states = load_file(tmp_path / "model.safetensors")
    wanted = []
    for text in TEXTS:
        ids = token_ids(
            tmp_path, f"Represent the query for retrieving supporting documents: {text}"
        )
        wanted.append(F.normalize((both_sides(tmp_path, ids) @ matrix.T).mean(0), dim=0))
    named = {
        name if name.startswith("model.") else f"model.{name}": tensor
        for name, tensor in states.items()
    }
    save_file(
        {**named, "linear.weight": matrix},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    reconfigure(
        tmp_path, {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": 128}
    )
    model = load(tmp_path, "voyageai/voyage-4-nano")
    assert model.card.dimensions == 128
    assert_close(dense(model, TEXTS, "query"), torch.stack(wanted).numpy())


def test_nemotron_3_averages_bidirectional_states(tmp_path: Path) -> None:
    """Its tensors have no prefix, and texts are longer than the context before scaling."""
    prompts = {"query": "query: ", "document": "passage: "}
    write_checkpoint(
        "ministral3", tmp_path, config={"is_causal": False}, sentence=SentenceFiles(prompts=prompts)
    )
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    ours = load(tmp_path, "nvidia/Nemotron-3-Embed-1B-BF16")
    for role in ("query", "document"):
        assert_close(dense(ours, TEXTS, role), theirs.encode(TEXTS, prompt_name=role))


@pytest.mark.parametrize(("pooling", "temperature"), [("avg", 1.0), ("last", 0.5), ("cls", 2.0)])
def test_nemotron_classifies_the_state_that_its_config_names(
    pooling: str, temperature: float, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path, head="sequence_classification", positions=1024)
    head = load_file(tmp_path / "model.safetensors")["score.weight"]
    wanted = []
    for text in TEXTS:
        rendered = f"question:{QUERY} \n \n passage:{text}"
        states = both_sides(tmp_path, token_ids(tmp_path, rendered))
        pooled = {"avg": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
        wanted.append(float(head[0] @ pooled) / temperature)
    reconfigure(
        tmp_path, {"model_type": "llama_bidirec", "pooling": pooling, "temperature": temperature}
    )
    model = load(tmp_path, "nvidia/llama-nemotron-rerank-1b-v2")
    assert_close(scores(model, ScoreWork(QUERY, TEXTS)), np.array(wanted, np.float32))


def test_bge_reranker_v2_gemma_has_the_logit_of_yes(tmp_path: Path) -> None:
    """FlagEmbedding tokenises query, document and prompt separately, joined by line feeds."""
    write_checkpoint(
        "gemma", tmp_path, head="causal_lm", positions=1024, config={"vocab_size": 410}
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.add_tokens(["Yes"]) == 1
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, "BAAI/bge-reranker-v2-gemma")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction "
        "of either 'Yes' or 'No'."
    )
    yes = tokenizer.token_to_id("Yes")
    wanted: list[float] = []
    for text in TEXTS:
        ids = token_ids(tmp_path, f"<bos>A: {QUERY}\nB: {text}\n{prompt}", special=False)
        with torch.inference_mode():
            wanted.append(float(network(input_ids=torch.tensor([ids])).logits[0, -1, yes]))
    assert_close(
        scores(model, ScoreWork(QUERY, TEXTS, scale="logit")), np.array(wanted, np.float32)
    )


def test_mxbai_rerank_v1_is_a_cross_encoder(tmp_path: Path) -> None:
    write_checkpoint("deberta-v2", tmp_path, head="sequence_classification", positions=512)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    logits = theirs.predict([(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Identity())
    assert_close(
        scores(load(tmp_path, "mixedbread-ai/mxbai-rerank-base-v1"), ScoreWork(QUERY, TEXTS)),
        logits,
    )


def test_gte_multilingual_reranker_has_a_pooler_before_its_classifier(tmp_path: Path) -> None:
    write_checkpoint("new", tmp_path, positions=1024)
    network = random_model("new", positions=1024)
    generator = torch.Generator().manual_seed(5)
    head = {
        "new.pooler.dense.weight": torch.randn(64, 64, generator=generator) * 0.2,
        "new.pooler.dense.bias": torch.randn(64, generator=generator) * 0.2,
        "classifier.weight": torch.randn(1, 64, generator=generator) * 0.2,
        "classifier.bias": torch.randn(1, generator=generator) * 0.2,
    }
    states = {
        f"new.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**states, **head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reconfigure(
        tmp_path, {"architectures": ["NewForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    wanted = []
    for text in TEXTS:
        pair = tokenizer.encode(QUERY, text)
        with torch.inference_mode():
            inputs = {
                "input_ids": torch.tensor([pair.ids]),
                "token_type_ids": torch.tensor([pair.type_ids]),
            }
            first = network(**inputs).last_hidden_state[0, 0]
        pooled = F.linear(
            first, head["new.pooler.dense.weight"], head["new.pooler.dense.bias"]
        ).tanh()
        wanted.append(float(F.linear(pooled, head["classifier.weight"], head["classifier.bias"])))
    ours = scores(
        load(tmp_path, "Alibaba-NLP/gte-multilingual-reranker-base"), ScoreWork(QUERY, TEXTS)
    )
    assert_close(ours, np.array(wanted, np.float32))


CLASSIFIERS = {
    "ProsusAI/finbert": (
        "bert",
        ("positive", "negative", "neutral"),
        "single_label_classification",
    ),
    "SamLowe/roberta-base-go_emotions": (
        "roberta",
        ("admiration", "anger", "neutral"),
        "multi_label_classification",
    ),
    "NousResearch/Minos-v1": (
        "modernbert",
        ("Non-refusal", "Refusal"),
        "single_label_classification",
    ),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_equal_the_pipeline(name: str, tmp_path: Path) -> None:
    kind, labels, problem = CLASSIFIERS[name]
    write_checkpoint(
        kind,
        tmp_path,
        head="sequence_classification",
        labels=labels,
        config={"problem_type": problem},
    )
    texts = (
        [f"<|user|>\n{QUERY}\n<|assistant|>\n{TEXTS[0]}"]
        if name.endswith("Minos-v1")
        else TEXTS[:2]
    )
    (result,) = run(load(tmp_path, name), ClassifyWork(texts))
    assert isinstance(result, ExtractResult)
    pipeline = cast(Any, transformers.pipeline)("text-classification", str(tmp_path), device="cpu")
    for ours, theirs in zip(result.items, pipeline(texts, top_k=None), strict=True):
        assert [item.label for item in ours.labels] == [item["label"] for item in theirs]
        assert [item.score for item in ours.labels] == pytest.approx(
            [item["score"] for item in theirs], rel=1e-5, abs=1e-7
        )


def test_arctic_reads_the_first_token_after_its_prompt(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path, sentence=SentenceFiles(pooling="cls_token", normalize=True))
    prompt = "Represent this sentence for searching relevant passages: "
    theirs: NDArray[np.float32] = SentenceTransformer(str(tmp_path), device="cpu").encode(
        TEXTS, prompt=prompt
    )
    assert_close(
        dense(load(tmp_path, "Snowflake/snowflake-arctic-embed-m-v1.5"), TEXTS, "query"), theirs
    )


def test_kalm_is_bidirectional_after_its_instruction(tmp_path: Path) -> None:
    write_checkpoint(
        "qwen2",
        tmp_path,
        positions=1024,
        sentence=SentenceFiles(pooling="mean_tokens", max_seq_length=1024),
    )
    prompt = "Instruct: Given a query, retrieve documents that answer the query \n Query: "
    wanted = [
        F.normalize(both_sides(tmp_path, token_ids(tmp_path, prompt + text)).mean(0), dim=0)
        for text in TEXTS
    ]
    reconfigure(tmp_path, {"is_causal": False})
    model = load(tmp_path, "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1.5")
    assert_close(dense(model, TEXTS, "query"), torch.stack(wanted).numpy())


def test_qwen3guard_is_generative(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, head="causal_lm", positions=1024)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    name = "Qwen/Qwen3Guard-Gen-0.6B"
    assert read_card(tmp_path, name, read_catalog().overrides(name)).kind == "generative"
