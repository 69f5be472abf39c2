"""Finds a checkpoint's chat template, its variables, and whether texts are rendered with it.

The files are transformers' (chat_template.jinja, additional_chat_templates, `chat_template` of
tokenizer_config.json); which inputs are rendered is in `modality_config` and `processing_kwargs` of
sentence_bert_config.json (sentence-transformers 5.4 and later). Templates are only read here;
`libs/models/text/tokenising/chat.py` renders them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libs.catalog.card import Card
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import CheckpointConfig, read_config, read_file
from libs.errors import ModelBroken

PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Files of image processors that have their template under the key `chat_template`."""
_DEFAULT = "default"
MAX_TEMPLATE_BYTES = 1 << 20
# Keys of `processing_kwargs.chat_template` that are options of sentence-transformers and
# transformers, not template variables.
_NOT_VALUES = (
    "chat_template", "restore_suffix", "tokenize", "return_dict", "return_tensors", "padding",
    "truncation", "max_length",
)  # fmt: skip
# Substrings by which sentence-transformers recognises templates that take a message's content as a
# list of typed parts.
_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")


def takes_messages(files: Checkpoint) -> bool:
    """Return True if inputs are rendered with the chat template: as configured; without
    modules.json, if a template exists.
    """
    if not files.modules.listed:
        return bool(_templates(files))
    return "message" in files.sentence.part("modality_config").values


def refuse_messages(files: Checkpoint) -> None:
    """Raise ModelBroken if inputs are rendered with a chat template, for kinds that read single
    texts: only pairs can be rendered.
    """
    if files.modules.listed and takes_messages(files):
        raise files.sentence.broken(
            "modality_config",
            "has `message`: texts go through a chat template, which is only served for rerankers",
        )


def with_template(files: Checkpoint, card: Card) -> Card:
    """Return the card with the checkpoint's chat template, if it has one. Raises ModelBroken if a
    template is named that it lacks.
    """
    given = files.sentence.part("processing_kwargs").part("chat_template")
    templates = _templates(files)
    wanted = given.text("chat_template") or _DEFAULT
    source = templates.get(wanted, "")
    if not source and wanted != _DEFAULT:
        if "{" not in wanted:
            raise given.broken(
                "chat_template",
                (
                    f"is {wanted!r}, which is not a template of the checkpoint; its templates are: "
                    f"{', '.join(templates) or 'none'}"
                ),
            )
        source = wanted
    values = {name: value for name, value in given.values.items() if name not in _NOT_VALUES}
    for name, value in values.items():
        if value is not None and not isinstance(value, str | int | float):
            raise given.broken(
                name, f"is {value!r}; only texts, numbers, true and false are served"
            )
    form = files.sentence.part("modality_config").part("message").text("format")
    parts = form == "structured" or (form != "flat" and any(sign in source for sign in _PARTS))
    return replace(card, template=source, template_values=values, message_parts=parts)


def read_template(directory: Path) -> str:
    """Return the default template in a directory, that of a processor of images among them; empty:
    there is none.
    """
    own = [
        (read_config(directory, name) or CheckpointConfig(name, {})).text("chat_template")
        for name in PROCESSOR_FILES
    ]
    return _in_folder(directory, "").get(_DEFAULT, "") or next(filter(None, own), "")


def template_files(files: Checkpoint) -> list[str]:
    """Return the checkpoint's files of chat templates, as paths from its root."""
    return _files(files.directory, files.modules.encoder_folder)


def _files(directory: Path, folder: str) -> list[str]:
    root = directory / folder
    found = [
        root / "chat_template.jinja",
        *sorted((root / "additional_chat_templates").glob("*.jinja")),
    ]
    return [str(path.relative_to(directory)) for path in found if path.is_file()]


def _templates(files: Checkpoint) -> dict[str, str]:
    return _in_folder(files.directory, files.modules.encoder_folder)


def _in_folder(directory: Path, folder: str) -> dict[str, str]:
    """Return the templates by name; files override tokenizer_config.json, as in transformers."""
    name = str(Path(folder) / "tokenizer_config.json")
    found = _configured(read_config(directory, name) or CheckpointConfig(name, {}))
    for file in _files(directory, folder):
        path = directory / file
        try:
            text = (read_file(directory, file, MAX_TEMPLATE_BYTES) or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelBroken(f"{file}: cannot be read: {error}") from error
        found[_DEFAULT if path.name == "chat_template.jinja" else path.stem] = text
    return found


def _configured(config: CheckpointConfig) -> dict[str, str]:
    """Return the templates of tokenizer_config.json, which holds one, or a list of them
    with names.
    """
    value = config.values.get("chat_template")
    if not isinstance(value, list):
        text = config.text("chat_template")
        return {_DEFAULT: text} if text else {}
    entries = [
        CheckpointConfig(f"{config.file} (chat_template)", entry)
        for entry in value
        if isinstance(entry, dict)
    ]
    return {entry.text("name"): entry.text("template") for entry in entries}
