"""`/v1/batches` in front of a fake router: results, and checks of requests and inputs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from shoal.bulk.places import place
from shoal.v1 import inference_pb2 as pb

from services.edge.batches import files as files_routes
from services.edge.batches import lines as lines_of_batches
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import BatchStore, tenant_key
from tests.edge.batches.parts import (
    ENDED,
    create,
    embed,
    line,
    lines,
    results,
    retrieve,
    sent,
    start,
    texts,
    upload,
    wait_for,
)
from tests.edge.parts import MODEL, Script, edge

CHAT = "/v1/chat/completions"


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BatchSettings:
    """A directory and an object store."""
    url = tmp_path / "files" if request.param == "folder" else f"memory:/{tmp_path}"
    return BatchSettings(url=str(url))


async def test_usage_counts_a_prompt_once_for_several_answers(storage: BatchSettings) -> None:
    def generate(request: pb.ExtractRequest) -> pb.ExtractResponse:
        count = len(request.items)
        usage = pb.Usage(input_tokens=5 * count, output_tokens=3 * count)
        return pb.ExtractResponse(results=[pb.Extraction(text="yes")] * count, usage=usage)

    asked = {"model": MODEL, "n": 4, "messages": [{"role": "user", "content": "Is it?"}]}
    async with edge(Script(extract=generate), batches=storage) as http:
        one = (await http.post(CHAT, asked)).json["usage"]
        request = {"custom_id": "a", "method": "POST", "url": CHAT, "body": asked}
        content = json.dumps(request).encode() + b"\n"
        found = await wait_for(http, await start(http, content, endpoint=CHAT), ENDED)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [one[name] for name in names] == [5, 12, 17]
        usage = found["usage"]
        assert [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")] == [
            5,
            12,
            17,
        ]


async def test_results_and_errors_are_files_with_each_request_once(
    storage: BatchSettings,
) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=storage) as http:
        content = lines(3) + line("bad", "bad") + b"\n" + line("two", ["a", "b"])
        batch = await start(http, content, metadata={"job": "nightly"})
        assert (batch["object"], batch["status"]) == ("batch", "validating")
        assert batch["output_file_id"] is batch["error_file_id"] is batch["errors"] is None
        found = await wait_for(http, batch, ENDED)
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        assert found["usage"]["total_tokens"] == 20
        assert (found["metadata"], found["model"]) == ({"job": "nightly"}, MODEL)
        assert found["created_at"] <= found["in_progress_at"] <= found["completed_at"]
        done = await results(http, found["output_file_id"])
        assert {one["custom_id"] for one in done} == {"id-0", "id-1", "id-2", "two"}
        assert {one["response"]["status_code"] for one in done} == {200}
        (two,) = (one for one in done if one["custom_id"] == "two")
        assert len(two["response"]["body"]["data"]) == 2
        assert two["response"]["request_id"] == two["id"]
        (failed,) = await results(http, found["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
        assert failed["response"]["body"]["error"]["param"] == "input"
        assert failed["error"]["message"]
        file = (await http.get(f"/v1/files/{found['output_file_id']}")).json
        assert (file["purpose"], file["filename"]) == (
            "batch_output",
            f"{batch['id']}_output.jsonl",
        )
        page = (await http.get("/v1/batches")).json
        assert (page["data"], page["has_more"]) == ([found], False)
    assert all(request.priority == pb.PRIORITY_BULK for request in script.requests)
    assert {call.request_id for call in script.calls} >= {one["id"] for one in (*done, failed)}
    store = BatchStore(storage.location).tenant(tenant_key("default"))
    assert not place(f"{storage.location}/active").names()
    assert store.stored_bytes() == len(content) + sum(
        one.bytes for one in store.all_files() if one.batch
    )


async def test_input_of_several_pieces_is_executed_in_two_chunks_at_a_time(
    folder: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_routes, "FILE_PIECE_BYTES", 5000)
    monkeypatch.setattr(lines_of_batches, "CHUNK_REQUESTS", 20)
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        content = lines(200)
        assert len(content) > 4 * 5000
        found = await wait_for(http, await start(http, content), ENDED)
        assert found["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
        done = await results(http, found["output_file_id"])
    assert {one["custom_id"] for one in done} == {f"id-{number}" for number in range(200)}
    assert texts(script) == Counter(f"text {number}" for number in range(200))


async def test_data_of_a_batch_is_deleted_with_its_last_file(
    folder: BatchSettings, tmp_path: Path
) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        batch = await wait_for(http, await start(http, lines(1) + line("bad", "bad")), ENDED)
        data = tmp_path / "files" / tenant_key("default") / batch["id"]
        for name, exists in (("output_file_id", True), ("error_file_id", False)):
            await http.send("DELETE", f"/v1/files/{batch[name]}", b"", {})
            assert data.exists() == exists
        await http.send("DELETE", f"/v1/files/{batch['input_file_id']}", b"", {})
        assert BatchStore(folder.location).tenant(tenant_key("default")).stored_bytes() == 0
        assert (await retrieve(http, batch))["status"] == "completed"


async def test_outputs_are_kept_as_long_as_the_edge_keeps_files(tmp_path: Path) -> None:
    longest = 60 * 86_400
    settings = BatchSettings(url=str(tmp_path / "files"), expiry_seconds=longest)
    after = {"anchor": "created_at", "seconds": 7200}
    async with edge(Script(encode=embed), batches=settings) as http:
        whole = await start(http, lines(1))
        short = await start(http, lines(1), output_expires_after=after)
        for batch, seconds in ((whole, longest), (short, 7200)):
            found = await wait_for(http, batch, ENDED)
            file = (await http.get(f"/v1/files/{found['output_file_id']}")).json
            assert file["expires_at"] - file["created_at"] == seconds


async def test_bad_lines_fail_the_batch_before_any_request(folder: BatchSettings) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        content = lines(1) + b"{\n" + line("id-0", "again") + line("x", "a", url="/v1/rerank")
        found = await wait_for(http, await start(http, content), ENDED)
    assert found["status"] == "failed"
    assert found["failed_at"]
    assert found["output_file_id"] is found["error_file_id"] is None
    assert found["errors"]["object"] == "list"
    errors = [(one["line"], one["code"], one["param"]) for one in found["errors"]["data"]]
    assert errors == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
    ]
    assert not script.requests


async def test_batch_of_failed_requests_is_completed_without_results(
    folder: BatchSettings,
) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        found = await wait_for(http, await start(http, line("a", "bad")), ENDED)
    assert (found["status"], found["output_file_id"]) == ("completed", None)
    assert found["error_file_id"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": "/v1/extract/" + "a" * 500}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_requests_for_a_batch_are_checked(
    folder: BatchSettings, more: dict[str, Any], param: str
) -> None:
    async with edge(Script(), batches=folder) as http:
        file = (await upload(http, lines(1))).json["id"]
        reply = await create(http, file, **more)
        assert reply.status == 400
        assert param in reply.json["error"]["param"]
        assert (await http.get("/v1/batches")).json["data"] == []


async def test_batches_of_another_tenant_do_not_exist(folder: BatchSettings) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        file = (await upload(http, lines(1), "red")).json["id"]
        assert (await create(http, file, "blue")).status == 400
        batch = (await create(http, file, "red")).json
        for tenant, status in (("blue", 404), ("red", 200)):
            reply = await http.get(f"/v1/batches/{batch['id']}", x_shoal_tenant=tenant)
            assert reply.status == status
        path = f"/v1/batches/{batch['id']}/cancel"
        assert (await http.post(path, b"", x_shoal_tenant="blue")).status == 404
        page = (await http.get("/v1/batches", x_shoal_tenant="blue")).json
        assert page["data"] == []


async def test_requests_are_sent_as_their_tenant(folder: BatchSettings) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        await start(http, lines(2), "red")
        await sent(script, 2)
    assert {call.tenant for call in script.calls} == {"red"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-1/content"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/batch_1"),
    ],
)
async def test_edge_without_storage_names_the_setting(method: str, path: str) -> None:
    async with edge(Script()) as http:
        reply = await http.send(method, path, b"", {})
        described = (await http.get("/openapi.json")).json
    assert (reply.status, reply.json["error"]["code"]) == (404, "batches_disabled")
    assert "SHOAL_BATCHES_URL" in reply.json["error"]["message"]
    assert "/v1/batches" not in described["paths"]
