"""Chunks against references over transformers: late ones as in the paper, others as separate
texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from libs.errors import InvalidInput, TaskNotSupported
from libs.models import EncodeResult, EncodeWork, PackedModel, Role, load_model
from libs.models.interface.work import Chunking, ChunkMethod, Span
from services.local.settings import packaged_minilm
from tests.parity.checkpoints import Kind, SentenceFiles, write_checkpoint
from tests.parity.test_hybrid import write_m3
from tests.support.texts import texts

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

Pooling = Literal["cls_token", "mean_tokens", "lasttoken", "weightedmean_tokens"]
MODELS: tuple[tuple[Kind, Pooling], ...] = (
    ("bert", "mean_tokens"),
    ("xlm-roberta", "mean_tokens"),
    ("modernbert", "cls_token"),
    ("bert", "cls_token"),
    ("qwen3", "lasttoken"),
    ("llama", "weightedmean_tokens"),
)
PROMPT = "find: "
SHORT = (
    "Each licensee is addressed as you. Programs, GPL; warranty (none)! To protect your rights, we "
    "need to prevent others."
)
LONG = " ".join(texts(30, shortest=5, longest=25, seed=3))
HARD = (
    "日本語の文。次の文です。😀👩\u200d👩\u200d👧 emoji! e\u0301te\u0301 naïve.\r\n"
    "New line.\r\n\r\n"
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. The end\u200b of it."
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, pooling = request.param
    files = SentenceFiles(
        pooling=pooling, prompts={"document": PROMPT}, dense=16 if kind == "xlm-roberta" else None
    )
    return write_checkpoint(kind, tmp_path_factory.mktemp(f"{kind}-{pooling}"), sentence=files)


def load(directory: Path) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), torch.float32)


def encode(model: PackedModel, *works: EncodeWork) -> list[EncodeResult]:
    """Run all works in one forward, as a worker does."""
    prepared = [model.prepare(work) for work in works]
    outputs = model.forward(
        prepared[0].head, [sequence for item in prepared for sequence in item.sequences]
    )
    found, first = [], 0
    for item in prepared:
        result = model.finish(item, outputs[first : first + len(item.sequences)])
        assert isinstance(result, EncodeResult)
        found.append(result)
        first += len(item.sequences)
    return found


def dense(result: EncodeResult) -> NDArray[np.float32]:
    assert result.dense is not None
    return result.dense.values.astype(np.float32)


def spans_of(result: EncodeResult, item: int = 0) -> list[tuple[int, int]]:
    chunks = result.chunks
    assert chunks is not None
    rows = range(chunks.offsets[item], chunks.offsets[item + 1])
    return [(chunks.starts[row], chunks.ends[row]) for row in rows]


class Reference:
    """Compute long late chunking (arXiv 2409.04701, section 3.1) over transformers: token states of
    successive windows without those of the overlap, pooled by span."""

    def __init__(self, directory: Path, limit: int, overlap: int) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(directory))
        self.model: Any = transformers.AutoModel.from_pretrained(str(directory)).eval()
        self.limit, self.overlap = limit, overlap

    def states(self, ids: Sequence[int]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return list(self.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0])

    def vectors(
        self, text: str, spans: Sequence[tuple[int, int]], pooling: Pooling, prompt: str
    ) -> NDArray[np.float32]:
        found = self.tokenizer(
            prompt + text,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            truncation=False,
        )
        ids, special = found["input_ids"], found["special_tokens_mask"]
        places = [
            (start - len(prompt), end - len(prompt)) for start, end in found["offset_mapping"]
        ]
        own = [index for index in range(len(ids)) if not special[index] and places[index][1] > 0]
        lead, tail = ids[: own[0]], ids[own[-1] + 1 :]
        room = self.limit - len(lead) - len(tail)
        overlap = min(self.overlap, room // 4)
        states: list[torch.Tensor] = []
        begin, end = own[0], min(own[0] + room, own[-1] + 1)
        while True:
            window = self.states([*lead, *ids[begin:end], *tail])
            dropped = len(lead) + (overlap if states else 0)
            states += window[0 if not states else dropped : len(lead) + end - begin]
            if end == own[-1] + 1:
                states += window[len(lead) + end - begin :]
                break
            begin, end = end - overlap, min(end - overlap + room, own[-1] + 1)
        assert len(states) == len(ids)
        rows = []
        for start, stop in spans:
            inside = [index for index in own if start <= self._begin(text, *places[index]) < stop]
            low = 0 if inside[0] == own[0] else inside[0]
            high = len(ids) if inside[-1] == own[-1] else inside[-1] + 1
            rows.append(pool(torch.stack(states[low:high]), pooling))
        return torch.stack(rows).numpy()

    @staticmethod
    def _begin(text: str, start: int, end: int) -> int:
        start = max(start, 0)
        while start < end - 1 and text[start].isspace():
            start += 1
        return start


def pool(states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    if pooling == "lasttoken":
        return states[-1]
    if pooling == "weightedmean_tokens":
        weights = torch.arange(1, len(states) + 1, dtype=torch.float32)[:, None]
        return (states * weights).sum(0) / weights.sum()
    return states.mean(0)


def worst(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float((np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max())


def finished(directory: Path, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply the modules after the pooling and normalise to length 1."""
    file = directory / "2_Dense" / "model.safetensors"
    if file.exists():
        from safetensors.numpy import load_file

        state = load_file(file)
        pooled = np.tanh(pooled @ state["linear.weight"].T + state["linear.bias"])
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def read_pooling(directory: Path) -> Pooling:
    name: Pooling = directory.name.rsplit("-", 1)[-1].rstrip("0123456789")  # type: ignore[assignment]
    return name


@pytest.mark.parametrize("role", ["", "document"])
@pytest.mark.parametrize(
    ("text", "method"),
    [(SHORT, "sentences"), (LONG, "tokens"), (LONG, "sentences"), (HARD, "tokens")],
)
def test_late_chunks_equal_the_papers_method(
    directory: Path, text: str, method: ChunkMethod, role: Literal["", "document"]
) -> None:
    """Alone and among others, within the model's 64 tokens and beyond them."""
    model, pooling = load(directory), read_pooling(directory)
    chunking = Chunking(method, max_tokens=11, overlap=3, late=True)
    alone = encode(model, EncodeWork([text], role=role, chunking=chunking))[0]
    others = [
        EncodeWork([LONG, SHORT], role=role, chunking=chunking),
        EncodeWork([HARD, text], role=role, chunking=chunking),
    ]
    among = encode(model, *others)[1]
    found = spans_of(alone)
    assert len(found) > 2
    reference = Reference(directory, model.max_tokens, 256)
    theirs = finished(directory, reference.vectors(text, found, pooling, PROMPT if role else ""))
    assert worst(dense(alone), theirs) <= 1e-5
    assert spans_of(among, 1) == found
    assert worst(dense(among)[-len(found) :], theirs) <= 1e-5


def test_late_chunk_of_a_whole_text_equals_its_vector(directory: Path) -> None:
    if read_pooling(directory) == "cls_token":
        pytest.skip("late chunks of such models have the mean of their tokens")
    model = load(directory)
    whole = encode(model, EncodeWork([SHORT], role="document"))[0]
    span = ((Span(0, len(SHORT)),),)
    late = encode(
        model,
        EncodeWork([SHORT], role="document", chunking=Chunking("spans", late=True), spans=span),
    )[0]
    if len(model.prepare(EncodeWork([SHORT], role="document")).sequences[0].ids) < model.max_tokens:
        assert worst(dense(late), dense(whole)) <= 1e-5


def test_unpooled_prompt_belongs_to_no_chunk(tmp_path: Path) -> None:
    directory = write_checkpoint(
        "bert", tmp_path, sentence=SentenceFiles(prompts={"document": PROMPT})
    )
    pooling = directory / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    model, text = load(directory), SHORT[:50]
    roles: tuple[Role, ...] = ("document", "")
    for role in roles:
        (whole,) = encode(model, EncodeWork([text], role=role))
        late = EncodeWork(
            [text], role=role, chunking=Chunking("spans", late=True), spans=((Span(0, len(text)),),)
        )
        assert worst(dense(encode(model, late)[0]), dense(whole)) <= 1e-5


def test_late_chunks_of_a_published_model() -> None:
    """MiniLM's weights, within its 256 tokens and beyond them."""
    directory = packaged_minilm()
    assert directory is not None
    model, chunking = load(directory), Chunking(max_tokens=50, late=True)
    reference = Reference(directory, model.max_tokens, 256)
    for text in (LONG[:600], LONG):
        (late,) = encode(model, EncodeWork([text], chunking=chunking))
        theirs = finished(directory, reference.vectors(text, spans_of(late), "mean_tokens", ""))
        assert worst(dense(late), theirs) <= 1e-5


def test_model_with_several_representations_has_late_dense_vectors(tmp_path: Path) -> None:
    directory = write_m3(tmp_path)
    model = load(directory)
    (late,) = encode(
        model,
        EncodeWork([LONG], representations=("dense",), chunking=Chunking(max_tokens=20, late=True)),
    )
    reference = Reference(directory, model.max_tokens, 256)
    theirs = finished(directory, reference.vectors(LONG, spans_of(late), "cls_token", ""))
    assert worst(dense(late), theirs) <= 1e-5
    (plain,) = encode(
        model,
        EncodeWork(
            [LONG], representations=model.card.representations, chunking=Chunking(max_tokens=20)
        ),
    )
    assert plain.sparse is not None
    assert plain.multi_vector is not None
    assert len(plain.sparse.offsets) == len(plain.multi_vector.offsets) == len(dense(plain)) + 1
    # Within the model's length, the token vectors of chunks that cover the text are those of the
    # text, in order.
    # text, one after the other.
    ends = (0, 9, 30, 31, 60, len(SHORT))
    spans = (tuple(Span(start, end) for start, end in pairwise(ends)),)
    asked = EncodeWork(
        [SHORT],
        representations=("dense", "multi_vector"),
        chunking=Chunking("spans", late=True),
        spans=spans,
    )
    (both,), (whole,) = (
        encode(model, asked),
        encode(model, EncodeWork([SHORT], representations=("dense", "multi_vector"))),
    )
    assert both.multi_vector is not None
    assert whole.multi_vector is not None
    assert len(both.multi_vector.offsets) == len(dense(both)) + 1 > 4
    rows, wanted = (
        both.multi_vector.values.values.astype(np.float32),
        whole.multi_vector.values.values.astype(np.float32),
    )
    assert worst(rows, wanted) <= 1e-5
    (beyond,) = encode(
        model,
        EncodeWork(
            [LONG], representations=("multi_vector",), chunking=Chunking(max_tokens=20, late=True)
        ),
    )
    assert beyond.multi_vector is not None
    assert beyond.chunks is not None
    assert np.diff(beyond.multi_vector.offsets).sum() == sum(beyond.chunks.tokens) - 1, (
        "all but the first token's"
    )
    with pytest.raises(TaskNotSupported):
        model.prepare(EncodeWork([LONG], representations=("sparse",), chunking=Chunking(late=True)))


@pytest.mark.parametrize("method", ["sentences", "tokens", "markdown"])
def test_chunks_equal_separate_items(directory: Path, method: ChunkMethod) -> None:
    model = load(directory)
    (result,) = encode(
        model, EncodeWork([SHORT, HARD], role="document", chunking=Chunking(method, max_tokens=12))
    )
    pieces = [
        text[start:end]
        for index, text in enumerate((SHORT, HARD))
        for start, end in spans_of(result, index)
    ]
    (alone,) = encode(model, EncodeWork(pieces, role="document"))
    assert worst(dense(result), dense(alone)) <= 1e-5
    assert result.chunks is not None
    assert result.chunks.tokens == [
        item.tokens for item in model.prepare(EncodeWork(pieces, role="document")).sequences
    ]


@pytest.mark.parametrize("late", [False, True])
def test_callers_spans_are_kept_exactly(directory: Path, late: bool) -> None:
    """Spans are in any order, overlap, have gaps, and divide a word and a character's marks."""
    model = load(directory)
    spans = (Span(20, 30), Span(0, 5), Span(3, 12), Span(1, 2), Span(len(HARD) - 3, len(HARD)))
    (result,) = encode(
        model, EncodeWork([HARD], chunking=Chunking("spans", late=late), spans=(spans,))
    )
    assert spans_of(result) == [(span.start, span.end) for span in spans]
    assert np.isfinite(dense(result)).all()


def test_contexts_precede_each_chunk(directory: Path) -> None:
    model = load(directory)
    spans = (Span(0, 34, "One. "), Span(35, 60))
    (result,) = encode(
        model,
        EncodeWork([SHORT], chunking=Chunking("spans"), spans=(spans,), contexts=("Title: ",)),
    )
    (alone,) = encode(model, EncodeWork(["Title: One. " + SHORT[:34], "Title: " + SHORT[35:60]]))
    assert worst(dense(result), dense(alone)) <= 1e-5


def test_invalid_chunking_is_refused(directory: Path) -> None:
    model = load(directory)
    for work, error, field in (
        (
            EncodeWork([SHORT], chunking=Chunking(max_tokens=65)),
            InvalidInput,
            "chunking.max_tokens",
        ),
        (
            EncodeWork([SHORT], chunking=Chunking(late=True), contexts=("a",)),
            InvalidInput,
            "items[0].context",
        ),
        (
            EncodeWork([SHORT], chunking=Chunking(), contexts=("word " * 99,)),
            InvalidInput,
            "items[0].context",
        ),
        (
            EncodeWork(["word " * 20_000], chunking=Chunking(max_tokens=1)),
            InvalidInput,
            "items[0].text",
        ),
        (
            EncodeWork([SHORT], chunking=Chunking(), representations=("sparse",)),
            TaskNotSupported,
            "representations[0]",
        ),
    ):
        with pytest.raises(error) as caught:
            model.prepare(work)
        assert caught.value.field == field
