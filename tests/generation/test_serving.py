"""Generative models, as workers use them: prepare, forwards with sequences that join and leave,
finish.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from libs.errors import InputTooLong, InvalidInput, ShoalError, TaskNotSupported
from libs.kinds.generative import model as writers
from libs.models import EncodeWork, ExtractResult, GeneratedIds, Output, Prepared, Unfinished
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.model import GenerativeModel
from libs.models.interface.sequences import InputSequence, YieldPoint
from libs.models.interface.source import LoadArguments
from libs.models.interface.work import TextWork, Turn, never_cancelled
from tests.generation.chat_templates import MISTRAL
from tests.generation.served import reference, write

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [
    "the first text",
    "another one, which is longer than the first",
    "a third",
    "the words of a fourth text of this list",
]


def load(directory: Path) -> GenerativeModel:
    return writers.load(
        LoadArguments(directory, "random/language_model", torch.device("cpu"), torch.float32)
    )


def outputs(model: GenerativeModel, jobs: list[Prepared]) -> list[list[Output]]:
    """Forwards in which a job joins each time, until all are written."""
    found: dict[tuple[int, int], Output] = {}
    for number in range(10_000):
        going = [
            (job, place)
            for job in range(min(number + 1, len(jobs)))
            for place in range(len(jobs[job].sequences))
            if (job, place) not in found
        ]
        if not going:
            break
        outcomes = zip(
            going,
            model.forward("generate", [jobs[job].sequences[place] for job, place in going]),
            strict=True,
        )
        found |= {
            where: outcome for where, outcome in outcomes if not isinstance(outcome, Unfinished)
        }
    return [
        [found[job, place] for place in range(len(jobs[job].sequences))] for job in range(len(jobs))
    ]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "llama",
        "gemma2",
        "phi3",
        "lfm2",
        "ministral3",
        "qwen3_5_text",
        "bart",
        "marian",
        "t5",
    ],
)
@pytest.mark.parametrize("instruction", ["", "shorten it:"])
def test_texts_are_those_of_transformers(name: str, instruction: str, tmp_path: Path) -> None:
    theirs = write(name, tmp_path)
    model = load(tmp_path)
    works = [
        TextWork([text], max_tokens=32 - 3 * number, instruction=instruction)
        for number, text in enumerate(TEXTS)
    ]
    jobs = [model.prepare(work, never_cancelled) for work in works]
    written = outputs(model, jobs)
    for job, own, text, work in zip(jobs, written, TEXTS, works, strict=True):
        result = model.finish(job, own)
        assert isinstance(result, ExtractResult)
        assert result.items[0].text == reference(
            theirs, tmp_path, text, work.max_tokens, instruction
        )
        assert (result.items[0].finish_reason, result.output_tokens) == ("length", work.max_tokens)
    assert (model.generating, model.claimed_bytes) == (0, 0)


@pytest.mark.parametrize("instruction", ["", "short"])
def test_conversations_are_those_of_transformers(instruction: str, tmp_path: Path) -> None:
    theirs = write("qwen3", tmp_path)
    model = load(tmp_path)
    turns = (
        Turn("user", "text"),
        Turn("assistant", "yes"),
        Turn("user", "a"),
        Turn("assistant", "so"),
    )
    works = [
        TextWork(TEXTS[:2], max_tokens=20, instruction=instruction, turns=turns[:count])
        for count in (0, 2, 3, 4)
    ]
    jobs = [model.prepare(work, never_cancelled) for work in works]
    found = set()
    for job, own, work in zip(jobs, outputs(model, jobs), works, strict=True):
        result = model.finish(job, own)
        assert isinstance(result, ExtractResult)
        said = [(turn.role, turn.text) for turn in work.turns]
        wanted = [reference(theirs, tmp_path, text, 20, instruction, said) for text in TEXTS[:2]]
        assert [item.text for item in result.items] == wanted
        found.update(wanted)
    assert len(found) > 4  # the turns are read


def test_without_a_system_message_the_users_first_one_begins_with_the_instruction(
    tmp_path: Path,
) -> None:
    write("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    model = load(tmp_path)
    turns = (Turn("user", "a question"), Turn("assistant", "an answer"))

    def prompt(work: TextWork) -> str:
        (sequence,) = model.prepare(work, never_cancelled).sequences
        return model._reader.text(sequence.ids.tolist())

    reported = prompt(TextWork(["and then?"], instruction="Be short.", turns=turns))
    before = (Turn("user", "Be short.\n\na question"), turns[1])
    assert reported == prompt(TextWork(["and then?"], turns=before))
    assert reported != prompt(TextWork(["and then?"], turns=turns))


def test_stop_token_ends_a_text(tmp_path: Path) -> None:
    theirs = write("qwen3", tmp_path)
    model = load(tmp_path)
    job = model.prepare(TextWork(TEXTS[:1], max_tokens=20), never_cancelled)
    ((all_of_it,),) = outputs(model, [job])
    assert isinstance(all_of_it, GeneratedIds)
    stop = int(all_of_it.ids[9])
    first = all_of_it.ids.tolist().index(stop)
    theirs.generation_config.eos_token_id = stop
    theirs.generation_config.save_pretrained(tmp_path)
    model = load(tmp_path)
    ((written,),) = outputs(
        model, [model.prepare(TextWork(TEXTS[:1], max_tokens=20), never_cancelled)]
    )
    assert isinstance(written, GeneratedIds)
    assert (written.finish, written.ids.tolist()) == ("stop", all_of_it.ids[: first + 1].tolist())


def test_dropped_and_failed_sequences_return_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("qwen3", tmp_path)
    model = load(tmp_path)
    wanted = outputs(model, [model.prepare(TextWork(TEXTS, max_tokens=30), never_cancelled)])
    job = model.prepare(TextWork(TEXTS, max_tokens=30), never_cancelled)
    monkeypatch.setattr("libs.models.generation.model.STEPS_SECONDS", 0.0)
    assert model.forward("generate", job.sequences) == [Unfinished()] * 4
    assert (model.generating, model.claimed_bytes > 0) == (4, True)
    model.drop(job.sequences[:2])
    assert model.generating == 2
    forward = model._reader.language_model.forward

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("a fault of our making")

    monkeypatch.setattr(model._reader.language_model, "forward", fails)
    with pytest.raises(RuntimeError):
        model.forward("generate", job.sequences[2:])
    assert (model.generating, model.claimed_bytes) == (0, 0)
    monkeypatch.setattr(model._reader.language_model, "forward", forward)
    again = outputs(model, [job])
    for one, other in zip(again[0], wanted[0], strict=True):
        assert isinstance(one, GeneratedIds)
        assert isinstance(other, GeneratedIds)
        assert one.ids.tolist() == other.ids.tolist()


@pytest.mark.parametrize("name", ["qwen3", "lfm2", "bart"])
def test_sequences_without_room_wait(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No encoder runs for them yet: its rows would take memory while they wait."""
    write(name, tmp_path)
    model = load(tmp_path)
    model.pages = 6
    job = model.prepare(TextWork(TEXTS * 4, max_tokens=20), never_cancelled)
    encoded, requests = 0, model._reader.requests

    def count(sequences: list[InputSequence], yield_point: YieldPoint) -> list[SequenceRequest]:
        nonlocal encoded
        encoded += len(sequences)
        return requests(sequences, yield_point)

    monkeypatch.setattr(model._reader, "requests", count)
    model.forward("generate", job.sequences)
    assert 0 < encoded == model.generating < len(job.sequences)
    model.drop(job.sequences)
    found = [
        [each for each in own if isinstance(each, GeneratedIds)] for own in outputs(model, [job])
    ]
    assert [each.ids.tolist() for each in found[0][:4]] * 4 == [
        each.ids.tolist() for each in found[0]
    ]
    assert model.claimed_bytes == 0


REFUSED: dict[str, tuple[TextWork, type[ShoalError], str]] = {
    "no text": (TextWork(["a", " \n"]), InvalidInput, "items[1].text"),
    "too long": (TextWork(["word " * 3000]), InputTooLong, "items[0].text"),
    "no room": (TextWork(["a text"], max_tokens=4096), InputTooLong, "items[0].text"),
    "regions": (TextWork(["a text"], text_kind="ocr_regions"), TaskNotSupported, "text.kind"),
    "turns and no room": (
        TextWork(["a"], turns=(Turn("user", "word " * 3000), Turn("assistant", "a"))),
        InputTooLong,
        "items[0].text",
    ),
    "a value that the template does not look for": (
        TextWork(["a text"], template_values='{"no_such": 1}'),
        InvalidInput,
        "text.template_values",
    ),
    "a region": (TextWork(["a text"], region=(0, 0, 1, 1)), TaskNotSupported, "text.region"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    work, error, field = REFUSED[name]
    with pytest.raises(error) as caught:
        load(tmp_path).prepare(work, never_cancelled)
    assert caught.value.field == field
    with pytest.raises(TaskNotSupported):
        load(tmp_path).prepare(EncodeWork(["a"]), never_cancelled)


def test_models_without_a_chat_template_read_no_conversations(tmp_path: Path) -> None:
    write("t5", tmp_path)
    with pytest.raises(TaskNotSupported) as caught:
        load(tmp_path).prepare(TextWork(["a"], turns=(Turn("user", "a"),)), never_cancelled)
    assert caught.value.field == "text.turns"
    with pytest.raises(TaskNotSupported) as caught:
        load(tmp_path).prepare(
            TextWork(["a"], template_values='{"enable_thinking": false}'), never_cancelled
        )
    assert caught.value.field == "text.template_values"
