"""The options that calls share, declared once for the verbs of both clients and for commands.

A verb takes them as `**options: Unpack[...]`: type checkers and editors expand that to keyword
arguments. `with_options` does the same for `help()` and `inspect.signature`, and refuses unknown
names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

from shoal.tasks import LongText, OnInvalid, Priority, Truncation

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Option:
    """The documentation and the default of an option."""

    help: str
    default: Any = None


PoolOption = Annotated[
    str, Option("Pool of workers, such as l4-spot; default from the mesh's catalog.", "")
]
PriorityOption = Annotated[
    Priority | None,
    Option(
        "interactive (default) or bulk. Bulk requests get a tenth of a busy lane, or all of an "
        "idle one."
    ),
]
AdapterOption = Annotated[
    str, Option("LoRA adapter of the model, org/name, or one of the model's own tasks.", "")
]
TruncationOption = Annotated[
    Truncation | None,
    Option("Where to cut texts that are too long (default end), or none to refuse them."),
]


class RequestOptions(TypedDict, total=False):
    """The options of every request."""

    pool: PoolOption
    priority: PriorityOption
    timeout: Annotated[
        float | None, Option("Seconds for one request, retries included; default the client's.")
    ]


class StreamOptions(RequestOptions, total=False):
    """The options of `extract_stream`."""

    truncation: TruncationOption


class EncodeStreamOptions(StreamOptions, total=False):
    """The options of `encode_stream`."""

    adapter: AdapterOption


class CallOptions(RequestOptions, total=False):
    """The options of calls that may be split into several requests."""

    on_progress: Annotated[
        Progress | None,
        Option("Called as on_progress(done, total) after each request of a long list."),
    ]


class ItemOptions(CallOptions, total=False):
    """The options of verbs over items."""

    adapter: AdapterOption
    on_invalid: Annotated[
        OnInvalid,
        Option(
            "raise: an item that is empty, or too long with truncation none, fails the call; "
            "skip: it is skipped and reported.",
            "raise",
        ),
    ]


class EncodeOptions(ItemOptions, total=False):
    """The options of `encode`, and of models that read no text in windows."""

    truncation: TruncationOption


class LongTextOptions(ItemOptions, total=False):
    """The options of verbs that can read a long text in windows and merge their results."""

    truncation: Annotated[
        LongText | None,
        Option(
            "Where to cut texts that are too long (default end), or none to refuse them. windows: "
            "read all of them in overlapping windows, and merge the results."
        ),
    ]
    window_overlap: Annotated[
        int | None,
        Option("Tokens that windows share; default 256, or a quarter of a shorter window."),
    ]


def declared_options(kind: type[Any]) -> Mapping[str, tuple[Any, Option]]:
    """Return the type and the `Option` of each option of one of these classes."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def with_options(verb: Callable[P, T]) -> Callable[P, T]:
    """Return a function with `**options: Unpack[...]`, the options named in its signature and
    documentation. The function raises TypeError for other names.
    """
    signature = inspect.signature(verb)
    *own, _ = signature.parameters.values()
    unpacked = inspect.signature(verb, eval_str=True).parameters["options"].annotation
    options = declared_options(get_args(unpacked)[0])
    known = {one.name for one in own} | options.keys()

    def check(given: Mapping[str, object]) -> None:
        for name in given:
            if name not in known:
                raise TypeError(f"{verb.__name__}() got an unexpected keyword argument {name!r}")

    @wraps(verb)
    async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
        check(kwargs)
        return await verb(*args, **kwargs)  # type: ignore[misc]

    @wraps(verb)
    def plain(*args: P.args, **kwargs: P.kwargs) -> Any:
        check(kwargs)
        return verb(*args, **kwargs)

    call: Any = coroutine if inspect.iscoroutinefunction(verb) else plain
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind
        )
        for name, (kind, option) in options.items()
    ]
    call.__signature__ = signature.replace(parameters=[*own, *keywords])
    lines = (f"        {name}: {option.help}" for name, (_, option) in options.items())
    call.__doc__ = "\n".join([f"{verb.__doc__ or ''}\n    Options:", *lines])
    return call  # type: ignore[no-any-return]
