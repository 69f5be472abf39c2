"""The decode loop writes what transformers' `generate` writes, alone and among others, greedy and
by beams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from libs.errors import InvalidInput, ModelBroken, NoCapacity
from libs.kernels.attention.paged import PAGE
from libs.models.generation import (
    DecodeLoop,
    DecodeSettings,
    Finish,
    LanguageModel,
    SequenceRequest,
    load_language_model,
)
from libs.models.generation.decoding.rules import Bits, Ids
from tests.generation.checkpoints import (
    CARRIED,
    CAUSAL,
    SEQ2SEQ,
    VOCABULARY,
    prompts,
    write,
    written,
)
from tests.kernels.ways import use_dense

pytestmark = pytest.mark.filterwarnings("ignore")

MAX_NEW_TOKENS = 34
# Random weights repeat themselves; what may not be repeated makes every answer another one.
VARIED = {
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.2,
    "suppress_tokens": [0],
}  # 0: the reference's padding


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path) -> LanguageModel:
    return load_language_model(directory, torch.device("cpu"), torch.float32)


def requests(
    language_model: LanguageModel, inputs: Sequence[Ids], most: int | None = MAX_NEW_TOKENS
) -> list[SequenceRequest]:
    if not language_model.has_cross:
        return [SequenceRequest(ids, most=most) for ids in inputs]
    return [SequenceRequest(states=states, most=most) for states in language_model.encode(inputs)]


def finished(
    loop: DecodeLoop, requested: Sequence[SequenceRequest], every: int = 0
) -> list[tuple[list[int], Finish | None]]:
    """Generate all; with `every`, another request joins after this many steps."""
    texts: dict[int, list[int]] = {}
    left, added = list(requested), []
    for number in range(10_000):
        while left and (not every or number % every == 0):
            added.append(loop.add(left.pop(0)))
            if every:
                break
        if not left and loop.next_step() is None:
            break
        for one in loop.step():
            texts.setdefault(id(one.sequence), []).extend(one.ids)
    assert (loop.pool.taken, loop.pool.claimed) == (0, 0)
    return [(texts[id(sequence)], sequence.finish) for sequence in added]


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_writes_as_transformers_alone_and_among_others(name: str, tmp_path: Path) -> None:
    """16 sequences of different lengths that join one by one and leave; pieces of long prompts are
    prefilled apart.
    """
    model = write(name, tmp_path, VARIED)
    language_model, inputs = load(tmp_path), prompts(16)
    wanted = written(model, inputs, MAX_NEW_TOKENS)
    requested = [
        replace(each, most=MAX_NEW_TOKENS - number % 7)
        for number, each in enumerate(requests(language_model, inputs))
    ]
    together = finished(DecodeLoop(language_model, 96, most_rows=40), requested, every=2)
    assert [len(text) for text, _ in together] == [each.most for each in requested]
    assert [text for text, _ in together] == [
        text[: each.most] for text, each in zip(wanted, requested, strict=True)
    ]
    assert finished(DecodeLoop(language_model, 8), requested[:1]) == together[:1]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text", "bart", "t5"])
def test_torchs_operators_write_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(name, tmp_path, VARIED)
    inputs = prompts(4)
    wanted = written(model, inputs, 8)
    use_dense(monkeypatch)
    language_model = load(tmp_path)
    assert [
        text
        for text, _ in finished(
            DecodeLoop(language_model, 64, most_rows=40), requests(language_model, inputs, 8)
        )
    ] == wanted


@pytest.mark.parametrize(
    "name",
    [
        "llama", "mistral", "ministral3", "gemma2", "gemma3_text", "lfm2", "qwen3_5_text", "t5",
        "mbart",
    ],
)  # fmt: skip
@torch.inference_mode()
def test_scores_of_every_step_are_those_of_the_full_forward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(name, tmp_path)
    language_model = load(tmp_path)
    seen: list[torch.Tensor] = []
    forward = language_model.forward

    def watched(*given: Any) -> torch.Tensor:
        seen.append(forward(*given))
        return seen[-1]

    monkeypatch.setattr(language_model, "forward", watched)
    prompt = prompts(2)[1]
    requested = requests(language_model, [prompt], 36)
    (text, _), *_ = finished(DecodeLoop(language_model, 8), requested)
    if language_model.has_cross:
        begun = torch.tensor([[language_model.settings.start, *text]])
        wanted = model(
            input_ids=torch.from_numpy(prompt).long()[None], decoder_input_ids=begun
        ).logits[0, :-1]
    else:
        wanted = model(input_ids=torch.tensor([[*prompt.tolist(), *text]])).logits[
            0, len(prompt) - 1 : -1
        ]
    assert float((torch.cat(seen) - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "bart",
            {
                "num_beams": 3,
                "no_repeat_ngram_size": 3,
                "forced_bos_token_id": 0,
                "forced_eos_token_id": 1,
                "eos_token_id": 1,
            },
        ),
        (
            "bart",
            {
                "num_beams": 4,
                "length_penalty": 2.0,
                "early_stopping": True,
                "eos_token_id": [1, 2],
                "min_length": 5,
            },
        ),
        (
            "llama",
            {
                "num_beams": 2,
                "early_stopping": "never",
                "eos_token_id": list(range(3, 40)),
                "repetition_penalty": 1.4,
            },
        ),
        (
            "lfm2",
            {"num_beams": 3, "eos_token_id": list(range(3, 30)), "repetition_penalty": 1.4},
        ),
        (
            "qwen3_5_text",
            {"num_beams": 2, "eos_token_id": list(range(3, 20)), "repetition_penalty": 1.4},
        ),
        (
            "t5 1.1 resaved",
            {"num_beams": 3, "eos_token_id": list(range(3, 30)), "no_repeat_ngram_size": 2},
        ),
        (
            "marian",
            {
                "num_beams": 4,
                "renormalize_logits": True,
                "bad_words_ids": [[2], [7]],
                "forced_eos_token_id": 1,
                "eos_token_id": list(range(1, 30)),
                "repetition_penalty": 1.3,
            },
        ),
        (
            "t5",
            {
                "num_beams": 3,
                "length_penalty": -1.0,
                "eos_token_id": list(range(3, 30)),
                "no_repeat_ngram_size": 2,
            },
        ),
    ],
)
def test_beams_that_the_config_asks_for(
    name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model = write(name, tmp_path, settings)
    language_model, inputs = load(tmp_path), prompts(4)
    # transformers' caches of states are not those of its beams.
    cache = {"use_cache": False} if name in CARRIED else {}
    wanted = [
        _ended(written(model, [ids], 14, **cache)[0], language_model.settings) for ids in inputs
    ]
    assert language_model.settings.beams == settings["num_beams"]
    found = finished(DecodeLoop(language_model, 100), requests(language_model, inputs, 14), every=3)
    assert [text for text, _ in found] == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {
            "bad_words_ids": [[5], [7, 8], [150]],
            "suppress_tokens": [12, 90, 200],
            "begin_suppress_tokens": [35, 127, 181],
        },
        {"eos_token_id": list(range(3, 60)), "min_new_tokens": 6},
        {"eos_token_id": 2, "forced_eos_token_id": 2, "min_length": 20, "no_repeat_ngram_size": 1},
    ],
)
def test_rules_of_generation_config(settings: dict[str, object], tmp_path: Path) -> None:
    model = write("llama", tmp_path, settings)
    language_model, inputs = load(tmp_path), prompts(5)
    wanted = [_ended(written(model, [ids], 24)[0], language_model.settings) for ids in inputs]
    assert [
        text
        for text, _ in finished(
            DecodeLoop(language_model, 64), requests(language_model, inputs, 24)
        )
    ] == wanted


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"eos_token_id": list(range(1_000_000))},
            "eos_token_id .*: it has 1,000,000 token ids; at most 64",
        ),
        (
            {"eos_token_id": [2, VOCABULARY], "min_new_tokens": 6},
            "eos_token_id has the token id 300: ids from 0 to 299",
        ),
        ({"eos_token_id": -1}, "eos_token_id has the token id -1"),
        ({"suppress_tokens": [VOCABULARY]}, "suppress_tokens has the token id 300"),
        ({"suppress_tokens": [1] * 65_537}, "suppress_tokens .*: it has 65,537 token ids"),
        ({"begin_suppress_tokens": [10**6]}, "begin_suppress_tokens has the token id 1000000"),
        ({"bad_words_ids": [[5], [7, 300]]}, "bad_words_ids has the token id 300"),
        ({"bad_words_ids": [[5]] * 1_025}, "bad_words_ids .*: it has 1,025 lists; at most 1,024"),
        ({"bad_words_ids": [[5] * 65]}, "bad_words_ids .*: it has 65 token ids"),
        ({"forced_bos_token_id": 300}, "forced_bos_token_id has the token id 300"),
        ({"forced_eos_token_id": 10**6}, "forced_eos_token_id has the token id 1000000"),
        ({"decoder_start_token_id": 301}, "decoder_start_token_id has the token id 301"),
        ({"num_beams": 33}, "num_beams is 33: at most 32"),
        ({"length_penalty": 1e308}, r"length_penalty is 1e\+308: a number from -16 to 16"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty is 1e-308: a number from 0.01 to 100"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
    ],
)
def test_settings_beyond_their_bounds_are_refused_when_a_model_is_loaded(
    settings: Mapping[str, object], problem: str, tmp_path: Path
) -> None:
    write("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelBroken, match=f"^generation_config.json: {problem}"):
        load(tmp_path)


def _ended(text: list[int], settings: DecodeSettings) -> list[int]:
    """Without the padding behind the first stop token."""
    end = next(
        (place for place, token in enumerate(text) if token in settings.stops), len(text) - 1
    )
    return text[: end + 1]


@pytest.fixture(scope="module")
def llama(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[transformers.PreTrainedModel, LanguageModel]:
    directory = tmp_path_factory.mktemp("llama")
    return write("llama", directory), load(directory)


def test_answer_says_why_it_ended(
    llama: tuple[transformers.PreTrainedModel, LanguageModel],
) -> None:
    _, language_model = llama
    ids = prompts(3)[2]
    text, finish = finished(DecodeLoop(language_model, 4), [SequenceRequest(ids, most=9)])[0]
    assert (len(text), finish) == (9, "length")
    stopped = replace(language_model.settings, stops=(text[4],))
    end = text.index(text[4]) + 1
    assert finished(
        DecodeLoop(language_model, 4), [SequenceRequest(ids, most=9, settings=stopped)]
    )[0] == (
        text[:end],
        "stop",
    )


def test_cancelled_sequence_returns_its_pages_and_leaves_the_others_alone(
    llama: tuple[transformers.PreTrainedModel, LanguageModel],
) -> None:
    model, language_model = llama
    inputs = prompts(4)
    loop = DecodeLoop(language_model, 16)
    first, *others = [loop.add(SequenceRequest(ids, most=12)) for ids in inputs]
    texts: dict[int, list[int]] = {}
    for _ in range(4):
        for one in loop.step():
            texts.setdefault(id(one.sequence), []).extend(one.ids)
    held = loop.pool.claimed
    loop.cancel(first)
    assert first.finish == "cancelled"
    assert held - loop.pool.claimed == loop.needs(SequenceRequest(inputs[0], most=12))
    while loop.next_step() is not None:
        for one in loop.step():
            texts.setdefault(id(one.sequence), []).extend(one.ids)
    assert [texts[id(each)] for each in others] == written(model, inputs[1:], 12)
    assert (loop.pool.taken, loop.pool.claimed) == (0, 0)


def test_memory_is_claimed_before_and_never_exceeded(
    llama: tuple[transformers.PreTrainedModel, LanguageModel],
) -> None:
    _, language_model = llama
    loop = DecodeLoop(language_model, 5)
    long = SequenceRequest(np.arange(3, 3 + PAGE, dtype=np.int32), most=PAGE + 1)
    assert loop.needs(long) == 3
    loop.add(long)
    assert not loop.has_room(long)
    with pytest.raises(NoCapacity, match="needs 3 pages of key/value memory; 2 are free"):
        loop.add(long)
    while loop.next_step() is not None:
        loop.step()
        assert loop.pool.taken <= loop.pool.claimed <= 3
    assert loop.has_room(long)


@pytest.mark.parametrize("name", CARRIED)
def test_failed_forward_can_be_repeated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that runs out of memory changes no state, so the next one has the same result."""
    write(name, tmp_path, VARIED)
    language_model = load(tmp_path)
    requested = requests(language_model, prompts(3), 8)
    wanted = finished(DecodeLoop(language_model, 32), requested)
    loop, failures = DecodeLoop(language_model, 32), iter([True, False] * 100)
    head = language_model.head.forward

    def failing(x: torch.Tensor) -> torch.Tensor:
        if next(failures):
            raise MemoryError
        return head(x)

    monkeypatch.setattr(language_model.head, "forward", failing)
    step = loop.step

    def repeated() -> list[Any]:
        with pytest.raises(MemoryError):
            step()
        return step()

    monkeypatch.setattr(loop, "step", repeated)
    assert finished(loop, requested) == wanted


@pytest.mark.parametrize("name", CARRIED)
def test_states_are_claimed_before_and_never_exceeded(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    language_model = load(tmp_path)
    loop, requested = (
        DecodeLoop(language_model, 64, slots=2),
        requests(language_model, prompts(3), 4),
    )
    first, _ = (loop.add(each) for each in requested[:2])
    assert not loop.has_room(requested[2])
    with pytest.raises(NoCapacity, match="states of 1 rows; 0 are free"):
        loop.add(requested[2])
    loop.cancel(first)
    assert loop.has_room(requested[2])


def test_cost_of_a_step_is_known_before_it(
    llama: tuple[transformers.PreTrainedModel, LanguageModel],
) -> None:
    _, language_model = llama
    loop = DecodeLoop(language_model, 16, most_rows=40)
    loop.add(SequenceRequest(np.full(50, 7, np.int32), most=4))
    costs = []
    while (cost := loop.next_step()) is not None:
        costs.append((cost.kind, cost.rows, cost.keys))
        loop.step()
    assert costs == [
        ("prefill", 40, 40),
        ("prefill", 10, 50),
        ("decode", 1, 51),
        ("decode", 1, 52),
        ("decode", 1, 53),
    ]


def test_grammar_and_a_bound_on_ids_restrict_the_next_token(
    llama: tuple[transformers.PreTrainedModel, LanguageModel],
) -> None:
    _, language_model = llama
    ids = prompts(2)[1]

    def even(text: Ids) -> Bits:
        return np.packbits(np.arange(VOCABULARY) % 2 == len(text) % 2, bitorder="little")

    text, _ = finished(DecodeLoop(language_model, 4), [SequenceRequest(ids, most=10, allows=even)])[
        0
    ]
    assert [token % 2 for token in text] == [0, 1] * 5
    bounded = replace(language_model.settings, vocabulary=20)
    text, _ = finished(
        DecodeLoop(language_model, 4), [SequenceRequest(ids, most=10, settings=bounded)]
    )[0]
    assert max(text) < 20


def test_requests_that_cannot_be_generated_are_refused(
    llama: tuple[transformers.PreTrainedModel, LanguageModel], tmp_path: Path
) -> None:
    _, language_model = llama
    loop = DecodeLoop(language_model, 4)
    with pytest.raises(InvalidInput, match="leaves no room"):
        loop.add(SequenceRequest(np.full(language_model.max_positions, 3, np.int32)))
    with pytest.raises(InvalidInput, match=r"a token outside 0\.\.299"):
        loop.add(SequenceRequest(np.array([VOCABULARY], np.int32)))
    with pytest.raises(InvalidInput, match="at least one token"):
        loop.add(SequenceRequest())
    with pytest.raises(InvalidInput, match="encoder states"):
        loop.add(SequenceRequest(np.array([3], np.int32), states=torch.zeros(1, 64)))
    assert loop.pool.claimed == 0
    write("llama", tmp_path, {"guidance_scale": 2.0})
    with pytest.raises(ModelBroken, match="guidance_scale"):
        load(tmp_path)
