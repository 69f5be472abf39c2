"""GLiClass against the gliclass package's model and pipeline, on random checkpoints written by the
package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gliclass
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.models import ClassifyWork, ExtractResult, PackedModel, ScoreWork, Truncation, load_model
from tests.parity.recipes import RECIPES, Size
from tests.parity.test_heads import TEXTS, assert_close, load, run
from tests.parity.tokenizers import train_tokenizer

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

LABELS = ("law", "the weather of tomorrow", "copying of free programs", "love")
MARKERS = ["<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>"]
Settings = Mapping[str, object]

VARIANTS: dict[str, Settings] = {
    "of v1": {},
    "of v3": {"scorer_type": "mlp", "layer_wise": True},
    "weighted dot": {"scorer_type": "weighted-dot", "pooling_strategy": "avg"},
    "hopfield": {"scorer_type": "hopfield", "pooling_strategy": "last"},
    "lengths and a scale": {"normalize_features": True, "pooling_strategy": "sum"},
    "labels after the text": {"prompt_first": False, "pooling_strategy": "max"},
    "means of labels": {"class_token_pooling": "average", "pooling_strategy": "rms"},
    "means of labels without markers": {
        "class_token_pooling": "average",
        "embed_class_token": False,
        "extract_text_features": True,
        "prompt_first": True,
    },
    "labels after the text, in means": {
        "class_token_pooling": "average",
        "prompt_first": False,
        "extract_text_features": True,
    },
    "first words of labels": {
        "embed_class_token": False,
        "pooling_strategy": "abs_max",
        "extract_text_features": True,
    },
    "largest numbers of the text": {"pooling_strategy": "max", "extract_text_features": True},
    "mean of the text": {
        "pooling_strategy": "abs_avg",
        "extract_text_features": True,
        "hidden_size": 48,
    },
    "labels that read the whole": {"scorer_type": "cross-attn", "pooling_strategy": "pass"},
    "labels that read the text": {
        "scorer_type": "cross-attn",
        "pooling_strategy": "pass",
        "extract_text_features": True,
        "scorer_num_heads": 4,
        "scorer_mlp_hidden_size": 40,
        "normalize_features": True,
    },
    "segments": {"use_segment_embeddings": True, "projector_hidden_act": "relu"},
    "segments and labels after the text": {"use_segment_embeddings": True, "prompt_first": False},
}


def write(
    directory: Path, settings: Settings, *, encoder: str = "deberta-v2", **more: object
) -> tuple[Any, Any]:
    """Return the package's model and tokenizer, saved in `directory`. `more` overrides the
    encoder's configuration.
    """
    own = Tokenizer.from_str(train_tokenizer(RECIPES[encoder].tokenizer, 400).to_str())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    values = RECIPES[encoder].config(Size(len(tokenizer), 64, 2, 4, 64))
    label, text, example = (tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS)
    config = gliclass.GLiClassModelConfig(
        encoder_config=transformers.AutoConfig.for_model(encoder, **(dict(values) | more)),
        encoder_model=encoder,
        class_token_index=label,
        text_token_index=text,
        example_token_index=example,
        **({"prompt_first": True} | dict(settings)),
    )
    model = gliclass.GLiClassModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The heads amplify their inputs several times over, and rounding errors too.
            parameter.normal_(0.0, 0.2 if "encoder_model" in name else 0.1, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def reference(
    model: Any, tokenizer: Any, texts: Sequence[str], *, multi_label: bool, limit: int
) -> list[dict[str, float]]:
    """Return every label's score, one text at a time, because the package also pools padding."""
    pipeline = gliclass.ZeroShotClassificationPipeline(
        model, tokenizer, device="cpu", progress_bar=False, max_length=limit
    )
    kind = "multi-label" if multi_label else "single-label"
    found: list[dict[str, float]] = pipeline(
        list(texts), list(LABELS), batch_size=1, classification_type=kind, return_hierarchical=True
    )
    return found


def logits(model: PackedModel, work: ClassifyWork) -> list[NDArray[np.float32]]:
    prepared = model.prepare(work)
    return [np.asarray(row) for row in model.forward(prepared.head, prepared.sequences)]


def scores(model: PackedModel, work: ClassifyWork) -> list[dict[str, float]]:
    result = run(model, work)[0]
    assert isinstance(result, ExtractResult)
    for found in result.items:
        assert [item.score for item in found.labels] == sorted(
            (item.score for item in found.labels), reverse=True
        )
    return [{item.label: item.score for item in found.labels} for found in result.items]


def check_logits(directory: Path, model: Any, tokenizer: Any, settings: Settings) -> None:
    """Score each text alone by the package, and all together by Shoal."""
    ours = np.stack(logits(load(directory), ClassifyWork(TEXTS, LABELS)))
    assert_close(
        ours,
        package_logits(model, tokenizer, prompt_first=bool(settings.get("prompt_first", True))),
    )


def package_logits(model: Any, tokenizer: Any, *, prompt_first: bool = True) -> NDArray[np.float32]:
    prompt = "".join(f"<<LABEL>>{label}" for label in LABELS) + "<<SEP>>"
    inputs = [
        tokenizer(prompt + text if prompt_first else text + prompt, return_tensors="pt")
        for text in TEXTS
    ]
    with torch.inference_mode():
        rows = [
            model(**each, max_num_classes=len(LABELS)).logits[0].float().numpy() for each in inputs
        ]
    return np.stack(rows)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_form_equals_the_package(settings: Settings, tmp_path: Path) -> None:
    check_logits(tmp_path, *write(tmp_path, settings), settings)


@pytest.mark.parametrize(
    ("encoder", "pooling"), [("modernbert", "avg"), ("bert", "first"), ("t5", "max")]
)
def test_other_encoders_equal_the_package(encoder: str, pooling: str, tmp_path: Path) -> None:
    settings = {"scorer_type": "mlp", "pooling_strategy": pooling}
    check_logits(
        tmp_path, *write(tmp_path, settings, encoder=encoder, max_position_embeddings=512), settings
    )


@pytest.mark.parametrize("encoder", ["modernbert", "deberta-v2"])
def test_multilingual_scorer_equals_the_package(encoder: str, tmp_path: Path) -> None:
    """Labels of gliclass-multilang attend to the states of the text, of an encoder like mmBERT
    (ModernBERT) or mDeBERTa.
    """
    settings = {
        "scorer_type": "cross-attn",
        "pooling_strategy": "pass",
        "class_token_pooling": "average",
        "scorer_num_heads": 4,
    }
    check_logits(
        tmp_path, *write(tmp_path, settings, encoder=encoder, max_position_embeddings=512), settings
    )


def test_decoder_is_refused(tmp_path: Path) -> None:
    """The package makes it bidirectional with another package, or its labels do not see the
    text."""
    write(tmp_path, {}, encoder="qwen2")
    with pytest.raises(
        ModelBroken, match=r"config\.json: `encoder_config` describes a decoder \(qwen2\)"
    ):
        load(tmp_path)


def test_segments_with_absolute_positions_equal_the_package(tmp_path: Path) -> None:
    settings = {"use_segment_embeddings": True}
    check_logits(
        tmp_path,
        *write(tmp_path, settings, position_biased_input=True, max_position_embeddings=512),
        settings,
    )


@pytest.mark.parametrize("multi_label", [True, False])
def test_scores_equal_the_pipeline(multi_label: bool, tmp_path: Path) -> None:
    package = write(tmp_path, {"normalize_features": True})
    model = load(tmp_path)
    assert (model.card.kind, model.card.tasks, model.card.labels, model.max_tokens) == (
        "gliclass",
        ("classify",),
        (),
        1024,
    )
    texts = [*TEXTS, *(["copy of the law " * 600] if multi_label else [])]
    theirs = reference(*package, texts, multi_label=multi_label, limit=1024)
    ours = scores(model, ClassifyWork(texts, LABELS, multi_label=multi_label))
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_checkpoint_sets_the_default_problem_type(problem: str, tmp_path: Path) -> None:
    write(tmp_path, {"problem_type": problem})
    model = load(tmp_path)
    said = ClassifyWork(TEXTS, LABELS, multi_label=problem.startswith("multi"))
    assert scores(model, ClassifyWork(TEXTS, LABELS)) == scores(model, said)
    kept = scores(model, ClassifyWork(TEXTS, LABELS, multi_label=True, threshold=0.5))
    every = scores(model, ClassifyWork(TEXTS, LABELS, multi_label=True))
    assert kept == [
        {label: score for label, score in found.items() if score >= 0.5} for found in every
    ]
    assert 0 < sum(map(len, kept)) < sum(map(len, every))


@pytest.mark.parametrize("prompt_first", [True, False])
@pytest.mark.parametrize("truncation", ["end", "start"])
def test_only_texts_are_truncated(
    prompt_first: bool, truncation: Truncation, tmp_path: Path
) -> None:
    """The labels' tokens are those of a short text, and the text keeps its first or last ones."""
    _, tokenizer = write(tmp_path, {"prompt_first": prompt_first}, encoder="modernbert")
    model = load(tmp_path)
    assert model.max_tokens == 64
    text = tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]
    [cut] = model.prepare(ClassifyWork([TEXTS[3]], LABELS, truncation=truncation)).sequences
    whole = tokenizer(
        "".join(f"<<LABEL>>{label}" for label in LABELS) + "<<SEP>>", add_special_tokens=False
    )["input_ids"]
    room = 64 - 2 - len(whole)
    kept = text[:room] if truncation == "end" else text[-room:]
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert cut.ids.tolist() == [first, *(whole + kept if prompt_first else kept + whole), last]


@pytest.mark.parametrize("prompt_first", [True, False])
def test_markers_in_a_text_are_not_labels(prompt_first: bool, tmp_path: Path) -> None:
    write(tmp_path, {"prompt_first": prompt_first})
    found = scores(
        load(tmp_path), ClassifyWork(["free <<LABEL>> programs <<SEP>> and love"], LABELS)
    )
    assert set(found[0]) == set(LABELS)


def test_hypothesis_surrounds_each_label(tmp_path: Path) -> None:
    write(tmp_path, {})
    model = load(tmp_path)
    [wanted] = logits(model, ClassifyWork(["a copy"], ("of law?", "of love?")))
    [got] = logits(model, ClassifyWork(["a copy"], ("law", "love"), hypothesis="of {}?"))
    assert np.array_equal(got, wanted)


def test_invalid_requests_are_refused_with_path(tmp_path: Path) -> None:
    write(tmp_path, {}, encoder="modernbert")
    model = load(tmp_path)
    for work, field in (
        (ClassifyWork(["a"]), "classify.labels"),
        (ClassifyWork(["a"], ("law", "a <<SEP>> b")), "classify.labels[1]"),
        (ClassifyWork(["a"], ("law", "")), "classify.labels[1]"),
        (ClassifyWork(["a"], LABELS, hypothesis="none"), "classify.hypothesis"),
    ):
        with pytest.raises(InvalidInput) as refused:
            model.prepare(work)
        assert refused.value.field == field
    with pytest.raises(
        InputTooLong, match="labels and special tokens included; the model's maximum is 64"
    ) as long:
        model.prepare(ClassifyWork(TEXTS, LABELS, truncation="none"))
    assert long.value.field == "items[3].text"
    with pytest.raises(InputTooLong) as many:
        model.prepare(ClassifyWork(["a"], LABELS * 5))
    assert many.value.field == "classify.labels"
    with pytest.raises(TaskNotSupported):
        model.prepare(ScoreWork("a", ["b"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture_type": "bi-encoder"},
        {"architecture_type": "decoder-kv"},
        {"use_lstm": True},
        {"squeeze_layers": True},
        {"encoder_layer_id": 1},
        {"use_calibrator": True},
        {"scorer_type": "cross-attn"},
        {"pooling_strategy": "pass"},
        {"class_token_pooling": "max"},
        {"problem_type": "regression"},
        {"extract_text_features": True, "pooling_strategy": "last"},
        {"encoder_config": {"hidden_size": 64}},
    ],
)
def test_unsupported_settings_are_refused_by_key(settings: Settings, tmp_path: Path) -> None:
    write(tmp_path, {})
    edit(tmp_path, settings)
    with pytest.raises(ModelBroken, match=f"config.json: `{list(settings)[-1]}` is "):
        load(tmp_path)


def test_tensors_and_markers_are_accounted_for(tmp_path: Path) -> None:
    write(tmp_path, {"scorer_type": "mlp"})
    edit(tmp_path, {"scorer_type": "simple"})
    with pytest.raises(ModelBroken, match=r"tensor 'model\.scorer\.mlp\.0\.bias' does not belong"):
        load(tmp_path)
    edit(tmp_path, {"scorer_type": "hopfield"})
    with pytest.raises(ModelBroken, match=r"tensor `scorer\.q_proj\.weight` is missing"):
        load(tmp_path)
    edit(tmp_path, {"scorer_type": "mlp", "class_token_index": 7})
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: '<<LABEL>>' is not the token 7"):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.text_projector.linear_1.weight"] = torch.zeros(3, 64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelBroken,
        match=r"`text_projector\.linear_1\.weight` has the shape \(3, 64\), not \(64, 64\)",
    ):
        load(tmp_path)


def test_bfloat16_is_as_good_as_the_package_in_bfloat16(tmp_path: Path) -> None:
    model, tokenizer = write(tmp_path, {"scorer_type": "mlp"})
    exact = np.stack(logits(load(tmp_path), ClassifyWork(TEXTS, LABELS)))
    low = load_model(tmp_path, "test/model", torch.device("cpu"), torch.bfloat16)
    ours = np.stack(logits(low, ClassifyWork(TEXTS, LABELS)))
    theirs = package_logits(model.to(torch.bfloat16), tokenizer)
    assert np.abs(ours - exact).max() < 3 * np.abs(theirs - exact).max()


def edit(directory: Path, settings: Settings) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
