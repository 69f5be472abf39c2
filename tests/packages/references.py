"""The references that models of packages are compared with: transformers, sentence-transformers, and onnxruntime.

The graph of an ONNX file is run with float activations: its nodes that quantise activations are taken out, because the weights
alone are what was converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import shoal
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from libs.catalog.kinds.scoring.labels import entity_kind
from tests.generation.checkpoints import written
from tests.mesh.test_sparse import whole

TEXTS: Final = [
    "Their is a cat on the mats, and she go to school every day.",
    "Ada Lovelace wrote, in 1843 in London, what many call the first program.",
    "Rain.",
    "The boundary layer on a flat plate in supersonic flow; naïve Überraschung in 東京.",
]
QUESTIONS: Final = ["What is the capital of France?", "Write one sentence about the sea."]
MAX_COSINE_DISTANCE: Final = 1e-5
MAX_DIFFERENCE: Final = 1e-3
"""Of a weight of a sparse vector, and of a probability."""

MAX_TOKENS: Final = 24


def compare_sparse(client: shoal.Client, model: str, source: Path, served: Path) -> None:
    """SPLADE: the maximum over tokens of log(1 + relu(logit))."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [theirs(**tokenizer([text], return_tensors="pt")).logits[0] for text in TEXTS]
    wanted = torch.stack([torch.log1p(torch.relu(rows)).amax(0) for rows in logits]).numpy()
    found = client.encode(model, TEXTS).sparse
    assert found is not None
    assert (wanted > 0).sum() > 100
    np.testing.assert_allclose(whole(found), wanted, atol=MAX_DIFFERENCE)


def compare_tags(client: shoal.Client, model: str, source: Path, served: Path) -> None:
    """The tag of each token and its probability, by the ONNX graph itself."""
    session = float_session(source / "tagger.onnx")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    names = transformers.AutoConfig.from_pretrained(source).id2label
    changes = 0
    found_in = client.entities(model, TEXTS, aggregation="none", flat=False)
    for text, result in zip(TEXTS, found_in, strict=True):
        encoded = tokenizer.encode(text)
        inputs = {
            "input_ids": np.asarray([encoded.ids], np.int64),
            "attention_mask": np.asarray([encoded.attention_mask], np.int64),
        }
        (logits,) = session.run(None, inputs)
        shares = np.exp(logits[0] - logits[0].max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        wanted = {
            encoded.offsets[place]: (entity_kind(names[int(row.argmax())]), float(row.max()))
            for place, row in enumerate(shares)
            if not encoded.special_tokens_mask[place]
        }
        found = {(entity.start, entity.end): (entity.label, entity.score) for entity in result.entities}
        assert found.keys() == wanted.keys()
        for place, (label, score) in wanted.items():
            assert found[place][0] == label
            assert abs(found[place][1] - score) <= MAX_DIFFERENCE
        changes += sum(label != "$KEEP" for label, _ in wanted.values())
    assert changes, "no tag but $KEEP was given, so little was compared"


def compare_dense(client: shoal.Client, model: str, source: Path, served: Path) -> None:
    """sentence-transformers in float32."""
    theirs = SentenceTransformer(str(source), device="cpu", model_kwargs={"dtype": torch.float32})
    wanted = np.asarray(theirs.encode(TEXTS), np.float64)
    found = np.asarray(client.encode(model, TEXTS).dense, np.float64)
    cosines = (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert cosines.min() >= 1 - MAX_COSINE_DISTANCE, cosines


def compare_texts(client: shoal.Client, model: str, source: Path, served: Path) -> None:
    """Greedy texts of transformers, which reads the GGUF file by itself."""
    (file,) = source.glob("*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    ours = transformers.AutoTokenizer.from_pretrained(served)
    assert [ours(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    task = shoal.ReadText(max_tokens=MAX_TOKENS, temperature=0)
    for question, answer in zip(QUESTIONS, client.extract(model, QUESTIONS, task), strict=True):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="np")["input_ids"][0]
        (wanted,) = written(theirs, [ids], MAX_TOKENS)
        assert answer.text == tokenizer.decode(wanted, skip_special_tokens=True).strip()


def float_session(path: Path) -> Any:
    """A session of onnxruntime on a graph without the pairs of nodes that quantise activations and dequantise them again."""
    model = onnx.load(path)
    nodes = model.graph.node
    quantised = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    instead = {node.output[0]: quantised[node.input[0]] for node in nodes if node.input and node.input[0] in quantised}
    kept = [node for node in nodes if not node.output or node.output[0] not in instead]
    for node in kept:
        node.input[:] = _followed(node.input, instead)
    outputs = [out.name for out in model.graph.output if out.name in instead]
    kept += [onnx.helper.make_node("Identity", _followed([name], instead), [name]) for name in outputs]
    del nodes[:]
    nodes.extend(kept)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _followed(names: Sequence[str], instead: dict[str, str]) -> list[str]:
    found = list(names)
    while any(name in instead for name in found):
        found = [instead.get(name, name) for name in found]
    return found
