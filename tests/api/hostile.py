"""A router that puts control characters into every text of its responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

CONTROLS = "".join(
    map(
        chr,
        [
            *range(9),
            *range(11, 32),
            *range(0x7F, 0xA0),
            0x2028,
            0x2029,
            *range(0x202A, 0x202F),
            *range(0x2066, 0x206A),
        ],
    )
)
"""All that a terminal obeys; tabs and newlines are text."""
WORDS = f"\x1b]0;owned\x07\x9b2J{CONTROLS}end"


def spoilt(message: Message) -> Message:
    """The message with WORDS behind each of its texts, in place; lists of texts get one more."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in (
                value if field.is_repeated else [value] if message.HasField(field.name) else []
            ):
                spoilt(part)
        elif field.type == FieldDescriptor.TYPE_STRING and field.is_repeated:
            value.append(WORDS)
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, value + WORDS)
    return message


class Spoiling(grpc.ServerInterceptor):
    """Spoils every answer but those of the health service."""

    def intercept_service(
        self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(details)
        if not details.method.startswith("/shoal."):
            return handler
        coding = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_each(handler.unary_stream), **coding)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: spoilt(handler.unary_unary(request, context)), **coding
        )


def _each(stream: Callable[..., Iterator[Message]]) -> Callable[..., Iterator[Message]]:
    return lambda request, context: map(spoilt, stream(request, context))
