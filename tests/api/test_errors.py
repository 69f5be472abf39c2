from __future__ import annotations

import copy
import pickle

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from shoal import errors
from shoal.transport.failures import decode


def details(*messages: object) -> bytes:
    packed = []
    for message in messages:
        packed.append(any_pb2.Any())
        packed[-1].Pack(message)  # type: ignore[arg-type]
    return bytes(status_pb2.Status(details=packed).SerializeToString())


def test_details_become_attributes() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="items[3].text")
    data = details(
        error_details_pb2.ErrorInfo(reason="INPUT_TOO_LONG", domain="shoal"),
        error_details_pb2.BadRequest(field_violations=[violation]),
    )
    error = decode("INVALID_ARGUMENT", "items[3].text has 900 tokens", data, address="a:1")
    assert type(error) is errors.InputTooLong
    assert isinstance(error, errors.InvalidInput)
    assert (error.code, error.reason, error.field, error.retry_after) == (
        "INVALID_ARGUMENT",
        "INPUT_TOO_LONG",
        "items[3].text",
        None,
    )


def test_retry_delay_is_in_seconds() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    data = details(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="shoal"), retry)
    error = decode("RESOURCE_EXHAUSTED", "full", data, address="a:1")
    assert (type(error), error.retry_after) == (errors.QueueFull, 1.5)


def test_error_without_retry_info_is_not_retried() -> None:
    data = details(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="shoal"))
    assert decode("RESOURCE_EXHAUSTED", "full", data, address="a:1").retry_after is None
    assert errors.QueueFull("full").retry_after == 1.0  # as a server raises it


def test_field_is_reported_for_codes_without_bad_request() -> None:
    info = error_details_pb2.ErrorInfo(
        reason="OUT_OF_MEMORY", domain="shoal", metadata={"field": "items[3].text"}
    )
    error = decode("RESOURCE_EXHAUSTED", "too large", details(info), address="a:1")
    assert (type(error), error.field) == (errors.OutOfMemory, "items[3].text")


def test_unavailable_without_our_details_is_the_way_to_the_router() -> None:
    error = decode("UNAVAILABLE", "connection refused", b"", address="a:1")
    assert type(error) is errors.CannotConnect
    assert str(error) == "cannot reach a router at a:1: connection refused [CANNOT_CONNECT]"
    foreign = details(error_details_pb2.ErrorInfo(reason="PROXY", domain="envoy"))
    assert (
        type(decode("UNAVAILABLE", "no upstream", foreign, address="a:1")) is errors.CannotConnect
    )


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("UNAVAILABLE", "NO_CAPACITY", errors.NoCapacity),
        ("UNAVAILABLE", "SOMETHING_NEW", errors.Unavailable),
        ("INVALID_ARGUMENT", "SOMETHING_NEW", errors.InvalidInput),
        ("RESOURCE_EXHAUSTED", "", errors.Overloaded),
        ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", errors.OutOfMemory),
        ("DEADLINE_EXCEEDED", "", errors.DeadlinePassed),
        ("NOT_FOUND", "MODEL_NOT_FOUND", errors.ModelNotFound),
        ("FAILED_PRECONDITION", "MODEL_LOAD_FAILED", errors.ModelBroken),
        ("FAILED_PRECONDITION", "NOT_READY", errors.NotReady),
        ("INTERNAL", "INTERNAL", errors.InternalError),
        ("UNIMPLEMENTED", "", errors.ShoalError),
    ],
)
def test_every_failure_has_a_class(code: str, reason: str, kind: type[errors.ShoalError]) -> None:
    data = details(error_details_pb2.ErrorInfo(reason=reason, domain="shoal")) if reason else b""
    error = decode(code, "", data, address="a:1")
    assert (type(error), error.code) == (kind, code)
    assert error.reason
    assert error.message


def test_error_of_a_part_names_the_index_in_the_whole() -> None:
    error = errors.InputTooLong("items[3].text is long", field="items[3].text")
    error.move("items", range(500, 510))
    assert (error.field, error.message) == ("items[503].text", "items[503].text is long")
    assert str(error) == "items[503].text is long [INPUT_TOO_LONG, field items[503].text]"
    elsewhere = errors.InvalidInput("dimensions is 9", field="dimensions")
    elsewhere.move("items", range(500, 510))
    assert elsewhere.field == "dimensions"
    for field, index in (
        ("items[7]", 7),
        ("items[7].entities[2]", 7),
        ("items[07]", None),
        ("items", None),
        ("documents[1]", None),
    ):
        assert errors.InvalidInput("no", field=field).index("items") == index
    beyond = errors.InvalidInput("items[3] is bad", field="items[3]")
    beyond.move("items", [5])
    assert beyond.field == "items[3]"


def test_errors_travel_between_processes() -> None:
    error = errors.QueueFull("full", retry_after=1.0, request_id="abc")
    error.reason = "NEWER"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is errors.QueueFull
        assert (str(other), other.retry_after, other.reason) == (
            "full [NEWER, request abc]",
            1.0,
            "NEWER",
        )


def test_details_that_are_garbage_are_none() -> None:
    error = decode("INVALID_ARGUMENT", "wrong", b"\xff\xff\xff", address="x")
    assert (error.code, error.message) == ("INVALID_ARGUMENT", "wrong")
