"""Stop strings end an answer wherever they stand in its tokens, and no part of one is streamed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from libs.models import ExtractResult, GeneratedIds, Unfinished
from libs.models.generation.model import GenerativeModel
from libs.models.generation.stops import StopStrings, stable_text, text_before_stop
from libs.models.interface.work import Sampling, TextWork, never_cancelled
from tests.generation.served import reference, write
from tests.generation.test_serving import TEXTS, load, outputs
from tests.parity.checkpoints import Kind, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def whole(directory: Path) -> str:
    """The greedy answer to the first text."""
    return reference(write("qwen3", directory), directory, TEXTS[0], 40)


@pytest.fixture(scope="module")
def model(directory: Path, whole: str) -> GenerativeModel:
    return load(directory)


def streamed(model: GenerativeModel, work: TextWork) -> tuple[list[str], ExtractResult]:
    """The text after each step, and the answer."""
    job = model.prepare(work, never_cancelled)
    (sequence,), texts = job.sequences, []
    for _ in range(10_000):
        (outcome,) = model.forward("generate", [sequence])
        if not isinstance(outcome, Unfinished):
            break
        texts.append(model.text(job, outcome.ids))
    assert isinstance(outcome, GeneratedIds)
    texts += [
        model.text(job, outcome.ids[:count].tolist()) for count in range(len(outcome.ids) + 1)
    ]
    result = model.finish(job, [outcome])
    assert isinstance(result, ExtractResult)
    return texts, result


def test_every_piece_of_an_answer_ends_it_when_it_is_a_stop_string(
    model: GenerativeModel, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Return texts of 1 to 9 characters from each position on, most of which begin or end within a
    token.
    """
    monkeypatch.setattr("libs.models.generation.model.STEPS_SECONDS", 0.0)
    for start in range(2, 30, 3):
        for length in (1, 2, 5, 9):
            stop = whole[start : start + length]
            if not stop.strip():
                continue
            texts, result = streamed(
                model, TextWork(TEXTS[:1], max_tokens=40, stops=("never there", stop))
            )
            wanted = whole[: whole.index(stop)].strip()
            assert (result.items[0].text, result.items[0].finish_reason) == (wanted, "stop")
            assert all(wanted.startswith(text) for text in texts)
            assert result.output_tokens <= 40


def test_generation_ends_with_the_token_that_completes_a_stop_string(
    model: GenerativeModel, whole: str
) -> None:
    _, free = streamed(model, TextWork(TEXTS[:1], max_tokens=40))
    _, result = streamed(model, TextWork(TEXTS[:1], max_tokens=40, stops=(whole[8:12],)))
    assert (free.items[0].finish_reason, free.output_tokens) == ("length", 40)
    assert result.output_tokens < 20


def test_stop_string_that_is_not_written_changes_nothing(
    model: GenerativeModel, whole: str
) -> None:
    texts, result = streamed(
        model, TextWork(TEXTS[:1], max_tokens=40, stops=("\n\nObservation:", whole + "!"))
    )
    assert (result.items[0].text, result.items[0].finish_reason) == (whole, "length")
    assert all(whole.startswith(text) for text in texts)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "t5"])
def test_long_stop_strings_are_found_across_many_tokens(kind: Kind, tmp_path: Path) -> None:
    write_tokenizer(kind, tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    before, stop = (
        "the first text of another list " * 9,
        "the end of the words, which is the text that is another one",
    )
    stop = tokenizer.decode(
        tokenizer.encode(stop, add_special_tokens=False).ids
    )  # without characters outside the vocabulary
    ids = np.array(tokenizer.encode(f"{before} {stop}", add_special_tokens=False).ids, np.int32)
    ends = StopStrings(tokenizer.decode, [stop])
    assert [ends(ids[:count]) for count in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [
        True
    ]


def test_possible_stop_string_is_held_back() -> None:
    stops = ("</call>", "END", "\n\n")
    text = "a <b> </cal EN E</call> more"
    whole = text_before_stop(text, stops)
    assert whole == "a <b> </cal EN E"
    assert all(whole.startswith(stable_text(text[:count], stops)) for count in range(len(text) + 1))
    assert stable_text("a </cal", stops) == "a "
    assert stable_text("a </cal ", stops) == "a </cal "
    assert stable_text("a\n", stops) == "a"
    assert stable_text("a", ()) == "a"


def test_seed_gives_one_text_alone_and_among_others(model: GenerativeModel) -> None:
    sampling = Sampling(temperature=1.5)
    seeds = tuple(bytes([number]) for number in range(len(TEXTS)))
    jobs = [
        model.prepare(
            TextWork(TEXTS, max_tokens=20, sampling=sampling, seeds=seeds), never_cancelled
        )
    ]
    jobs += [
        model.prepare(TextWork([text], max_tokens=20), never_cancelled) for text in TEXTS
    ]  # greedy ones in the same batch
    together = model.finish(jobs[0], outputs(model, jobs)[0])
    assert isinstance(together, ExtractResult)
    for text, seed, item in zip(TEXTS, seeds, together.items, strict=True):
        _, alone = streamed(
            model, TextWork([text], max_tokens=20, sampling=sampling, seeds=(seed,))
        )
        assert alone.items[0].text == item.text
    _, other = streamed(
        model, TextWork(TEXTS[:1], max_tokens=20, sampling=sampling, seeds=(b"other",))
    )
    assert other.items[0].text != together.items[0].text


def test_top_k_top_p_or_min_p_turn_sampling_on(model: GenerativeModel, whole: str) -> None:
    for greedy in (
        Sampling(),
        Sampling(temperature=0.0, top_p=0.5),
        Sampling(top_p=1.0),
        Sampling(top_k=1),
    ):
        _, result = streamed(
            model, TextWork(TEXTS[:1], max_tokens=40, sampling=greedy, seeds=(b"1",))
        )
        assert result.items[0].text == whole
    for drawn in (
        Sampling(temperature=2.0),
        Sampling(top_p=0.99),
        Sampling(top_k=200),
        Sampling(min_p=0.001),
    ):
        _, result = streamed(
            model, TextWork(TEXTS[:1], max_tokens=40, sampling=drawn, seeds=(b"1",))
        )
        assert result.items[0].text != whole


def test_log_probabilities_are_of_the_tokens_of_the_text(
    model: GenerativeModel, whole: str
) -> None:
    _, result = streamed(model, TextWork(TEXTS[:1], max_tokens=40, top_logprobs=3))
    tokens = result.items[0].tokens
    assert "".join(token.text for token in tokens).strip() == whole or "\ufffd" in whole
    assert all(len(token.top) == 3 and token.logprob <= 0 for token in tokens)
    assert all(token.top[0].logprob >= token.top[1].logprob for token in tokens)
    _, cut = streamed(
        model, TextWork(TEXTS[:1], max_tokens=40, top_logprobs=0, stops=(whole[8:12],))
    )
    assert 0 < len(cut.items[0].tokens) < len(tokens)
    assert cut.items[0].tokens[0].top == ()
    _, without = streamed(model, TextWork(TEXTS[:1], max_tokens=40))
    assert without.items[0].tokens == ()
