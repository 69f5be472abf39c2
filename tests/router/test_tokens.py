"""Tokenize and Detokenize through a router: splitting, merging, limits, and the fields that a
worker's failure names.
"""

from __future__ import annotations

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, worker_pb2

from libs import tokens
from libs.errors import InvalidInput, TaskNotSupported
from services.router.admission import pricing
from services.router.admission.validation import limits
from services.router.admission.validation.answer_bounds import check_tokens
from services.router.admission.validation.tokens import check_detokenize, check_tokenize
from tests.router.parts import MODEL, FakeWorker, card, refused, router

ANY_BYTES = 1 << 40
DEFAULT_LIMIT = 4 << 20


def sequences(*ids: list[int]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=one) for one in ids]


async def test_large_request_is_split_and_its_answers_are_joined_in_order(redis_url: str) -> None:
    texts = [f"{number} " * (1 + number % 200) for number in range(6000)]
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.sees("w1")
        counted = await client.inference.Tokenize(
            pb.TokenizeRequest(model=MODEL, texts=texts, count_only=True)
        )
        assert [result.count for result in counted.results] == list(map(len, texts))
        assert (counted.max_tokens, counted.model_revision, counted.usage.input_tokens) == (
            512,
            "r1",
            len(texts),
        )
        assert counted.timings.total_seconds > 0
        assert len(worker.jobs) > 1, "a worker reads about a MiB of text for a job"
        worker.jobs.clear()
        named = await client.inference.Tokenize(pb.TokenizeRequest(model=MODEL, texts=texts[:150]))
        assert ["".join(map(chr, result.ids)) for result in named.results] == texts[:150]
        ids = [list(result.ids) for result in named.results]
        back = await client.inference.Detokenize(
            pb.DetokenizeRequest(model=MODEL, sequences=sequences(*ids))
        )
        assert list(back.texts) == texts[:150]


async def test_refused_text_is_named_by_its_index(redis_url: str) -> None:
    texts = ["x" * 1000] * 3000

    def refuse(job: worker_pb2.Job) -> worker_pb2.JobResult:
        place = job.first_item + len(job.tokenize.texts) - 1
        failure = worker_pb2.Failure(
            reason="INPUT_TOO_LONG", message="too long", field=f"texts[{place}]"
        )
        return worker_pb2.JobResult(failure=failure)

    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        worker.answer = refuse
        await client.sees("w1")
        refusal = await refused(
            client.inference.Tokenize(pb.TokenizeRequest(model=MODEL, texts=texts, count_only=True))
        )
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INPUT_TOO_LONG",
        )
        assert refusal.field.startswith("texts[")


@pytest.mark.parametrize(
    "wrong",
    [
        pb.Tokenization(count=2, ids=[1, 2], starts=[0], ends=[1, 2]),
        pb.Tokenization(count=1, ids=[1], starts=[0], ends=[1], special_before=1, special_after=1),
        pb.Tokenization(count=1, ids=[1], starts=[0], ends=[1], kept_start=1, kept_end=0),
    ],
    ids=["a list is shorter", "more special tokens than tokens", "ends before it begins"],
)
async def test_answer_that_contradicts_itself_is_not_passed_on(
    redis_url: str, wrong: pb.Tokenization
) -> None:
    def broken(job: worker_pb2.Job) -> worker_pb2.JobResult:
        return worker_pb2.JobResult(tokenize=pb.TokenizeResponse(results=[wrong]))

    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        worker.answer = broken
        await client.sees("w1")
        refusal = await refused(
            client.inference.Tokenize(pb.TokenizeRequest(model=MODEL, texts=["a"]))
        )
        assert refusal.code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.TokenizeRequest(texts=["a"]), "model"),
        (pb.TokenizeRequest(model="no model", texts=["a"]), "model"),
        (pb.TokenizeRequest(model=MODEL), "texts"),
        (pb.TokenizeRequest(model=MODEL, texts=["a"] * 10_001), "texts"),
        (
            pb.TokenizeRequest(
                model=MODEL, texts=["a", "é" * (limits.TOKENIZED_TEXT.most // 2) + "b"]
            ),
            "texts[1]",
        ),
        (pb.TokenizeRequest(model=MODEL, texts=["a"], truncation=9), "truncation"),  # type: ignore[arg-type]
        (pb.TokenizeRequest(model=MODEL, texts=["a"], priority=9), "priority"),  # type: ignore[arg-type]
    ],
)
def test_requests_beyond_their_limits_name_the_field(
    request_: pb.TokenizeRequest, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_tokenize(request_, None)
    assert caught.value.field == field


def test_ids_of_all_sequences_are_limited_together() -> None:
    half = list(range(limits.IDS.most // 2))
    check_detokenize(pb.DetokenizeRequest(model=MODEL, sequences=sequences(half, half)), None)
    with pytest.raises(InvalidInput) as caught:
        check_detokenize(
            pb.DetokenizeRequest(model=MODEL, sequences=sequences(half, [*half, 1])), None
        )
    assert caught.value.field == "sequences"
    with pytest.raises(InvalidInput, match="sequences is empty"):
        check_detokenize(pb.DetokenizeRequest(model=MODEL), None)


def test_model_of_images_alone_has_no_tokenizer() -> None:
    images = models_pb2.ModelCard(model=MODEL, inputs=[models_pb2.INPUT_KIND_IMAGE])
    with pytest.raises(TaskNotSupported):
        check_tokenize(pb.TokenizeRequest(model=MODEL, texts=["a"]), images)


def test_answer_is_bounded_by_the_bytes_of_its_texts_before_any_work() -> None:
    most = (limits.TOKENIZED.most - tokens.RESULT_BYTES) // tokens.TOKEN_BYTES - tokens.TEXT_TOKENS
    texts = ["x" * (most // 2), "x" * (most - most // 2 - 100)]
    check_tokens(pb.TokenizeRequest(model=MODEL, texts=texts), card(), readable=ANY_BYTES)
    larger = pb.TokenizeRequest(model=MODEL, texts=[*texts, "x" * 200])
    with pytest.raises(InvalidInput, match="one answer has at most 16,777,216") as caught:
        check_tokens(larger, card(), readable=ANY_BYTES)
    assert caught.value.field == "texts"
    larger.count_only = True
    check_tokens(larger, card(), readable=DEFAULT_LIMIT)


def test_answer_above_the_clients_limit_names_the_way_to_raise_it() -> None:
    request = pb.TokenizeRequest(model=MODEL, texts=["x" * 400_000])
    check_tokens(request, card(), readable=ANY_BYTES)
    with pytest.raises(InvalidInput, match="x-shoal-max-answer-bytes"):
        check_tokens(request, card(), readable=DEFAULT_LIMIT)
    request.truncation = pb.TRUNCATION_END
    check_tokens(request, card(), readable=DEFAULT_LIMIT)
    request.return_tokens = True
    with pytest.raises(InvalidInput):
        check_tokens(
            pb.TokenizeRequest(model=MODEL, texts=["x" * 600_000], return_tokens=True),
            card(),
            readable=DEFAULT_LIMIT,
        )


def test_many_ids_are_bounded_by_the_texts_that_they_may_become() -> None:
    few = pb.DetokenizeRequest(model=MODEL, sequences=sequences([7] * 60_000))
    check_tokens(few, card(), readable=DEFAULT_LIMIT)
    many = pb.DetokenizeRequest(model=MODEL, sequences=sequences([7] * 70_000))
    with pytest.raises(InvalidInput) as caught:
        check_tokens(many, card(), readable=DEFAULT_LIMIT)
    assert caught.value.field == "sequences"


def test_text_is_priced_by_the_work_of_reading_it() -> None:
    sizes = check_tokenize(pb.TokenizeRequest(model=MODEL, texts=["", "x" * 10_240]), card())
    assert pricing.price_reading(sizes) == [pricing.SPECIAL_TOKENS, pricing.SPECIAL_TOKENS + 10]
