"""GLiREL against the glirel package: equal relations and scores between the same entities."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from shoal.extractions import Relation

from libs.catalog.detect import read_card
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.kinds.glirel import head as pairs
from libs.kinds.glirel import processor as glirel
from libs.models import EntitiesWork, ExtractResult, Given, PackedModel, RelationsWork, load_model
from libs.models.interface.sequences import SparseRow
from tests.parity.gliner_models import slug
from tests.parity.glirel_models import (
    LABELS,
    WORDS,
    Found,
    Reference,
    Span,
    make_reference,
    spans_of,
)

# glirel, transformers and their dependencies emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[..., Reference]

TEXTS = [
    "Programs such as the GPL, which naïve Überraschung-users in 東京 run 😀, are free_software.",
    "The licensee conveys; the source code of the work must be conveyed too (see section 6). " * 2,
    "To protect your rights, we need to prevent others.",
]
SPANS = [
    spans_of(TEXTS[0], "GPL", "Programs such", "Überraschung-users", "東京", "free_software"),
    spans_of(TEXTS[1], "The licensee", "source code", "work", "conveyed too", "section 6"),
    spans_of(TEXTS[2], "protect your", "we"),
]
CONFIGS: list[dict[str, object]] = [
    {},
    {"hidden_size": 64},
    {"label_embed_strategy": "ent_token"},
    {"label_embed_strategy": "label"},
    {"label_embed_strategy": "ent_token", "subtoken_pooling": "last"},
    {"max_entity_pair_distance": 4},
    {"scorer": "concat_proj"},
    {"coref_classifier": True},
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
            made[key] = make_reference(tmp_path_factory.mktemp("glirel"), config, **options)  # type: ignore[arg-type]
        return made[key]

    return get


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def work(
    texts: Sequence[str] = TEXTS,
    spans: Sequence[Sequence[Span]] = SPANS,
    labels: Sequence[str] = LABELS,
    **more: object,
) -> RelationsWork:
    given = tuple(
        tuple(Given(start, end, f"kind {number}") for number, (start, end) in enumerate(own))
        for own in spans
    )
    return RelationsWork(list(texts), tuple(labels), entities=given, **more)  # type: ignore[arg-type]


def answers(model: PackedModel, *works: RelationsWork) -> list[list[tuple[Relation, ...]]]:
    """Run all works in one forward, as a worker does."""
    prepared = [model.prepare(one) for one in works]
    ends = np.cumsum([0, *(len(item.sequences) for item in prepared)])
    sequences = [sequence for item in prepared for sequence in item.sequences]
    outputs = model.forward("relations", sequences) if sequences else []
    results = [
        model.finish(item, outputs[start:end])
        for item, (start, end) in zip(prepared, pairwise(ends), strict=True)
    ]
    assert all(isinstance(result, ExtractResult) for result in results)
    return [
        [item.relations for item in result.items]
        for result in results
        if isinstance(result, ExtractResult)
    ]


def found(model: PackedModel, *works: RelationsWork) -> list[list[dict[Found, float]]]:
    return [[scores(relations) for relations in items] for items in answers(model, *works)]


def scores(relations: Sequence[Relation]) -> dict[Found, float]:
    return {
        ((one.head.start, one.head.end), (one.tail.start, one.tail.end), one.label): one.score
        for one in relations
    }


def logits(model: PackedModel, text: str, spans: Sequence[Span]) -> NDArray[np.float32]:
    prepared = model.prepare(work([text], [spans]))
    output = model.forward(prepared.head, prepared.sequences)[0]
    assert isinstance(output, np.ndarray)
    return output


def assert_same(ours: Mapping[Found, float], theirs: Mapping[Found, float]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[key] - theirs[key]) <= 1e-5 for key in ours)


def check(reference: Reference) -> None:
    model = load(reference.directory)
    # Relative to the largest of all texts: the few logits of one text may all be small differences
    # of large sums.
    theirs = np.concatenate(
        [reference.logits(text, spans, LABELS) for text, spans in zip(TEXTS, SPANS, strict=True)]
    )
    own = np.concatenate(
        [logits(model, text, spans) for text, spans in zip(TEXTS, SPANS, strict=True)]
    )
    assert np.abs(own - theirs).max() <= 1e-5 * np.abs(theirs).max()
    for threshold in (0.0, 0.01, 0.3):
        ours = found(model, work(threshold=threshold))[0]
        assert sum(map(len, ours))
        for text, spans, mine in zip(TEXTS, SPANS, ours, strict=True):
            assert_same(mine, reference.relations(text, spans, LABELS, threshold))


@pytest.mark.parametrize("config", CONFIGS, ids=slug)
def test_relations_and_scores_equal_the_package(make: Make, config: dict[str, object]) -> None:
    check(make(config))


def test_published_models_encoder_equals_the_package(make: Make) -> None:
    check(make({}, encoder="deberta-v2"))


def test_default_threshold_is_the_packages(make: Make) -> None:
    reference = make({"scorer": "concat_proj"})
    (ours,) = found(load(reference.directory), work())
    assert sum(map(len, ours))
    for text, spans, mine in zip(TEXTS, SPANS, ours, strict=True):
        assert_same(mine, reference.relations(text, spans, LABELS, 0.5))


def test_answer_repeats_the_entities_and_has_the_best_first(make: Make) -> None:
    ((first, *_),) = answers(load(make({}).directory), work(threshold=0.0))
    assert len(first) == 5 * 4 * 3
    assert [one.score for one in first] == sorted((one.score for one in first), reverse=True)
    kinds = {span: f"kind {number}" for number, span in enumerate(SPANS[0])}
    for entity in [entity for one in first for entity in (one.head, one.tail)]:
        assert (entity.text, entity.score) == (TEXTS[0][entity.start : entity.end], 1.0)
        assert entity.label == kinds[entity.start, entity.end]
    assert {one.head.text for one in first} == {
        "GPL",
        "Programs such",
        "Überraschung-users",
        "東京",
        "free_software",
    }


@pytest.mark.parametrize("scorer", ["dot", "concat_proj"])
def test_packed_batch_equals_each_text_alone(
    make: Make, scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs with different labels, texts of all lengths and numbers of entities run in one forward,
    and in small pieces of it.
    """
    directory = make({"scorer": scorer}).directory
    works = [
        work(threshold=0.0),
        work(["a", *TEXTS[:2]], [[], SPANS[0][:2], SPANS[1]], ["place"], threshold=0.1),
        work(TEXTS[2:], SPANS[2:], ["part", "works for", "part"], threshold=0.0),
    ]
    together = found(load(directory), *works)
    monkeypatch.setattr(pairs, "_CHUNK_ELEMENTS", 1)
    model = load(directory)
    for one, packed in zip(works, together, strict=True):
        for number, text in enumerate(one.texts):
            spans = [(given.start, given.end) for given in one.entities[number]]
            alone = found(model, work([text], [spans], one.labels, threshold=one.threshold))[0][0]
            assert_same(packed[number], alone)
    assert together[1][0] == {}


@pytest.mark.parametrize("scorer", ["dot", "concat_proj"])
def test_low_precision_errs_less_than_three_times_as_much(tmp_path: Path, scorer: str) -> None:
    reference = make_reference(tmp_path, {"scorer": scorer})
    exact = [
        reference.logits(text, spans, LABELS) for text, spans in zip(TEXTS, SPANS, strict=True)
    ]
    low = load(reference.directory, torch.bfloat16)
    ours = [logits(low, text, spans) for text, spans in zip(TEXTS, SPANS, strict=True)]
    reference.model.bfloat16()
    theirs = [
        reference.logits(text, spans, LABELS) for text, spans in zip(TEXTS, SPANS, strict=True)
    ]
    error, allowed = (
        np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(values, exact, strict=True)))
        for values in (ours, theirs)
    )
    assert error < 3 * allowed


def test_entity_covers_all_words_it_touches(make: Make) -> None:
    """Parts of words count as whole words; surrounding spaces do not count."""
    model = load(make({}).directory)
    whole, touched = (
        spans_of(TEXTS[0], "GPL", "Überraschung-users"),
        spans_of(TEXTS[0], " GP", "raschung-users "),
    )
    exact = found(model, work(TEXTS[:1], [whole], threshold=0.0))[0][0]
    loose = found(model, work(TEXTS[:1], [touched], threshold=0.0))[0][0]
    places = dict(zip(touched, whole, strict=True))
    assert_same(
        {
            (places[head], places[tail], label): score
            for (head, tail, label), score in loose.items()
        },
        exact,
    )


@pytest.mark.parametrize(
    "spans", [[], [(0, 8)], [(0, 8), (8, 9)]], ids=["none", "one", "one and a space"]
)
def test_texts_with_fewer_than_two_entities_have_no_relations(
    make: Make, spans: list[Span]
) -> None:
    model = load(make({}).directory)
    ours = found(model, work(TEXTS[:2], [spans, SPANS[1]], threshold=0.0))[0]
    assert not ours[0]
    assert ours[1]
    assert not model.prepare(work(TEXTS[:1], [spans])).sequences
    assert not model.prepare(RelationsWork(TEXTS[:1], tuple(LABELS))).sequences


def test_truncated_entities_have_no_relations(make: Make) -> None:
    reference = make({})
    model = load(reference.directory)
    words = [f"word{number}" for number in range(WORDS + 25)]
    text, begin = " ".join(words), " ".join(words[:WORDS])
    places = [match.span() for match in re.finditer(r"\w+", text)]
    near, edge, far = places[3], places[WORDS - 1], places[WORDS + 10]
    ours = found(model, work([text], [[near, edge, far]], threshold=0.0))[0][0]
    assert_same(ours, reference.relations(begin, [near, edge], LABELS, 0.0))
    ours = found(model, work([text], [[near, edge, far]], threshold=0.0, truncation="start"))[0][0]
    assert {head for head, _, _ in ours} == {edge, far}
    with pytest.raises(InputTooLong, match=r"items\[0\]\.text has more than 60 words"):
        model.prepare(work([text], [[near, far]], truncation="none"))


def test_words_without_tokens_are_dropped(make: Make) -> None:
    """A lone accent is a word that BERT's tokenizer drops. The package gives it a state of zeros,
    which the LSTM reads.
    """
    model = load(make({}).directory)
    plain = found(model, work(["Programs of licensee run"], [[(0, 8), (12, 20)]], threshold=0.0))[
        0
    ][0]
    ours = found(
        model, work(["Programs \u0301 of licensee run"], [[(0, 10), (14, 22)]], threshold=0.0)
    )[0][0]
    places = {(0, 10): (0, 8), (14, 22): (12, 20)}
    assert_same(
        {(places[head], places[tail], label): score for (head, tail, label), score in ours.items()},
        plain,
    )


def test_only_the_best_relations_of_a_text_are_returned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make({}).directory)
    every = answers(model, work(threshold=0.0))[0][0]
    monkeypatch.setattr(glirel, "MAX_RELATIONS", 7)
    assert answers(model, work(threshold=0.0))[0][0] == every[:7]


@pytest.mark.parametrize("share", [0, 500, 2000])
def test_item_returns_the_best_relations_of_its_share(make: Make, share: int) -> None:
    model = load(make({}).directory)
    every = answers(model, work(threshold=0.0))[0][0]
    own, other = (
        replace(model.prepare(one), answer_bytes=share)
        for one in (work(TEXTS[:1], SPANS[:1], threshold=0.0), work())
    )
    outputs = model.forward("relations", [*other.sequences, *own.sequences])
    alone, among = (
        model.finish(own, found)
        for found in (model.forward_all(own), outputs[len(other.sequences) :])
    )
    assert isinstance(alone, ExtractResult)
    assert isinstance(among, ExtractResult)
    (cut,), (batched,) = alone.items, among.items
    assert cut.truncated
    assert len(cut.relations) == len(batched.relations) < len(every)
    assert bool(cut.relations) == (share > 0)
    ends = [
        [(one.head.start, one.tail.start, one.label) for one in found]
        for found in (cut.relations, batched.relations, every)
    ]
    assert ends[0] == ends[1] == ends[2][: len(cut.relations)]


def test_head_keeps_only_relations_that_an_answer_can_have(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make({}).directory)
    every = answers(model, work(threshold=0.0))[0][0]
    for module in (glirel, pairs):
        monkeypatch.setattr(module, "MAX_RELATIONS", 7)
    prepared = model.prepare(work(threshold=0.0))
    outputs = model.forward_all(prepared)
    assert isinstance(outputs[0], SparseRow)
    assert len(outputs[0].values) == 8
    result = model.finish(prepared, outputs)
    assert isinstance(result, ExtractResult)
    assert (result.items[0].relations, result.items[0].truncated) == (every[:7], True)
    assert answers(model, work(threshold=every[6].score))[0][0] == every[:7]


def test_invalid_requests_are_refused(make: Make) -> None:
    model = load(make({}).directory)
    wrong = {
        "relations.labels": work(labels=()),
        "relations.entity_labels": work(entity_labels=("person",)),
        "relations.labels[1]": work(labels=("part", " ")),
    }
    for field, one in wrong.items():
        with pytest.raises(InvalidInput) as caught:
            model.prepare(one)
        assert caught.value.field == field
    with pytest.raises(
        InvalidInput, match=r"the labels have \d+ tokens; the model's maximum with the text is 256"
    ) as caught:
        model.prepare(work(labels=tuple(f"label number {number}" for number in range(100))))
    assert caught.value.field == "relations.labels"
    with pytest.raises(TaskNotSupported):
        model.prepare(EntitiesWork(["a"], ("b",)))


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(make({}).directory, tmp_path / "copy"))


def edit(directory: Path, **values: object) -> None:
    path = directory / "glirel_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in {**config, **values}.items() if value != "absent"})
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rel_mode", "conv"),
        ("span_marker_mode", "markerv2"),
        ("refine_relation", True),
        ("refine_prompt", True),
        ("add_entity_markers", True),
        ("subtoken_pooling", "first_last"),
        ("subtoken_pooling", "mean"),
        ("subtoken_pooling", "last"),
        ("label_embed_strategy", "absent"),
        ("scorer", "dot_norm"),
        ("max_len", 0),
        ("encoder_config", {}),
        ("max_entity_pair_distance", -1),
    ],
)
def test_unsupported_settings_are_refused_by_key(copy: Path, key: str, value: object) -> None:
    edit(copy, **{key: value})
    with pytest.raises(ModelBroken, match=rf"glirel_config\.json: `{key}`"):
        load(copy)


def test_published_checkpoints_are_refused_with_advice(make: Make, copy: Path) -> None:
    published = make({}).directory.parent / "published"
    with pytest.raises(
        ModelBroken,
        match=r"`encoder_config` is missing.*the weights.*tokenizer\.json.*Converting GLiREL",
    ):
        load(published)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(
        ModelBroken,
        match=r"pytorch_model\.bin: torch checkpoints are pickles.*shoal models convert DIR",
    ):
        load(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: missing.*Converting GLiREL"):
        load(copy)


def test_unknown_and_missing_tensors_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    left_over = {
        f"{layer}.0.bias": torch.zeros(2)
        for layer in ("coref_classifier", "refine_relation", "_rel_filtering")
    }
    save_file({**tensors, **left_over}, copy / "model.safetensors")
    load(copy)
    save_file({**tensors, "other.0.bias": torch.zeros(2)}, copy / "model.safetensors")
    with pytest.raises(
        ModelBroken,
        match=r"model\.safetensors: tensor 'other\.0\.bias' does not belong.*glirel_config",
    ):
        load(copy)
    marker = "span_rep_layer.rel_rep_layer.span_marker"
    for name in (
        "rnn.lstm.weight_ih_l0",
        f"{marker}.project_end.3.weight",
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
    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer.replace('"[REL]"', '"[OTHER]"'))
    with pytest.raises(ModelBroken, match=r"tokenizer\.json: token '\[REL\]'"):
        load(copy)


def test_card_describes_the_model(copy: Path) -> None:
    card = read_card(copy, "test/model@main")
    assert (card.kind, card.family, card.tasks, card.revision) == (
        "glirel",
        "bert",
        ("relations",),
        "main",
    )
    assert card.given_entities
    before = read_card(copy, "test/model").revision
    edit(copy, max_len=30)
    assert read_card(copy, "test/model").revision != before


def test_batch_of_pairs_can_be_preempted_between_pieces(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make({}).directory
    model = load(directory)
    prepared = model.prepare(work(threshold=0.0))
    (head,) = prepared.groups()
    sequences = list(prepared.sequences)
    layers: list[None] = []
    model.forward(head, sequences, lambda: layers.append(None))
    monkeypatch.setattr(pairs, "_CHUNK_ELEMENTS", 1)
    pieces: list[None] = []
    model.forward(head, sequences, lambda: pieces.append(None))
    count = sum(len(cast("pairs.PairPlaces", sequence.input).heads) for sequence in sequences)
    assert count > 1
    assert len(pieces) - len(layers) == count - 1, "one pair at a time instead of all at once"
