"""The references that models of packages are compared with: transformers, sentence-transformers,
and onnxruntime.

The graph of an ONNX file is run with float activations, because only the weights were converted.
Each comparison asserts its bound and returns the measured difference, for docs/evaluation.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import shoal
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers.image_transforms import convert_to_rgb

from libs.kinds.token_labels.card import entity_kind
from tests.generation.checkpoints import written
from tests.mesh.test_sparse import whole
from tests.packages.graphs import float_session
from tests.parity.image_models import pictures

TEXTS: Final = [
    "Their is a cat on the mats, and she go to school every day.",
    "Ada Lovelace wrote, in 1843 in London, what many call the first program.",
    "Rain.",
    "The boundary layer on a flat plate in supersonic flow; naïve Überraschung in 東京.",
]
QUESTIONS: Final = ["What is the capital of France?", "Write one sentence about the sea."]
MAX_COSINE_DISTANCE: Final = 1e-5
MAX_DIFFERENCE: Final = 1e-3
"""Maximum difference of a weight of a sparse vector, and of a probability."""

MAX_TOKENS: Final = 24
PAIR_TOKENS: Final = 160
REACTIONS: Final = [
    "CCO.CC(=O)O>>CC(=O)OCC",
    "Brc1ccccc1.OB(O)c1ccccc1.[Na+].[OH-]>>c1ccc(-c2ccccc2)cc1",
    "C=CC(=O)OC.C1CCNCC1>>COC(=O)CCN1CCCCC1",
    "O=C(Cl)c1ccc([N+](=O)[O-])cc1.NCCc1ccccc1>>O=C(NCCc1ccccc1)c1ccc([N+](=O)[O-])cc1",
]
"""An esterification, a Suzuki coupling, a Michael addition and an acylation, as SMILES."""


def compare_sparse(client: shoal.Client, model: str, source: Path, served: Path) -> str:
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
    return f"weights differ by at most {np.abs(whole(found) - wanted).max():.1e}"


def compare_tags(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """The tag of each token and its probability, by the ONNX graph itself."""
    session = float_session(source / "tagger.onnx")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    names = transformers.AutoConfig.from_pretrained(source).id2label
    changes, most = 0, 0.0
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
        found = {
            (entity.start, entity.end): (entity.label, entity.score) for entity in result.entities
        }
        assert found.keys() == wanted.keys()
        for place, (label, score) in wanted.items():
            assert found[place][0] == label
            assert abs(found[place][1] - score) <= MAX_DIFFERENCE
            most = max(most, abs(found[place][1] - score))
        changes += sum(label != "$KEEP" for label, _ in wanted.values())
    assert changes, "no tag but $KEEP was given, so little was compared"
    return f"the same tags; probabilities differ by at most {most:.1e}"


def compare_dense(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """Compare with sentence-transformers in float32."""
    theirs = SentenceTransformer(str(source), device="cpu", model_kwargs={"dtype": torch.float32})
    wanted = np.asarray(theirs.encode(TEXTS), np.float64)
    found = np.asarray(client.encode(model, TEXTS).dense, np.float64)
    return assert_same_directions(found, wanted)


def assert_same_directions(found: NDArray[Any], wanted: NDArray[Any]) -> str:
    """Assert that the cosine of each two rows is 1."""
    cosines = (
        (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
    )
    assert cosines.min() >= 1 - MAX_COSINE_DISTANCE, cosines
    return f"1 - cosine is at most {max(0.0, 1 - cosines.min()):.1e}"


def compare_texts(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """Greedy texts of transformers, which reads the GGUF file by itself."""
    (file,) = source.glob("*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    ours = transformers.AutoTokenizer.from_pretrained(served)
    assert [ours(text)["input_ids"] for text in TEXTS] == [
        tokenizer(text)["input_ids"] for text in TEXTS
    ]
    task = shoal.ReadText(max_tokens=MAX_TOKENS, temperature=0)
    for question, answer in zip(QUESTIONS, client.extract(model, QUESTIONS, task), strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="np")["input_ids"][0]
        (wanted,) = written(theirs, [ids], MAX_TOKENS)
        assert answer.text == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    return f"{len(QUESTIONS)} texts of at most {MAX_TOKENS} tokens are equal"


def compare_roles(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """Compare with sentence-transformers in float32, with the checkpoint's prompts for roles."""
    theirs = SentenceTransformer(str(source), device="cpu", model_kwargs={"dtype": torch.float32})
    wanted = [
        np.asarray(made(TEXTS), np.float64)
        for made in (theirs.encode_query, theirs.encode_document)
    ]
    found = [
        np.asarray(client.encode(model, TEXTS, role=role).dense, np.float64)
        for role in ("query", "document")
    ]
    return assert_same_directions(np.concatenate(found), np.concatenate(wanted))


def compare_pairs(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """Compare the probability of the second of a pair's two classes with the ONNX graph, which has
    inputs of 160 tokens.
    """
    session = float_session(source / "reference.graph")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_padding(length=PAIR_TOKENS)
    wanted = []
    for document in TEXTS[1:]:
        encoded = tokenizer.encode(TEXTS[0], document)
        inputs = {"input_ids": [encoded.ids], "attention_mask": [encoded.attention_mask]}
        (logits,) = session.run(
            None, {name: np.asarray(rows, np.int64) for name, rows in inputs.items()}
        )
        wanted.append(logits[0])
    scores = client.score(model, TEXTS[0], TEXTS[1:], scale="logit").scores
    differences = np.abs(np.asarray(scores) - np.asarray(wanted)[:, 1])
    assert differences.max() <= MAX_DIFFERENCE, differences
    return f"logits differ by at most {differences.max():.1e}"


def compare_images(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """The first token's state after the backbone's last layer norm, by the ONNX graph, on images of
    transformers' processor.
    """
    session = float_session(source / "reference.graph", "/backbone/layernorm/Add_1_output_0")
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    files = pictures()[:4]
    images = [convert_to_rgb(Image.open(BytesIO(file))) for file in files]
    inputs = [
        np.asarray(processor(image, return_tensors="np")["pixel_values"], np.float32)
        for image in images
    ]
    wanted = np.concatenate(
        [session.run(None, {"input_image": pixels})[0][:, 0] for pixels in inputs]
    ).astype(np.float64)
    return assert_same_directions(np.asarray(client.encode(model, files).dense, np.float64), wanted)


def reaction_ids(source: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids as rxnfp's own tokenizer makes them: the matches of its regular expression, looked
    up in its vocabulary.
    """
    places = {
        token: place for place, token in enumerate((source / "vocab.txt").read_text().splitlines())
    }
    pattern = json.loads((source / "tokenizer.json").read_text())["pre_tokenizer"]["pattern"][
        "Regex"
    ]
    unknown = places["[UNK]"]
    return [
        [
            places["[CLS]"],
            *(places.get(token, unknown) for token in re.findall(pattern, text)),
            places["[SEP]"],
        ]
        for text in texts
    ]


def compare_fingerprints(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """The first token's state, by transformers on the ids of rxnfp's tokenizer."""
    theirs = transformers.BertModel.from_pretrained(
        source, dtype=torch.float32, add_pooling_layer=False
    ).eval()
    with torch.inference_mode():
        states = [
            theirs(torch.tensor([ids])).last_hidden_state[0, 0]
            for ids in reaction_ids(source, REACTIONS)
        ]
    found = np.asarray(client.encode(model, REACTIONS, normalize=False).dense, np.float64)
    wanted = torch.stack(states).double().numpy()
    assert np.abs(found - wanted).max() <= MAX_DIFFERENCE
    return f"states differ by at most {np.abs(found - wanted).max():.1e}"


def compare_classes(client: shoal.Client, model: str, source: Path, served: Path) -> str:
    """The probabilities of all classes of a reaction, by transformers on the ids of rxnfp's
    tokenizer.
    """
    theirs = transformers.BertForSequenceClassification.from_pretrained(
        source, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        logits = [theirs(torch.tensor([ids])).logits[0] for ids in reaction_ids(source, REACTIONS)]
    wanted = torch.stack(logits).softmax(-1).numpy()
    names = [theirs.config.id2label[place] for place in range(wanted.shape[1])]
    results = client.classify(model, REACTIONS)
    found = np.asarray(
        [
            [{one.label: one.score for one in result.labels}[name] for name in names]
            for result in results
        ]
    )
    assert np.abs(found - wanted).max() <= MAX_DIFFERENCE
    return (
        f"probabilities of {len(names)} classes differ by at most "
        f"{np.abs(found - wanted).max():.1e}"
    )
