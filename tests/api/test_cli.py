"""The `shoal` command against a real gRPC server."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pyarrow
import pytest
import shoal
import typer
from PIL import Image
from pyarrow import parquet
from shoal.cli import console, plugins
from shoal.cli.operation.tables import model_size
from shoal.cli.options import BUSY_ROUTER_SECONDS, REACH_SECONDS, reachable
from shoal.drawing import drawn
from shoal.errors import CannotConnect, DeadlinePassed
from shoal.extractions import Region
from shoal.status import Model, ModelPlace
from shoal.v1 import inference_pb2 as pb

from tests.api.conftest import Run
from tests.api.fake_router import DOWNLOADING, MODEL, FakeRouter, Refusal, make_vector


def test_encode_arguments_to_a_table(run: Run) -> None:
    ran = run("encode", MODEL, "first text", "[bold]second[/]")
    assert ran.code == 0
    assert "first text" in ran.out
    assert "[bold]second[/]" in ran.out
    assert "dense 12 float32" in ran.out


def test_encode_a_text_file_to_npy(run: Run, tmp_path: Path) -> None:
    texts = [f"line {number} ü" for number in range(7)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    ran = run("encode", MODEL, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out.npy")
    assert (ran.code, ran.out) == (0, "")
    assert "7 texts" in ran.err
    np.testing.assert_array_equal(
        np.load(tmp_path / "out.npy"), [make_vector(text) for text in texts]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "texts.txt"]


def test_encode_files_of_images(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    assert (
        run("encode", MODEL, "--image", tmp_path / "a.jpg", tmp_path / "b.png", "--json").code == 0
    )
    sent = [item.image.data for item in router.calls[-1].request.items]  # type: ignore[attr-defined]
    assert sent == [b"a.jpg", b"b.png"]
    ran = run("encode", MODEL, "--image", tmp_path / "a.jpg", tmp_path / "none.png")
    assert ran.code != 0
    assert "none.png does not exist" in ran.err
    assert "items[1]" in ran.err


def test_encode_jsonl_to_jsonl_keeps_the_objects(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "body": "one two"}\n{"id": 2, "body": "three"}\n')
    ran = run(
        "encode",
        MODEL,
        "-i",
        tmp_path / "in.jsonl",
        "--field",
        "body",
        "-o",
        tmp_path / "out.jsonl",
        "-r",
        "multi_vector",
    )
    assert ran.code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["body"], len(row["multi_vector"])) for row in rows] == [
        (1, "one two", 2),
        (2, "three", 1),
    ]


def test_embedding_ids(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    found = "0123456789abcdef.float32"
    router.embedding_id = lambda number: found
    assert json.loads(run("encode", MODEL, "a", "--json").out)["embedding_id"] == found
    asked = ("--expect-embedding-id", found)
    ran = run("encode", MODEL, "a", "-o", tmp_path / "out.npz", *asked)
    assert ran.code == 0
    assert f"embedding id {found}" in ran.err
    with np.load(tmp_path / "out.npz") as arrays:
        assert str(arrays["embedding_id"]) == found
    assert router.calls[-1].request.expect_embedding_id == found  # type: ignore[attr-defined]
    (tmp_path / "in.txt").write_text("a\nb\n")
    ran = run("encode", MODEL, "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", *asked)
    assert f"embedding id {found}" in ran.err
    router.embedding_id = lambda number: ""
    ran = run("encode", MODEL, "a", *asked)
    assert ran.code != 0
    assert found in ran.err


def test_file_of_vectors_with_two_embedding_ids_is_not_written(
    run: Run, router: FakeRouter, tmp_path: Path
) -> None:
    router.embedding_id = lambda number: f"{number:016x}.float32"
    (tmp_path / "in.txt").write_text("text\n" * 2000)
    ran = run("encode", MODEL, "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl")
    assert ran.code != 0
    assert "embedding id" in ran.err


def test_encode_chunks(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "one two"}\n{"id": 2, "text": "three"}\n')
    asked = (
        "encode",
        MODEL,
        "-i",
        tmp_path / "in.jsonl",
        "--chunk",
        "tokens",
        "--chunk-tokens",
        "8",
        "--chunk-overlap",
        "2",
        "--late",
    )
    assert run(*asked, "-o", tmp_path / "out.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[chunk["text"] for chunk in row["chunks"]] for row in rows] == [
        ["one", "two"],
        ["three"],
    ]
    assert [rows[0]["chunks"][1][name] for name in ("start", "end", "tokens")] == [4, 7, 3]
    assert np.allclose(rows[0]["chunks"][1]["dense"], make_vector("two"))
    assert run(*asked, "-o", tmp_path / "out.npz").code == 0
    arrays = np.load(tmp_path / "out.npz")
    assert (
        arrays["chunk_offsets"].tolist(),
        arrays["chunk_ends"].tolist(),
        len(arrays["dense"]),
    ) == ([0, 2, 3], [3, 7, 5], 3)
    assert "three" in run(*asked).out
    assert "where chunks are" in run(*asked, "-o", tmp_path / "out.npy").err
    assert run("encode", MODEL, "x", "--late").code == 2


def test_encode_chunks_of_documents(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_bytes(b"one two")
    asked = ("encode", MODEL, "--document", report, "--chunk", "sentences")
    assert run(*asked, "-o", tmp_path / "out.jsonl").code == 0
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["text"] == str(report)
    assert [(chunk["text"], chunk["page"]) for chunk in row["chunks"]] == [("one", 7), ("two", 7)]
    assert run(*asked, "-o", tmp_path / "out.npz").code == 0
    assert np.load(tmp_path / "out.npz")["chunk_pages"].tolist() == [7, 7]
    assert "two" in run(*asked).out
    assert "1 document, " in run(*asked, "-o", tmp_path / "chunks.jsonl").err
    assert "report.md" in run("encode", MODEL, "--document", tmp_path / "none" / "report.md").err
    assert run("encode", MODEL, "--document", "--image", report).code == 2


def test_pages_of_documents_are_selected(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    report = tmp_path / "report.pdf"
    report.write_bytes(b"%PDF-1.7")
    asked = ("encode", MODEL, "--document", report, "--chunk", "sentences")
    for pages, sent in (("3", (3, 3)), ("2-", (2, 0)), ("1-5", (1, 5)), (None, (0, 0))):
        assert run(*asked, *(("--pages", pages) if pages else ())).code == 0
        request = cast("pb.EncodeRequest", router.calls[-1].request)
        document = request.items[0].parts[0].document
        assert (document.first_page, document.last_page) == sent
    assert "must be a page or a range" in run(*asked, "--pages", "x").err
    assert "add --document" in run("encode", MODEL, "a text", "--pages", "3").err


def test_encode_stdin_to_stdout(run: Run) -> None:
    ran = run("encode", MODEL, "--input", "-", "--output", "-", stdin="one\ntwo\n")
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == ["one", "two"]
    assert run("encode", MODEL, "-", "--output", "-", stdin="one\ntwo\n").out == ran.out
    ran = run(
        "encode", MODEL, "--input", "-", "--field", "t", "--json", stdin='{"t": "one"}\n"two"\n'
    )
    assert len(ran.json()["items"]) == 2


def test_no_line_on_stdin_is_an_error(run: Run) -> None:
    ran = run("encode", MODEL, "-")
    assert ran.code == 2
    assert "stdin is empty" in ran.err


def test_encode_json_has_everything(run: Run) -> None:
    forms = ("-r", "dense", "-r", "sparse", "-r", "multi_vector")
    ran = run(
        "encode",
        MODEL,
        "ab cd",
        "--json",
        *forms,
        "--dimensions",
        "3",
        "--role",
        "query",
        "--no-normalize",
    )
    answer = ran.json()
    assert (answer["model"], answer["revision"], answer["usage"]) == (
        MODEL,
        "r1",
        {"input_tokens": 2},
    )
    (item,) = answer["items"]
    assert item["dense"] == make_vector("ab cd")[:3].tolist()
    assert item["sparse"]["indices"] == sorted({ord(letter) for letter in "ab cd"})
    assert np.array(item["multi_vector"]).shape == (2, 12)


def test_quantized_vectors_keep_their_scales(run: Run, tmp_path: Path) -> None:
    ran = run("encode", MODEL, "abc", "--data-type", "int8", "-o", tmp_path / "out.npy")
    assert ran.code == 1
    assert ".npz" in ran.err
    assert not list(tmp_path.iterdir())
    run(
        "encode",
        MODEL,
        "abc",
        "--data-type",
        "uint8",
        "-r",
        "dense",
        "-r",
        "sparse",
        "-o",
        tmp_path / "out.npz",
    )
    stored = np.load(tmp_path / "out.npz")
    assert set(stored) == {
        "dense",
        "scale",
        "offset",
        "sparse_data",
        "sparse_indices",
        "sparse_indptr",
        "sparse_shape",
    }
    assert stored["dense"].dtype == np.uint8
    item = run("encode", MODEL, "abc", "--data-type", "int8", "--json").json()["items"][0]
    assert set(item) == {"dense", "scale"}


def test_tokenize_shows_tokens_counts_or_json(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\nfour\n")
    ran = run("tokenize", MODEL, "ab", "x" * 60)
    assert ran.code == 0
    assert "_a:97 _b:98" in ran.out
    assert "40 more" in ran.out
    assert run("tokenize", MODEL, "--input", tmp_path / "texts.txt", "--count").out == "3\n4\n"
    assert router.calls[-1].request.count_only  # type: ignore[attr-defined]
    reported = run("tokenize", MODEL, "ab", "--no-special", "--truncation", "end", "--json").json()
    assert (reported["model"], reported["max_tokens"], reported["results"][0]["ids"]) == (
        MODEL,
        50,
        [97, 98],
    )
    assert reported["results"][0]["tokens"] == ["_a", "_b"]
    assert not router.calls[-1].request.add_special_tokens  # type: ignore[attr-defined]
    assert run("tokenize", MODEL, "ab", "--count", "--json").json()["results"] == [
        {"count": 2, "kept_tokens": 2}
    ]
    ran = run("tokenize", MODEL, "a", "x" * 60, "--truncation", "none")
    assert ran.code == 1
    assert "argument 2" in ran.err


def test_output_and_json_together(run: Run, tmp_path: Path) -> None:
    ran = run("encode", MODEL, "abc", "-o", tmp_path / "out.npy", "--json")
    assert ran.json()["output"] == str(tmp_path / "out.npy")


def test_score_ranks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "docs.txt").write_text("nothing\na red fox\na fox\n")
    ran = run("score", MODEL, "red fox", "--input", tmp_path / "docs.txt", "--top-n", "2", "--json")
    assert [
        (row["rank"], row["index"], row["score"], row["text"]) for row in ran.json()["results"]
    ] == [
        (1, 1, 2.0, "a red fox"),
        (2, 2, 1.0, "a fox"),
    ]
    table = run("score", MODEL, "red fox", "nothing", "a red fox").out
    assert table.index("a red fox") < table.index("nothing")
    run("score", MODEL, "red fox", "a fox", "-o", tmp_path / "ranked.jsonl")
    assert json.loads((tmp_path / "ranked.jsonl").read_text())["score"] == 1.0


def test_extract_entities_and_labels(run: Run, tmp_path: Path) -> None:
    ran = run(
        "extract", "entities", MODEL, "in Bern", "--label", "place", "--threshold", "0.1", "--json"
    )
    entity = ran.json()["results"][0]["entities"][0]
    assert (entity["text"], entity["label"], entity["start"]) == ("Bern", "place", 3)
    assert "Bern" in run("extract", "entities", MODEL, "in Bern").out
    assert "no entities" in run("extract", "entities", MODEL, "nothing here").out
    ran = run(
        "extract", "classify", MODEL, "abc", "-l", "xy", "-l", "ab", "-o", tmp_path / "labels.jsonl"
    )
    row = json.loads((tmp_path / "labels.jsonl").read_text())
    assert [label["label"] for label in row["labels"]] == ["ab", "xy"]
    assert "ab" in run("extract", "classify", MODEL, "abc", "-l", "ab", "--multi-label").out


def test_extract_relations(run: Run, tmp_path: Path) -> None:
    arguments = ("extract", "relations", MODEL, "Ada met Bob", "-l", "met", "--entity", "person")
    relation = run(*arguments, "--threshold", "0.1", "--json").json()["results"][0]["relations"][0]
    assert (relation["head"]["text"], relation["label"], relation["tail"]["start"]) == (
        "Ada",
        "met",
        8,
    )
    table = run(*arguments).out
    assert "Ada → Bob" in table
    assert "0.7500" in table
    assert "no relations" in run("extract", "relations", MODEL, "nobody", "-l", "met").out
    run(*arguments, "-o", tmp_path / "found.jsonl")
    assert json.loads((tmp_path / "found.jsonl").read_text())["relations"] == [relation]


def test_relations_between_entities_of_a_file(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    """The output of one command is the input of the next."""
    file = tmp_path / "found.jsonl"
    run("extract", "entities", MODEL, "Ada met Bob", "nobody", "-l", "person", "-o", file)
    run("extract", "relations", MODEL, "-i", file, "--given", "entities", "-l", "met")
    items = router.calls[-1].request.items  # type: ignore[attr-defined]
    assert [(one.start, one.end, one.label) for one in items[0].entities] == [
        (0, 3, "person"),
        (8, 11, "person"),
    ]
    assert not items[1].entities
    for line, reason in (
        ({"text": "a"}, "no list of entities"),
        ({"text": "a", "entities": [{"start": 0}]}, "start and end"),
    ):
        file.write_text(json.dumps(line))
        refused = run("extract", "relations", MODEL, "-i", file, "--given", "entities", "-l", "met")
        assert refused.code != 0
        assert reason in refused.err


def test_extract_regions(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    photo, drawing = tmp_path / "photo.png", tmp_path / "out.png"
    Image.new("RGB", (200, 100), "white").save(photo)
    arguments = ("extract", "regions", MODEL, "--image", photo, "--label", "cat", "--label", "dog")
    found = run(*arguments, "--threshold", "0.25", "--draw", drawing, "--json").json()["results"]
    sent = router.calls[-1].request
    assert [item.image.data for item in sent.items] == [photo.read_bytes()]  # type: ignore[attr-defined]
    assert (list(sent.regions.labels), sent.regions.threshold) == (["cat", "dog"], 0.25)  # type: ignore[attr-defined]
    boxes = [
        {"left": 50.0, "top": 60.0, "right": 90.0, "bottom": 95.0, "label": name}
        for name in ("cat", "dog")
    ]
    assert found == [
        {
            "text": str(photo),
            "regions": [
                box | {"score": score} for box, score in zip(boxes, (0.75, 0.5), strict=True)
            ],
        }
    ]
    regions = [Region(50, 60, 90, 95, "cat", 0.75), Region(50, 60, 90, 95, "dog", 0.5)]
    assert drawing.read_bytes() == drawn(photo.read_bytes(), regions)
    table = run(*arguments).out
    assert all(word in table for word in ("cat", "0.7500", "50, 60 to 90, 95"))
    assert "no regions" in run("extract", "regions", MODEL, photo, "-l", "nothing").out


def test_extract_generate(run: Run, router: FakeRouter) -> None:
    arguments = (
        "extract",
        "generate",
        MODEL,
        "Ada sails",
        "--instruction",
        "Shorten it.",
        "--max-tokens",
        "7",
    )
    [found] = run(*arguments, "--json").json()["results"]
    sent = router.calls[-1].request.text  # type: ignore[attr-defined]
    assert (sent.instruction, sent.max_tokens) == ("Shorten it.", 7)
    assert found == {
        "text": "Ada sails",
        "generated_text": "a text about Ada sails",
        "finish_reason": "length",
    }
    assert (
        run(*arguments, "Bob sings").out == "a text about Ada sails …\n\na text about Bob sings …\n"
    )
    assert run(*arguments[:4], "--max-tokens", "4097").code != 0
    streamed = run(*arguments, "--stream")
    assert streamed.out == "a text abou\na text about Ada sails\n"
    assert streamed.err == (
        "the worker was lost; the text starts again:\nthe text was cut off at its longest "
        "(--max-tokens)\n"
    )
    assert router.calls[-1].request.text.max_tokens == 7  # type: ignore[attr-defined]
    for wrong in (("Bob sings",), ("--json",), ("--output", "x.jsonl")):
        assert run(*arguments, "--stream", *wrong).code == 2
    run(*arguments, "--template-value", "enable_thinking=false", "--template-value", "style=a=b")
    values = router.calls[-1].request.text.template_values  # type: ignore[attr-defined]
    assert json.loads(values) == {"enable_thinking": False, "style": "a=b"}
    assert run(*arguments, "--template-value", "enable_thinking").code == 2


def test_extract_by_a_schema(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    schema, photo = tmp_path / "schema.json", tmp_path / "photo.png"
    schema.write_text('{"type": "object", "properties": {"b": {}, "a": {}}}')
    Image.new("RGB", (20, 10)).save(photo)
    for arguments in (("generate", MODEL, "Ada sails"), ("ocr", MODEL, photo)):
        [found] = run("extract", *arguments, "--schema", schema, "--json").json()["results"]
        assert (list(found["form"]), found["finish_reason"]) == (["about"], "stop")
        assert '{"about": ' in run("extract", *arguments, "--schema", schema).out
        assert router.calls[-1].request.text.json_schema == schema.read_text()  # type: ignore[attr-defined]
        assert run("extract", *arguments, "--schema", tmp_path / "none.json").code == 2


def test_extract_ocr(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (20, 10)).save(photo)
    arguments = ("extract", "ocr", MODEL, photo, "--kind", "ocr", "--region", "1,2,3.5,4")
    [found] = run(*arguments, "--json").json()["results"]
    sent = router.calls[-1].request
    region = sent.text.region  # type: ignore[attr-defined]
    assert (sent.text.kind, region.left, region.right) == (3, 1.0, 3.5)  # type: ignore[attr-defined]
    assert [item.image.data for item in sent.items] == [photo.read_bytes()]  # type: ignore[attr-defined]
    assert (found["text"], found["finish_reason"]) == (str(photo), "length")
    assert run(*arguments).out == f"{found['ocr_text']} …\n"
    assert run(*arguments[:4], "--region", "1,2,3").code == 2


def test_extract_structure(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    form = {
        "classifications": [{"task": "tone", "labels": ["calm", "angry"]}],
        "structures": {"ship": [["name", "str"]]},
    }
    schema.write_text(json.dumps(form))
    arguments = ("extract", "structure", MODEL, "Ada sails", "--schema", schema)
    [found] = run(*arguments, "--threshold", "0.25", "--json").json()["results"]
    sent = router.calls[-1].request.structure  # type: ignore[attr-defined]
    assert (sent.threshold, [one.name for one in sent.structures]) == (0.25, ["ship"])
    value = {"text": "Ada", "score": 0.75, "start": 0, "end": 3}
    assert found == {
        "text": "Ada sails",
        "entities": [],
        "relations": [],
        "classifications": [{"name": "tone", "labels": [{"label": "calm", "score": 0.5}]}],
        "structures": [{"name": "ship", "fields": {"name": value}}],
    }
    table = run(*arguments).out
    assert all(word in table for word in ("tone: calm", "ship.name", "0.7500", "Ada  (0-3)"))
    schema.write_text('{"classifications": []}')
    assert "no structure" in run(*arguments).out
    for content, reason in (("{", "not valid JSON"), ('{"other": 1}', "'other'")):
        schema.write_text(content)
        refused = run(*arguments)
        assert refused.code != 0
        assert reason in refused.err
    schema.unlink()
    assert "cannot be read" in run(*arguments).err


def test_drawing_that_cannot_be_made(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    photo, broken = tmp_path / "photo.png", tmp_path / "broken.png"
    Image.new("RGB", (20, 10)).save(photo)
    broken.write_bytes(b"no image")
    arguments = ("extract", "regions", MODEL, "-l", "cat", "--draw")
    for wrong in (
        (tmp_path / "out.jpg", photo),
        (tmp_path / "none" / "out.png", photo),
        (tmp_path / "out.png", photo, photo),
        ("-", photo),
    ):
        assert run(*arguments, *wrong).code == 2
    assert not router.calls
    ran = run(*arguments, tmp_path / "out.png", broken)
    assert ran.code != 0
    assert "cannot be drawn into" in ran.err
    assert sorted(tmp_path.iterdir()) == [broken, photo]


def test_download_shows_how_far_it_is(run: Run) -> None:
    assert "downloading 43 %" in run("models").out
    shown = run("models", "show", DOWNLOADING).out
    assert "downloading 43 %" in shown
    assert "downloading 43.0 MiB of 100.0 MiB" in shown
    place = run("models", "show", DOWNLOADING, "--json").json()["places"][0]
    assert (place["state"], place["downloaded_bytes"], place["download_bytes"]) == (
        "downloading",
        43 << 20,
        100 << 20,
    )


def test_models(run: Run, router: FakeRouter) -> None:
    table = run("models").out
    assert MODEL in table
    assert "[no] tensor 'a.b'" in table
    listed = json.loads(run("models", "--json").out)
    assert [model["model"] for model in listed] == ["org/broken", DOWNLOADING, MODEL]
    assert json.loads(run("models", "list", "--json").out) == listed
    described = run("models", "show", MODEL).out
    assert [wanted in described for wanted in ("bfloat16", "org/lora", "64.0 MiB")] == [True] * 3
    assert run("models", "show", MODEL, "--json").json()["card"]["family"] == "bert"
    assert "resident on w1" in run("models", "load", MODEL, "--pool", "cpu").err
    assert run("models", "evict", MODEL, "--json").json() == {"model": MODEL, "worker_ids": ["w1"]}
    assert "unloading from w1" in run("models", "evict", MODEL).err
    assert "pinned" in run("models", "pin", MODEL).err
    assert "pinned" not in run("models", "unpin", MODEL).err
    assert [call.method for call in router.calls[-2:]] == ["PinModel", "PinModel"]
    cold = run("models", "pin", DOWNLOADING).err
    assert f"nothing is pinned: `shoal models load {DOWNLOADING}` first" in cold
    assert "nothing is pinned" not in run("models", "pin", MODEL).err


def test_options_before_the_command_are_not_ignored(run: Run) -> None:
    ran = run("models", "--address", "elsewhere:1", "load", MODEL)
    assert ran.code == 2
    assert "after the command" in ran.err


def test_status(run: Run, router: FakeRouter) -> None:
    shown = run("status").out
    for wanted in ("router-1", "serving", "w1 (draining)", "128.0 MiB of 8.0 GiB", "1,234", MODEL):
        assert wanted in shown
    lines = (
        "scheduler s1 leads; its last plan was 0.5 s ago",
        "w2 (machine preempted in 25 s)",
        "256.0 MiB of 8.0 GiB",
        "200 s",
        "2.5 %",
    )
    for wanted in lines:
        assert wanted in shown
    assert "cpu, avx512" in shown
    answer = run("status", "--json").json()
    assert [worker["kernels"] for worker in answer["workers"]] == ["avx512", ""]
    assert (answer["serving"], answer["address"], answer["router_id"]) == (
        True,
        router.address,
        "router-1",
    )
    assert answer["lanes"][0]["done_jobs"] == 99
    assert [worker["preempted_in_seconds"] for worker in answer["workers"]] == [None, 25.0]
    assert [
        (worker["device_seconds"], worker["wasted_seconds"]) for worker in answer["workers"]
    ] == [(0, 0), (200, 5)]
    assert answer["scheduler"] == {"scheduler_id": "s1", "plan": 7, "age_seconds": 0.5}


def test_explain(run: Run, router: FakeRouter) -> None:
    shown = run("explain", MODEL).out
    for wanted in (
        "1 holds it.",
        "scheduler s1 leads",
        "its plan: one copy is enough",
        "it holds the model",
        "0.75",
        "l4-spot",
    ):
        assert wanted in shown
    assert shown.index("w2") < shown.index("w1")
    answer = run("explain", MODEL, "--json").json()
    assert (answer["model"], answer["plan"], answer["workers"][1]["eligible"]) == (
        MODEL,
        "one copy is enough",
        True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("encode", MODEL, "x"),
        ("score", MODEL, "q", "x"),
        ("extract", "entities", MODEL, "x", "--label", "a"),
    ],
)
def test_pool_can_be_named(run: Run, router: FakeRouter, words: tuple[str, ...]) -> None:
    assert run(*words, "--pool", "l4-spot", "--adapter", "org/lora").code == 0
    assert 'pool: "l4-spot"' in str(router.calls[-1].request)
    assert 'adapter: "org/lora"' in str(router.calls[-1].request)


def test_connection_options(run: Run, router: FakeRouter) -> None:
    run("encode", MODEL, "x", "--tenant", "search", "--timeout", "7", "--token", "secret")
    call = router.calls[0]
    assert (call.metadata["x-shoal-tenant"], call.metadata["authorization"]) == (
        "search",
        "Bearer secret",
    )
    assert round(call.seconds_left, 1) <= 7  # gRPC rounds deadlines up.


class LateClient:
    """A client of a router that answers the second question whether it is healthy.

    Attributes:
        timeouts: The timeout of each question.
    """

    address = "127.0.0.1:1"

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.timeouts: list[float] = []

    def healthy(self, *, timeout: float) -> bool:
        self.timeouts.append(timeout)
        if len(self.timeouts) < self._answers:
            raise DeadlinePassed("no answer within the timeout")
        return True


def test_router_that_answers_late_is_awaited() -> None:
    client = LateClient(2)
    reachable(cast(Any, client))
    assert client.timeouts == [REACH_SECONDS, BUSY_ROUTER_SECONDS]
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:1 within 10 s"):
        reachable(cast(Any, LateClient(3)))


def test_unreachable_router_is_reported(run: Run, nobody: str) -> None:
    ran = run("encode", MODEL, "x", "--address", nobody)
    assert (ran.code, ran.out) == (1, "")
    assert nobody in ran.err
    assert "shoal up" in ran.err


def test_error_names_the_line_and_the_remedy(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    too_long = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INPUT_TOO_LONG",
        "items[2].text has 900 tokens",
        "items[2].text",
    )
    router.refusals = [too_long]
    ran = run("encode", MODEL, "-i", tmp_path / "in.txt", "--truncation", "none", "--json")
    assert (ran.code, ran.out) == (1, "")
    for wanted in (
        "items[2].text has 900 tokens",
        f"{tmp_path}/in.txt:3",
        "INPUT_TOO_LONG",
        "--truncation end",
    ):
        assert wanted in ran.err
    ran = run("models", "show", "other/model")
    assert ran.code == 1
    assert "no worker knows other/model" in ran.err


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("in.txt", "one\n\ntwo\n", "in.txt:2 is blank"),
        ("in.txt", b"\xff\xfe", "not UTF-8"),
        ("in.jsonl", '{"text": "a"}\nno\n', "in.jsonl:2 is not JSON"),
        ("in.jsonl", '{"body": "a"}\n', "its fields are body"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_unusable_input(
    run: Run, tmp_path: Path, name: str, content: str | bytes | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = run("encode", MODEL, "-i", tmp_path / name)
    assert ran.code == 1
    assert problem in ran.err


def test_wrong_usage_exits_with_2_before_asking_anybody(
    run: Run, router: FakeRouter, nobody: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.csv").touch()
    for arguments in (
        ("encode", MODEL),
        ("encode", MODEL, "-i", tmp_path / "empty.txt"),
        ("encode", MODEL, "x", "-o", "out.csv"),
        ("encode", MODEL, "x", "-o", "/no/such/directory/out.npy"),
        ("encode", MODEL, "x", "--field", "text"),
        ("encode", MODEL, "x", "--column", "text"),
        ("encode", MODEL, "-i", tmp_path / "empty.txt", "--column", "text"),
        ("encode", MODEL, "-i", tmp_path / "empty.csv", "--field", "text"),
        ("encode", MODEL, "-i", tmp_path / "empty.csv"),
        ("encode", MODEL, "x", "--role", "reader"),
        ("encode", MODEL, "x", "--timeout", "0"),
        ("encode", MODEL, "x", "--tls-cert", "cert.pem"),
        ("encode", MODEL, "x", "--address", "10.0.0.1:1", "--token", "secret"),
        ("score", MODEL),
        ("nonsense",),
    ):
        ran = run(
            *arguments,
            *(
                ("--address", nobody)
                if "--address" not in arguments and arguments[0] == "encode"
                else ()
            ),
        )
        assert (ran.code, ran.out) == (2, ""), arguments
        assert ran.err
    assert not router.calls


def test_skipped_items_are_reported_with_their_lines(run: Run, tmp_path: Path) -> None:
    lines = ["one", "", "three", "long " * 20, *[""] * 12]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    words = (MODEL, "-i", tmp_path / "in.txt", "--on-invalid", "skip", "--truncation", "none")
    ran = run("encode", *words, "-o", tmp_path / "out.npy")
    assert ran.code == 0
    for wanted in (
        "skipped 14 of 16 texts",
        "in.txt:2: items[1] is empty [INVALID_INPUT]",
        "in.txt:4: items[3].text is too long",
        "4 more",
    ):
        assert wanted in ran.err
    stored = np.load(tmp_path / "out.npy")
    assert np.isnan(stored).all(axis=1).tolist() == [index not in (0, 2) for index in range(16)]
    np.testing.assert_array_equal(stored[2], make_vector("three"))
    answer = json.loads(run("encode", *words, "--json").out)
    assert [one["index"] for one in answer["skipped"]] == [1, *range(3, 16)]
    assert answer["items"][1] == {"skipped": "items[1] is empty"}
    assert "skipped" in run("encode", *words).out
    found = json.loads(run("extract", "entities", *words, "--json").out)["results"]
    assert (found[1]["skipped"], "skipped" in found[0]) == ("items[1] is empty", False)
    ranked = json.loads(run("score", MODEL, "one", *words[1:], "--json").out)["results"]
    assert [row["index"] for row in ranked] == [0, 2]
    assert "in.txt:2 is blank" in run("encode", MODEL, "-i", tmp_path / "in.txt").err


def test_malformed_lines_are_skipped_with_their_reason_and_not_counted(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(
        b'{"text": "one"}\nno json\n{"body": "a"}\n\xff\n{"text": "two"}\n'
    )
    ran = run(
        "encode",
        MODEL,
        "-i",
        tmp_path / "in.jsonl",
        "--on-invalid",
        "skip",
        "-o",
        tmp_path / "out.jsonl",
    )
    assert ran.code == 0
    assert "skipped 3 of 5 texts" in ran.err
    assert "\n2 texts, " in ran.err
    for wanted in (
        "in.jsonl:2 is not JSON",
        "in.jsonl:3 has no text in the field 'text'",
        "in.jsonl:4 is not UTF-8",
    ):
        assert ran.err.count(wanted) == 1
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["dense" in row for row in rows] == [True, False, False, False, True]
    assert "in.jsonl:2 is not JSON" in rows[1]["skipped"]


def test_one_text_is_not_called_texts(run: Run, tmp_path: Path) -> None:
    assert "1 text, " in run("encode", MODEL, "a b", "-o", tmp_path / "out.npy").err


def write_parquet(file: Path, **columns: list[object]) -> Path:
    parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".CSV"])
def test_column_of_a_table_is_read_as_texts(run: Run, tmp_path: Path, suffix: str) -> None:
    """The header is not a text, quotes and line ends within a cell are the format's, and the row
    stands in the output.
    """
    texts, file = ['first, with "quotes"', "second\nline"], tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        write_parquet(file, id=["7", "8"], body=list(texts))
    else:
        with file.open("w", encoding="utf-8-sig", newline="") as out:
            csv.writer(out, delimiter="\t" if suffix == ".tsv" else ",").writerows(
                [["id", "body"], ["7", texts[0]], ["8", texts[1]]]
            )
    ran = run(
        "encode", MODEL, "--input", file, "--column", "body", "--output", tmp_path / "out.jsonl"
    )
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["body"]) for row in rows] == list(zip("78", texts, strict=True))
    assert [row["dense"] for row in rows] == [make_vector(text).tolist() for text in texts]
    ran = run("encode", MODEL, "--input", file)
    assert (ran.code, ran.out) == (1, "")
    assert "has no column 'text'; its columns are id, body: name one with --column" in ran.err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("text,id\na,1\nb\n", "in.csv:3 has 1 columns; the header has 2"),
        ("text,id\na,1\n,2\n", "in.csv:3 has no text in the column 'text'"),
        ("text,text\na,1\n", "has several columns 'text'"),
        ('text\n"a" b\n', "in.csv is not a table"),
        ("text\n\xff\n", "in.csv is not UTF-8"),
    ],
)
def test_unusable_table(run: Run, tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "in.csv").write_bytes(content.encode("latin-1"))
    ran = run("encode", MODEL, "-i", tmp_path / "in.csv")
    assert (ran.code, ran.out) == (1, "")
    assert problem in ran.err


def test_unusable_parquet(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_text("a text\n")
    ran = run("encode", MODEL, "-i", tmp_path / "in.parquet")
    assert (ran.code, "in.parquet is not a Parquet file that can be read" in ran.err) == (1, True)
    ran = run("encode", MODEL, "-i", write_parquet(tmp_path / "b.parquet", text=["a", None]))
    assert (ran.code, "b.parquet:2 has no text in the column 'text'" in ran.err) == (1, True)
    ran = run("encode", MODEL, "-i", write_parquet(tmp_path / "c.parquet", text=[1]))
    assert (ran.code, "c.parquet:1 has int 1 in the column 'text'" in ran.err) == (1, True)


def test_parquet_to_parquet_keeps_columns_and_has_vectors_of_fixed_size(
    run: Run, router: FakeRouter, tmp_path: Path
) -> None:
    texts = [f"text {number}" for number in range(300)]  # in two calls
    source = write_parquet(
        tmp_path / "in.parquet",
        id=list(range(300)),
        text=list(texts),
        price=[number / 2 for number in range(300)],
        dense=["replaced"] * 300,
    )
    output = tmp_path / "out.parquet"
    assert run("encode", MODEL, "-i", source, "-o", output, "--data-type", "float16").code == 0
    table = parquet.read_table(output)
    assert table.column_names == ["id", "text", "price", "dense", "skipped"]
    assert table.schema.field("dense").type == pyarrow.list_(pyarrow.float16(), 12)
    assert (table["id"].to_pylist(), table["text"].to_pylist()) == (list(range(300)), texts)
    vectors = table["dense"].combine_chunks().values.to_numpy().reshape(300, 12)
    np.testing.assert_array_equal(
        vectors, np.array([make_vector(text) for text in texts]).astype(np.float16)
    )
    assert table.schema.metadata[b"shoal.model"] == MODEL.encode()
    assert parquet.ParquetFile(output).num_row_groups == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_parquet_of_all_forms(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    forms = ("-r", "dense", "-r", "sparse", "-r", "multi_vector")
    ran = run("encode", MODEL, "one two", "three", *forms, "--data-type", "uint8", "-o", output)
    assert ran.code == 0
    rows = parquet.read_table(output).to_pylist()
    lines = run(
        "encode", MODEL, "one two", "three", *forms, "--data-type", "uint8", "-o", "-"
    ).out.splitlines()
    for row, line in zip(rows, lines, strict=True):
        assert row.pop("skipped") is None
        expected = json.loads(line)
        assert row["dense"] == expected["dense"]
        assert (row["scale"], row["offset"]) == pytest.approx(
            (expected["scale"], expected["offset"])
        )
        assert row["sparse"]["indices"] == expected["sparse"]["indices"]
        assert row["sparse"]["values"] == pytest.approx(expected["sparse"]["values"])
        np.testing.assert_allclose(row["multi_vector"], expected["multi_vector"], rtol=1e-6)


def test_parquet_has_a_row_for_each_chunk(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"id": "a", "text": "one. two"}\n{"id": "b", "text": "three"}\n'
    )
    output = tmp_path / "out.parquet"
    chunked = ("--chunk", "sentences", "-o", output)
    assert run("encode", MODEL, "-i", tmp_path / "in.jsonl", *chunked).code == 0
    table = parquet.read_table(output)
    assert table["id"].to_pylist() == ["a", "a", "b"]
    assert table["chunk_start"].to_pylist()[0] == 0
    for row in table.to_pylist():
        assert row["chunk_text"] == row["text"][row["chunk_start"] : row["chunk_end"]]
        np.testing.assert_allclose(row["dense"], make_vector(row["chunk_text"].strip()), rtol=1e-6)


def test_skipped_rows_of_parquet_have_no_vector_and_a_reason(run: Run, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", text=["a", None, "b"])
    output = tmp_path / "out.parquet"
    assert run("encode", MODEL, "-i", source, "-o", output, "--on-invalid", "skip").code == 0
    rows = parquet.read_table(output).to_pylist()
    assert [row["dense"] is None for row in rows] == [False, True, False]
    assert [row["skipped"] is None for row in rows] == [True, False, True]
    assert "has no text" in rows[1]["skipped"]
    np.testing.assert_allclose(rows[2]["dense"], make_vector("b"))


def test_failed_call_leaves_no_parquet_file(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", text=[f"text {n}" for n in range(300)])
    wrong = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "no", "items[0].text")
    router.refusals = [None, wrong]  # type: ignore[list-item]
    output = tmp_path / "out.parquet"
    ran = run("encode", MODEL, "-i", source, "-o", output)
    assert ran.code == 1
    assert f"nothing was written to {output}" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]
    assert run("encode", MODEL, "-i", source, "-o", output, "--resume").code == 2


def test_columns_of_mixed_types_become_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"id": 1, "text": "a"}\n{"id": "two", "text": "b", "more": {"x": 1}}\n'
    )
    output = tmp_path / "out.parquet"
    assert run("encode", MODEL, "-i", tmp_path / "in.jsonl", "-o", output).code == 0
    rows = parquet.read_table(output).to_pylist()
    assert [row["id"] for row in rows] == ["1", "two"]
    assert [row["more"] for row in rows] == [None, '{"x": 1}']


def test_parquet_without_pyarrow_names_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = run("encode", MODEL, "-i", tmp_path / "in.parquet")
    assert (ran.code, "pip install 'shoal[parquet]'" in ran.err) == (1, True)


@pytest.mark.parametrize("name", ["in.log", "in", "in.csv.gz"])
def test_input_of_an_unknown_format_is_refused(
    run: Run, router: FakeRouter, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("a text\n")
    ran = run("encode", MODEL, "--input", tmp_path / name)
    assert (ran.code, ran.out) == (2, "")
    message = " ".join(ran.err.replace("│", " ").split())  # The box wraps by the path's length.
    for wanted in (".txt, .jsonl, .ndjson, .csv, .tsv or", "--input -"):
        assert wanted in message
    assert not router.calls


def test_byte_order_mark_is_not_part_of_a_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    answer = run("encode", MODEL, "-i", tmp_path / "in.txt", "--json").json()
    assert [row["dense"] for row in answer["items"]] == [
        make_vector("one").tolist(),
        make_vector("two").tolist(),
    ]


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """300 texts: three parts of at most 128, 256, … items."""
    file = tmp_path / "in.txt"
    file.write_text("".join(f"text {number}\n" for number in range(300)))
    return file


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def interrupt(
    monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException, verb: str = "encode"
) -> None:
    """Lets the client's `verb` raise the error after `after` calls."""
    whole, calls = getattr(shoal.Client, verb), iter(range(after))

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return whole(*arguments, **options)

    monkeypatch.setattr(shoal.Client, verb, interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), shoal.errors.NoCapacity("no worker")])
def test_interrupted_lines_are_kept_and_resumed(
    run: Run, numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        interrupt(patch, 1, error)
        ran = run("encode", MODEL, "-i", numbered, "-o", output)
    assert ran.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert f"128 of 300 texts are in {output}; --resume continues after them" in ran.err
    assert len(read_lines(output)) == 128
    with output.open("a") as file:
        file.write(
            '{"text": "text 128", "dense": [0.'
        )  # a line that the end of the process cut off
    ran = run("encode", MODEL, "-i", numbered, "-o", output, "--resume")
    assert ran.code == 0, ran.err
    assert "172 texts, " in ran.err
    assert "128 texts before them were already in the file" in ran.err
    assert [row["text"] for row in read_lines(output)] == [
        f"text {number}" for number in range(300)
    ]
    assert [row["dense"] for row in read_lines(output)] == [
        make_vector(f"text {number}").tolist() for number in range(300)
    ]


def test_resuming_refuses_another_input(
    run: Run, numbered: Path, router: FakeRouter, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text('{"text": "another", "dense": []}\n')
    ran = run("encode", MODEL, "-i", numbered, "-o", output, "--resume")
    assert (ran.code, ran.out) == (1, "")
    assert "line 1 is not of this input" in ran.err
    assert not [call for call in router.calls if call.method == "Encode"]
    assert output.read_text() == '{"text": "another", "dense": []}\n'
    for arguments in (
        ("-o", tmp_path / "out.npy", "--resume"),
        ("--resume",),
        ("-o", output, "--json", "--resume"),
    ):
        ran = run("encode", MODEL, "-i", numbered, *arguments)
        assert (ran.code, "--resume continues a file of lines" in ran.err) == (2, True)


def test_interrupt_without_lines_says_that_nothing_was_kept(
    run: Run, numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 0, KeyboardInterrupt())
    for output in (tmp_path / "out.npy", tmp_path / "out.jsonl"):
        ran = run("encode", MODEL, "-i", numbered, "-o", output)
        assert (ran.code, "interrupted: nothing was " in ran.err, output.exists()) == (
            130,
            True,
            False,
        )


@contextmanager
def full_disk() -> Iterator[None]:
    """Refuse to write more than 1 KiB of a file, as a full disk does, with another reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("suffix", "advice"),
    [
        ("npy", ""),
        ("npz", ""),
        ("parquet", "nothing was written to"),
        ("jsonl", "--resume continues after the lines that are in"),
    ],
)
def test_full_disk_is_reported_with_the_file_and_the_reason(
    run: Run, numbered: Path, tmp_path: Path, suffix: str, advice: str
) -> None:
    output = tmp_path / f"out.{suffix}"
    with full_disk():
        ran = run("encode", MODEL, "-i", numbered, "-o", output)
    assert (ran.code, ran.out) == (1, "")
    assert f"error: {output}: File too large" in ran.err
    assert not advice or f"{advice} {output}" in ran.err
    assert output.exists() is (suffix == "jsonl"), "the other formats have no part of a result"
    assert not list(tmp_path.glob(".out.*"))


def test_errors_late_in_a_file_of_lines_name_their_line(
    run: Run, router: FakeRouter, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("a\n" * 200 + "long " * 20 + "\n")
    options = ("-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", "--truncation", "none")
    ran = run("encode", MODEL, *options)
    assert (ran.code, f"at {tmp_path}/in.txt:201" in ran.err) == (1, True)
    ran = run("encode", MODEL, *options, "--resume", "--on-invalid", "skip")
    assert ran.code == 0
    assert "in.txt:201: " in ran.err
    assert "72 texts, " in ran.err


def test_entities_are_written_as_they_arrive(run: Run, numbered: Path, tmp_path: Path) -> None:
    ran = run("extract", "entities", MODEL, "-i", numbered, "-o", tmp_path / "out.jsonl")
    assert (ran.code, len(read_lines(tmp_path / "out.jsonl"))) == (0, 300)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("generate", MODEL), "generated_text"),
        (("ocr", MODEL), "ocr_text"),
        (("regions", MODEL, "-l", "cat"), "regions"),
        (("classify", MODEL, "-l", "cat"), "labels"),
    ],
)
def test_interrupted_extractions_are_kept_and_resumed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str
) -> None:
    """Generated texts are written 16 at a time; a part of 128 labels would have been lost here."""
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    (tmp_path / "photo.png").write_bytes(b"an image")
    is_text = words[0] in ("generate", "classify")
    source.write_text(
        "".join(
            f"text {number}\n" if is_text else f"{tmp_path}/photo.png\n" for number in range(140)
        )
    )
    arguments = ("extract", *words, "-i", source, "-o", output)
    with monkeypatch.context() as patch:
        interrupt(
            patch, 1, KeyboardInterrupt(), "extract" if words[0] != "classify" else "classify"
        )
        ran = run(*arguments)
    kept = 16 if words[0] in ("generate", "ocr") else 128
    assert ran.code == 130
    kind = "texts" if is_text else "images"
    assert (
        f"interrupted: {kept} of 140 {kind} are in {output}; --resume continues after them"
        in ran.err
    )
    assert len(read_lines(output)) == kept
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert f"{140 - kept} {kind}, " in ran.err
    rows = read_lines(output)
    assert [row["text"] for row in rows] == source.read_text().splitlines()
    assert all(field in row for row in rows)
    assert f"0 {kind}, 0 tokens" in run(*arguments, "--resume").err
    assert read_lines(output) == rows


def test_resuming_where_the_answer_replaces_a_field_of_the_input(run: Run, tmp_path: Path) -> None:
    """Lines that entities were written into are the input of a run that finds others."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "Ada", "entities": []}\n{"text": "Bob", "entities": []}\n')
    arguments = ("extract", "entities", MODEL, "-i", source, "-o", output)
    run(*arguments)
    output.write_text(output.read_text().splitlines()[0] + "\n")
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert [row["entities"][0]["text"] for row in read_lines(output)] == ["Ada", "Bob"]


def test_interrupted_ranking_says_why_nothing_was_kept(
    run: Run, numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 0, KeyboardInterrupt(), "score")
    ran = run("score", MODEL, "text", "-i", numbered, "-o", tmp_path / "out.jsonl")
    assert (ran.code, (tmp_path / "out.jsonl").exists()) == (130, False)
    assert (
        "interrupted: nothing was kept; a ranking is complete when all documents are scored"
        in ran.err
    )
    assert "No such option: --resume" in run("score", MODEL, "text", "-i", numbered, "--resume").err


def test_missing_labels_are_answered_with_the_option(run: Run, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "it is empty", "classify.labels")
    ]
    ran = run("extract", "classify", MODEL, "x")
    assert (ran.code, "give each label with --label" in ran.err) == (1, True)


def test_timeout_of_nothing_is_refused(run: Run) -> None:
    ran = run("encode", MODEL, "x", "--timeout", "0")
    assert (ran.code, "--timeout must be above 0 seconds, not 0" in ran.err) == (2, True)


def test_address_of_a_web_server_is_named(run: Run) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = run("encode", MODEL, "x", "--address", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (ran.code, ran.out) == (1, "")
    assert f"127.0.0.1:{server.server_port} speaks HTTP, as the edge and the console do" in ran.err


def test_misspelt_model_is_answered_with_similar_names(run: Run, router: FakeRouter) -> None:
    ran = run("models", "show", "org/smal")
    assert (ran.code, f"did you mean {MODEL}?" in ran.err) == (1, True)
    router.refusals = [
        Refusal(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no worker can find it")
    ]
    ran = run("encode", "orgs/Small", "x")
    assert (ran.code, f"did you mean {MODEL}?" in ran.err) == (1, True)
    assert "did you mean" not in run("models", "show", "other/different").err


@pytest.mark.parametrize(("field", "is_suggested"), [("model", True), ("items[0].text", False)])
def test_model_without_an_organisation_is_answered_with_the_whole_name(
    run: Run, router: FakeRouter, field: str, is_suggested: bool
) -> None:
    router.refusals = [
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "must be org/name", field)
    ]
    ran = run("encode", MODEL.partition("/")[2], "x")
    assert (ran.code, f"did you mean {MODEL}?" in ran.err) == (1, is_suggested)


def test_embed_and_rerank_are_other_names(run: Run) -> None:
    assert (
        json.loads(run("embed", MODEL, "x", "--json").out)["items"]
        == json.loads(run("encode", MODEL, "x", "--json").out)["items"]
    )
    assert json.loads(run("rerank", MODEL, "x", "x y", "--json").out)["results"][0]["score"] == 1.0
    shown = run("--help").out
    assert "The same as `encode`." in shown
    assert (
        shown.index("Inference")
        < shown.index("embed")
        < shown.index("Operation")
        < shown.index("Run a mesh")
    )
    shown = run("rerank", "--help").out
    assert "Score how relevant documents are to a query" in shown
    assert shown.index("Input and output") < shown.index("Serving") < shown.index("Connection")


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("http://mesh:50051", "'http://mesh:50051' is a URL; routers speak gRPC: use mesh:50051"),
        ("a:1,https://mesh", "use mesh with TLS"),
    ],
)
def test_address_of_the_web_is_explained(run: Run, address: str, advice: str) -> None:
    ran = run("status", "--address", address)
    assert ran.code == 2
    assert advice in " ".join(ran.err.replace("│", "").split())
    with pytest.raises(ValueError, match="is a URL"):
        shoal.Client(address)


def test_tls_to_a_router_without_is_one_error_and_no_noise(router: FakeRouter) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRPC", "SHOAL"))
    }
    command = [sys.executable, "-m", "shoal", "status", "--tls", "--address", router.address]
    done = subprocess.run(
        command,
        env=environment | {"PYTHONPATH": str(Path(shoal.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: the router at {router.address} does not use TLS")
    assert len(done.stderr.splitlines()) == 3


def test_model_has_its_size_before_it_is_loaded(run: Run) -> None:
    place = ModelPlace("w1", "cold", 3 << 20, 0.0, 0.0, "", False, 0, 0)
    cold = Model("org/cold", "cold", None, (place,), 0, "")
    assert model_size(cold) == "3.0 MiB"
    assert "85.8 MiB" in run("status").out


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"shoal {shoal.__version__}\n"
    shown = run("--help").out
    for command in (
        "encode",
        "score",
        "extract",
        "tokenize",
        "models",
        "status",
        "top",
        "up",
        "profile",
        "--install-completion",
    ):
        assert command in shown


@pytest.mark.parametrize(
    "command", [(), ("encode",), ("job",), ("job", "run", "encode"), ("extract", "text"), ("up",)]
)
def test_help_names_each_option_in_full_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, run: Run, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*command, "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"--[a-z-]*…", shown)
    assert "<bool>" not in shown, "a flag takes no value"
    assert run(*command, "-h").out == shown
    if command[-1:] == ("encode",):
        assert "--expect-embedding-id" in shown
        assert "│ --normalize " in shown
        assert "│ --no-normalize " in shown
        assert "--representation, -r" in shown


def test_lists_of_commands_have_summaries_without_breaks_and_begin_with_run(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for words in (
        "text layer of a PDF file, and other formats converted",
        "List the jobs below a folder, the last changed first: at most 1,000, of at most 10,000",
    ):
        assert any(words in run(group, "--help").out for group in ("extract", "job"))
    commands = run("job", "--help").out.partition("Commands")[2].splitlines()
    assert commands[1].split()[1] == "run"


def test_up_without_the_services(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    ran = run("up", "--port", "1")
    assert ran.code == 1
    assert "not installed" in ran.err
    assert "pip install 'shoal-mesh[local]'" in ran.err


def hello(name: str, loud: bool = False) -> None:
    """A plug-in's function."""
    typer.echo(f"HELLO {name}" if loud else f"hello {name}")


def test_commands_of_other_distributions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("greet", "tests.api.test_cli:hello", plugins.GROUP)
    unloadable = EntryPoint("heavy", "tests.api.nothing_there:run", plugins.GROUP)
    taken = EntryPoint("encode", "tests.api.nothing_there:run", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (found, unloadable, taken))
    assert run("greet", "world", "--loud").out == "HELLO world\n"
    assert "A plug-in's function." in run("greet", "--help").out
    assert "heavy" in run("--help").out  # Listed, and not loaded.
    assert run("encode", MODEL, "x").code == 0


def test_plugin_command_below_a_builtin_group(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    missing = run("models", "check", "x")
    assert (missing.code, "`shoal models check` is part of Shoal's services" in missing.err) == (
        1,
        True,
    )
    found = EntryPoint("models.check", "tests.api.test_cli:hello", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (found,))
    assert run("models", "check", "world", "--loud").out == "HELLO world\n"
    assert "check" in run("models", "--help").out
    assert run("models", "list").code == 0
    # A name that does not begin with one of our groups is a separate command.
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: (EntryPoint("a.b", "tests.api.test_cli:hello", plugins.GROUP),),
    )
    assert run("a.b", "world").out == "hello world\n"


def test_completion_and_module(router: FakeRouter) -> None:
    environment = dict(os.environ) | {
        "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
        "_SHOAL_COMPLETE": "complete_bash",
    }
    for words, completed in (
        ("shoal sta", "status"),
        ("shoal tok", "tokenize"),
        ("shoal prof", "profile"),
        ("shoal models che", "check"),
    ):
        typed = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run(
            [sys.executable, "-m", "shoal"],
            env=environment | typed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == [completed]


def test_progress_bar_only_for_long_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with console.bar("encoding", 10**6) as on_progress:
        assert on_progress is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.bar("encoding", 10) as on_progress:
        assert on_progress is None
    with console.bar("encoding", 2000) as on_progress:
        assert on_progress is not None
        on_progress(1000, 2000)
    assert "encoding" in terminal.getvalue()


def test_previews_and_sizes() -> None:
    assert console.preview("two\nlines") == "two lines"
    assert len(console.preview("x" * 500)) == 60
    assert [console.size(count) for count in (0, 1023, 1536, 3 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
