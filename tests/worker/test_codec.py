"""Conversion of jobs to work, and of results to messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shoal.extractions import (
    Classification,
    Entity,
    Extraction,
    LabelScore,
    Region,
    Structure,
    ToolCall,
    Value,
)
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2, worker_pb2

from libs.catalog.card import Card, ImageSize
from libs.errors import InputTooLong, InvalidInput, ShoalError, TaskNotSupported
from libs.models import (
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    ExtractResult,
    Given,
    Part,
    RaggedRows,
    RegionsWork,
    RelationsWork,
    Result,
    ScoreResult,
    ScoreWork,
    StoredArray,
    StructureWork,
)
from libs.models.interface.results import Chunks
from libs.models.interface.schema import schema_texts
from libs.models.interface.work import Chunking, Sampling, TextWork, Turn
from services.worker.mesh import codec, job_codec
from services.worker.mesh.codec import Timings

TIMES = Timings(queue=1.0, prepare=2.0, wait=3.0, forward=4.0, finish=5.0)


def item(text: str) -> pb.Item:
    return pb.Item(text=text)


def sent(result: Result) -> worker_pb2.JobResult:
    return worker_pb2.JobResult.FromString(
        codec.encode_result(result, revision="r", tokens=7, timings=TIMES)
    )


def test_encode_with_everything_set() -> None:
    request = pb.EncodeRequest(
        items=[item("a"), item("ü")],
        role=pb.ROLE_QUERY,
        representations=[pb.REPRESENTATION_DENSE, pb.REPRESENTATION_MULTI_VECTOR],
        data_type=tensor_pb2.DATA_TYPE_INT8,
        dimensions=8,
        normalize=False,
        instruction="find: ",
        truncation=pb.TRUNCATION_NONE,
    )
    work = job_codec.to_work(worker_pb2.Job(encode=request))
    assert work == EncodeWork(
        ["a", "ü"], "query", ("dense", "multi_vector"), "int8", 8, False, "find: ", "none"
    )


def test_empty_encode_request_has_the_documented_defaults() -> None:
    assert job_codec.to_work(
        worker_pb2.Job(encode=pb.EncodeRequest(items=[item("a")]))
    ) == EncodeWork(["a"], truncation="default")


def test_score() -> None:
    request = pb.ScoreRequest(
        query=item("q"), documents=[item("aa"), item("b")], scale=pb.SCORE_SCALE_PROBABILITY
    )
    work = job_codec.to_work(worker_pb2.Job(score=request))
    assert work == ScoreWork("q", ["aa", "b"], "", "probability", "default")


def test_extract() -> None:
    entities = pb.ExtractRequest(
        items=[item("a")], entities=pb.EntitiesTask(labels=["x"], threshold=0.5, flat=False)
    )
    assert job_codec.to_work(worker_pb2.Job(extract=entities)) == EntitiesWork(
        ["a"], ("x",), 0.5, False, truncation="default"
    )
    defaults = pb.ExtractRequest(
        items=[item("a")], entities=pb.EntitiesTask(aggregation=pb.AGGREGATION_MAX)
    )
    assert job_codec.to_work(worker_pb2.Job(extract=defaults)) == EntitiesWork(
        ["a"], (), None, True, "max", truncation="default"
    )
    classify = pb.ExtractRequest(
        items=[item("a")],
        classify=pb.ClassifyTask(labels=["x"], multi_label=True, hypothesis="is {}"),
    )
    assert job_codec.to_work(worker_pb2.Job(extract=classify)) == ClassifyWork(
        ["a"], ("x",), True, None, "is {}", truncation="default"
    )
    task = pb.RelationsTask(labels=["in"], entity_labels=["city"], threshold=0.25)
    among = pb.ExtractRequest(
        items=[item("a")], classify=pb.ClassifyTask(labels=["x"], among_labels=True)
    )
    assert job_codec.to_work(worker_pb2.Job(extract=among)) == ClassifyWork(
        ["a"], ("x",), among_labels=True, truncation="default"
    )
    relations = job_codec.to_work(
        worker_pb2.Job(extract=pb.ExtractRequest(items=[item("abc")], relations=task))
    )
    assert relations == RelationsWork(["abc"], ("in",), ("city",), 0.25, "default")
    known = pb.Item(
        text="in Bern", entities=[pb.Entity(start=3, end=7, label="city", score=0.5, text="Bern")]
    )
    given = job_codec.to_work(
        worker_pb2.Job(extract=pb.ExtractRequest(items=[item("a"), known], relations=task))
    )
    assert given == RelationsWork(
        ["a", "in Bern"], ("in",), ("city",), 0.25, "default", ((), (Given(3, 7, "city"),))
    )


def test_regions() -> None:
    items = [pb.Item(image=pb.Image(data=b"png")), item("a")]
    request = pb.ExtractRequest(
        items=items, regions=pb.RegionsTask(labels=["cat", "dog"], threshold=0.25)
    )
    parts = {0: (Part(b"png", "items[0].image"),)}
    assert job_codec.to_work(worker_pb2.Job(extract=request)) == RegionsWork(
        ["", "a"], ("cat", "dog"), 0.25, parts
    )
    request.regions.ClearField("threshold")
    assert job_codec.to_work(worker_pb2.Job(extract=request)) == RegionsWork(
        ["", "a"], ("cat", "dog"), None, parts
    )
    [reported] = sent(
        ExtractResult([Extraction(regions=(Region(1.0, 2.0, 3.0, 4.0, "cat", 0.5),))])
    ).extract.results
    assert reported == pb.Extraction(
        regions=[pb.Region(left=1, top=2, right=3, bottom=4, label="cat", score=0.5)]
    )


def test_turns() -> None:
    turns = [
        pb.Turn(role=pb.Turn.ROLE_USER, text="a"),
        pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="b"),
    ]
    turns.append(pb.Turn(role=pb.Turn.ROLE_SYSTEM, text="s"))
    request = pb.ExtractRequest(
        items=[item("c")], text=pb.TextTask(turns=turns, template_values='{"a": 1}')
    )
    wanted = TextWork(
        ["c"],
        turns=(Turn("user", "a"), Turn("assistant", "b"), Turn("system", "s")),
        template_values='{"a": 1}',
    )
    made = job_codec.to_work(worker_pb2.Job(extract=request))
    assert isinstance(made, TextWork)
    assert replace(made, seeds=()) == wanted


def test_sampling_stop_strings_and_tools() -> None:
    calls = [pb.ToolCall(name="f", arguments="{}")]
    task = pb.TextTask(
        turns=[
            pb.Turn(role=pb.Turn.ROLE_ASSISTANT, tool_calls=calls),
            pb.Turn(role=pb.Turn.ROLE_TOOL, text="20"),
        ],
        sampling=pb.Sampling(temperature=0.0, top_k=3),
        stop=["\n"],
        top_logprobs=0,
        raw_prompt=True,
        tools="[]",
        tool="f",
        single_tool_call=True,
        item_role=pb.Turn.ROLE_TOOL,
    )
    made = job_codec.to_work(
        worker_pb2.Job(extract=pb.ExtractRequest(items=[item("c")], text=task))
    )
    assert isinstance(made, TextWork)
    assert replace(made, seeds=()) == TextWork(
        ["c"],
        turns=(Turn("assistant", "", (ToolCall("f", "{}"),)), Turn("tool", "20")),
        sampling=Sampling(temperature=0.0, top_k=3),
        stops=("\n",),
        top_logprobs=0,
        raw_prompt=True,
        tools="[]",
        calls_tool=True,
        tool="f",
        single_tool_call=True,
        item_role="tool",
    )


def test_seeds_are_from_the_item_or_derived_from_the_job() -> None:
    items = [pb.Item(text="a", seed=7), pb.Item(text="a"), pb.Item(text="a")]
    request = pb.ExtractRequest(items=items, text=pb.TextTask())

    def seeds(job_id: str) -> tuple[bytes, ...]:
        made = job_codec.to_work(worker_pb2.Job(job_id=job_id, extract=request))
        assert isinstance(made, TextWork)
        return made.seeds

    assert seeds("a") == seeds("a")
    assert seeds("a")[0] == seeds("b")[0] == (7).to_bytes(8, "little")
    assert len({*seeds("a"), *seeds("b")}) == 5


def test_items_of_parts() -> None:
    """An item with only a text is a text in either form. Other items keep their parts, in order."""
    shown = pb.Image(data=b"png")
    pieces = [pb.Part(text="a"), pb.Part(image=shown), pb.Part(text="b")]
    items = [
        pb.Item(parts=[pb.Part(text="alone")]),
        pb.Item(image=shown),
        item("c"),
        pb.Item(parts=pieces),
    ]
    parts = {
        1: (Part(b"png", "items[1].image"),),
        3: (
            Part("a", "items[3].parts[0].text"),
            Part(b"png", "items[3].parts[1].image"),
            Part("b", "items[3].parts[2].text"),
        ),
    }
    work = job_codec.to_work(worker_pb2.Job(encode=pb.EncodeRequest(items=items)))
    assert work == EncodeWork(["alone", "", "c", ""], parts=parts, truncation="default")
    asked = pb.ScoreRequest(query=pb.Item(image=shown), documents=items[:2])
    parts = {1: (Part(b"png", "documents[1].image"),)}
    wanted = ScoreWork(
        "",
        ["alone", ""],
        query_parts=(Part(b"png", "query.image"),),
        parts=parts,
        truncation="default",
    )
    assert job_codec.to_work(worker_pb2.Job(score=asked)) == wanted


def test_cards_of_image_models() -> None:
    sizes = ImageSize(224, 224, 0, 32, 1, 50)
    card = Card(
        "a/b",
        "r",
        "clip",
        "images",
        ("encode",),
        ("dense",),
        77,
        inputs=("text", "image"),
        images=sizes,
    )
    reported = codec.to_card(card)
    assert list(reported.inputs) == [
        models_pb2.INPUT_KIND_TEXT,
        models_pb2.INPUT_KIND_IMAGE,
        models_pb2.INPUT_KIND_DOCUMENT,
    ]
    assert reported.images == models_pb2.ImageInput(
        height=224, width=224, patch=32, extra_tokens=1, max_tokens=50
    )
    plain = codec.to_card(replace(card, inputs=("text",), images=None))
    assert list(plain.inputs) == [
        models_pb2.INPUT_KIND_TEXT,
        models_pb2.INPUT_KIND_DOCUMENT_TEXT,
    ]
    assert not plain.HasField("images")
    ranks = codec.to_card(replace(card, inputs=("text",), tasks=("score",), images=None))
    assert not ranks.inputs


def test_chunks_of_documents_have_pages_and_texts() -> None:
    chunking = pb.Chunking(method=pb.Chunking.METHOD_TOKENS, return_text=True)
    job = worker_pb2.Job(encode=pb.EncodeRequest(items=[item("a")], chunking=chunking))
    work = job_codec.to_work(job)
    assert isinstance(work, EncodeWork)
    assert work.chunking == Chunking("tokens", return_text=True)
    result = EncodeResult(chunks=Chunks([0, 2], [0, 3], [2, 5], [4, 4], [1, 2], ["ab", "cd"]))
    payload = codec.encode_result(result, revision="r", tokens=8, timings=TIMES)
    chunks = worker_pb2.JobResult.FromString(payload).encode.chunks
    assert (list(chunks.pages), list(chunks.texts)) == ([1, 2], ["ab", "cd"])


@pytest.mark.parametrize(
    ("job", "error", "field"),
    [
        (worker_pb2.Job(), InvalidInput, ""),
        (
            worker_pb2.Job(encode=pb.EncodeRequest(items=[item("a"), pb.Item()])),
            InvalidInput,
            "items[1]",
        ),
        (
            worker_pb2.Job(
                extract=pb.ExtractRequest(
                    items=[pb.Item(image=pb.Image())], entities=pb.EntitiesTask()
                )
            ),
            TaskNotSupported,
            "items[0].image",
        ),
        (
            worker_pb2.Job(encode=pb.EncodeRequest(items=[pb.Item(parts=[pb.Part()])])),
            InvalidInput,
            "items[0].parts[0]",
        ),
        (
            worker_pb2.Job(
                encode=pb.EncodeRequest(items=[pb.Item(text="a", parts=[pb.Part(text="b")])])
            ),
            InvalidInput,
            "items[0]",
        ),
        (worker_pb2.Job(score=pb.ScoreRequest(documents=[item("a")])), InvalidInput, "query"),
        (
            worker_pb2.Job(
                encode=pb.EncodeRequest(items=[pb.Item(text="a", entities=[pb.Entity()])])
            ),
            InvalidInput,
            "items[0].entities",
        ),
        (worker_pb2.Job(encode=pb.EncodeRequest(items=[item("a")], role=99)), InvalidInput, "role"),  # type: ignore[arg-type]
        (worker_pb2.Job(extract=pb.ExtractRequest(items=[item("a")])), InvalidInput, "task"),
        (
            worker_pb2.Job(extract=pb.ExtractRequest(text=pb.TextTask(text_layer=99))),  # type: ignore[arg-type]
            InvalidInput,
            "text.text_layer",
        ),
        (
            worker_pb2.Job(extract=pb.ExtractRequest(text=pb.TextTask(turns=[pb.Turn(text="a")]))),
            InvalidInput,
            "text.turns[0].role",
        ),
    ],
)
def test_invalid_work_is_refused(job: worker_pb2.Job, error: type[ShoalError], field: str) -> None:
    with pytest.raises(error) as caught:
        job_codec.to_work(job)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("stored", "data_type"),
    [
        (
            StoredArray("float32", (2, 2), np.array([[1, 2], [3, 4]], "<f4")),
            tensor_pb2.DATA_TYPE_FLOAT32,
        ),
        (
            StoredArray("float16", (2, 2), np.array([[1, 2], [3, 4]], "<f2")),
            tensor_pb2.DATA_TYPE_FLOAT16,
        ),
        (
            StoredArray("bfloat16", (2, 2), np.array([[1, 2], [3, 4]], "<u2")),
            tensor_pb2.DATA_TYPE_BFLOAT16,
        ),
        (
            StoredArray("binary", (2, 9), np.array([[1, 128], [3, 0]], "u1")),
            tensor_pb2.DATA_TYPE_BINARY,
        ),
    ],
)
def test_dense_vectors_keep_their_bytes(stored: StoredArray, data_type: int) -> None:
    tensor = sent(EncodeResult(dense=stored)).encode.dense
    assert (tensor.data_type, tuple(tensor.shape)) == (data_type, stored.shape)
    np.testing.assert_array_equal(
        np.frombuffer(tensor.data, stored.values.dtype).reshape(2, 2), stored.values
    )
    assert (tensor.scale, tensor.offset) == (b"", b"")


@pytest.mark.parametrize("data_type", ["int8", "uint8"])
def test_quantised_vectors_include_scales_and_offsets(data_type: str) -> None:
    rows = np.array([0.5, 0.25], np.float32)
    offset = rows + 1 if data_type == "uint8" else None
    stored = StoredArray(data_type, (2, 3), np.zeros((2, 3), data_type), rows, offset)  # type: ignore[arg-type]
    tensor = sent(EncodeResult(dense=stored)).encode.dense
    np.testing.assert_array_equal(np.frombuffer(tensor.scale, "<f4"), rows)
    assert tensor.offset == (b"" if offset is None else offset.tobytes())


def test_multi_vectors() -> None:
    rows = RaggedRows(
        StoredArray("float16", (3, 2), np.arange(6, dtype="<f2").reshape(3, 2)), [0, 1, 3]
    )
    message = sent(EncodeResult(multi_vector=rows)).encode
    assert not message.HasField("dense")
    assert list(message.multi_vector.offsets) == [0, 1, 3]
    assert list(message.multi_vector.values.shape) == [3, 2]


def test_scores_usage_and_timings() -> None:
    message = sent(ScoreResult(np.array([0.5, -1], np.float32))).score
    assert np.frombuffer(message.scores.data, "<f4").tolist() == [0.5, -1]
    assert message.model_revision == "r"
    assert message.usage.input_tokens == 7
    times = message.timings
    assert [
        times.queue_seconds,
        times.prepare_seconds,
        times.wait_seconds,
        times.forward_seconds,
        times.finish_seconds,
    ] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_extractions() -> None:
    found = Extraction(
        entities=(Entity(0, 2, "PER", 0.5, "Al"),), labels=(LabelScore("good", 0.25),)
    )
    (result, empty) = sent(ExtractResult([found, Extraction()])).extract.results
    assert result == pb.Extraction(
        entities=[pb.Entity(start=0, end=2, label="PER", score=0.5, text="Al")],
        labels=[pb.LabelScore(label="good", score=0.25)],
    )
    assert empty == pb.Extraction()


def test_failure_has_the_path_in_the_request() -> None:
    error = InputTooLong("too long", field="items[2].text")
    failure = worker_pb2.JobResult.FromString(codec.failed(error, first_item=10)).failure
    assert failure == worker_pb2.Failure(
        reason="INPUT_TOO_LONG", message="too long", field="items[12].text"
    )


@pytest.mark.parametrize(
    ("field", "rebased"),
    [
        ("documents[0].text", "documents[5].text"),
        ("items[7]", "items[12]"),
        ("query.text", "query.text"),
        ("", ""),
        ("classify.labels[1]", "classify.labels[1]"),
    ],
)
def test_only_items_are_rebased(field: str, rebased: str) -> None:
    assert codec.rebase(field, 5) == rebased


def test_cards() -> None:
    card = Card(
        model="org/m",
        revision="r",
        family="bert",
        kind="dense",
        tasks=("encode", "score", "entities", "classify"),
        representations=("dense", "multi_vector"),
        max_tokens=256,
        dimensions=384,
        labels=("x",),
        prompts={"query": "q: ", "document": "d: "},
    )
    message = codec.to_card(card, stored_bytes=9, data_type="bfloat16", tokens_per_byte=0.25)
    assert list(message.tasks) == [
        models_pb2.TASK_ENCODE,
        models_pb2.TASK_SCORE,
        models_pb2.TASK_ENTITIES,
        models_pb2.TASK_CLASSIFY,
    ]
    assert list(message.representations) == [
        pb.REPRESENTATION_DENSE,
        pb.REPRESENTATION_MULTI_VECTOR,
    ]
    assert list(message.prompts) == ["document", "query"]
    assert (message.bytes, message.data_type, message.tokens_per_byte) == (9, "bfloat16", 0.25)
    assert message.max_tokens == 256


def test_schemas() -> None:
    field = pb.SchemaField(
        name="f", kind=pb.SchemaField.KIND_STRING, choices=["c"], description="d", threshold=0.25
    )
    task = pb.StructureTask(
        entities=[pb.SchemaLabel(label="a", description="b", threshold=0.5)],
        classifications=[
            pb.SchemaClassification(
                name="q",
                labels=[pb.SchemaLabel(label="l")],
                multi_label=True,
                threshold=0,
                description="e",
            )
        ],
        relations=[pb.SchemaLabel(label="r")],
        structures=[pb.SchemaStructure(name="s", fields=[field, pb.SchemaField(name="g")])],
        threshold=0.75,
    )
    request = pb.ExtractRequest(
        items=[item("a text")], structure=task, truncation=pb.TRUNCATION_START
    )
    asked = Schema(
        (SchemaLabel("a", "b", 0.5),),
        (SchemaClassification("q", (SchemaLabel("l"),), True, 0.0, "e"),),
        (SchemaLabel("r"),),
        (SchemaStructure("s", (SchemaField("f", "str", ("c",), "d", 0.25), SchemaField("g"))),),
        0.75,
    )
    assert job_codec.to_work(worker_pb2.Job(extract=request)) == StructureWork(
        ["a text"], asked, "start"
    )
    assert sorted(text for _, text in schema_texts(asked) if text) == sorted("abqelrsfcdg")
    [reported] = sent(
        ExtractResult(
            [
                Extraction(
                    classifications=(Classification("q", (LabelScore("l", 0.5),)),),
                    structures=(
                        Structure("s", {"f": (Value("x", 0.5, 0, 1), Value("c", 0.25)), "g": None}),
                    ),
                )
            ]
        )
    ).extract.results
    values = [
        pb.StructureValue(text="x", score=0.5, start=0, end=1),
        pb.StructureValue(text="c", score=0.25),
    ]
    assert reported == pb.Extraction(
        classifications=[pb.Classification(name="q", labels=[pb.LabelScore(label="l", score=0.5)])],
        structures=[
            pb.Structure(
                name="s",
                fields=[
                    pb.StructureField(name="f", values=values, list=True),
                    pb.StructureField(name="g"),
                ],
            )
        ],
    )
