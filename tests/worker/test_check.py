"""`shoal models check`: its report on a directory, on a refused one, and on a model with wrong
answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from shoal.cli import main, plugins
from typer.testing import CliRunner

from libs.catalog.cards import read_catalog
from libs.kernels.linear import int8
from libs.models import Head, Output, PackedModel, load_model
from libs.models.interface.sequences import InputSequence
from services.worker.check import selftest
from services.worker.check.explain import ModelReport, inspect
from tests.generation.served import write
from tests.models.test_int8 import write_outliers
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.glirel_models import make_reference as make_glirel
from tests.parity.image_models import write_checkpoint as write_image_model
from tests.parity.image_repositories import write_repository
from tests.parity.v_splade_models import v_splade
from tests.readers import florence_models, page_models

LABELS = ("O", "B-PER", "I-PER")
CHECK = EntryPoint("models.check", "services.worker.check.command:check", plugins.GROUP)


class Ran:
    """The command's output and exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


Check = Callable[..., Ran]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: (CHECK,))
    for name in ("SHOAL_MODELS", "SHOAL_STORES", "SHOAL_CATALOG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str | Path) -> Ran:
        result = CliRunner().invoke(main.build(), ["models", "check", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    files = SentenceFiles(
        max_seq_length=32, dense=16, prompts={"query": "query: "}, default_prompt="query"
    )
    return write_checkpoint("bert", tmp_path / "org" / "embedder", sentence=files)


def test_folder_of_models_is_refused_with_its_models(check: Check, embedder: Path) -> None:
    folder = embedder.parents[1]
    ran = check(folder, "--no-test")
    assert ran.code == 1
    assert f"name one, such as {embedder}" in " ".join(ran.out.split())
    assert check(embedder, "--no-test").code == 0


def why(report: ModelReport) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {fact.what: (fact.value, fact.why) for fact in report.facts}


def test_each_fact_names_its_file_and_key(embedder: Path) -> None:
    report = inspect(embedder, "org/embedder", None)
    facts = why(report)
    assert facts["family"] == ("bert", ('config.json model_type = "bert"',))
    assert facts["kind"][0] == "dense"
    assert 'modules.json type = "sentence_transformers.models.Pooling"' in facts["kind"][1]
    assert 'config.json architectures = ["BertModel"]' in facts["kind"][1]
    limits = (
        "sentence_bert_config.json max_seq_length = 32",
        "config.json max_position_embeddings = 128",
    )
    assert facts["max tokens"] == ("32", limits)
    assert facts["pooling"] == ("mean", ("1_Pooling/config.json pooling_mode_mean_tokens = true",))
    assert "2_Dense/config.json out_features = 16" in facts["dimensions"][1]
    assert facts["normalised"] == (
        "yes",
        ('modules.json type = "sentence_transformers.models.Normalize"',),
    )
    assert facts["prompts"] == (
        "query: 'query: '",
        ('config_sentence_transformers.json prompts = {"query": "query: "}',),
    )
    assert facts["default prompt"] == (
        "query",
        ('config_sentence_transformers.json default_prompt_name = "query"',),
    )
    assert facts["tasks"] == ("encode, score, classify", ("follow from the kind",))


@pytest.mark.parametrize("name", ["qwen3", "llama", "bart", "t5"])
def test_generative_model_is_run(check: Check, tmp_path: Path, name: str) -> None:
    write(name, tmp_path, {"num_beams": 2} if name == "bart" else None)
    ran = check(tmp_path, "--json")
    [report] = ran.json()
    assert (ran.code, report["good"], report["refused"], report["skipped"]) == (0, True, "", "")
    assert [test["name"] for test in report["tests"]] == [
        "loads in float32",
        "generate: finite in float32",
        "generate: tokens",
        "generate: together as alone",
        "generate: same input, same answer",
        "generate: answer",
        "loads in bfloat16",
        "generate: finite in bfloat16",
    ]
    assert "tokens for 3 prompts" in check(tmp_path).out


def test_generative_model_with_nan_weights_fails(check: Check, tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "norm" in name)
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    ran = check(tmp_path, "--json")
    failed = {test["name"] for test in ran.json()[0]["tests"] if not test["passed"]}
    assert ran.code == 1
    assert {"generate: finite in float32", "generate: finite in bfloat16"} <= failed


@pytest.mark.parametrize("make", [florence_models.write, page_models.write_donut])
def test_image_reader_is_run(check: Check, tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path)
    ran = check(tmp_path, "--json")
    [report] = ran.json()
    assert (ran.code, report["good"]) == (0, True), report
    assert "generate: together as alone" in [test["name"] for test in report["tests"]]


def test_sizes_match_the_tensors(embedder: Path) -> None:
    report = inspect(embedder, "org/embedder", None)
    tensors = {
        str(path.relative_to(embedder)): load_file(path)
        for path in embedder.glob("**/*.safetensors")
    }
    assert {file.file: file.tensors for file in report.files} == {
        name: len(found) for name, found in tensors.items()
    }
    assert report.parameters == sum(
        tensor.numel() for found in tensors.values() for tensor in found.values()
    )
    assert sum(file.bytes["F32"] for file in report.files) == 4 * report.parameters


def test_labels_are_reported_with_their_keys(tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path, head="token_classification", labels=LABELS)
    facts = why(inspect(directory, "org/tagger", None))
    assert facts["labels"] == (
        "PER",
        ('config.json id2label = {"0": "O", "1": "B-PER", "2": "I-PER"}',),
    )


def test_card_settings_are_reported_with_their_line(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text(
        '# mine\nmodel: org/embedder\nmax_tokens: 9\nprompts: {document: "d: "}\npinned: true\n'
    )
    facts = why(
        inspect(
            embedder, "org/embedder", read_catalog([tmp_path / "cards"]).overrides("org/embedder")
        )
    )
    card = f"card {tmp_path}/cards/mine.yaml:2"
    assert (facts["max tokens"][0], facts["max tokens"][1][0]) == ("9", card)
    assert (facts["prompts"][0], facts["prompts"][1][0]) == (
        "query: 'query: '\ndocument: 'd: '",
        card,
    )
    assert facts["pinned"] == ("yes", (card,))


@pytest.mark.parametrize(
    ("kind", "head", "labels", "tasks"),
    [
        ("bert", "base", ("LABEL_0",), {"encode", "score", "classify"}),
        ("roberta", "sequence_classification", ("LABEL_0",), {"score"}),
        ("distilbert", "sequence_classification", ("bad", "good"), {"score", "classify"}),
        ("mpnet", "token_classification", LABELS, {"entities"}),
    ],
)
def test_sound_models_pass(
    tmp_path: Path, kind: str, head: Any, labels: Sequence[str], tasks: set[str]
) -> None:
    directory = write_checkpoint(kind, tmp_path, head=head, labels=labels)
    tests = list(selftest.run(directory, "org/name", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert {test.name.partition(":")[0] for test in tests[1:]} == tasks
    names = {test.name.partition(": ")[2] for test in tests[1:]}
    assert names == {
        "finite",
        "packed as alone",
        "same text, same answer",
        "answer",
        "bfloat16 near float32",
        "int8 near float32",
    }


@pytest.mark.filterwarnings("ignore")  # glirel's dependencies warn of much
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_image_model_passes(tmp_path: Path, family: Literal["clip", "siglip"]) -> None:
    """Texts and images of one job, and models with images only."""
    write_repository(family, tmp_path / "both")
    write_image_model("dinov2", tmp_path / "alone")
    for name, inputs in (("both", "text, image"), ("alone", "image")):
        report = inspect(tmp_path / name, f"tests/{name}", None)
        assert why(report)["inputs"] == (
            inputs,
            (f'config.json model_type = "{family if name == "both" else "dinov2"}"',),
        )
        tests = list(selftest.run(tmp_path / name, f"tests/{name}", None))
        assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
        assert {test.name.split(":")[0] for test in tests} >= {"encode", "score"}
        assert "encode: same text, same answer" in {test.name for test in tests}


@pytest.mark.filterwarnings("ignore")  # transformers deprecation warnings
def test_model_with_text_queries_only_passes(tmp_path: Path) -> None:
    """V-SPLADE: its texts need no forward pass, and cannot be documents of a score."""
    v_splade().save(tmp_path)
    assert why(inspect(tmp_path, "tests/v-splade", None))["inputs"][0] == "text, image"
    tests = list(selftest.run(tmp_path, "tests/v-splade", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert {"encode: answer", "score: answer", "encode: same text, same answer"} <= {
        test.name for test in tests
    }


def test_model_with_entities_as_input_passes(tmp_path: Path) -> None:
    tests = list(selftest.run(make_glirel(tmp_path, {}).directory, "org/name", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert "relations: answer" in {test.name for test in tests}


def test_nan_weights_fail(embedder: Path) -> None:
    file = embedder / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.output.dense.bias"][0] = float("nan")
    save_file(tensors, file)
    failed = {test.name for test in selftest.run(embedder, "org/name", None) if not test.passed}
    assert {"encode: finite", "encode: packed as alone"} <= failed
    # Outputs with NaN have no answer to check.
    assert "encode: answer" not in failed


def test_model_that_depends_on_its_batch_fails(
    embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = PackedModel.forward

    def leaking(model: PackedModel, head: Head, sequences: Sequence[InputSequence]) -> list[Output]:
        """Simulate visible padding or neighbours: answers depend on the size and order of the
        batch.
        """
        found = sound(model, head, sequences)
        return [
            np.asarray(output, np.float32) + np.float32(0.01 * number)
            for number, output in enumerate(found)
        ]

    monkeypatch.setattr(PackedModel, "forward", leaking)
    failed = {test.name for test in selftest.run(embedder, "org/name", None) if not test.passed}
    assert {"encode: packed as alone", "encode: same text, same answer"} <= failed
    assert "encode: finite" not in failed


def test_wrong_width_fails(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = load_model

    def lying(*arguments: Any) -> PackedModel:
        model = sound(*arguments)
        model.card = replace(model.card, dimensions=17)
        return model

    monkeypatch.setattr(selftest, "load_model", lying)
    failed = {
        test.name: test.detail
        for test in selftest.run(embedder, "org/name", None)
        if not test.passed
    }
    assert failed["encode: answer"] == "dense vectors have shape (4, 16), not (4, 17)"


def test_command_on_a_good_model(check: Check, embedder: Path) -> None:
    ran = check(embedder)
    assert ran.code == 0, ran.out
    for words in (
        "org/embedder",
        "good",
        "max_seq_length = 32",
        "parameters",
        "encode: packed as alone",
    ):
        assert words in ran.out
    assert "FAILS" not in ran.out


def test_several_models_as_json(check: Check, embedder: Path, tmp_path: Path) -> None:
    broken = write_checkpoint("bert", tmp_path / "org" / "broken")
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"pickle")
    (broken / "modeling.py").write_text("raise SystemExit(1)")
    ran = check(embedder, broken, "--no-test", "--json")
    assert ran.code == 1
    good, bad = ran.json()
    assert (good["model"], good["good"], good["skipped"], good["card"]["dimensions"]) == (
        "org/embedder",
        True,
        "--no-test",
        16,
    )
    assert bad["good"] is False
    assert bad["refused"].startswith(
        "pytorch_model.bin: is neither a zip archive of torch.save nor"
    )


def test_refusal_reports_the_facts_read_so_far(check: Check, tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "org" / "name")
    (directory / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.WordWeights", "path": ""}]'
    )
    ran = check(directory, "--no-test")
    assert ran.code == 1
    assert "modules.json: `type`" in ran.out
    assert "no self-test: the model is refused" in ran.out


def test_loading_detects_a_missing_tensor(check: Check, embedder: Path) -> None:
    file = embedder / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, file)
    assert check(embedder, "--no-test").code == 0
    ran = check(embedder, "--json")
    assert ran.code == 1
    assert (
        ran.json()[0]["refused"]
        == "model.safetensors: tensor 'encoder.layer.1.output.dense.bias' is missing"
    )


def test_loading_detects_an_unsupported_architecture(check: Check, embedder: Path) -> None:
    config = json.loads((embedder / "config.json").read_text()) | {"model_type": "mamba"}
    (embedder / "config.json").write_text(json.dumps(config))
    untried = check(embedder, "--no-test")
    assert (untried.code, "weights were not tested" in untried.out) == (0, True)
    (report,) = check(embedder, "--json").json()
    assert report["refused"].startswith("config.json: model_type is 'mamba': supported are ")


def test_id_is_looked_up_in_the_folders(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path))
    (report,) = check("org/embedder", "--no-test", "--json").json()
    assert (report["directory"], report["refused"]) == (str(embedder), "")
    (missing,) = check("org/missing", "--json").json()
    assert missing["refused"].startswith(
        "org/missing is in no folder of SHOAL_MODELS; give its directory, or set SHOAL_STORES=hf"
    )
    (neither,) = check("nonsense", "--json").json()
    assert (
        neither["refused"] == "nonsense is neither a directory nor a model id of the form org/name"
    )


def test_id_is_fetched_if_stores_are_set(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STORES", f"file://{tmp_path}")
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path / "store"))
    (report,) = check("org/embedder", "--no-test", "--json").json()
    assert (report["refused"], report["card"]["dimensions"]) == ("", 16)


def test_as_option_selects_the_card(check: Check, tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "anything", sentence=SentenceFiles())
    (report,) = check(directory, "--as", "intfloat/e5-base-v2", "--no-test", "--json").json()
    assert report["card"]["prompts"] == {"query": "query: ", "passage": "passage: "}
    assert check(directory, "--as", "nonsense").code == 2


def test_broken_card_is_a_usage_error(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text("modle: org/name\n")
    monkeypatch.setenv("SHOAL_CATALOG", str(tmp_path / "cards"))
    ran = check(embedder)
    assert (ran.code, ran.out) == (2, "")
    assert "mine.yaml:1: the card has no key 'modle': did you mean 'model'?" in ran.err


def test_model_too_large_for_this_memory_is_not_loaded(
    check: Check, embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.check.command._free_bytes", lambda: 1000)
    (report,) = check(embedder, "--json").json()
    assert report["good"]
    assert "of memory, 1000 B are free" in report["skipped"]


def test_int8_loss_is_reported(embedder: Path) -> None:
    found = {test.name: test for test in selftest.run(embedder, "org/embedder", None)}
    reported = found["encode: int8 near float32"]
    assert reported.passed
    assert 0.99 <= float(reported.detail.removeprefix("lowest cosine ")) < 1


def test_large_int8_loss_fails_if_the_card_selects_int8(
    check: Check, tmp_path: Path, monkeypatch: Any
) -> None:
    directory = write_outliers(tmp_path / "org" / "lossy")
    monkeypatch.setattr(selftest, "BFLOAT16_COSINE", 0.0)  # it also loses quality in bfloat16
    (report,) = check(directory, "--json").json()
    (reported,) = (test for test in report["tests"] if "int8" in test["name"])
    assert (
        reported["passed"],
        "loses too much in int8: encode: lowest cosine 0." in reported["detail"],
    ) == (True, True)
    assert report["good"]
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text("model: org/lossy\ndtype: int8\n")
    monkeypatch.setenv("SHOAL_CATALOG", str(tmp_path / "cards"))
    ran = check(directory, "--json")
    assert (ran.code, [test["name"] for test in ran.json()[0]["tests"] if not test["passed"]]) == (
        1,
        ["loads in int8"],
    )
    monkeypatch.delenv("SHOAL_CATALOG")
    monkeypatch.setenv("SHOAL_DTYPE", "int8")
    assert check(directory).code == 1, "a worker with these settings would load it so"


def test_missing_int8_support_is_reported(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_choice", lambda: "this CPU has nothing")
    (reported,) = (
        test for test in selftest.run(embedder, "org/embedder", None) if "int8" in test.name
    )
    assert (reported.passed, reported.detail) == (True, "not available: this CPU has nothing")


def test_card_dtype_is_used(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text(
        "model: org/embedder\ndtype: bfloat16\nmemory_bytes: 123456789\n"
    )
    overrides = read_catalog([tmp_path / "cards"]).overrides("org/embedder")
    whole = load_model(embedder, "org/embedder", torch.device("cpu"), torch.float32)
    half = load_model(embedder, "org/embedder", torch.device("cpu"), torch.float32, overrides)
    assert half.bytes == 123_456_789 > whole.bytes
    assert half.card.dtype == "bfloat16"
    assert {
        test.detail.partition(" bytes")[0]
        for test in selftest.run(embedder, "org/embedder", overrides)
        if "loads" in test.name
    } == {"123,456,789"}
