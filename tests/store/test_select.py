"""Selection of the files of a listing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from libs.errors import ModelBroken
from libs.store.select import select
from libs.store.source import RemoteFile


@dataclass(frozen=True)
class FakeRemote:
    """Files that are their content; others are 10 bytes that cannot be read."""

    contents: Mapping[str, object]
    others: Sequence[str]
    origin: str = "here"
    revision: str = "r1"

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        known = [RemoteFile(name, len(json.dumps(value))) for name, value in self.contents.items()]
        return (*known, *(RemoteFile(name, 10) for name in self.others))

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return json.dumps(self.contents[file.path]).encode()[start:end]

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


class TextRemote(FakeRemote):
    """The same with files that are texts."""

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return str(self.contents[file.path]).encode()[start:end]


def wanted(contents: Mapping[str, object], *others: str) -> list[str]:
    return [file.path for file in select("org/model", FakeRemote(contents, others))]


def test_without_lists_only_the_root_counts() -> None:
    others = (
        "config.json",
        "model.safetensors",
        "lora/adapter.safetensors",
        "1_Pooling/config.json",
        "merges.txt",
    )
    assert wanted({}, *others) == ["config.json", "merges.txt", "model.safetensors"]


def test_jina_embeddings_v3_is_fetched_without_its_code() -> None:
    modules = [
        {"type": "custom_st.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
    ]
    kept = (
        "1_Pooling/config.json",
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
    )
    others = (
        "custom_st.py",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "pytorch_model.bin",
        "tokenizer.json",
        *kept,
    )
    assert wanted({"modules.json": modules}, *others) == sorted(
        [*kept, "modules.json", "tokenizer.json"]
    )


def test_model_is_fetched_with_its_adapters() -> None:
    adapters = [
        f"adapters/{task}/{name}"
        for task in ("clustering", "retrieval")
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    others = (
        "model.safetensors",
        *adapters,
        "adapters/retrieval/optimizer.pt",
        "adapters/README.md",
        "custom_st.py",
    )
    config = {"model_type": "jina_embeddings_v5", "task_names": ["retrieval", "clustering"]}
    assert wanted({"config.json": config}, *others) == [
        *adapters,
        "config.json",
        "model.safetensors",
    ]
    assert wanted({"config.json": {"model_type": "qwen3"}}, *others) == [
        "config.json",
        "model.safetensors",
    ]


def test_shards_tokenizers_and_templates() -> None:
    others = (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "sentencepiece.bpe.model",
        "chat_template.jinja",
        "artifact.metadata",
    )
    assert wanted(
        {}, *others, "consolidated.safetensors", "model.onnx", "flax_model.msgpack"
    ) == sorted(others)


def test_of_several_dense_folders_only_the_one_that_is_listed() -> None:
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense_1024/"}]
    others = (
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense_1024/model.safetensors",
        "2_Dense_8192/model.safetensors",
    )
    assert wanted({"modules.json": modules}, *others) == sorted([*others[:3], "modules.json"])


def test_router_names_its_folders() -> None:
    types = {"types": {"query_0_Static": "x", "document_0_MLM": "y"}}
    for folder, name in (
        ("", "router_config.json"),
        ("0_Router/", "router_config.json"),
        ("0_Asym/", "config.json"),
    ):
        kind = "Asym" if name == "config.json" else "Router"
        configs = {
            "modules.json": [{"path": folder, "type": f"sentence_transformers.models.{kind}"}],
            folder + name: types,
        }
        others = (
            "config.json",
            f"{folder}query_0_Static/idf.json",
            f"{folder}document_0_MLM/model.safetensors",
            "other/idf.json",
        )
        assert wanted(configs, *others) == sorted({*configs, *others[:3]})


def test_gliner_and_its_second_tokenizer() -> None:
    others = ("gliner_config.json", "model.safetensors", "labels_tokenizer/tokenizer.json")
    assert wanted({}, *others, "onnx/model.onnx", "onnx/tokenizer.json") == sorted(others)


def test_folders_of_the_packages_gliner2_and_laya() -> None:
    others = ("config.json", "model.safetensors", "encoder_config/config.json")
    assert wanted({}, *others, "onnx/config.json") == sorted(others)
    laya = (
        "rl_agent_config.json",
        "model.safetensors",
        "encoder/config.json",
        "tokenizer/tokenizer.json",
    )
    assert wanted({}, *laya, "onnx/config.json") == sorted(laya)


def test_static_embedder_in_the_root_or_a_folder() -> None:
    modules = [
        {"path": ".", "type": "sentence_transformers.models.StaticEmbedding"},
        {"path": "1_Normalize"},
    ]
    files = ("config.json", "model.safetensors", "tokenizer.json")
    assert wanted({"modules.json": modules}, *files, "onnx/model.onnx") == sorted(
        [*files, "modules.json"]
    )
    folder = [{"path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}]
    inside = ("0_StaticEmbedding/model.safetensors", "0_StaticEmbedding/tokenizer.json")
    assert wanted({"modules.json": folder}, *inside, "onnx/model.onnx") == sorted(
        [*inside, "modules.json"]
    )


def test_named_templates_next_to_the_encoder() -> None:
    others = (
        "0_Transformer/model.safetensors",
        "0_Transformer/additional_chat_templates/rerank.jinja",
    )
    assert wanted({"modules.json": [{"path": "0_Transformer"}]}, *others) == sorted(
        [*others, "modules.json"]
    )


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", ".git"])
def test_folder_out_of_the_model_is_refused(path: str) -> None:
    with pytest.raises(ModelBroken, match=r"modules\.json"):
        wanted({"modules.json": [{"path": path}]}, "model.safetensors")


@pytest.mark.parametrize("value", ["text", 7, {"types": {}}])
def test_lists_that_are_none(value: object) -> None:
    with pytest.raises(ModelBroken, match=r"modules\.json: must hold a list"):
        wanted({"modules.json": value}, "model.safetensors")


@pytest.mark.parametrize("value", [[], {}, {"types": ["a"]}])
def test_routers_that_are_none(value: object) -> None:
    lists = {"modules.json": [{"path": "", "type": "x.Router"}], "router_config.json": value}
    with pytest.raises(ModelBroken, match=r"router_config\.json: names no `types`"):
        wanted(lists, "model.safetensors")


def test_torch_checkpoints_are_fetched_if_safetensors_are_missing() -> None:
    assert wanted({"glirel_config.json": {}}, "pytorch_model.bin") == [
        "glirel_config.json",
        "pytorch_model.bin",
    ]
    assert wanted({}, "config.json", "model.safetensors", "pytorch_model.bin") == [
        "config.json",
        "model.safetensors",
    ]
    layers = ("sparse_linear.pt", "colbert_linear.pt")
    assert wanted({}, "config.json", "pytorch_model.bin", *layers) == sorted(
        ("config.json", "pytorch_model.bin", *layers)
    )
    assert wanted({}, "config.json", "model.safetensors", *layers) == sorted(
        ("config.json", "model.safetensors", *layers)
    )
    assert wanted(
        {}, "config.json", "sparse_linear.safetensors", *layers, "pytorch_model.bin"
    ) == sorted(
        ("config.json", "sparse_linear.safetensors", "colbert_linear.pt", "pytorch_model.bin")
    )


def test_all_shards_of_a_torch_checkpoint_are_fetched_or_the_missing_one_is_named() -> None:
    shards = [f"pytorch_model-{number:05}-of-00003.bin" for number in (1, 2, 3)]
    others = ("config.json", "pytorch_model.bin.index.json")
    assert wanted({}, *others, *shards) == sorted((*others, *shards))
    with pytest.raises(ModelBroken, match=r"pytorch_model-00002-of-00003\.bin: missing"):
        wanted({}, *others, shards[0], shards[2])


def test_one_torch_file_of_any_name_is_the_weights_and_several_are_refused() -> None:
    others = ("optimizer.pt", "training_args.bin", "rng_state_0.pth")
    assert wanted({}, "config.json", "best.pt", *others) == ["best.pt", "config.json"]
    with pytest.raises(ModelBroken, match=r"best\.pt: one of 2 torch files \(best\.pt, last\.pt\)"):
        wanted({}, "config.json", "best.pt", "last.pt")


def test_weights_in_other_formats_are_refused_by_name() -> None:
    for name in ("flax_model.msgpack", "tf_model.h5", "model.pkl"):
        with pytest.raises(ModelBroken, match=rf"{name}: .*in a format that is not read"):
            wanted({}, "config.json", name)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["a-Q4_K_M.gguf", "a-Q8_0.gguf"],
            (
                r"a-Q4_K_M\.gguf: .* only as GGUF\. Use the repository that it was made from; or "
                r".*convert DIR"
            ),
        ),
        (["config.json", "model.gguf"], r"model\.gguf: .* only as GGUF"),
        (["config.json", "onnx/model.onnx"], r"model\.onnx: .* only as ONNX"),
    ],
)
def test_gguf_and_onnx_alone_are_refused_with_an_alternative(names: list[str], said: str) -> None:
    with pytest.raises(ModelBroken, match=said):
        wanted({}, *names)


def test_base_model_of_the_readme_is_named_instead_of_gguf() -> None:
    readme = "---\nlicense: mit\nbase_model:\n- org/base-model\n---\nbase_model: other/one\n"
    with pytest.raises(ModelBroken, match="Use its base model 'org/base-model'"):
        select("org/model", TextRemote({"README.md": readme}, ["a.gguf"]))


def test_of_an_adapter_its_own_two_files() -> None:
    others = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "checkpoint-5/adapter_model.safetensors",
    )
    assert wanted({}, *others) == ["adapter_config.json", "adapter_model.safetensors"]
    assert wanted({}, *others, "config.json") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_model_that_keeps_the_adapter_it_was_merged_from_is_a_model() -> None:
    others = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "model.safetensors",
    )
    assert wanted({}, *others) == sorted(others)


def test_adapter_s_torch_file_is_fetched_where_it_is_the_only_one() -> None:
    assert wanted({}, "adapter_config.json", "adapter_model.bin") == [
        "adapter_config.json",
        "adapter_model.bin",
    ]
    both = ("adapter_config.json", "adapter_model.bin", "adapter_model.safetensors")
    assert wanted({}, *both) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (("model.safetensors", "model.safetensors"), "listed twice"),
        (("model.safetensors", "1_Pooling", "1_Pooling/config.json"), "as a file and as a folder"),
    ],
)
def test_listing_that_no_disk_could_hold_is_refused(others: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ModelBroken, match=problem):
        wanted({}, "config.json", *others)


def test_names_that_lead_elsewhere_are_not_fetched() -> None:
    odd = (
        "../config.json",
        "/etc/x.json",
        "a/../b.json",
        "./c.json",
        "d\0.json",
        ".hidden.json",
        "e//f.json",
        "g" * 300 + ".json",
        "h ",
    )
    assert wanted({}, "config.json", "model.safetensors", *odd) == [
        "config.json",
        "model.safetensors",
    ]


def test_file_has_no_negative_size() -> None:
    class Negative(FakeRemote):
        @property
        def files(self) -> tuple[RemoteFile, ...]:
            return (RemoteFile("config.json", 10), RemoteFile("model.safetensors", -1))

    with pytest.raises(ModelBroken, match="-1 bytes"):
        select("org/model", Negative({}, ()))


def test_of_two_layouts_of_the_weights_the_one_that_is_read() -> None:
    files = (
        "model.safetensors",
        "open_clip_config.json",
        "open_clip_model.safetensors",
        "tokenizer.json",
    )
    assert "open_clip_model.safetensors" not in wanted(
        {"config.json": {"model_type": "clip", "vision_config": {}}}, *files
    )
    others: tuple[Mapping[str, object], ...] = ({"config.json": {"auto_map": {}}}, {})
    for contents in others:
        found = wanted(contents, *files)
        assert "open_clip_model.safetensors" in found
        assert "model.safetensors" not in found
