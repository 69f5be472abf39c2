"""Validate the prompt, the sampling, the stop strings and the tools of a text task (generation).
Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.router.admission.validation import limits

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 10.0),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
_TOOL_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
LOGPROB_BYTES: Final = 32
"""Approximate serialised bytes of one token with its text and log probability."""
_MAX_ANSWER_TOKENS: Final = 4096


def check(task: pb.TextTask, items: int) -> None:
    """Validate a text task for a request of `items` items. Raises InvalidInput."""
    message = f"text.max_tokens is {task.max_tokens}; at most {_MAX_ANSWER_TOKENS} are allowed"
    _refuse(task.max_tokens > _MAX_ANSWER_TOKENS, message, "text.max_tokens")
    limits.INSTRUCTION.check(len(task.instruction), "text.instruction")
    limits.JSON_SCHEMA.check(_utf8(task.json_schema), "text.json_schema")
    _check_turns(task)
    _check_template_values(task.template_values)
    _check_sampling(task.sampling)
    limits.STOPS.check(len(task.stop), "text.stop")
    for index, stop in enumerate(task.stop):
        _refuse(not stop, f"text.stop[{index}] is empty", f"text.stop[{index}]")
        limits.STOP.check(len(stop), f"text.stop[{index}]")
    _check_logprobs(task, items)
    for name in ("instruction", "turns", "template_values", "tools"):
        problem = f"text.{name} is for a prompt in the chat template: omit it, or text.raw_prompt"
        _refuse(task.raw_prompt and bool(getattr(task, name)), problem, f"text.{name}")
    _check_tools(task)


def asks_model(task: pb.TextTask) -> bool:
    """Return whether the task needs a model, because the text layer of a page cannot answer it."""
    return bool(task.json_schema or task.turns or task.tools or task.raw_prompt) or task.HasField(
        "top_logprobs"
    )


def _check_sampling(sampling: pb.Sampling) -> None:
    for field, value in sampling.ListFields():
        path, (least, most) = f"text.sampling.{field.name}", _RANGES[field.name]
        is_within = math.isfinite(value) and least <= value <= most
        _refuse(
            not is_within, f"{path} is {value:g}; it must be within {least:g} and {most:g}", path
        )


def _check_logprobs(task: pb.TextTask, items: int) -> None:
    if not task.HasField("top_logprobs"):
        return
    field = "text.top_logprobs"
    message = f"{field} is {task.top_logprobs}; at most {limits.TOP_LOGPROBS.most} are allowed"
    _refuse(task.top_logprobs > limits.TOP_LOGPROBS.most, message, field)
    each = (task.max_tokens or _MAX_ANSWER_TOKENS) * (1 + task.top_logprobs) * LOGPROB_BYTES
    if items * each > limits.LOGPROBS.most:
        message = (
            f"an answer may have {each:,} bytes of log probabilities, and there are {items:,} items"
        )
        cure = f"send at most {limits.LOGPROBS.most // each:,} at a time, or request fewer tokens"
        raise InvalidInput(f"{message}: {cure}", field=field)


def _check_turns(task: pb.TextTask) -> None:
    limits.TURNS.check(len(task.turns), "text.turns")
    characters = 0
    for index, turn in enumerate(task.turns):
        path = f"text.turns[{index}]"
        if turn.role not in pb.Turn.Role.values():
            raise InvalidInput(
                f"{path}.role is {turn.role}, which is none of {', '.join(pb.Turn.Role.keys())}",
                field=f"{path}.role",
            )
        unset = f"{path}.role must be ROLE_USER, ROLE_ASSISTANT, ROLE_SYSTEM or ROLE_TOOL"
        _refuse(turn.role == pb.Turn.ROLE_UNSPECIFIED, unset, f"{path}.role")
        # A function may return nothing.
        is_needed = turn.role != pb.Turn.ROLE_TOOL and not turn.tool_calls
        _refuse(is_needed and not turn.text.strip(), f"{path}.text is empty", f"{path}.text")
        characters += len(turn.text) + _check_calls(turn, path)
    limits.TURNS_TEXT.check(characters, "text.turns")
    is_said = task.item_role in (pb.Turn.ROLE_UNSPECIFIED, pb.Turn.ROLE_USER, pb.Turn.ROLE_TOOL)
    _refuse(
        not is_said,
        "text.item_role must be ROLE_USER or ROLE_TOOL: the model answers one of them",
        "text.item_role",
    )
    calls = any(turn.tool_calls for turn in task.turns)
    unasked = (
        "text.item_role is ROLE_TOOL, but no function was called in text.turns: name the call of"
        " the assistant there"
    )
    _refuse(task.item_role == pb.Turn.ROLE_TOOL and not calls, unasked, "text.item_role")


def _check_calls(turn: pb.Turn, path: str) -> int:
    """Check the function calls of a turn, and return their characters. Raises InvalidInput."""
    if not turn.tool_calls:
        return 0
    field = f"{path}.tool_calls"
    _refuse(
        turn.role != pb.Turn.ROLE_ASSISTANT,
        f"{field} are only for the assistant: the model makes them",
        field,
    )
    limits.TOOL_CALLS.check(len(turn.tool_calls), field)
    for index, call in enumerate(turn.tool_calls):
        _check_name(call.name, f"{field}[{index}].name")
        limits.TURNS_TEXT.check(len(call.arguments), f"{field}[{index}].arguments")
        is_object = isinstance(_parsed(call.arguments), dict)
        _refuse(
            not is_object,
            f"{field}[{index}].arguments must be a JSON object",
            f"{field}[{index}].arguments",
        )
    return sum(len(call.name) + len(call.arguments) for call in turn.tool_calls)


def _check_tools(task: pb.TextTask) -> None:
    field = "text.tools"
    limits.TOOLS.check(_utf8(task.tools), field)
    if task.tool_choice not in pb.TextTask.ToolChoice.values():
        raise InvalidInput(
            f"text.tool_choice has no value {task.tool_choice}", field="text.tool_choice"
        )
    is_chosen = task.tool_choice == pb.TextTask.TOOL_CHOICE_REQUIRED or bool(task.tool)
    unnamed = "no function to call is named: name some in text.tools"
    _refuse(is_chosen and not task.tools, unnamed, "text.tool" if task.tool else "text.tool_choice")
    if not task.tools:
        return
    message = "text.json_schema is for answers without tools: omit one of the two"
    _refuse(bool(task.json_schema), message, "text.json_schema")
    names = _tool_names(_parsed(task.tools), field)
    limits.TOOL_NAME.check(len(task.tool), "text.tool")
    known = ", ".join(names)
    _refuse(
        bool(task.tool) and task.tool not in names,
        f"text.tool is not one of the functions {known}",
        "text.tool",
    )


def _tool_names(tools: object, field: str) -> list[str]:
    if not isinstance(tools, list) or not tools or len(tools) > limits.TOOL_CALLS.most:
        raise InvalidInput(
            f"{field} must be a JSON list of 1..{limits.TOOL_CALLS.most} functions", field=field
        )
    names: list[str] = []
    for index, tool in enumerate(tools):
        path = f"{field}[{index}]"
        function = (
            tool.get("function")
            if isinstance(tool, dict) and tool.get("type") == "function"
            else None
        )
        if not isinstance(function, dict):
            raise InvalidInput(
                f'{path} must be {{"type": "function", "function": {{…}}}}: other tools are not'
                " served",
                field=path,
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str):
            raise InvalidInput(f"{path}.function.name is required", field=f"{path}.function.name")
        _check_name(name, f"{path}.function.name")
        _refuse(
            name in names,
            f"{path}.function.name repeats the name of another function",
            f"{path}.function.name",
        )
        message = f"{path}.function.parameters must be a JSON Schema of an object"
        _refuse(
            parameters is not None and not isinstance(parameters, dict),
            message,
            f"{path}.function.parameters",
        )
        names.append(name)
    return names


def _check_name(name: str, path: str) -> None:
    is_name = _TOOL_NAME.fullmatch(name) is not None and len(name) <= limits.TOOL_NAME.most
    message = (
        f"{path} must have 1..{limits.TOOL_NAME.most} letters, digits, dots, underscores and"
        " hyphens"
    )
    _refuse(not is_name, message, path)


def _check_template_values(text: str) -> None:
    field = "text.template_values"
    limits.TEMPLATE_VALUES.check(_utf8(text), field)
    if not text:
        return
    values = _parsed(text)
    is_flat = isinstance(values, dict) and not any(
        isinstance(value, dict | list) for value in values.values()
    )
    _refuse(
        not is_flat, f"{field} must be a JSON object of texts, numbers, booleans or null", field
    )


def _parsed(text: str) -> object:
    """Return the parsed JSON; None if it is invalid."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _refuse(wrong: bool, message: str, field: str) -> None:
    if wrong:
        raise InvalidInput(message, field=field)
