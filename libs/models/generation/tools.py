"""Calls of functions: the form in which a model's chat template has them, their grammar, and what
an answer calls.

Served are the forms of Hermes and Qwen, a JSON object between `<tool_call>` and `</tool_call>`, any
number of times after a text, and of Llama 3, where the whole answer is a JSON object. A template
with another form is one without tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from libs.models.work import TextWork, ToolCall

FIELD: Final = "text.tools"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OTHER_FORMS: Final = ("<function=", "<arg_key>", "[TOOL_CALLS]")
_MAX_CALLS: Final = 64


@dataclass(frozen=True, slots=True)
class ToolForm:
    """`opens`, `closes`: around a call; empty: the whole answer is one. `arguments`: the name of
    the arguments in it.
    """

    opens: str
    closes: str
    arguments: str

    def settled(self, text: str) -> str:
        """What of an unfinished text is not, and does not become, a call."""
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
        """The text before the first call, and the calls; the whole text where it has none, or one
        that is not whole.
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
        """Objects one after the other. Empty: there is something else."""
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
    """The form of a chat template; None: it has no tools, or another form."""
    if "tools" not in template or any(other in template for other in _OTHER_FORMS):
        return None
    if _OPEN in template and _CLOSE in template:
        return HERMES
    return LLAMA if '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class Marks:
    """How a tokenizer has what stands around calls. `opens`, `closes`: their tokens; None: they
    have none of their own. `others`: added tokens that stand in texts, such as `<think>`."""

    opens: int | None
    closes: int | None
    others: Sequence[int]


def schemas_of(work: TextWork) -> list[tuple[str, str, dict[str, Any]]]:
    """The path, the name and the parameters' schema of each function that may be called. A schema
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


def grammar_source(
    work: TextWork, form: ToolForm, marks: Marks, options: Mapping[str, object]
) -> str | None:
    """A grammar in llguidance's Lark. None: the answer is free text, of which `ToolForm.read` makes
    calls. `options`: of JSON.
    """
    has_tokens = marks.opens is not None and marks.closes is not None
    if not work.calls_tool and not has_tokens:
        return None
    opens, closes = (
        (f"<[{marks.opens}]>", f"<[{marks.closes}]>")
        if has_tokens
        else (json.dumps(_OPEN), json.dumps(_CLOSE))
    )
    schemas = schemas_of(work)
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
