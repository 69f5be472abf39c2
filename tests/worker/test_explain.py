"""The report on a checkpoint: facts with their file and key, sizes and labels."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from libs.catalog.cards import read_catalog
from services.worker.check.explain import ModelReport, inspect
from tests.parity.checkpoints import write_checkpoint

LABELS = ("O", "B-PER", "I-PER")


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
