"""KEDA's external scaler protocol, written down again by hand from KEDA's documentation.

Not made from our protos/externalscaler: a wrong field number or name there would else agree with
itself. The messages are in a separate pool, apart from the generated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

SERVICE: Final = "externalscaler.ExternalScaler"

_MESSAGES: Final[Mapping[str, str]] = {
    # A map is a repeated message of keys and values on the wire.
    "ScalerMetadata": "string key = 1; string value = 2",
    "ScaledObjectRef": "string name = 1; string namespace = 2; "
    "repeated ScalerMetadata scalerMetadata = 3",
    "IsActiveResponse": "bool result = 1",
    "GetMetricSpecResponse": "repeated MetricSpec metricSpecs = 1",
    "MetricSpec": "string metricName = 1; int64 targetSize = 2; double targetSizeFloat = 3",
    "GetMetricsRequest": "ScaledObjectRef scaledObjectRef = 1; string metricName = 2",
    "GetMetricsResponse": "repeated MetricValue metricValues = 1",
    "MetricValue": "string metricName = 1; int64 metricValue = 2; double metricValueFloat = 3",
}
METHODS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "IsActive": ("ScaledObjectRef", "IsActiveResponse", False),
    "StreamIsActive": ("ScaledObjectRef", "IsActiveResponse", True),
    "GetMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", False),
    "GetMetrics": ("GetMetricsRequest", "GetMetricsResponse", False),
    "StreamMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", True),
}
"""Request, response, and whether a stream of responses."""

_SCALARS: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
}


def _fill(message: DescriptorProto, fields: str) -> None:
    for line in fields.split("; "):
        declared, _, number = line.partition(" = ")
        *repeated, kind, name = declared.split()
        field = message.field.add(name=name, number=int(number))
        field.label = (
            FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        )
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = (
                FieldDescriptorProto.TYPE_MESSAGE,
                f".externalscaler.{kind}",
            )


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="keda.proto", package="externalscaler", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        _fill(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


CLASSES: Final = _classes()
"""Message classes by name."""


def reference(name: str, namespace: str, metadata: Mapping[str, str]) -> Any:
    """A ScaledObjectRef."""
    pairs = [CLASSES["ScalerMetadata"](key=key, value=value) for key, value in metadata.items()]
    return CLASSES["ScaledObjectRef"](name=name, namespace=namespace, scalerMetadata=pairs)


def metrics_request(scaled: Any, metric_name: str) -> Any:
    """A GetMetricsRequest."""
    return CLASSES["GetMetricsRequest"](scaledObjectRef=scaled, metricName=metric_name)


def method(channel: grpc.aio.Channel, name: str) -> Any:
    """Return the callable for this method: unary, or with a stream of responses."""
    request, response, streams = METHODS[name]
    make: Any = channel.unary_stream if streams else channel.unary_unary
    return make(
        f"/{SERVICE}/{name}",
        request_serializer=CLASSES[request].SerializeToString,
        response_deserializer=CLASSES[response].FromString,
    )
