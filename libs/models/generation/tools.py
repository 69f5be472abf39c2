"""Function calls: their format in a chat template, their grammar, and the calls in an answer.

Two formats are served. Hermes and Qwen write a JSON object between `<tool_call>` and
`</tool_call>`, any number of times after a text. Llama 3 writes one JSON object as the whole
answer. A template with another format counts as one without tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal.extractions import ToolCall

from libs.models.interface.work import TextWork

FIELD: Final = "text.tools"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OTHER_FORMS: Final = ("<function=", "<arg_key>", "[TOOL_CALLS]")
_MAX_CALLS: Final = 64


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The form of calls in an answer."""

    opens: str
    """The text before a call; empty: the whole answer is one call."""
    closes: str
    """The text after a call."""
    arguments: str
    """The name of the arguments in a call."""

    def stable_text(self, text: str) -> str:
        """Return the part of an unfinished text that neither is nor can become a call."""
        if not self.opens:
            return "" if text.lstrip()[:1] in ("{", "") else text
        found = text.partition(self.opens)[0]
        if len(found) < len(text):
            return found
        begun = next(
            (
                size
                for size in range(len(self.opens) - 1, 0, -1)
                if text.endswith(self.opens[:size])
            ),
            0,
        )
        return text[: len(text) - begun]

    def read(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text before the first call, and the calls; the whole text if a call is missing
        or incomplete.
        """
        before, calls = self._found(text)
        return (before, calls) if calls else (text, ())

    def _found(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        if not self.opens:
            return "", self._calls(text.strip(), ";")
        before, *parts = text.split(self.opens)
        if len(parts) > _MAX_CALLS:
            return text, ()
        calls = [self._calls(part.partition(self.closes)[0].strip(), "") for part in parts]
        return before, tuple(call for each in calls for call in each) if all(calls) else ()

    def _calls(self, text: str, separator: str) -> tuple[ToolCall, ...]:
        """Parse consecutive objects. Empty if the text has anything else."""
        found: list[ToolCall] = []
        decoder = json.JSONDecoder()
        while text and len(found) < _MAX_CALLS:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return ()
            call = self._call(value)
            if call is None:
                return ()
            found.append(call)
            text = text[end:].strip()
            text = text.removeprefix(separator).strip() if separator else text
        return () if text else tuple(found)

    def _call(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return None
        arguments = value.get(self.arguments, value.get("arguments"))
        if not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


HERMES: Final = ToolForm(_OPEN, _CLOSE, "arguments")
LLAMA: Final = ToolForm("", "", "parameters")


def tool_form(template: str) -> ToolForm | None:
    """Return the format of a chat template; None if it has no tools or an unsupported format."""
    if "tools" not in template or any(other in template for other in _OTHER_FORMS):
        return None
    if _OPEN in template and _CLOSE in template:
        return HERMES
    return LLAMA if '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Token ids of the marks around calls.

    Attributes:
        opens: Token before a call; None if the mark is not one token.
        closes: Token after a call; None if the mark is not one token.
        others: Added tokens that may occur in texts, such as `<think>`.
    """

    opens: int | None
    closes: int | None
    others: Sequence[int]


def parameter_schemas(work: TextWork) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the path, the name and the parameters' schema of each callable function. A schema
    without a type is an object's.
    """
    found = []
    for index, tool in enumerate(json.loads(work.tools)):
        function: Mapping[str, Any] = tool["function"]
        if work.tool in ("", function["name"]):
            parameters = {"type": "object", **(function.get("parameters") or {})}
            found.append(
                (f"{FIELD}[{index}].function.parameters", str(function["name"]), parameters)
            )
    return found


def has_strict_function(work: TextWork) -> bool:
    """Return whether a function's arguments must follow its schema, as OpenAI's `strict` says."""
    return any(tool["function"].get("strict") is True for tool in json.loads(work.tools))


def grammar_source(
    work: TextWork, form: ToolForm, marks: CallMarks, options: Mapping[str, object]
) -> str | None:
    """Return a grammar in llguidance's Lark format; None for free text that `ToolForm.read` parses.

    `options`: JSON options.
    """
    has_tokens = marks.opens is not None and marks.closes is not None
    if not work.calls_tool and not has_tokens:
        return None
    opens, closes = (
        (f"<[{marks.opens}]>", f"<[{marks.closes}]>")
        if has_tokens
        else (json.dumps(_OPEN), json.dumps(_CLOSE))
    )
    schemas = parameter_schemas(work)
    is_single = work.single_tool_call or bool(work.tool) or not form.opens
    calls = "call" if is_single else f'call ("\\n" call){{0,{_MAX_CALLS - 1}}}'
    lines = [f"start: {calls}" if work.calls_tool else f"start: said* ({calls})?"]
    if not work.calls_tool:
        others = f" | <[{','.join(map(str, marks.others))}]>" if marks.others else ""
        lines += [f"said: TEXT{others}", "TEXT: /(?s:.+)/"]
    lines.append(f'call: {opens} "\\n" body "\\n" {closes}' if form.opens else "call: body")
    lines.append("body: " + " | ".join(f"body{number}" for number in range(len(schemas))))
    for number, (_, name, schema) in enumerate(schemas):
        begin = json.dumps(f'{{"name": "{name}", "{form.arguments}": ')
        lines += [
            f'body{number}: {begin} args{number} "}}"',
            f"args{number}: %json {json.dumps({**schema, 'x-guidance': options})}",
        ]
    return "\n".join(lines)
