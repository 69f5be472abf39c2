"""`/v1/files`: uploads, lists, downloads, deletions, and their limits."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.edge import server
from services.edge.batches import store as stores
from services.edge.batches.context import new_id
from services.edge.batches.objects import BatchRecord, FilePiece, FileRecord, make_id
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import (
    FILE_PIECE_BYTES,
    BatchStore,
    FileContent,
    TenantStore,
    tenant_key,
)
from tests.edge.batches.parts import BOUNDARY, form, lines, send_form, upload
from tests.edge.parts import Http, Script, edge, head, read_reply
from tests.edge.test_server import until


@pytest.fixture
async def http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Http]:
    # The rest of a refused upload is read as long as the test sends it, so that it gets the answer.
    monkeypatch.setattr(server, "LINGER_SECONDS", 60.0)
    batches = BatchSettings(url=str(tmp_path / "files"), file_bytes=6 << 20, tenant_bytes=8 << 20)
    async with edge(Script(), batches=batches) as http:
        yield http


def stored(folder: Path) -> list[Path]:
    """Return the files with data of uploads and batches."""
    # Unlike `rglob`, `walk` accepts a folder that the edge deletes at the same time.
    return [Path(parent) / name for parent, _, names in os.walk(folder / "files") for name in names]


async def test_file_is_listed_downloaded_and_deleted(http: Http) -> None:
    content = lines(3)
    made = (await upload(http, content)).json
    assert made["object"] == "file"
    assert (made["bytes"], made["purpose"], made["filename"], made["status"]) == (
        len(content),
        "batch",
        "in.jsonl",
        "processed",
    )
    assert (await http.get(f"/v1/files/{made['id']}")).json == made
    page = (await http.get("/v1/files")).json
    assert (page["object"], page["data"], page["has_more"]) == ("list", [made], False)
    reply = await http.get(f"/v1/files/{made['id']}/content")
    assert (reply.status, reply.body) == (200, content)
    assert reply.headers["x-content-type-options"] == "nosniff"
    deleted = await http.send("DELETE", f"/v1/files/{made['id']}", b"", {})
    assert deleted.json == {"id": made["id"], "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = await http.send(method, f"/v1/files/{made['id']}{path}", b"", {})
        assert reply.status == 404
        assert reply.json["error"]["message"].startswith("No such File object")
    assert (await http.get("/v1/files")).json["data"] == []


async def test_lists_are_divided_into_pages(http: Http) -> None:
    made = [(await upload(http, lines(1))).json["id"] for _ in range(3)]
    first = (await http.get("/v1/files?limit=2&order=asc")).json
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (sorted(made)[:2], True)
    rest = (await http.get(f"/v1/files?limit=2&order=asc&after={first['last_id']}")).json
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (sorted(made)[2:], False)
    newest = (await http.get("/v1/files?limit=1")).json
    assert newest["data"][0]["id"] == sorted(made)[-1]
    assert (await http.get("/v1/files?purpose=batch_output")).json["data"] == []
    for query in ("limit=0", "limit=99999", "limit=x", "after=file-0"):
        assert (await http.get(f"/v1/files?{query}")).status == 400


async def test_page_reads_only_its_records(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await upload(http, lines(1))).status == 200
    key = next((tmp_path / "files").glob("t-*")).name
    store, files = BatchStore(str(tmp_path / "files")).tenant(key), []
    for number in range(5):
        store.end_batch(batch_record(number, status="completed"))
        files.append(make_id("file-", int(time.time()) + 9 + number, "0" * 32))
        store.create_file(file_record(files[-1], int(time.time()) + 60), [])
    read: list[str] = []
    real = TenantStore._decode

    def decode(self: TenantStore, name: str, kind: Any, content: bytes) -> Any:
        read.append(name)
        return real(self, name, kind, content)

    monkeypatch.setattr(TenantStore, "_decode", decode)
    first = (await http.get("/v1/batches?limit=2")).json
    assert ([one["id"][-1] for one in first["data"]], first["has_more"]) == (["4", "3"], True)
    rest = (await http.get(f"/v1/batches?limit=9&after={first['last_id']}")).json
    assert ([one["id"][-1] for one in rest["data"]], rest["has_more"]) == (["2", "1", "0"], False)
    assert len(read) == 5
    read.clear()
    page = (await http.get(f"/v1/files?limit=1&after={files[3]}")).json
    assert [one["id"] for one in page["data"]] == [files[2]]
    assert read == [f"{files[2]}.json", f"{files[1]}.json"]


def file_record(identity: str, expires_at: int) -> FileRecord:
    return FileRecord(
        id=identity,
        filename="a",
        purpose="batch",
        bytes=2,
        created_at=int(time.time()),
        expires_at=expires_at,
        folder=identity,
    )


def batch_record(number: int, **more: Any) -> BatchRecord:
    now = int(time.time())
    return BatchRecord(
        id=make_id("batch_", now, f"{number:032}"),
        endpoint="/v1/embeddings",
        input_file_id="",
        completion_window="24h",
        created_at=now,
        expires_at=now + 60,
        output_id="",
        errors_id="",
        output_seconds=1,
        **more,
    )


def test_records_in_memory_are_bounded_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_CACHED_BYTES", 13_000)
    store = BatchStore(str(tmp_path / "files"))
    tenant = store.tenant(tenant_key("red"))
    for number in range(5):
        record = batch_record(number, status="completed", metadata={"a": "b" * 3000})
        tenant.create_batch(record)
        tenant.end_batch(record)
    for _ in range(2):
        assert len(list(tenant.all_batches())) == 5
        assert 9_000 < store._cached_bytes <= 13_000
        assert store._cached_bytes == sum(size for _, size in store._cache.values())
    last = record.id + ".end.json"
    assert store.cached(tenant.key, last) == record
    store.forget(tenant.key, last)
    assert store.cached(tenant.key, last) is None
    assert store._cached_bytes == sum(size for _, size in store._cache.values())


async def test_files_of_another_tenant_do_not_exist(http: Http) -> None:
    made = (await upload(http, lines(1), "red")).json
    for tenant, status in (("blue", 404), ("", 404), ("red", 200)):
        for path in ("", "/content"):
            headers = {"x_shoal_tenant": tenant} if tenant else {}
            reply = await http.get(f"/v1/files/{made['id']}{path}", **headers)
            assert reply.status == status
    assert (await http.get("/v1/files", x_shoal_tenant="blue")).json["data"] == []
    reply = await http.send("DELETE", f"/v1/files/{made['id']}", b"", {"x-shoal-tenant": "blue"})
    assert reply.status == 404


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/tmp/x", "a/b\\c", "..", "\u00fcber \U0001f41f", "x" * 300]
)
async def test_names_of_clients_are_only_content(http: Http, tmp_path: Path, name: str) -> None:
    made = (await upload(http, lines(1), name=name)).json
    assert made["filename"] == name[:255]
    names = {part for path in stored(tmp_path) for part in path.relative_to(tmp_path).parts}
    assert not {part for part in names if "passwd" in part or "x" * 20 in part}
    assert (await http.get("/v1/files/..%2f..%2fetc%2fpasswd")).status == 404


async def test_file_of_several_pieces_is_read_as_it_was_sent(http: Http) -> None:
    content = b"".join(b"%07d\n" % number for number in range((FILE_PIECE_BYTES + 9000) // 8))
    made = (await upload(http, content)).json
    assert made["bytes"] == len(content)
    assert (await http.get(f"/v1/files/{made['id']}/content")).body == content


async def test_file_that_is_too_large_leaves_nothing(http: Http, tmp_path: Path) -> None:
    body = form(b"a" * ((6 << 20) + 1))
    assert (await send_form(http, body)).status == 413
    reader, writer = await http.open()
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    request = head("POST", "/v1/files", {"transfer-encoding": "chunked", "content-type": kind})
    writer.write(request)
    try:
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    except ConnectionError:
        pass
    reply = await read_reply(reader)
    writer.close()
    assert (reply.status, b"larger than the limit" in reply.body) == (413, True)
    assert not stored(tmp_path)


@pytest.mark.parametrize("is_before", [True, False])
async def test_bytes_around_the_file_are_bounded(
    http: Http, tmp_path: Path, is_before: bool
) -> None:
    def with_rest(size: int) -> bytes:
        rest = b"\r\n" * (size // 2)
        return rest + form(b"a" * 1000) if is_before else form(b"a" * 1000) + rest

    assert (await send_form(http, with_rest(128 << 10))).status == 200
    before = stored(tmp_path)
    reader, writer = await http.open()
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    writer.write(head("POST", "/v1/files", {"transfer-encoding": "chunked", "content-type": kind}))
    body = with_rest(8 << 20)
    with suppress(ConnectionError):
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
    reply = await read_reply(reader)
    writer.close()
    assert (reply.status, b"in addition to its file" in reply.body) == (413, True)
    assert stored(tmp_path) == before


async def test_files_of_a_tenant_have_a_limit(http: Http) -> None:
    content = b"a" * (5 << 20)
    first = (await upload(http, content)).json
    refused = await upload(http, content)
    assert (refused.status, refused.json["error"]["code"]) == (400, "storage_quota_exceeded")
    assert "delete files" in refused.json["error"]["message"]
    assert (await upload(http, content, "other")).status == 200
    await http.send("DELETE", f"/v1/files/{first['id']}", b"", {})
    assert (await upload(http, content)).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(b"a\n", purpose="vision"), "purpose"),
        (form(b""), "file"),
        (form(b"a\n", expires_after__anchor="now", expires_after__seconds="3600"), "anchor"),
        (form(b"a\n", expires_after__anchor="created_at", expires_after__seconds="1"), "seconds"),
        (form(b"a\n").replace(b'name="file"', b'name="other"'), "file"),
        (form(b"a\n").replace(b'; filename="in.jsonl"', b""), "file"),
        (form(b"a\n")[:-20], None),
        (b"no form", None),
        (b"", None),
        (b"--" + BOUNDARY.encode() + b"\r\nA" * 5000, None),
        (form(b"a\n", note="x" * 5000), "note"),
        (form(b"a\n", **{f"field{number}": "x" for number in range(20)}), None),
    ],
)
async def test_malformed_forms_are_refused(
    http: Http, tmp_path: Path, body: bytes, param: str | None
) -> None:
    reply = await send_form(http, body)
    assert reply.status == 400
    assert param is None or param in reply.json["error"]["param"]
    assert not stored(tmp_path)


async def test_other_content_types_are_refused(http: Http) -> None:
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary=", ""):
        reply = await http.send("POST", "/v1/files", form(b"a\n"), {"content-type": kind})
        assert reply.status == 415
    reply = await send_form(http, form(b"a\n"), **{"content-encoding": "gzip"})
    assert reply.status == 415


async def test_upload_that_stops_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    batches = BatchSettings(url=str(tmp_path / "files"))
    async with edge(Script(), batches=batches, body_pause_seconds=0.2) as http:
        body = form(b"a" * (FILE_PIECE_BYTES + 1))
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        request = head(
            "POST", "/v1/files", {"content-length": str(len(body)), "content-type": kind}
        )
        reader, writer = await http.open()
        writer.write(request + body[:-10])
        assert (await read_reply(reader)).status == 408
        writer.close()
        reader, writer = await http.open()
        writer.write(request + body[: FILE_PIECE_BYTES + 500])
        await writer.drain()
        writer.close()
        await until(lambda: not stored(tmp_path))


async def test_requested_expiry_is_applied(http: Http) -> None:
    made = (
        await upload(
            http, lines(1), expires_after__anchor="created_at", expires_after__seconds="3600"
        )
    ).json
    assert made["expires_at"] == made["created_at"] + 3600
    assert (await upload(http, lines(1))).json["expires_at"] - time.time() > 29 * 86_400


async def test_edge_without_a_storage_has_no_files() -> None:
    async with edge(Script()) as http:
        assert (await http.get("/v1/files")).status == 404
        assert (await http.post("/v1/batches", {})).status == 404
        assert "/v1/files" not in (await http.get("/openapi.json")).json["paths"]


async def test_openapi_describes_files_and_batches(http: Http) -> None:
    paths: dict[str, Any] = (await http.get("/openapi.json")).json["paths"]
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    (parameter,) = paths["/v1/files/{file_id}"]["delete"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("file_id", "path")
    assert {one["name"] for one in paths["/v1/batches"]["get"]["parameters"]} == {"after", "limit"}
    assert paths["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"].keys() == {
        "application/octet-stream"
    }


def test_expired_files_and_data_without_a_record_are_deleted(tmp_path: Path) -> None:
    now = int(time.time())
    store = BatchStore(str(tmp_path / "files")).tenant(tenant_key("red"))
    old, new = (make_id("file-", now, digit * 32) for digit in "01")
    for identity, expires_at in ((old, now - 1), (new, now + 60)):
        store.data(identity).create("00000000", b"a\n")
        store.create_file(file_record(identity, expires_at), [])
    orphans = [make_id("file-", at, "2" * 32) for at in (now - 2 * 86_400, now)]
    for identity in orphans:
        store.data(identity).create("00000000", b"a\n")
    assert store.file(old, now) is None
    store.delete_expired(now, 86_400.0)
    assert [one.id for one in store.all_files()] == [new]
    folders = {path.name for path in (tmp_path / "files" / store.key).iterdir()}
    assert folders == {"records", new, orphans[1]}


def store_pieces(store: TenantStore, *texts: bytes) -> FileRecord:
    """Store a file with these pieces."""
    identity = make_id("file-", 0, "0" * 32)
    pieces = []
    for number, text in enumerate(texts):
        store.data(identity).create(str(number), text)
        pieces.append(FilePiece(str(number), 0, len(text), len(text)))
    record = FileRecord(
        id=identity,
        filename="a",
        purpose="batch",
        bytes=sum(map(len, texts)),
        created_at=0,
        expires_at=1,
        folder=identity,
    )
    store.create_file(record, pieces)
    return record


class Shared(FileContent):
    """A content of which another thread replaces the last piece whenever one is kept."""

    @property
    def _last(self) -> tuple[str, bytes]:
        return "other", b"other piece"

    @_last.setter
    def _last(self, value: tuple[str, bytes]) -> None:
        pass


def test_threads_that_share_a_content_read_their_own_pieces(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path / "files")).tenant(tenant_key("red"))
    content = Shared(store, store_pieces(store, b"one\n", b"two\n"))
    assert content.read(0, 8) == b"one\ntwo\n"
    assert content.read(2, 4) == b"e\ntw"


def test_lines_of_pieces_have_their_offsets(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path / "files")).tenant(tenant_key("red"))
    texts = [b"one\ntw", b"o\n\nthr", b"ee is too long to keep\nfour"]
    content = FileContent(store, store_pieces(store, *texts))
    whole = b"".join(texts)
    found = list(content.lines(5))
    assert found == [(0, b"one"), (4, b"two"), (8, b""), (9, b"three "), (35, b"four")]
    assert [whole.index(text) for text in (b"one", b"two", b"three", b"four")] == [0, 4, 9, 35]
    for start in range(0, len(whole), 3):
        for size in (1, 7, 100):
            assert content.read(start, size) == whole[start : start + size]


def test_ids_are_in_the_order_of_their_objects() -> None:
    ids = []
    for _ in range(3):
        ids.append(new_id("file-")[0])
        time.sleep(0.001)
    assert ids == sorted(ids)
    assert {len(one) for one in ids} == {len("file-") + 40}
