"""Bad input gets the code, the reason and the field's path (docs/api.md), and affects nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc

from services.local.settings import MINILM
from tests.support.cluster import Cluster

EMBED, RANK, ENTITIES = MINILM, "random/bert-rank", "random/bert-entities"
Raw = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Refused:
    code: str
    reason: str
    field: str


@pytest.fixture(scope="module")
def channel(mesh: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(
        mesh.address, options=[("grpc.max_send_message_length", -1)]
    ) as opened:
        yield opened


def item(text: str = "a text") -> pb.Item:
    return pb.Item(text=text)


def encode(**fields: object) -> tuple[str, bytes]:
    request = pb.EncodeRequest(**{"model": EMBED, "items": [item()], **fields})  # type: ignore[arg-type]
    return "Encode", request.SerializeToString()


def extract(model: str, **task: object) -> tuple[str, bytes]:
    return "Extract", pb.ExtractRequest(model=model, items=[item()], **task).SerializeToString()  # type: ignore[arg-type]


def score(model: str = EMBED, **fields: object) -> tuple[str, bytes]:
    return "Score", pb.ScoreRequest(model=model, **fields).SerializeToString()  # type: ignore[arg-type]


def refusal(channel: grpc.Channel, method: str, request: bytes) -> Refused:
    call = channel.unary_unary(
        f"/shoal.v1.InferenceService/{method}",
        request_serializer=bytes,
        response_deserializer=bytes,
    )
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    infos: list[error_details_pb2.ErrorInfo] = []
    fields: list[str] = []
    for detail in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            infos.append(info)
        elif detail.Unpack(bad):
            fields.extend(violation.field for violation in bad.field_violations)
    assert len(infos) == 1
    assert infos[0].domain == "shoal"
    assert infos[0].metadata["request_id"]
    return Refused(caught.value.code().name, infos[0].reason, ",".join(fields))


def answers(channel: grpc.Channel) -> None:
    response = inference_pb2_grpc.InferenceServiceStub(channel).Encode(
        pb.EncodeRequest(model=EMBED, items=[item()]), timeout=60
    )
    assert list(response.dense.shape) == [1, 384]


INVALID_UTF8 = (
    pb.EncodeRequest(model=EMBED, items=[item("good"), item("????")])
    .SerializeToString()
    .replace(b"????", b"\xff\xfe\xfa\xfb")
)
CASES: dict[str, tuple[tuple[str, bytes], Refused]] = {
    "empty list": (encode(items=[]), Refused("INVALID_ARGUMENT", "INVALID_INPUT", "items")),
    "no documents": (
        score(query=item()),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "documents"),
    ),
    "no query": (score(documents=[item()]), Refused("INVALID_ARGUMENT", "INVALID_INPUT", "query")),
    "empty text": (
        encode(items=[item(), item("")]),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "items[1].text"),
    ),
    "item without content": (
        encode(items=[pb.Item()]),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "items[0]"),
    ),
    "no model": (encode(model=""), Refused("INVALID_ARGUMENT", "INVALID_INPUT", "model")),
    "model that climbs": (
        encode(model="../../etc"),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "model"),
    ),
    "unknown model": (encode(model="nobody/nothing"), Refused("NOT_FOUND", "MODEL_NOT_FOUND", "")),
    "wrong task": (
        extract(EMBED, entities=pb.EntitiesTask()),
        Refused("INVALID_ARGUMENT", "TASK_NOT_SUPPORTED", "entities"),
    ),
    "no task": (extract(EMBED), Refused("INVALID_ARGUMENT", "INVALID_INPUT", "task")),
    "encode a cross-encoder": (
        encode(model=RANK),
        Refused("INVALID_ARGUMENT", "TASK_NOT_SUPPORTED", "model"),
    ),
    "invalid enum": (encode(role=99), Refused("INVALID_ARGUMENT", "INVALID_INPUT", "role")),
    "invalid enum in a list": (
        encode(representations=[1, 77]),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "representations[1]"),
    ),
    "representation not offered": (
        encode(representations=[pb.REPRESENTATION_SPARSE]),
        Refused("INVALID_ARGUMENT", "TASK_NOT_SUPPORTED", "representations[0]"),
    ),
    "too long": (
        encode(items=[item(), item("word " * 400)], truncation=pb.TRUNCATION_NONE),
        Refused("INVALID_ARGUMENT", "INPUT_TOO_LONG", "items[1].text"),
    ),
    "too many dimensions": (
        encode(dimensions=385),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "dimensions"),
    ),
    "NaN threshold": (
        extract(ENTITIES, entities=pb.EntitiesTask(threshold=float("nan"))),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "entities.threshold"),
    ),
    "threshold above 1": (
        extract(ENTITIES, entities=pb.EntitiesTask(threshold=1.5)),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "entities.threshold"),
    ),
    "unknown label": (
        extract(ENTITIES, entities=pb.EntitiesTask(labels=["PER", "DRAGON"])),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "entities.labels[1]"),
    ),
    "labels missing": (
        extract(EMBED, classify=pb.ClassifyTask()),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "classify.labels"),
    ),
    "100 MB": (
        encode(items=[item("x" * 100_000_000)]),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", ""),
    ),
    "10,001 items": (
        encode(items=[item("x")] * 10_001),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "items"),
    ),
    "adapter of no form": (
        encode(adapter="lora/"),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "adapter"),
    ),
    "task that the model does not have": (
        encode(adapter="text-matching"),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "adapter"),
    ),
    "invalid UTF-8": (
        ("Encode", INVALID_UTF8),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", "items[1].text"),
    ),
    "not protobuf": (
        ("Encode", b"\xff\xff\xff\xff"),
        Refused("INVALID_ARGUMENT", "INVALID_INPUT", ""),
    ),
    "picture for a text model": (
        encode(items=[pb.Item(image=pb.Image(data=b"\x89PNG"))]),
        Refused("INVALID_ARGUMENT", "TASK_NOT_SUPPORTED", "items[0].image"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_and_the_next_good_request_answered(
    case: str, channel: grpc.Channel
) -> None:
    answers(channel)
    (method, request), expected = CASES[case]
    assert refusal(channel, method, request) == expected
    answers(channel)


def test_refused_requests_do_not_affect_their_batch(channel: grpc.Channel) -> None:
    """Fifty good and ten bad concurrent requests share batches, and only the bad ones fail."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    long = [item("fine"), item("word " * 400)]
    good = [
        stub.Encode.future(
            pb.EncodeRequest(model=EMBED, items=[item(f"text {number}")]), timeout=60
        )
        for number in range(50)
    ]
    bad = [
        stub.Encode.future(
            pb.EncodeRequest(model=EMBED, items=long, truncation=pb.TRUNCATION_NONE), timeout=60
        )
        for _ in range(10)
    ]
    assert all(list(call.result().dense.shape) == [1, 384] for call in good)
    assert {call.code() for call in bad} == {grpc.StatusCode.INVALID_ARGUMENT}
