"""Texts longer than the model are read in windows, and their results are merged to one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from shoal.extractions import Entity, Extraction
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from libs.catalog.card import Card
from libs.errors import DeadlinePassed, InvalidInput, TaskNotSupported
from libs.kinds.gliner import processor as gliner
from libs.kinds.gliner.card import Gliner
from libs.kinds.gliner.processor import GlinerProcessor
from libs.models import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    ExtractResult,
    PackedModel,
    ScoreResult,
    ScoreWork,
)
from libs.models.interface.results import Result
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.work import CancelCheck, ModelWork, Span, Work, never_cancelled
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import item_path
from libs.models.text.processing.chunking.token_chunks import by_tokens
from libs.models.text.processing.extraction.words import WordFrame, Words
from libs.models.text.tokenising.text import TextProcessor
from libs.models.text.tokenising.whole import WholeText
from libs.models.text.windows import spans as window_spans
from libs.models.text.windows.processor import SizesOutputs, WindowedProcessor, WindowNotes

LONG = "copying distribution and modification are not covered by this License " * 12
SENTENCES = [
    "Ada Lovelace wrote to Charles Babbage.",
    "The engine stood in London 😀 for years.",
    "Später kam sie nach Überlingen am See.",
    "ここ は 東京 Tower です。",
    "Mary Somerville taught her e\u0301te\u0301 mathematics.",
]
NAME = re.compile(r"[A-ZÄÖÜ]\w+(?: [A-ZÄÖÜ]\w+)*|東京(?: Tower)?")


class Names:
    """A processor of words: finds names among the first `limit` words, by their capitals.

    Args:
        known: Words of the vocabulary. With any, unknown ones are removed, as Model2Vec does.
    """

    def __init__(self, limit: int, *, reads_space: bool = False, known: Sequence[str] = ()) -> None:
        vocabulary = {word: number for number, word in enumerate(("[UNK]", *known))}
        self._removes_unknown = bool(known)
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = (
            pre_tokenizers.Split(Regex(r"\s|\S+"), "isolated")
            if reads_space
            else pre_tokenizers.WhitespaceSplit()
        )
        self._text = TextProcessor(self.tokenizer, limit=limit, segments=False)

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        assert isinstance(work, EntitiesWork)
        sequences, spans = self._text.encode_spans(
            work.texts, work.truncation, item_path, check_cancelled
        )
        if self._removes_unknown:
            sequences = [replace(one, ids=one.ids[one.ids != 0]) for one in sequences]
        return Prepared(work, "names", sequences, [int(one.ends[-1]) for one in spans])

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        assert isinstance(prepared.work, EntitiesWork)
        ends = cast("list[int]", prepared.notes)
        items = (
            Extraction(
                entities=tuple(
                    Entity(*found.span(), "name", 0.5 + len(found[0]) / 100, found[0])
                    for found in NAME.finditer(text, 0, end)
                )
            )
            for text, end in zip(prepared.work.texts, ends, strict=True)
        )
        return build_result(items, prepared.answer_bytes, check_cancelled)


def windowed(inner: Names) -> WindowedProcessor:
    card = Card("a/b", "", "bert", "token_labels", ("entities",), (), max_tokens=16)
    return WindowedProcessor(card, inner, inner.tokenizer)


@pytest.fixture(scope="module")
def names() -> WindowedProcessor:
    return windowed(Names(limit=16))


@pytest.fixture(scope="module")
def spaced_names() -> WindowedProcessor:
    """White space has tokens, as with a byte-level tokenizer."""
    return windowed(Names(limit=16, reads_space=True))


def entities(processor: WindowedProcessor, work: EntitiesWork) -> list[list[Entity]]:
    prepared = processor.prepare(work, never_cancelled)
    assert all(one.tokens <= 16 for one in prepared.sequences)
    result = processor.finish(
        prepared, [np.zeros(1, np.float32)] * len(prepared.sequences), never_cancelled
    )
    return [list(one.entities) for one in cast("ExtractResult", result).items]


def test_long_text_has_the_entities_of_its_sentences(names: WindowedProcessor) -> None:
    order = [SENTENCES[index * 3 % 5] for index in range(40)]
    text = "\r\n".join(order)
    alone = entities(names, EntitiesWork(order))
    wanted, place = [], 0
    for sentence, found in zip(order, alone, strict=True):
        wanted += [replace(one, start=one.start + place, end=one.end + place) for one in found]
        place += len(sentence) + 2
    assert len(wanted) > 60
    (found,) = entities(names, EntitiesWork([text], truncation="windows"))
    assert [(one.start, one.end) for one in found] == [(one.start, one.end) for one in wanted]
    assert [one.score for one in found] == [one.score for one in wanted]
    assert all(text[one.start : one.end] == one.text for one in found)


def test_entity_at_a_windows_edge_gives_way_to_the_whole_one(names: WindowedProcessor) -> None:
    text = " ".join(["w"] * 14 + ["Ada", "King", "Lovelace", "Byron"] + ["w"] * 14)
    for overlap in (4, 6, 7):
        (found,) = entities(
            names, EntitiesWork([text], truncation="windows", window_overlap=overlap)
        )
        assert [one.text for one in found] == ["Ada King Lovelace Byron"]


def test_without_overlap_a_name_across_windows_is_found_in_parts(names: WindowedProcessor) -> None:
    text = " ".join(["w"] * 14 + ["Ada", "Lovelace"] + ["w"] * 14)
    (found,) = entities(names, EntitiesWork([text], truncation="windows", window_overlap=0))
    assert [one.text for one in found] == ["Ada", "Lovelace"]


def test_blank_windows_do_not_move_the_only_other_one(spaced_names: WindowedProcessor) -> None:
    text = "\n" * 300 + "Anna lives"
    work = EntitiesWork([text], truncation="windows")
    assert len(spans_of(spaced_names.prepare(work, never_cancelled))[0]) == 1
    (found,) = entities(spaced_names, work)
    assert [(one.start, one.end) for one in found] == [(300, 304)]


def test_text_of_one_window_has_the_result_without_windows(names: WindowedProcessor) -> None:
    work = EntitiesWork(SENTENCES)
    assert entities(names, replace(work, truncation="windows")) == entities(names, work)


def test_windows_do_not_depend_on_other_texts_of_the_job() -> None:
    processor = windowed(Names(limit=16, known=["w"]))
    text, unknown = "w " * 40, "東京 " * 40
    alone = processor.prepare(EntitiesWork([text], truncation="windows"), never_cancelled)
    both = processor.prepare(EntitiesWork([unknown, text], truncation="windows"), never_cancelled)
    groups = cast("WindowNotes", both.notes).groups
    assert groups[1].spans == spans_of(alone)
    assert len(groups[0].spans[0]) == len(groups[1].spans[0]) == 4


def test_outputs_of_a_job_are_bounded_before_the_forward(
    names: WindowedProcessor, embedder: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_spans, "MAX_OUTPUT_BYTES", 100)
    work = ScoreWork("copying", ["short", LONG], truncation="windows")
    with pytest.raises(InvalidInput, match="fewer labels, or several requests") as caught:
        embedder.prepare(work)
    assert caught.value.field == "documents[1].text"
    embedder.prepare(replace(work, documents=["short"]))
    names.prepare(EntitiesWork(["w " * 40], truncation="windows"), never_cancelled)  # no outputs


def test_outputs_of_span_models_count_spans_and_labels() -> None:
    settings = SimpleNamespace(span_mode="markerV0", max_width=12)
    card = Card("a/b", "", "bert", "gliner", ("entities",), (), max_tokens=512)
    processor = GlinerProcessor(
        card, cast("Gliner", settings), cast("WordFrame", None), tokens=None, pairs=None
    )
    words = Words(np.zeros(384, np.int32), np.zeros(384, np.int32))
    notes = gliner._Notes(tuple(map(str, range(256))), (), [words] * 2)
    prepared = Prepared(EntitiesWork(["a", "b"]), "entities", [], notes)
    assert isinstance(processor, SizesOutputs)
    assert processor.output_bytes(prepared) == 2 * 384 * 12 * 256 * 4
    settings.span_mode = "token_level"
    assert processor.output_bytes(prepared) == 2 * 384 * 3 * 256 * 4


def test_cut_texts_are_collected_once_a_preparation(
    names: WindowedProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    collect = cast("property", Prepared.__dict__["cut_texts"]).fget
    assert collect is not None

    def counted(prepared: Prepared) -> frozenset[str]:
        nonlocal calls
        calls += 1
        return cast("frozenset[str]", collect(prepared))

    monkeypatch.setattr(Prepared, "cut_texts", property(counted))
    names.prepare(EntitiesWork([*["w"] * 40, "w " * 400], truncation="windows"), never_cancelled)
    assert calls == 3  # the whole job, the short texts, and the windows of the long one


def test_overlap_of_more_than_half_a_window_is_refused(names: WindowedProcessor) -> None:
    work = EntitiesWork(["w " * 40], truncation="windows", window_overlap=9)
    with pytest.raises(InvalidInput, match="at most half of them, 8") as caught:
        names.prepare(work, never_cancelled)
    assert caught.value.field == "window_overlap"


def test_text_of_too_many_windows_is_refused_before_it_is_prepared(
    names: WindowedProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match="more than 2,048 windows") as caught:
        names.prepare(EntitiesWork(["w", "w " * 40_000], truncation="windows"), never_cancelled)
    assert caught.value.field == "items[1].text"


def test_preparation_is_cancelled_between_pieces(names: WindowedProcessor) -> None:
    calls = 0

    def check_cancelled() -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise DeadlinePassed("the deadline passed")

    with pytest.raises(DeadlinePassed):
        names.prepare(EntitiesWork(["w " * 20_000], truncation="windows"), check_cancelled)


def word_windows(
    text: str, overlap: int | None = None, *, limit: int = 4096, max_words: int = 10_000
) -> list[str]:
    """The windows of a model of words, in which each character is a token."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    frame = WordFrame(
        tokenizer, limit=limit, max_words=max_words, pooling="first", adds_special_tokens=False
    )
    spans = frame.windows(text, [], overlap, "items[0].text", never_cancelled)
    return [text[one.start : one.end] for one in spans]


def test_overlap_is_a_part_of_the_words_that_a_window_has() -> None:
    found = word_windows("w " * 1000, max_words=200)
    assert [len(one.split()) for one in found[:-1]] == [200] * 6
    assert len(found) == 7  # each repeats a quarter of its 200 tokens
    assert len(word_windows("w " * 1000, 100, max_words=200)) == 9
    assert len(word_windows("w " * 1000, 0, max_words=200)) == 5
    with pytest.raises(InvalidInput, match=r"a window has 200 tokens .*, 100, may") as caught:
        word_windows("w " * 1000, 101, max_words=200)
    assert caught.value.field == "window_overlap"


def test_word_that_does_not_fit_next_to_the_overlap_reduces_it() -> None:
    text = ("w " * 120 + "x" * 500 + " ") * 8
    for overlap in (None, 0, 64, 256):
        found = word_windows(text, overlap, limit=512)
        assert len(found) <= 16
        assert sum(one.count("x" * 500) for one in found) == 8
        assert all(len(one.replace(" ", "")) <= 512 for one in found)
        assert {"w", "x" * 500} == set(" ".join(found).split())


def test_windows_of_uneven_words_repeat_a_bounded_part() -> None:
    random = np.random.default_rng(7)
    for room, most in ((40, 1000), (1000, 12), (40, 12)):
        lengths = random.choice([1, 2, 15, 39, 60], size=400)
        words = [chr(97 + number % 26) * length for number, length in enumerate(lengths)]
        text = " ".join(words)
        read = " ".join(word_windows(text, limit=room, max_words=most))
        assert len(read) < 2.5 * len(text)
        assert set(words) <= set(read.split())


@pytest.mark.parametrize("overlap", [None, 0, 100])
@pytest.mark.parametrize(
    "text",
    [
        "Bob\n" + " " * 900 + "Anna lives",
        "Bob " + "x" * 60 + " " * 900 + "Anna lives",
        "A word " * 20 + "x" * 60 + " " * 900 + "Anna lives",
    ],
)
def test_windows_end_at_words_before_long_runs_of_space(text: str, overlap: int | None) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    processor = TextProcessor(tokenizer, limit=512, segments=False)
    spans = window_spans.token_windows(processor, text, 300, overlap, "text", never_cancelled)
    pieces = [text[one.start : one.end].split() for one in spans]
    assert {piece[-1] for piece in pieces} <= set(text.split())
    assert {word for piece in pieces for word in piece} >= set(text.split())
    assert all(one.end - one.start <= 300 for one in spans)


def spans_of(prepared: Prepared) -> Sequence[Sequence[Span]]:
    """The windows of each text of a job of one group."""
    (group,) = cast("WindowNotes", prepared.notes).groups
    return group.spans


def run(model: PackedModel, work: Work) -> Result:
    prepared = model.prepare(work)
    outputs = model.forward(prepared.head, prepared.sequences)
    return model.finish(prepared, outputs, never_cancelled)


@pytest.mark.parametrize("name", ["reranker", "embedder"])
def test_score_is_the_best_of_a_documents_windows(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: PackedModel = request.getfixturevalue(name)
    documents = ["short one", LONG, "another"]
    prepared = model.prepare(ScoreWork("copying", documents, truncation="windows"))
    assert not prepared.cut_texts
    windows = len(prepared.sequences) - (name == "embedder")
    assert windows > 8
    assert max(one.tokens for one in prepared.sequences) <= model.max_tokens
    outputs = model.forward(prepared.head, prepared.sequences)
    found = cast("ScoreResult", model.finish(prepared, outputs, never_cancelled)).scores
    short = cast("ScoreResult", run(model, ScoreWork("copying", documents))).scores
    np.testing.assert_allclose(found[[0, 2]], short[[0, 2]], rtol=1e-4, atol=1e-5)
    pieces = [LONG[one.start : one.end] for one in spans_of(prepared)[1]]
    alone = cast("ScoreResult", run(model, ScoreWork("copying", pieces))).scores
    np.testing.assert_allclose(found[1], alone.max(), rtol=1e-4, atol=1e-5)


def test_exclusive_classes_are_averaged_and_others_are_not(classifier: PackedModel) -> None:
    text = LONG * 8
    work = ClassifyWork([text, "short"], truncation="windows")
    prepared = classifier.prepare(work)
    spans = spans_of(prepared)[0]
    assert len(spans) > 2
    pieces = [text[one.start : one.end] for one in spans]
    weights = np.array([len(piece) for piece in pieces]) / sum(map(len, pieces))
    for multi in (False, True):
        (whole, _) = cast("ExtractResult", run(classifier, replace(work, multi_label=multi))).items
        parts = cast("ExtractResult", run(classifier, ClassifyWork(pieces, multi_label=multi)))
        scores = {
            label: np.array(
                [
                    next(one.score for one in part.labels if one.label == label)
                    for part in parts.items
                ]
            )
            for label in classifier.card.classes
        }
        for one in whole.labels:
            wanted = scores[one.label].max() if multi else float(weights @ scores[one.label])
            assert one.score == pytest.approx(wanted, abs=1e-5)
        assert multi or sum(one.score for one in whole.labels) == pytest.approx(1, abs=1e-5)


def test_threshold_applies_to_merged_scores(classifier: PackedModel) -> None:
    work = ClassifyWork([LONG * 8], truncation="windows")
    (every,) = cast("ExtractResult", run(classifier, work)).items
    threshold = every.labels[0].score - 1e-4
    (few,) = cast("ExtractResult", run(classifier, replace(work, threshold=threshold))).items
    assert [one.label for one in few.labels] == [every.labels[0].label]


def test_tags_of_long_texts_lie_where_the_text_says(tagger: PackedModel) -> None:
    text = "".join(f"{sentence} 東京 😀 copying e\u0301 " for sentence in SENTENCES * 6)
    prepared = tagger.prepare(EntitiesWork(["a", text], truncation="windows"))
    assert not prepared.cut_texts
    assert len(prepared.sequences) > 10
    assert set(prepared.fields) == {"items[0].text", "items[1].text"}
    result = run(tagger, EntitiesWork(["a", text], truncation="windows"))
    (_, found) = cast("ExtractResult", result).items
    assert found.entities
    for one, later in zip(found.entities, found.entities[1:], strict=False):
        assert one.start <= later.start
    for one in found.entities:
        assert text[one.start : one.end] == one.text
    beyond = [one for one in found.entities if one.start > len(text) // 2]
    assert beyond


def test_short_texts_have_equal_results_with_windows(tagger: PackedModel) -> None:
    work = EntitiesWork(["copying is allowed", "a", "This License"])
    assert run(tagger, replace(work, truncation="windows")) == run(tagger, work)


def test_labels_that_leave_no_room_are_refused_as_without_windows(reranker: PackedModel) -> None:
    with pytest.raises(InvalidInput) as caught:
        reranker.prepare(ScoreWork(LONG, ["short", LONG], truncation="windows"))
    assert caught.value.field == "query.text"


def test_windows_are_not_for_encode(embedder: PackedModel) -> None:
    with pytest.raises(TaskNotSupported) as caught:
        embedder.prepare(EncodeWork([LONG], truncation="windows"))
    assert caught.value.field == "truncation"


def test_window_that_a_tokenizer_makes_longer_is_halved(
    tagger: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = EntitiesWork([LONG], truncation="windows")
    usual = len(tagger.prepare(work).sequences)

    def too_long(
        text: str, whole: WholeText, most: int, overlap: int = 0, *, whole_words: bool
    ) -> object:
        more = most * 3 if overlap else most
        return by_tokens(text, whole, more, overlap, whole_words=whole_words)

    monkeypatch.setattr(window_spans, "by_tokens", too_long)
    prepared = tagger.prepare(work)
    assert not prepared.cut_texts
    assert len(prepared.sequences) >= usual // 3
