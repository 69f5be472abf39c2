"""The page of the gRPC API: services, messages and enumerations with the comments of
protos/shoal/v1.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tools.docs.markdown import code, escape, table

ROOT: Final = Path(__file__).parents[2]
PREFIX: Final = "shoal/v1/"
HEAD: Final = """# gRPC API

Generated from the comments of `protos/shoal/v1` by `python -m tools.docs`.
[The API](../api.md) explains the calls with examples.
"""
# Field numbers of descriptor.proto, of which the paths of comments consist.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED_MESSAGES, NESTED_ENUMS, ONEOFS = 2, 3, 4, 8
VALUES, METHODS = 2, 2

Path_ = tuple[int, ...]


def page() -> str:
    parts = [HEAD]
    for file in _files():
        parts += [f"\n## {file.name.removeprefix(PREFIX)}\n\n", *_file(file)]
    return "".join(parts)


def _files() -> Iterator[FileDescriptorProto]:
    buf = Path(sys.executable).with_name("buf")
    made = subprocess.run(
        [buf, "build", "--as-file-descriptor-set", "-o", "-"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    files = FileDescriptorSet.FromString(made.stdout).file
    return (file for file in files if file.name.startswith(PREFIX))


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(place.path): _comment(place.leading_comments)
        for place in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        path = (SERVICES, index)
        yield f"### {service.name}\n\n{comments.get(path, '')}\n\n"
        for number, method in enumerate(service.method):
            answer = ("stream " if method.server_streaming else "") + _short(method.output_type)
            request = ("stream " if method.client_streaming else "") + _short(method.input_type)
            yield (
                f"**`{method.name}({request}) returns "
                f"({answer})`**\n\n{comments.get((*path, METHODS, number), '')}\n\n"
            )
    for index, message in enumerate(file.message_type):
        yield from _message(message, (MESSAGES, index), comments, "")
    for index, enum in enumerate(file.enum_type):
        yield _enum(enum, (ENUMS, index), comments, "")


def _message(
    message: DescriptorProto, path: Path_, comments: dict[Path_, str], outer: str
) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = f"{outer}{message.name}"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (
            code(field.name),
            _type(field, maps),
            _oneof(field, message),
            comments.get((*path, FIELDS, index), ""),
        )
        for index, field in enumerate(message.field)
    ]
    yield f"### {name}\n\n{comments.get(path, '')}\n\n"
    if rows:
        yield table(("field", "type", "one of", "description"), rows) + "\n"
    for index, nested in enumerate(message.nested_type):
        yield from _message(nested, (*path, NESTED_MESSAGES, index), comments, f"{name}.")
    for index, enum in enumerate(message.enum_type):
        yield _enum(enum, (*path, NESTED_ENUMS, index), comments, f"{name}.")


def _enum(enum: EnumDescriptorProto, path: Path_, comments: dict[Path_, str], outer: str) -> str:
    rows = [
        (code(value.name), comments.get((*path, VALUES, index), ""))
        for index, value in enumerate(enum.value)
    ]
    return (
        "### "
        f"{outer}{enum.name}\n\n{comments.get(path, '')}\n\n"
        f"{table(('value', 'description'), rows)}\n"
    )


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return f"map of {_single(entry.field[0])} to {_single(entry.field[1])}"
    return (
        f"list of {_single(field)}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED
        else _single(field)
    )


def _single(field: FieldDescriptorProto) -> str:
    if not field.type_name:
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if not field.type_name.startswith(".shoal.v1."):
        return code(field.type_name.lstrip("."))
    name = _short(field.type_name)
    return f"[{name}](#{name.lower().replace('.', '')})"


def _oneof(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return code(message.oneof_decl[field.oneof_index].name)


def _short(name: str) -> str:
    return name.removeprefix(".shoal.v1.").lstrip(".")


def _comment(text: str) -> str:
    """Return a comment without directives of buf, with its paragraphs."""
    lines: Sequence[str] = [
        line.strip() for line in text.splitlines() if not line.strip().startswith("buf:lint")
    ]
    return escape("\n".join(lines).strip())
