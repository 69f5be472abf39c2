"""Traces in files: written traces can be read, and errors name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.scheduler.simulate.generate import TraceShape, zipf
from services.scheduler.simulate.trace import (
    TOKENS_PER_SECOND,
    ModelCost,
    TraceRequest,
    models_path,
    read_models,
    read_trace,
    write_models,
    write_trace,
)

COSTS = "model,bytes,load_seconds\norg/a,100,1.5\norg/b,200,2\n"


def file(directory: Path, text: str, name: str = "trace.csv") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def test_trace_is_read_by_time_with_the_costs_of_its_models(tmp_path: Path) -> None:
    path = file(
        tmp_path, "time_seconds, model, tokens, adapter\n2.5, org/b, 7, org/lora\n0, org/a, 3,\n"
    )
    trace = read_trace(path, file(tmp_path, COSTS + "org/c,300,3\n", "models.csv"))
    assert trace.requests == [
        TraceRequest(0.0, "org/a", 3),
        TraceRequest(2.5, "org/b", 7, "org/lora"),
    ]
    assert trace.models == {
        "org/a": ModelCost("org/a", 100, 1.5),
        "org/b": ModelCost("org/b", 200, 2.0),
    }
    assert trace.models["org/a"].tokens_per_second == TOKENS_PER_SECOND


def test_costs_are_read_from_first_line_of_a_model_in_trace(tmp_path: Path) -> None:
    text = (
        "model,tokens,time_seconds,bytes,load_seconds,warm_seconds,tokens_per_second\n"
        "org/a,3,0,100,1.5,0.25,900\norg/a,3,1,,,,\n"
    )
    trace = read_trace(file(tmp_path, text))
    assert trace.models == {"org/a": ModelCost("org/a", 100, 1.5, 0.25, 900.0)}
    assert len(trace.requests) == 2


def test_written_trace_is_read_back(tmp_path: Path) -> None:
    made = zipf(TraceShape(models=9, requests=50), seed=1)
    path = tmp_path / "made.csv"
    write_trace(path, made.requests)
    write_models(models_path(path), list(made.models.values()))
    read = read_trace(path, tmp_path / "made.models.csv")
    assert [(one.model, one.tokens) for one in read.requests] == [
        (one.model, one.tokens) for one in made.requests
    ]
    assert all(
        abs(one.at - other.at) < 1e-5
        for one, other in zip(read.requests, made.requests, strict=True)
    )
    assert {name: cost.bytes for name, cost in read.models.items()} == {
        name: cost.bytes for name, cost in made.models.items()
    }


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "trace.csv:1: has no column 'time_seconds'"),
        ("time_seconds,model\n", "trace.csv:1: has no column 'tokens'"),
        ("time_seconds,model,tokens,colour\n", "trace.csv:1: has a column 'colour'"),
        ("time_seconds,model,tokens\n", "trace.csv: the file has no requests"),
        (
            "time_seconds,model,tokens\n0,org/a,1\n1,org/a,many\n",
            "trace.csv:3: tokens: must be a whole number of at least 1, not 'many'",
        ),
        (
            "time_seconds,model,tokens\n0,org/a,0\n",
            "trace.csv:2: tokens: must be a whole number of at least 1, not '0'",
        ),
        (
            "time_seconds,model,tokens\n-1,org/a,1\n",
            "trace.csv:2: time_seconds: must be a number of at least 0, not '-1'",
        ),
        (
            "time_seconds,model,tokens\nnan,org/a,1\n",
            "trace.csv:2: time_seconds: must be a number of at least 0, not 'nan'",
        ),
        ("time_seconds,model,tokens\n0,,1\n", "trace.csv:2: model: is missing"),
        ("time_seconds,model,tokens\n0,org/a\n", "trace.csv:2: tokens: is missing"),
        (
            "time_seconds,model,tokens\n0,org/a,1,2\n",
            "trace.csv:2: tokens: the line has more than 3 values",
        ),
        (
            "time_seconds,model,tokens\n0,org/x,1\n",
            "trace.csv:2: bytes: the costs of org/x are missing",
        ),
    ],
)
def test_invalid_trace_is_reported_with_line(tmp_path: Path, text: str, reported: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_trace(file(tmp_path, text), file(tmp_path, COSTS, "models.csv"))
    assert caught.value.message.startswith(f"{tmp_path}/{reported}")


def test_invalid_models_file_is_reported_with_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"models.csv:4: model: org/a is listed twice"):
        read_models(file(tmp_path, COSTS + "org/a,1,1\n", "models.csv"))
    with pytest.raises(
        InvalidInput, match=r"models.csv:2: bytes: must be a whole number of at least 1, not '1.5'"
    ):
        read_models(file(tmp_path, "model,bytes,load_seconds\norg/a,1.5,1\n", "models.csv"))
    (tmp_path / "binary.csv").write_bytes(b"time_seconds,model,tokens\n\xff\xfe,1,1\n")
    with pytest.raises(InvalidInput, match=r"binary.csv:\d: is not CSV"):
        read_trace(tmp_path / "binary.csv")
