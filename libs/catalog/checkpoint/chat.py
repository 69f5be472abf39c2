"""Chat templates of a checkpoint: where they lie, which one counts, and what it is given besides messages.

Files are transformers' (chat_template.jinja, additional_chat_templates, `chat_template` of tokenizer_config.json); which inputs go
through a template is said by sentence-transformers 5.4 and later (`modality_config` and `processing_kwargs` of
sentence_bert_config.json). Templates are only read here; the worker renders them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libs.catalog.card import Card
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import Config, read_config, read_file
from libs.errors import ModelBroken

_DEFAULT = "default"
MAX_TEMPLATE_BYTES = 1 << 20
# Of `processing_kwargs.chat_template`: what sentence-transformers and transformers take for themselves.
_NOT_VALUES = (
    "chat_template", "restore_suffix", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
)  # fmt: skip
# By these sentence-transformers tells that a template takes a message's content as a list of parts.
_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")


def takes_messages(files: Checkpoint) -> bool:
    """Whether texts go through the chat template: as saved; without a modules.json, where there is a template."""
    if not files.modules.listed:
        return bool(_templates(files))
    return "message" in files.sentence.part("modality_config").values


def refuse_messages(files: Checkpoint) -> None:
    """Raises ModelBroken for texts alone that are to go through the chat template, as only pairs do here."""
    if files.modules.listed and takes_messages(files):
        raise files.sentence.broken(
            "modality_config", "has `message`: texts go through a chat template, which only rerankers do here"
        )


def with_template(files: Checkpoint, card: Card) -> Card:
    """The card with the checkpoint's chat template, if it has one. Raises ModelBroken for one that is named and not there."""
    given = files.sentence.part("processing_kwargs").part("chat_template")
    templates = _templates(files)
    wanted = given.text("chat_template") or _DEFAULT
    source = templates.get(wanted, "")
    if not source and wanted != _DEFAULT:
        if "{" not in wanted:
            raise given.broken("chat_template", f"is {wanted!r}; the checkpoint has {', '.join(templates) or 'no templates'}")
        source = wanted
    values = {name: value for name, value in given.values.items() if name not in _NOT_VALUES}
    for name, value in values.items():
        if value is not None and not isinstance(value, str | int | float):
            raise given.broken(name, f"is {value!r}; only texts, numbers, true and false are served")
    told = files.sentence.part("modality_config").part("message").text("format")
    parts = told == "structured" or (told != "flat" and any(sign in source for sign in _PARTS))
    return replace(card, template=source, template_values=values, message_parts=parts)


def template_files(files: Checkpoint) -> list[str]:
    """Paths from the checkpoint's root."""
    folder = Path(files.modules.encoder_folder)
    root = files.directory / folder
    found = [root / "chat_template.jinja", *sorted((root / "additional_chat_templates").glob("*.jinja"))]
    return [str(path.relative_to(files.directory)) for path in found if path.is_file()]


def _templates(files: Checkpoint) -> dict[str, str]:
    """By name; files before tokenizer_config.json, as in transformers."""
    name = str(Path(files.modules.encoder_folder) / "tokenizer_config.json")
    found = _configured(read_config(files.directory, name) or Config(name, {}))
    for file in template_files(files):
        path = files.directory / file
        try:
            text = (read_file(files.directory, file, MAX_TEMPLATE_BYTES) or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelBroken(f"{file}: cannot be read: {error}") from error
        found[_DEFAULT if path.name == "chat_template.jinja" else path.stem] = text
    return found


def _configured(config: Config) -> dict[str, str]:
    """One template, or a list of them with names."""
    value = config.values.get("chat_template")
    if not isinstance(value, list):
        text = config.text("chat_template")
        return {_DEFAULT: text} if text else {}
    entries = [Config(f"{config.file} (chat_template)", entry) for entry in value if isinstance(entry, dict)]
    return {entry.text("name"): entry.text("template") for entry in entries}
