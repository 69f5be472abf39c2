"""Triton's client of KServe v2 over HTTP."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.http as http
from checking import (
    BASE,
    LIMITED,
    MODEL,
    QUERY,
    SCORES,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    refusal,
    reports_retry_after,
)
from tritonclient.utils import InferenceServerException

client = http.InferenceServerClient(
    BASE.removeprefix("http://"), network_timeout=120, connection_timeout=120
)

limited = http.InferenceServerClient(
    LIMITED.removeprefix("http://"), network_timeout=120, connection_timeout=120
)


def texts(name: str, values: Sequence[str], **more: Any) -> Any:
    tensor = http.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], object), **more)
    return tensor


def dense(*, is_binary: bool, **more: Any) -> Any:
    outputs = [http.InferRequestedOutput("dense", binary_data=is_binary)]
    return client.infer(
        MODEL, [texts("text", TEXTS, binary_data=is_binary)], outputs=outputs, **more
    ).as_numpy("dense")


def scores() -> float:
    inputs = [texts("query", [QUERY]), texts("documents", TEXTS)]
    found = client.infer(MODEL, inputs, parameters={"scale": "probability"}).as_numpy("scores")
    return distance([found], [SCORES])


def slow() -> float:
    return distance(limited.infer(MODEL, [texts("text", TEXTS)]).as_numpy("dense"), VECTORS)


def seconds(error: InferenceServerException) -> float:
    assert_status(error, "429")
    return 2.0  # it shows no headers


def assert_status(error: InferenceServerException, status: str) -> None:
    assert error.status() == status, error


def described() -> None:
    assert client.get_server_metadata()["name"] == "shoal"
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("gpt-4o")
    found = client.get_model_metadata(MODEL)
    assert [one["name"] for one in found["inputs"]] == ["text"]
    assert found["outputs"][0] == {
        "name": "dense",
        "datatype": "FP32",
        "shape": [-1, len(VECTORS[0])],
    }


check(
    "infer (binary tensors, unasked)",
    lambda: distance(client.infer(MODEL, [texts("text", TEXTS)]).as_numpy("dense"), VECTORS),
)
check("infer (JSON)", lambda: distance(dense(is_binary=False), VECTORS))
check(
    "infer (JSON, gzip both ways)",
    lambda: distance(
        dense(
            is_binary=False,
            request_compression_algorithm="gzip",
            response_compression_algorithm="gzip",
        ),
        VECTORS,
    ),
)
check(
    "infer (binary, deflate both ways)",
    lambda: distance(
        dense(
            is_binary=True,
            request_compression_algorithm="deflate",
            response_compression_algorithm="deflate",
        ),
        VECTORS,
    ),
)
check("infer (query and documents)", scores)
check("metadata, live, ready", described)
check(
    "errors",
    lambda: assert_status(
        refusal(InferenceServerException, lambda: client.infer("gpt-4o", [texts("text", TEXTS)])),
        "404",
    ),
)
check(
    f"infer, repeated by its caller {WAITED}",
    lambda: reports_retry_after(InferenceServerException, slow, seconds),
)
