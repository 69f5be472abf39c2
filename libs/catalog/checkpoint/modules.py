"""Parses modules.json of sentence-transformers and PyLate: the layers that follow the encoder, in
order.

Keys are those of sentence-transformers 2 to 6: Pooling has `pooling_mode_*` flags up to version 5
and one `pooling_mode` since.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from libs.catalog.card import Activation, DenseModule, PoolingMode, StaticQueries, kept_prompts
from libs.catalog.checkpoint.files import CheckpointConfig, need_config, read_config, read_json
from libs.catalog.checkpoint.routes import read_routes
from libs.catalog.checkpoint.tasks import CUSTOM_TRANSFORMER, has_tasks
from libs.errors import ModelBroken

# In the order in which sentence-transformers concatenates them.
_POOLING_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES: dict[str, PoolingMode] = {mode: mode for mode in get_args(PoolingMode)}
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
# Packages with modules that are recognised by class name; none of them is imported.
_PACKAGES = ("sentence_transformers", "pylate")
_SERVED = (
    "Transformer",
    "StaticEmbedding",
    "Pooling",
    "Dense",
    "Normalize",
    "MultiVectorMask",
    "SpladePooling",
    "Router",
    "LogitScore",
)
_SENTENCE, _TOKEN = "sentence_embedding", "token_embeddings"


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of a checkpoint. The defaults, without modules.json, mean the encoder alone;
    the kind chooses what follows it.
    """

    listed: bool = False  # whether there is a modules.json
    static_embedding: bool = False  # a table of token vectors stands in the encoder's place
    encoder_folder: str = ""
    pooling: tuple[PoolingMode, ...] = ()
    pool_prompt: bool = True
    dense: tuple[DenseModule, ...] = ()
    token_level: bool = (
        False  # the dense layers apply to token states, not to a pooled vector: late interaction
    )
    normalize: bool = False
    mask: CheckpointConfig | None = None  # MultiVectorMask's settings
    splade: CheckpointConfig | None = None  # SpladePooling's settings
    static: StaticQueries | None = None  # of a Router, for queries
    queries: Modules | None = None  # of a Router with separate modules for queries
    query_default: bool = (
        False  # Texts without a role are queries, where queries have separate modules.
    )
    answers: CheckpointConfig | None = None  # LogitScore's settings: a yes/no reranker


def read_modules(directory: Path) -> Modules:
    """Return the modules of a checkpoint. Raises ModelBroken for a module that is not served."""
    listed = read_json(directory, "modules.json")
    if listed is None:
        return Modules()
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ModelBroken("modules.json: must hold a list of objects")
    found = _Builder()
    for entry in listed:
        found.add(directory, CheckpointConfig("modules.json", entry))
    if not found.encoder:
        raise ModelBroken("modules.json: names no Transformer")
    return found.modules()


def read_prompts(top: CheckpointConfig) -> tuple[dict[str, str], str]:
    """Return the prompts of config_sentence_transformers.json, and the name of the default one;
    empty: none.

    Raises ModelBroken if the default is not one of them.
    """
    named = top.part("prompts").values
    prompts = kept_prompts({name: text for name, text in named.items() if isinstance(text, str)})
    default = top.text("default_prompt_name")
    if default and default not in named:
        raise top.broken("default_prompt_name", f"is {default!r}, which is not one of `prompts`")
    return prompts, default if default in prompts else ""


def activation(config: CheckpointConfig, key: str, default: Activation) -> Activation:
    """Return the activation that the key's dotted class path names: a known one of torch, as the
    path is never imported.
    """
    path = config.text(key)
    if not path:
        return default
    name = path.rpartition(".")[2]
    if not path.startswith("torch.") or name not in _ACTIVATIONS:
        raise config.broken(
            key, f"is {path!r}, which is not one of torch's {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


class _Builder:
    """Collects modules in the order of modules.json. Raises ModelBroken for those, and for orders,
    that are not served.
    """

    def __init__(self) -> None:
        self.encoder: list[str] = []
        self.pooling: tuple[PoolingMode, ...] = ()
        self.pool_prompt = True
        self.dense: list[DenseModule] = []
        self.token_level = False
        self.normalize = False
        self.settings: dict[str, CheckpointConfig] = {}  # by class, of modules without weights
        self.static: StaticQueries | None = None
        self.static_embedding = False
        self.queries: _Builder | None = None
        self.query_default = False

    def add(self, directory: Path, entry: CheckpointConfig) -> None:
        kind, folder = _module_class(directory, entry), entry.text("path")
        if self.queries is not None:
            self.queries.add(directory, entry)
        if kind in ("Transformer", "MLMTransformer"):
            self.encoder.append(folder)
        elif kind == "StaticEmbedding":
            self.encoder.append("" if folder == "." else folder)
            self.static_embedding = True
        elif kind == "Pooling":
            self.pooling, self.pool_prompt = _pooling(
                need_config(directory, f"{folder}/config.json")
            )
        elif kind == "Dense":
            self._add_dense(directory, entry, folder)
        elif kind == "Normalize":
            self.normalize = True
        elif kind in ("MultiVectorMask", "SpladePooling", "LogitScore"):
            self.settings[kind] = need_config(directory, f"{folder}/config.json")
        elif kind in ("Router", "Asym"):
            self._add_routes(directory, entry, folder)
        elif kind != "Dropout":
            raise entry.broken(
                "type", f"is {entry.text('type')!r}, which is not served: {', '.join(_SERVED)} are"
            )

    def _add_routes(self, directory: Path, entry: CheckpointConfig, folder: str) -> None:
        if self.queries is not None:
            raise entry.broken("type", "puts a Router after another one, which is not served")
        routes = read_routes(directory, folder)
        self.static = routes.static
        for module in routes.modules:
            self.add(directory, module)
        if routes.queries:
            self.queries, self.query_default = _Builder(), routes.query_default
            for module in routes.queries:
                self.queries.add(directory, module)

    def _add_dense(self, directory: Path, entry: CheckpointConfig, folder: str) -> None:
        if self.normalize:
            raise entry.broken("type", "puts a Dense after a Normalize, which is not served")
        config = need_config(directory, f"{folder}/config.json")
        token_level = config.text("module_input_name", _SENTENCE) == _TOKEN or entry.text(
            "type"
        ).startswith("pylate.")
        self.token_level = self.token_level or token_level
        self.dense.append(_dense(config, folder))

    def modules(self) -> Modules:
        if len(self.encoder) != 1:
            raise ModelBroken("modules.json: names more than one Transformer")
        return Modules(
            listed=True,
            static_embedding=self.static_embedding,
            encoder_folder=self.encoder[0],
            pooling=self.pooling,
            pool_prompt=self.pool_prompt,
            dense=tuple(self.dense),
            token_level=self.token_level,
            normalize=self.normalize,
            mask=self.settings.get("MultiVectorMask"),
            splade=self.settings.get("SpladePooling"),
            static=self.static,
            answers=self.settings.get("LogitScore"),
            queries=None if self.queries is None else self.queries.modules(),
            query_default=self.query_default,
        )


def _module_class(directory: Path, entry: CheckpointConfig) -> str:
    """Return the class name of a module. Raises ModelBroken for classes of other packages, and for
    folders outside the checkpoint.
    """
    package, _, kind = entry.text("type").rpartition(".")
    is_known = entry.text("type") == CUSTOM_TRANSFORMER and has_tasks(directory)
    if package.partition(".")[0] not in _PACKAGES and not is_known:
        raise entry.broken(
            "type",
            f"is {entry.text('type')!r}: a class of the checkpoint's own code, which is never run",
        )
    path = Path(entry.text("path"))
    if path.is_absolute() or ".." in path.parts:
        raise entry.broken("path", f"is {entry.text('path')!r}, which leads out of the checkpoint")
    return kind


def _pooling(config: CheckpointConfig) -> tuple[tuple[PoolingMode, ...], bool]:
    names = config.texts("pooling_mode")
    unknown = [name for name in names if name not in _MODES]
    if unknown:
        raise config.broken(
            "pooling_mode", f"is {unknown[0]!r}, which is not one of {', '.join(_MODES)}"
        )
    for key in config.values:
        if key.startswith("pooling_mode_") and key not in _POOLING_FLAGS:
            raise config.broken(key, "is not a pooling mode that is served")
    modes = tuple(_MODES[name] for name in names) or tuple(
        mode for key, mode in _POOLING_FLAGS.items() if config.flag(key)
    )
    pool_prompt = config.flag("include_prompt", True)
    if not pool_prompt and "weightedmean" in modes:
        raise config.broken(
            "include_prompt", "is false, which is not served together with weightedmean"
        )
    return modes or ("mean",), pool_prompt


def _dense(config: CheckpointConfig, folder: str) -> DenseModule:
    sizes = {key: config.number(key) for key in ("in_features", "out_features")}
    for key, size in sizes.items():
        if size < 1:
            raise config.broken(key, "must be at least 1")
    return DenseModule(
        folder=folder,
        in_features=sizes["in_features"],
        out_features=sizes["out_features"],
        bias=config.flag("bias", True),
        activation=activation(config, "activation_function", "tanh"),
        residual=config.flag("use_residual"),
    )


def sentence_settings(directory: Path, encoder_folder: str) -> CheckpointConfig:
    """Return sentence_bert_config.json in the encoder's folder; empty without the file."""
    name = str(Path(encoder_folder) / "sentence_bert_config.json")
    return read_config(directory, name) or CheckpointConfig(name, {})
