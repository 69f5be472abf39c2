"""`shoal alias` and `shoal migrate` against a real gRPC server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from shoal.cli.migration.comparison import read_files, read_folder
from shoal.v1 import aliases_pb2, inference_pb2

from tests.api.conftest import Run
from tests.api.fake_router import MODEL, FakeRouter
from tests.api.test_evaluation import write_beir

OLD, NEW = "org/old", MODEL
SetAlias = Callable[..., None]


@pytest.fixture
def set_alias(router: FakeRouter) -> SetAlias:
    def put(model: str, next_model: str = "", previous_model: str = "") -> None:
        router.aliases["docs"] = aliases_pb2.Alias(
            name="docs", model=model, next_model=next_model, previous_model=previous_model
        )

    return put


def alias_of(router: FakeRouter) -> dict[str, Any]:
    alias = router.aliases["docs"]
    return {"model": alias.model, "next": alias.next_model, "previous": alias.previous_model}


def test_aliases_are_set_listed_and_removed(run: Run, router: FakeRouter) -> None:
    assert "no aliases: shoal alias set" in run("alias", "list").out
    assert run("alias", "set", "docs", OLD).err == f"docs -> {OLD}\n"
    assert OLD in run("alias", "list").out
    (listed,) = run("alias", "list", "--json").json()
    assert (listed["name"], listed["model"]) == ("docs", OLD)
    assert run("alias", "remove", "docs").code == 0
    assert router.aliases == {}
    ran = run("alias", "remove", "docs")
    assert ran.code == 1
    assert "no alias docs" in ran.err


def test_answer_names_the_model_of_the_alias(run: Run, set_alias: SetAlias) -> None:
    set_alias(OLD, next_model=NEW)
    answer = run("encode", "docs", "a text", "--json").json()
    assert answer["model"] == "docs"
    assert (answer["alias"]["model"], answer["alias"]["next_model"]) == (OLD, NEW)


def test_alias_of_another_model_is_moved_only_by_force(run: Run, set_alias: SetAlias) -> None:
    set_alias(OLD)
    ran = run("alias", "set", "docs", NEW)
    assert ran.code == 1
    assert f"shoal migrate start docs --to {NEW}" in ran.err
    assert run("alias", "set", "docs", NEW, "--force", "--json").json()["model"] == NEW


@pytest.mark.parametrize("other", ["next_model", "previous_model"])
def test_set_ends_a_change_only_by_force(
    run: Run, router: FakeRouter, set_alias: SetAlias, other: str
) -> None:
    set_alias(OLD, **{other: NEW})
    before = alias_of(router)
    ran = run("alias", "set", "docs", OLD)
    assert ran.code == 1
    assert "shoal migrate finish docs" in ran.err
    assert alias_of(router) == before
    assert run("alias", "set", "docs", OLD, "--force").code == 0
    assert alias_of(router) == {"model": OLD, "next": "", "previous": ""}


def test_set_does_not_overwrite_a_change_by_another_caller(run: Run, router: FakeRouter) -> None:
    for revision, force in ((0, ()), (1, ()), (None, ("--force",))):
        assert run("alias", "set", "docs", OLD, *force).code == 0
        request: Any = router.calls[-1].request
        sent = request.expect_revision if request.HasField("expect_revision") else None
        assert sent == revision


def test_steps_of_a_migration(run: Run, router: FakeRouter, set_alias: SetAlias) -> None:
    set_alias(OLD)
    started = run("migrate", "start", "docs", "--to", NEW)
    assert started.code == 0
    assert f"{OLD} answers, {NEW} is next" in started.err
    assert alias_of(router) == {"model": OLD, "next": NEW, "previous": ""}
    assert "shoal migrate compare docs" in run("migrate", "status").out
    switched = run("migrate", "switch", "docs")
    assert f"{NEW} answers on all routers" in switched.err
    assert alias_of(router) == {"model": NEW, "next": "", "previous": OLD}
    assert run("migrate", "switch", "docs").err == switched.err
    assert alias_of(router) == {"model": NEW, "next": "", "previous": OLD}
    assert run("migrate", "rollback", "docs", "--json").json()["model"] == OLD
    assert run("migrate", "switch", "docs").code == 0
    assert f"docs stays with {NEW}" in run("migrate", "finish", "docs").err
    assert alias_of(router) == {"model": NEW, "next": "", "previous": ""}


def test_start_says_that_other_dimensions_need_another_index(
    run: Run, router: FakeRouter, set_alias: SetAlias
) -> None:
    set_alias(OLD)
    router.dimensions[OLD] = 8
    ran = run("migrate", "start", "docs", "--to", NEW)
    assert "other dimensions (8 -> 12): they need a new index" in ran.err


def test_start_says_that_an_index_may_stay(
    run: Run, router: FakeRouter, set_alias: SetAlias
) -> None:
    set_alias(OLD)
    router.embedding_id = lambda number: "0" * 16
    assert "the index can stay" in run("migrate", "start", "docs", "--to", NEW).err


def test_start_encodes_the_corpus(
    run: Run, router: FakeRouter, set_alias: SetAlias, tmp_path: Path
) -> None:
    set_alias(OLD)
    texts = [f"text {number}" for number in range(5)]
    parquet.write_table(pyarrow.table({"id": range(5), "body": texts}), tmp_path / "docs.parquet")
    output = tmp_path / "vectors"
    command = (
        *("migrate", "start", "docs", "--to", NEW, "--input", tmp_path / "docs.parquet"),
        *("--column", "body", "--keep", "id", "--output", output),
    )
    ran = run(*command, "--json")
    assert ran.code == 0
    job = ran.json()
    assert (job["state"], job["counts"]["rows"]) == ("completed", 5)
    requests: list[Any] = [call.request for call in router.calls]
    bulk = [one for one in requests if len(getattr(one, "items", ())) == 5]
    assert [(one.model, one.role) for one in bulk] == [(NEW, inference_pb2.ROLE_DOCUMENT)]
    (status,) = run("migrate", "status", "docs", "--json").json()
    assert (status["output"], status["job"]) == (str(output), "completed, 5 rows")
    assert run(*command).code == 0


def test_input_without_output_is_refused(run: Run, set_alias: SetAlias) -> None:
    set_alias(OLD)
    ran = run("migrate", "start", "docs", "--to", NEW, "--input", "docs.parquet")
    assert ran.code == 2
    assert "belong together" in ran.err


def test_compare_with_judgements(run: Run, set_alias: SetAlias, tmp_path: Path) -> None:
    set_alias(OLD, next_model=NEW)
    folder = write_beir(tmp_path)
    found = run("migrate", "compare", "docs", "--data", folder, "--json").json()
    assert (found["old"], found["new"]) == (OLD, NEW)
    assert (found["documents"], found["queries"]) == (3, 2)
    assert found["agreement"]["overlap@10"] == 1
    assert [row["model"] for row in found["models"]] == [OLD, NEW]
    assert found["models"][0]["nDCG@10"] == found["models"][1]["nDCG@10"] > 0
    shown = run("migrate", "compare", "docs", "--data", folder).out
    assert "rank-biased overlap" in shown
    assert "nDCG@10" in shown
    assert "a sleeping cat" in shown


def test_compare_given_queries_on_a_corpus(run: Run, set_alias: SetAlias, tmp_path: Path) -> None:
    set_alias(NEW, previous_model=OLD)
    lines = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(30))
    (tmp_path / "docs.jsonl").write_text(lines)
    (tmp_path / "queries.txt").write_text("text 3\nanother\n")
    found = run(
        *("migrate", "compare", "docs", "--queries", tmp_path / "queries.txt"),
        *("--input", tmp_path / "docs.jsonl", "--sample", "20", "--json"),
    ).json()
    assert (found["old"], found["new"]) == (OLD, NEW)
    assert (found["documents"], found["queries"], found["models"]) == (20, 2, [])


def test_compare_without_a_change_or_data_is_refused(
    run: Run, set_alias: SetAlias, tmp_path: Path
) -> None:
    set_alias(OLD)
    assert run("migrate", "compare", "docs").code == 2
    ran = run("migrate", "compare", "docs", "--data", write_beir(tmp_path))
    assert ran.code == 1
    assert "`shoal migrate start docs --to MODEL` begins one" in ran.err


def test_judged_documents_are_in_every_sample(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    with (folder / "corpus.jsonl").open("a") as file:
        for number in range(100):
            file.write("\n" + json.dumps({"_id": f"x{number}", "text": "other"}))
    found = read_folder(folder, "test", 10)
    assert len(found.documents) == 10
    assert {"1", "2", "3"} <= set(found.documents)
    assert read_folder(folder, "test", 10).documents == found.documents


def test_sample_of_a_file_is_uniform_and_repeatable(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(2000))
    (tmp_path / "docs.jsonl").write_text(lines)
    (tmp_path / "queries.txt").write_text("a\n")
    found = [
        read_files(tmp_path / "queries.txt", str(tmp_path / "docs.jsonl"), "text", 200).documents
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 200
    indices = [int(text) for text in found[0].values()]
    assert 800 < sum(indices) / 200 < 1200
