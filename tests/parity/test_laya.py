"""laya against a reference implemented here: transformers' ModernBERT, torch's encoder layers and
the package's sequences.

Names of tensors, the prompt, its limits and the temperatures are those of the package laya 0.4.15
(common, agent).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.models import ClassifyWork, ExtractResult, PackedModel, ScoreWork, Truncation
from tests.parity.recipes import RECIPES, Size
from tests.parity.test_heads import TEXTS, load, run
from tests.parity.tokenizers import train_tokenizer

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

LABELS = ("law", "the weather of tomorrow", "copying of free programs", "love")
QUESTION = "Which of these labels fits best?"
SIZE = 128
TEMPERATURES = {"choice:2": 0.1, "choice:3-5": 1.5, "choice:6-10": True, "score:2": 3.0}


class Decisions(nn.Module):
    """Return the package's tensors under its names."""

    def __init__(self, encoder: nn.Module, layers: int) -> None:
        super().__init__()
        self.encoder = encoder
        layer = nn.TransformerEncoderLayer(
            SIZE, SIZE // 64, 4 * SIZE, batch_first=True, norm_first=True
        )
        self.head = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers else None
        )
        self.type_emb = nn.Embedding(3, SIZE)
        self.scorer = nn.Sequential(
            nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 1)
        )
        self.act_head = nn.Sequential(nn.Linear(SIZE + 4, 256), nn.GELU(), nn.Linear(256, 2))
        self.register_buffer("temperature", torch.ones(3))

    def logits(self, ids: Sequence[int], markers: Sequence[int]) -> Tensor:
        states = (
            self.encoder(input_ids=torch.tensor([ids])).last_hidden_state + self.type_emb.weight[0]
        )
        states = states if self.head is None else self.head(states)
        scores: Tensor = self.scorer(states[0, list(markers)]).squeeze(-1)
        return scores


@dataclass(frozen=True)
class Reference:
    model: Decisions
    tokenizer: Any
    limit: int
    budget: int

    def sequence(
        self, text: str, labels: Sequence[str], question: str, side: Truncation
    ) -> tuple[list[int], list[int]]:
        """Compute the package's `build_sequence` for a choice in which all options keep a
        marker."""
        options = [[self.tokenizer.mask_token_id, *self._ids(" " + label)[:48]] for label in labels]
        room = self.budget - sum(map(len, options))
        if room < 16:
            most = max(4, (self.budget - 16) // len(options))
            options = [option[:most] for option in options]
            room = self.budget - sum(map(len, options))
        last = self.tokenizer.sep_token_id
        ids = [
            self.tokenizer.cls_token_id,
            *self._ids(f"choice question: {question}")[: max(8, room)],
            last,
        ]
        markers = []
        for option in options:
            markers.append(len(ids))
            ids += option
        state, room = self._ids(text), self.limit - len(ids) - 2
        return [*ids, last, *(state[:room] if side == "end" else state[-room:]), last], markers

    def scores(
        self,
        text: str,
        labels: Sequence[str],
        temperature: float,
        question: str = QUESTION,
        side: Truncation = "end",
    ) -> dict[str, float]:
        with torch.inference_mode():
            logits = self.model.logits(*self.sequence(text, labels, question, side))
        return dict(zip(labels, (logits / temperature).softmax(-1).tolist(), strict=True))

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(
            text.replace(self.tokenizer.mask_token, " "), add_special_tokens=False
        )["input_ids"]
        return found


def write(directory: Path, *, layers: int = 2, limit: int = 512, **more: object) -> Reference:
    """A random checkpoint in the package's form."""
    own = Tokenizer.from_str(train_tokenizer("bert", 400).to_str())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
    values = RECIPES["modernbert"].config(Size(len(tokenizer), SIZE, 2, 4, 64))
    config = transformers.AutoConfig.for_model(
        "modernbert", **(dict(values) | {"max_position_embeddings": 512})
    )
    model = Decisions(transformers.AutoModel.from_config(config), layers).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
            if (
                parameter.dim() == 1
                and ("norm" in name or name == "scorer.0.weight")
                and name.endswith("weight")
            ):
                parameter.add_(1.0)
    config.save_pretrained(directory / "encoder")
    tokenizer.save_pretrained(directory / "tokenizer")
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "encoder": "answerdotai/ModernBERT-base",
        "head_layers": layers,
        "max_len": limit,
        "act_costs": {"ask": 1.0},
        "temperature": [0.8, 1.0, 1.0],
        "temperature_by_options": TEMPERATURES,
    }
    (directory / "rl_agent_config.json").write_text(json.dumps(settings | more))
    return Reference(model, tokenizer, limit, int(str(more.get("head_max_len", 192))))


def scores(model: PackedModel, work: ClassifyWork) -> list[dict[str, float]]:
    result = run(model, work)[0]
    assert isinstance(result, ExtractResult)
    return [{item.label: item.score for item in found.labels} for found in result.items]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_scores_equal_the_reference(layers: int, tmp_path: Path) -> None:
    """Score each text alone by the reference, and all together by Shoal."""
    reference = write(tmp_path, layers=layers)
    model = load(tmp_path)
    card = model.card
    assert (card.kind, card.family, card.tasks, card.labels, model.max_tokens) == (
        "laya",
        "modernbert",
        ("classify",),
        (),
        512,
    )
    for found, text in zip(scores(model, ClassifyWork(TEXTS, LABELS)), TEXTS, strict=True):
        assert found == pytest.approx(reference.scores(text, LABELS, 1.5), abs=1e-5)


def test_text_has_the_same_answer_alone(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path)
    together = scores(model, ClassifyWork(TEXTS, LABELS))
    for found, text in zip(together, TEXTS, strict=True):
        assert found == pytest.approx(scores(model, ClassifyWork([text], LABELS))[0], abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "temperature"),
    [(LABELS[:2], 0.5), (LABELS, 1.5), ((*LABELS, "a", "b"), 1.0), (tuple("abcdefghijkl"), 0.8)],
    ids=["raised to the least", "as it is", "no number", "of all choices"],
)
def test_temperature_depends_on_the_number_of_options(
    labels: tuple[str, ...], temperature: float, tmp_path: Path
) -> None:
    reference = write(tmp_path)
    [found] = scores(load(tmp_path), ClassifyWork(["a copy"], labels))
    assert found == pytest.approx(reference.scores("a copy", labels, temperature), abs=1e-5)


def test_hypothesis_is_the_question(tmp_path: Path) -> None:
    reference = write(tmp_path)
    [found] = scores(
        load(tmp_path),
        ClassifyWork(["a [MASK] copy"], LABELS, hypothesis="What is a [MASK] program?"),
    )
    assert found == pytest.approx(
        reference.scores("a [MASK] copy", LABELS, 1.5, "What is a [MASK] program?"), abs=1e-5
    )


@pytest.mark.parametrize("side", ["end", "start"])
def test_only_texts_are_truncated(side: Truncation, tmp_path: Path) -> None:
    reference = write(tmp_path, limit=64)
    model, text = load(tmp_path), " ".join(TEXTS) * 200
    work = ClassifyWork([text], LABELS, truncation=side)
    [sequence] = model.prepare(work).sequences
    assert sequence.ids.tolist() == reference.sequence(text, LABELS, QUESTION, side)[0]
    assert scores(model, work)[0] == pytest.approx(
        reference.scores(text, LABELS, 1.5, side=side), abs=1e-5
    )


def test_numerous_options_share_the_budget(tmp_path: Path) -> None:
    """Options are truncated to equal parts of the budget, and the question to
    the rest, as in the package.
    """
    reference = write(tmp_path, head_max_len=48)
    labels = tuple(f"{first} {second} of the free programs" for first in "abc" for second in "xy")
    model, work = load(tmp_path), ClassifyWork(["a copy"], labels, hypothesis="which " * 30)
    [sequence] = model.prepare(work).sequences
    ids, markers = reference.sequence("a copy", labels, "which " * 30, "end")
    assert sequence.ids.tolist() == ids
    assert np.array_equal(np.flatnonzero(sequence.ids == 4), markers)
    alike = tuple(f"the law of the free programs {letter}" for letter in "abcdef")
    with pytest.raises(InvalidInput, match="is the same as classify") as refused:
        model.prepare(ClassifyWork(["a"], alike))
    assert refused.value.field == "classify.labels[1]"


def test_invalid_requests_are_refused_with_path(tmp_path: Path) -> None:
    write(tmp_path, limit=64)
    model = load(tmp_path)
    for work, field in (
        (ClassifyWork(["a"]), "classify.labels"),
        (ClassifyWork(["a"], ("law", "law")), "classify.labels[1]"),
        (ClassifyWork(["a"], LABELS, multi_label=True), "classify.multi_label"),
    ):
        with pytest.raises(InvalidInput) as refused:
            model.prepare(work)
        assert refused.value.field == field
    with pytest.raises(InputTooLong, match="question, labels and special tokens included") as long:
        model.prepare(ClassifyWork(["a", "the law " * 100], LABELS, truncation="none"))
    assert long.value.field == "items[1].text"
    with pytest.raises(InputTooLong) as many:
        model.prepare(
            ClassifyWork(["a"], tuple(f"{one} {two}" for one in "abcdefgh" for two in "abcdefgh"))
        )
    assert many.value.field == "classify.labels"
    with pytest.raises(TaskNotSupported):
        model.prepare(ScoreWork("a", ["b"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"option_layout": "parallel"}, "`option_layout` is 'parallel', which is not served"),
        ({"temperature": [1.0]}, "`temperature` must be a list of three numbers"),
        ({"max_len": 8}, "`max_len` is 8"),
        ({"head_layers": 1000}, "`head_layers` is 1000"),
        ({"head_layers": 3}, r"tensor `head\.layers\.2\."),
        ({"head_layers": 1}, r"tensor 'head\.layers\.1\..*' does not belong"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    more: dict[str, object], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    path = tmp_path / "rl_agent_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path)


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"type_emb.weight": torch.zeros(2, SIZE)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ModelBroken, match=r"`type_emb\.weight` has the shape \(2, 128\), not \(3, 128\)"
    ):
        load(tmp_path)
