"""Repositories with the files of published models on the hub: small random weights in the published
formats.

Each model has a twin as its package saves it today, with safetensors and tokenizer.json. The
docstring of a function lists the files of its repository. Base models have no weights in a readable
format, because none may be fetched.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.parity import gliner_models, glirel_models
from tests.parity.checkpoints import write_checkpoint
from tests.parity.test_hybrid import write_m3
from tests.readers.page_models import write_trocr
from tests.support.sentencepieces import DEBERTA, trained

_DEBERTA_ROWS: Final = 640
"""Rows of the base models' embedding: more than their tokenizers have tokens, like deberta-v3's
128,100.
"""

_TRAINING: Final = {
    "train_batch_size": 8, "num_steps": 30_000, "warmup_ratio": 0.1, "scheduler_type": "cosine",
    "eval_every": 5_000, "lr_encoder": 1e-5, "lr_others": 5e-5, "root_dir": "ablation_backbone",
    "log_dir": "logs", "prev_path": "none",
}  # fmt: skip
_SAVED_BY_PACKAGE: Final = (
    "encoder_config",
    "labels_encoder_config",
    "class_token_index",
    "vocab_size",
    "rel_token_index",
)


@dataclass(frozen=True, slots=True)
class Published:
    """Published models. `hub` has repositories by ID, including base models; `twins` the same
    models as saved by their packages.
    """

    hub: Mapping[str, Path]
    twins: Mapping[str, Path]


class _Writer:
    """Writes repositories and twins below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hub: dict[str, Path] = {}
        self.twins: dict[str, Path] = {}
        (root / "made").mkdir(parents=True)
        corpus = [*gliner_models.TEXTS, *Path(__file__).read_text().splitlines()] * 2
        self._pieces = {
            "deberta": trained(_folder(root / "deberta"), corpus, model_type="unigram", **DEBERTA),
            "mdeberta": trained(
                _folder(root / "mdeberta"),
                corpus,
                model_type="unigram",
                user_defined_symbols=["<extra_id_0>", "<extra_id_1>"],
                **DEBERTA,
            ),
        }

    def repository(self, model: str) -> Path:
        """Make an empty repository of the hub."""
        self.hub[model] = _folder(self.root / "hub" / model)
        (self.hub[model] / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        (self.hub[model] / ".gitattributes").write_text("*.bin filter=lfs\n")
        return self.hub[model]

    def deberta(self, model: str, name: str, *, markers: tuple[str, ...] = ()) -> Path:
        """Write config.json, pytorch_model.bin, spm.model and a tokenizer_config.json of two keys.
        Return a directory for packages.

        `markers` are tokens that only the package's directory has.
        """
        base = write_checkpoint(
            "deberta-v2",
            self.root / "bases" / model,
            positions=256,
            config={"vocab_size": _DEBERTA_ROWS},
        )
        fast = _deberta_tokenizer(self._pieces[name], markers)
        fast.save_pretrained(base)
        if markers:
            _resize(base, len(fast))
        else:
            own = self.repository(model)
            shutil.copyfile(base / "config.json", own / "config.json")
            shutil.copyfile(self._pieces[name], own / "spm.model")
            (own / "pytorch_model.bin").write_bytes(b"not fetched")
            _write(own / "tokenizer_config.json", {"do_lower_case": False, "vocab_type": "spm"})
        return base

    def gliner(
        self, model: str, config: Mapping[str, object], **options: Any
    ) -> gliner_models.Reference:
        made = gliner_models.make_reference(self.root / "made" / model, config, **options)
        self.twins[model] = made.directory
        return made


def write(root: Path) -> Published:
    """Write all repositories."""
    writer = _Writer(root)
    for each in _REPOSITORIES:
        each(writer)
    return Published(writer.hub, writer.twins)


def _bge_m3(writer: _Writer) -> None:
    """Write pytorch_model.bin, sparse_linear.pt and colbert_linear.pt in half precision, both forms
    of the tokenizer, modules, onnx/.
    """
    twin = write_m3(writer.root / "twins" / "bge-m3")
    for path in twin.glob("*_linear.safetensors"):
        half = {name: tensor.half() for name, tensor in load_file(path).items()}
        _save(half, path)
    own = writer.repository("BAAI/bge-m3")
    shutil.copytree(twin, own, dirs_exist_ok=True)
    for path in own.glob("*.safetensors"):
        name = "pytorch_model.bin" if path.stem == "model" else f"{path.stem}.pt"
        torch.save(load_file(path), own / name)
        path.unlink()
    (own / "sentencepiece.bpe.model").write_bytes(b"\x0a\x00")
    _folder(own / "onnx")
    for name in (
        "model.onnx",
        "model.onnx_data",
        "config.json",
        "tokenizer.json",
        "Constant_7_attr__value",
    ):
        (own / "onnx" / name).write_bytes(b"not fetched")
    writer.twins["BAAI/bge-m3"] = twin


def _urchade(writer: _Writer) -> None:
    """Write pytorch_model.bin, and gliner_config.json with the training's keys, which name the base
    model.
    """
    base = writer.deberta("microsoft/deberta-v3-small", "deberta")
    _training_files(writer, "urchade/gliner_small-v2.1", base, "microsoft/deberta-v3-small", {})


def _urchade_multilingual(writer: _Writer) -> None:
    base = writer.deberta("microsoft/mdeberta-v3-base", "mdeberta")
    _training_files(
        writer,
        "urchade/gliner_multi-v2.1",
        base,
        "microsoft/mdeberta-v3-base",
        {"subtoken_pooling": "first"},
    )


def _nuner(writer: _Writer) -> None:
    base = writer.deberta("microsoft/deberta-v3-large", "deberta")
    _training_files(
        writer,
        "numind/NuNER_Zero",
        base,
        "microsoft/deberta-v3-large",
        {"span_mode": "token_level"},
    )


def _training_files(
    writer: _Writer, model: str, base: Path, name: str, config: Mapping[str, object]
) -> None:
    made = writer.gliner(model, config, base=base)
    own = writer.repository(model)
    torch.save(load_file(made.directory / "model.safetensors"), own / "pytorch_model.bin")
    settings = json.loads((made.directory / "gliner_config.json").read_text())
    kept = {key: value for key, value in settings.items() if key not in _SAVED_BY_PACKAGE}
    _write(own / "gliner_config.json", {**_TRAINING, **kept, "model_name": name})


def _community(writer: _Writer) -> None:
    """Write pytorch_model.bin, a tokenizer with <<ENT>> and <<SEP>> in all its files, and a null
    encoder_config.
    """
    markers = ("<<ENT>>", "<<SEP>>")
    base = writer.deberta("local/deberta-with-markers", "deberta", markers=markers)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    made = writer.gliner(
        "gliner-community/gliner_small-v2.5",
        {"class_token_index": size - 2, "vocab_size": size, "num_rnn_layers": 1},
        base=base,
    )
    own = _package_files(writer, "gliner-community/gliner_small-v2.5", made)
    settings = json.loads((own / "gliner_config.json").read_text())
    _write(
        own / "gliner_config.json",
        {**settings, "encoder_config": None, "model_name": "microsoft/deberta-v3-small"},
    )
    _write(
        own / "added_tokens.json", {"[MASK]": size - 3, "<<ENT>>": size - 2, "<<SEP>>": size - 1}
    )
    shutil.copyfile(writer.hub["microsoft/deberta-v3-small"] / "spm.model", own / "spm.model")


def _knowledgator_pii(writer: _Writer) -> None:
    """Write pytorch_model.bin, gliner_config.json with encoder_config, tokenizer.json, and
    onnx/.
    """
    made = writer.gliner("knowledgator/gliner-pii-small-v1.0", {}, encoder="modernbert")
    own = _package_files(writer, "knowledgator/gliner-pii-small-v1.0", made)
    (_folder(own / "onnx") / "model.onnx").write_bytes(b"not fetched")


def _knowledgator_bi(writer: _Writer) -> None:
    """Write the same without the tokenizer of the label encoder, which is in that model's
    repository.
    """
    labels = "BAAI/bge-small-en-v1.5"
    made = writer.gliner(
        "knowledgator/gliner-bi-small-v2.0", {}, encoder="modernbert", labels_encoder="bert"
    )
    own = _package_files(writer, "knowledgator/gliner-bi-small-v2.0", made)
    shutil.rmtree(own / "labels_tokenizer")
    settings = json.loads((own / "gliner_config.json").read_text())
    _write(own / "gliner_config.json", {**settings, "labels_encoder": labels})
    shutil.copytree(made.directory.parent / "labels", writer.repository(labels), dirs_exist_ok=True)


def _knowledgator_relex(writer: _Writer) -> None:
    made = writer.gliner("knowledgator/gliner-relex-large-v1.0", {"relations_layer": "none"})
    _package_files(writer, "knowledgator/gliner-relex-large-v1.0", made)


def _package_files(writer: _Writer, model: str, made: gliner_models.Reference) -> Path:
    """Write the repository of a model that the package saved, with its weights in the package's
    default format, a torch checkpoint.
    """
    own = writer.repository(model)
    shutil.copytree(made.directory, own, dirs_exist_ok=True)
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    return own


def _glirel(writer: _Writer) -> None:
    """Write pytorch_model.bin and glirel_config.json as the package does."""
    base = writer.root / "bases" / "microsoft" / "deberta-v3-large"
    made = glirel_models.make_reference(writer.root / "made" / "glirel", {}, base=base)
    own = writer.repository("jackboyla/glirel-large-v0")
    for name in ("pytorch_model.bin", "glirel_config.json"):
        shutil.copyfile(made.directory.parent / "published" / name, own / name)
    settings = json.loads((own / "glirel_config.json").read_text())
    _write(own / "glirel_config.json", {**settings, "model_name": "microsoft/deberta-v3-large"})
    writer.twins["jackboyla/glirel-large-v0"] = made.directory


def _trocr(writer: _Writer) -> None:
    """Write pytorch_model.bin, vocab.json and merges.txt, and the settings of the processor and of
    generation.
    """
    twin = _folder(writer.root / "twins" / "trocr")
    write_trocr(twin)
    own = writer.repository("microsoft/trocr-base-printed")
    shutil.copytree(twin, own, dirs_exist_ok=True)
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    Tokenizer.from_file(str(own / "tokenizer.json")).model.save(str(own))
    for name in ("model.safetensors", "tokenizer.json"):
        (own / name).unlink()
    _write(
        own / "tokenizer_config.json",
        {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False},
    )
    _write(
        own / "special_tokens_map.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "mask_token": {"content": "<mask>", "lstrip": True},
        },
    )
    writer.twins["microsoft/trocr-base-printed"] = twin


_REPOSITORIES: Final[tuple[Callable[[_Writer], None], ...]] = (
    _bge_m3, _urchade, _urchade_multilingual, _nuner, _community, _knowledgator_pii,
    _knowledgator_bi, _knowledgator_relex, _glirel, _trocr,
)  # fmt: skip


def _deberta_tokenizer(pieces: Path, markers: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Make the fast tokenizer of a SentencePiece model with transformers' converter."""
    converters: Any = importlib.import_module("transformers.convert_slow_tokenizer")
    slow = SimpleNamespace(
        vocab_file=str(pieces),
        split_by_punct=False,
        do_lower_case=False,
        convert_tokens_to_ids={"[CLS]": 1, "[SEP]": 2}.get,
    )
    made = converters.DebertaV2Converter(slow).converted()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("[MASK]", *markers)]
    )
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "cls", "sep", "unk", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def _resize(base: Path, rows: int) -> None:
    """Cut a base model's embedding to the rows of its tokenizer."""
    tensors = load_file(base / "model.safetensors")
    cut = {
        name: tensor[:rows].clone() if tensor.shape[0] == _DEBERTA_ROWS else tensor
        for name, tensor in tensors.items()
    }
    _save(cut, base / "model.safetensors")
    _write(
        base / "config.json", json.loads((base / "config.json").read_text()) | {"vocab_size": rows}
    )


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
