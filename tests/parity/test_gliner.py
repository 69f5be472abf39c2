"""GLiNER against the gliner package: the same entities and scores from the same directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from libs.catalog.detect import read_card
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.models import EntitiesWork, ExtractResult, PackedModel, ScoreWork, load_model
from libs.models.text.heads.extraction import label_vectors
from tests.parity.gliner_models import LABELS, TEXTS, WORDS, Reference, make_reference, slug

# gliner, transformers and their dependencies emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[..., Reference]

SPANS: list[dict[str, object]] = [
    {},
    {"num_rnn_layers": 0, "hidden_size": 64},
    {"num_rnn_layers": 2, "embed_ent_token": False},
    {"span_mode": "markerV1"},
    {"subtoken_pooling": "last"},
    {"subtoken_pooling": "mean"},
    {"subtoken_pooling": "max", "ent_token": "[E]"},
]
WORDWISE: list[dict[str, object]] = [
    {"span_mode": "token_level"},
    {"span_mode": "token_level", "num_rnn_layers": 0},
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """References, each built once."""
    made: dict[str, Reference] = {}

    def get(config: Mapping[str, object], **options: str) -> Reference:
        key = repr((config, options))
        if key not in made:
            made[key] = make_reference(tmp_path_factory.mktemp("gliner"), config, **options)  # type: ignore[arg-type]
        return made[key]

    return get


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def found(
    model: PackedModel, *works: EntitiesWork
) -> list[list[dict[tuple[int, int, str], float]]]:
    """Run all works in one forward, as a worker does."""
    prepared = [model.prepare(work) for work in works]
    ends = np.cumsum([0, *(len(item.sequences) for item in prepared)])
    outputs = model.forward(
        prepared[0].head, [sequence for item in prepared for sequence in item.sequences]
    )
    results = [
        model.finish(item, outputs[start:end])
        for item, (start, end) in zip(prepared, pairwise(ends), strict=True)
    ]
    lists = []
    for work, result in zip(works, results, strict=True):
        assert isinstance(result, ExtractResult)
        for text, item in zip(work.texts, result.items, strict=True):
            assert all(text[entity.start : entity.end] == entity.text for entity in item.entities)
        lists.append(
            [
                {(one.start, one.end, one.label): one.score for one in item.entities}
                for item in result.items
            ]
        )
    return lists


def logits(model: PackedModel, text: str) -> NDArray[np.float32]:
    prepared = model.prepare(EntitiesWork([text], labels=tuple(LABELS)))
    output = model.forward(prepared.head, prepared.sequences)[0]
    assert isinstance(output, np.ndarray)
    return output


def assert_same(
    ours: list[dict[tuple[int, int, str], float]], theirs: list[dict[tuple[int, int, str], float]]
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(abs(mine[key] - other[key]) <= 1e-5 for key in mine)


def check(reference: Reference) -> None:
    model = load(reference.directory)
    for flat, threshold in ((True, 0.5), (True, 0.1), (False, 0.3)):
        ours = found(
            model, EntitiesWork(TEXTS, labels=tuple(LABELS), threshold=threshold, flat=flat)
        )[0]
        assert sum(map(len, ours)) > 3
        assert_same(ours, reference.entities(TEXTS, LABELS, threshold, flat=flat))
    for text in TEXTS:
        theirs = reference.logits(text, LABELS)
        assert np.abs(logits(model, text) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("config", SPANS + WORDWISE, ids=slug)
def test_labels_before_the_text_equal_the_package(make: Make, config: dict[str, object]) -> None:
    check(make(config))


@pytest.mark.parametrize(
    "config", [{}, {"span_mode": "token_level"}, {"hidden_size": 48}], ids=slug
)
def test_separate_label_encoder_equals_the_package(make: Make, config: dict[str, object]) -> None:
    check(make(config, labels_encoder="bert"))


@pytest.mark.parametrize("encoder", ["deberta-v2", "modernbert", "xlm-roberta"])
def test_encoders_of_published_models_equal_the_package(make: Make, encoder: str) -> None:
    check(make({}, encoder=encoder))


def test_default_threshold_is_the_packages(make: Make) -> None:
    reference = make({})
    ours = found(load(reference.directory), EntitiesWork(TEXTS, labels=tuple(LABELS)))[0]
    assert_same(ours, reference.entities(TEXTS, LABELS, 0.5, flat=True))


@pytest.mark.parametrize("labels_encoder", ["", "bert"])
@pytest.mark.parametrize("mode", ["markerV0", "token_level"])
def test_packed_batch_equals_each_text_alone(make: Make, mode: str, labels_encoder: str) -> None:
    """Jobs with different labels and texts of all lengths, including no words, run in one
    forward."""
    options = {"labels_encoder": labels_encoder} if labels_encoder else {}
    model = load(make({"span_mode": mode}, **options).directory)
    works = [
        EntitiesWork(TEXTS, labels=tuple(LABELS), threshold=0.2),
        EntitiesWork([" \n", *TEXTS[:2]], labels=("place",), threshold=0.2, flat=False),
        EntitiesWork(TEXTS[2:], labels=("city", "person", "city"), threshold=0.2),
    ]
    together = found(model, *works)
    fresh = load(make({"span_mode": mode}, **options).directory)
    for work, packed in zip(works, together, strict=True):
        alone = [
            found(fresh, EntitiesWork([text], work.labels, work.threshold, work.flat))[0][0]
            for text in work.texts
        ]
        assert_same(packed, alone)
    assert together[1][0] == {}


@pytest.mark.parametrize(
    ("config", "options"),
    [({}, {}), ({"span_mode": "token_level"}, {}), ({}, {"labels_encoder": "bert"})],
    ids=str,
)
def test_low_precision_errs_less_than_three_times_as_much(
    tmp_path: Path, config: dict[str, object], options: dict[str, str]
) -> None:
    reference = make_reference(tmp_path, config, **options)  # type: ignore[arg-type]
    exact = [reference.logits(text, LABELS) for text in TEXTS]
    ours = [logits(load(reference.directory, torch.bfloat16), text) for text in TEXTS]
    reference.model.model.to(torch.bfloat16)
    theirs = [reference.logits(text, LABELS) for text in TEXTS]
    error, allowed = (
        np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(values, exact, strict=True)))
        for values in (ours, theirs)
    )
    assert error < 3 * allowed


def test_long_texts_are_truncated_to_the_models_words(make: Make) -> None:
    reference = make({})
    model = load(reference.directory)
    words = [f"word{number}" for number in range(WORDS + 25)]
    text, begin, end = " ".join(words), " ".join(words[:WORDS]), " ".join(words[25:])
    labels = tuple(LABELS)
    at_end, at_start = (
        found(model, EntitiesWork([text], labels, 0.3, truncation=cut))[0][0]
        for cut in ("end", "start")
    )
    assert_same([at_end], reference.entities([begin], LABELS, 0.3, flat=True))
    moved = len(text) - len(end)
    theirs = reference.entities([end], LABELS, 0.3, flat=True)[0]
    assert_same(
        [at_start],
        [
            {
                (first + moved, last + moved, label): score
                for (first, last, label), score in theirs.items()
            }
        ],
    )
    with pytest.raises(InputTooLong, match=r"items\[1\]\.text has more than 60 words") as caught:
        model.prepare(EntitiesWork(["short", text], labels, truncation="none"))
    assert caught.value.field == "items[1].text"


def test_long_words_are_dropped_by_tokens(make: Make) -> None:
    """Words of several tokens that do not fit with the labels are dropped as whole words."""
    model = load(make({}).directory)
    text, labels = " ".join(["zyx" * 9] * 20), tuple(LABELS)
    spans = {}
    for cut in ("end", "start"):
        work = EntitiesWork([text], labels, 0.0, flat=False, truncation=cut)
        assert model.max_tokens - 30 < model.prepare(work).sequences[0].tokens <= model.max_tokens
        spans[cut] = [(start, end) for start, end, _ in found(model, work)[0][0]]
    assert min(spans["end"])[0] == 0
    assert max(end for _, end in spans["end"]) < len(text)
    assert min(spans["start"])[0] > 0
    assert max(end for _, end in spans["start"]) == len(text)
    with pytest.raises(InputTooLong, match="tokens, labels included; the model's maximum is 256"):
        model.prepare(EntitiesWork([text], labels, truncation="none"))


def test_words_without_tokens_do_not_move_the_others(make: Make) -> None:
    """A lone accent is a word that BERT's tokenizer drops. The package would take each later word
    for the previous one.
    """
    reference = make({"num_rnn_layers": 0})
    plain, accented = "Programs of licensee run here", "Programs \u0301 of licensee run here"
    ours = found(
        load(reference.directory), EntitiesWork([accented], tuple(LABELS), 0.05, flat=False)
    )[0][0]
    theirs = reference.entities([plain], LABELS, 0.05, flat=False)[0]
    moved = {
        (start + 2 * (start > 8), end + 2 * (end > 8), label): score
        for (start, end, label), score in theirs.items()
    }
    assert_same([ours], [moved])


@pytest.mark.parametrize(
    "text", ["<<ENT>> person <<SEP>> a city", "🏳️‍🌈 x́y 👩‍👩‍👧", "\u200b\u200d", "０１２ﬁ"]
)
def test_odd_texts_keep_their_offsets(make: Make, text: str) -> None:
    model = load(make({}).directory)
    assert all(
        0 <= start < end <= len(text)
        for start, end, _ in found(model, EntitiesWork([text], ("a", "b"), 0.0))[0][0]
    )


def test_invalid_requests_are_refused(make: Make) -> None:
    model = load(make({}).directory)
    with pytest.raises(InvalidInput, match="has no fixed labels") as caught:
        model.prepare(EntitiesWork(["a"]))
    assert caught.value.field == "entities.labels"
    with pytest.raises(
        InvalidInput, match=r"the labels have \d+ tokens; the model's maximum with the text is 256"
    ) as caught:
        model.prepare(EntitiesWork(["a"], tuple(f"label number {number}" for number in range(100))))
    assert caught.value.field == "entities.labels"
    with pytest.raises(TaskNotSupported):
        model.prepare(ScoreWork("a", ["b"]))


def test_label_vector_cache_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make({}, labels_encoder="bert")
    monkeypatch.setattr(label_vectors, "_KEPT", 2)
    monkeypatch.setattr(label_vectors, "_TOKENS", 4)
    model = load(reference.directory)
    for labels in (LABELS, LABELS[::-1], ["city", "person", "licence name", "colour"]):
        ours = found(model, EntitiesWork(TEXTS, tuple(labels), 0.3))[0]
        assert_same(ours, reference.entities(TEXTS, labels, 0.3, flat=True))


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(make({}).directory, tmp_path / "copy"))


def edit(directory: Path, **values: object) -> None:
    path = directory / "gliner_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in {**config, **values}.items() if value != "absent"})
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fuse_layers", True),
        ("post_fusion_schema", "l2l-l2t"),
        ("span_mode", "conv_conv"),
        ("subtoken_pooling", "sum"),
        ("span_encoder_config", {"model_type": "rnn"}),
        ("precomputed_prompts_mode", True),
        ("words_splitter_type", "spacy"),
        ("labels_decoder", "gpt2"),
        ("relations_layer", "attention"),
        ("model_type", "gliner_streaming_span"),
        ("max_width", 0),
    ],
)
def test_unsupported_settings_are_refused_by_key(copy: Path, key: str, value: object) -> None:
    edit(copy, **{key: value})
    with pytest.raises(ModelBroken, match=rf"gliner_config\.json: `{key}`"):
        load(copy)


@pytest.mark.parametrize(
    ("name", "key"), [("encoder_config", "encoder_config"), ("max_len", "max_len")]
)
def test_invalid_values_are_named(copy: Path, name: str, key: str) -> None:
    edit(copy, **{name: "absent" if name == "encoder_config" else -3})
    with pytest.raises(ModelBroken, match=rf"gliner_config\.json: `{key}`"):
        load(copy)


def test_incomplete_checkpoints_are_refused_with_advice(copy: Path) -> None:
    """The files are those of the package's first versions, not converted by a store."""
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(
        ModelBroken,
        match=r"pytorch_model\.bin: torch checkpoints are pickles.*shoal models convert DIR",
    ):
        load(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: missing.*save_pretrained"):
        load(copy)
    edit(copy, encoder_config="absent")
    with pytest.raises(ModelBroken, match=r"`encoder_config` is missing.*save_pretrained"):
        load(copy)


def test_unknown_and_missing_tensors_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "scorer.proj_token.weight": torch.zeros(2)}, copy / "model.safetensors")
    with pytest.raises(
        ModelBroken,
        match=r"model\.safetensors: tensor 'scorer\.proj_token\.weight' does not belong",
    ):
        load(copy)
    for name in (
        "rnn.lstm.weight_ih_l0",
        "span_rep_layer.span_rep_layer.out_project.3.weight",
        "prompt_rep_layer.0.bias",
    ):
        save_file(
            {key: value for key, value in tensors.items() if key != name},
            copy / "model.safetensors",
        )
        with pytest.raises(ModelBroken, match=name.replace(".", r"\.")):
            load(copy)
        save_file({**tensors, name: tensors[name][:-1].clone()}, copy / "model.safetensors")
        with pytest.raises(ModelBroken, match=name.replace(".", r"\.")):
            load(copy)


def test_markers_must_be_tokens(copy: Path) -> None:
    edit(copy, class_token_index=7)
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: token '<<ENT>>' with the id 7"):
        load(copy)
    edit(copy, class_token_index=-1, ent_token="<<OTHER>>")
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: token '<<OTHER>>'"):
        load(copy)


def test_encoder_for_labels_needs_its_own_files(make: Make, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(make({}, labels_encoder="bert").directory, tmp_path / "copy"))
    shutil.rmtree(copy / "labels_tokenizer")
    with pytest.raises(ModelBroken, match=r"labels_tokenizer/tokenizer\.json: missing"):
        load(copy)
    edit(copy, labels_encoder_config="absent")
    with pytest.raises(ModelBroken, match=r"`labels_encoder_config` is missing"):
        load(copy)


@pytest.mark.parametrize(
    ("biased", "tokenizer", "wanted"),
    [(False, 10**30, 4096), (True, 10**30, 256), (False, 300, 300)],
)
def test_longest_sequence_is_read_from_the_checkpoint(
    copy: Path, biased: bool, tokenizer: int, wanted: int
) -> None:
    """The tokenizer's limit and the positions decide. DeBERTa v3 has no limit, and its tokenizer
    has a huge number.
    """
    encoder = json.loads((copy / "gliner_config.json").read_text())["encoder_config"]
    edit(copy, encoder_config={**encoder, "position_biased_input": biased})
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(
        json.dumps({**settings, "model_max_length": float(tokenizer)})
    )
    assert read_card(copy, "test/model").max_tokens == wanted


def test_card_describes_the_model(copy: Path) -> None:
    card = read_card(copy, "test/model@main")
    assert (card.kind, card.family, card.tasks, card.labels, card.revision) == (
        "gliner",
        "bert",
        ("entities",),
        (),
        "main",
    )
    before = read_card(copy, "test/model").revision
    edit(copy, max_width=3)
    assert read_card(copy, "test/model").revision != before
