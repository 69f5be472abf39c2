"""The output of `shoal profile`: tables with bars, a plot, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text
from shoal.cli.console import preview, table

from libs.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from services.local.profile.request import RequestProfile
    from services.worker.profile.forward import ForwardProfile

PLOT_FORMATS: Final = (".png", ".svg", ".pdf")
_BAR: Final = 24
"""Characters of the longest bar."""
_MAX_OPERATORS: Final = 2
"""Maximum number of operators that are named for a part. Each takes at least `_MIN_SHARE` of it."""
_MIN_SHARE: Final = 0.1


def as_json(forward: ForwardProfile, request: RequestProfile | None) -> dict[str, object]:
    """Return all measurements as values for JSON: times in seconds, `covered` and `overhead` as
    shares.
    """
    own = asdict(forward) | {"covered": forward.covered, "overhead": forward.overhead}
    return {"forward": own, "request": None if request is None else asdict(request)}


def describe(forward: ForwardProfile) -> str:
    """Describe the profiled forward pass."""
    size = f"{_count(forward.tokens, 'token')} in {_count(forward.texts, 'text')}"
    with_threads = f", {_count(forward.threads, 'thread')}" if forward.device == "cpu" else ""
    return (
        f"{forward.model}: a forward pass of {size}, {forward.dtype} on "
        f"{forward.device}{with_threads}"
    )


def forward_table(forward: ForwardProfile) -> Table:
    made = table(
        describe(forward), "part", "time", "share", "", "largest operators", right=("time", "share")
    )
    for part, seconds in sorted(forward.parts.items(), key=lambda entry: -entry[1]):
        made.add_row(
            part, *_measured(seconds, forward.seconds), _largest_operators(forward.inside[part])
        )
    made.add_section()
    made.add_row("sum of the parts", *_measured(sum(forward.parts.values()), forward.seconds), "")
    made.add_row(
        "whole", _time(forward.seconds), "", Text(), f"median of {forward.runs} forward passes"
    )
    plain = f"the profiler adds {_percent(forward.overhead)}"
    made.add_row("without the profiler", _time(forward.plain_seconds), "", Text(), plain)
    made.add_row(
        "tokenise", _time(forward.prepare_seconds), "", Text(), "before it, on a separate thread"
    )
    made.add_row(
        "finish", _time(forward.finish_seconds), "", Text(), "after it, on a separate thread"
    )
    return made


def request_table(request: RequestProfile) -> Table:
    title = (
        f"a request of one text through a temporary mesh: mean of {request.requests} sequential "
        "requests"
    )
    made = table(title, "stage", "time", "share", "", "what", right=("time", "share"))
    for stage in request.stages:
        made.add_row(stage.name, *_measured(stage.seconds, request.seconds), stage.what)
    made.add_section()
    made.add_row(
        "whole",
        _time(request.seconds),
        "",
        Text(),
        f"by the client's clock; median {_time(request.median_seconds)}",
    )
    return made


def _measured(seconds: float, whole: float) -> tuple[str, str, Text]:
    share = seconds / whole
    return _time(seconds), _percent(share), Text("█" * min(_BAR, round(share * _BAR)), style="cyan")


def _largest_operators(inside: Mapping[str, float]) -> Text:
    """Return the largest operators of a part."""
    whole = sum(inside.values())
    largest = sorted(inside.items(), key=lambda entry: -entry[1])[:_MAX_OPERATORS]
    named = (
        f"{preview(name, 40)} {_percent(seconds / whole)}"
        for name, seconds in largest
        if seconds >= _MIN_SHARE * whole > 0
    )
    return Text(", ".join(named), style="dim")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.2f} ms"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def check_plot(path: Path) -> None:
    """Raise InvalidInput for a file that cannot be drawn to, and without matplotlib."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InvalidInput(
            f"a plot's file must end in {', '.join(PLOT_FORMATS)}, not {path.name!r}", field="plot"
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InvalidInput(
            "plots need matplotlib: pip install 'shoal-mesh[plot]'", field="plot"
        ) from None


def plot(forward: ForwardProfile, request: RequestProfile | None, path: Path) -> None:
    """Draw a bar for each part of the forward pass, and below them one for each stage of a request,
    to the file `path`.
    """
    from matplotlib.figure import Figure

    drawn: list[tuple[str, list[tuple[str, float]]]] = [
        (
            describe(forward),
            sorted(
                ((part, seconds) for part, seconds in forward.parts.items()),
                key=lambda entry: -entry[1],
            ),
        )
    ]
    if request is not None:
        drawn.append(
            ("a request of one text", [(stage.name, stage.seconds) for stage in request.stages])
        )
    figure = Figure(figsize=(8, 3.2 * len(drawn)), layout="constrained")
    for number, (title, bars) in enumerate(drawn, 1):
        _draw(figure, (len(drawn), 1, number), title, bars)
    figure.savefig(
        path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None
    )


def _draw(
    figure: Figure, place: tuple[int, int, int], title: str, bars: Iterable[tuple[str, float]]
) -> None:
    names, seconds = zip(*bars, strict=True)
    axes = figure.add_subplot(*place)
    drawn = axes.barh(names, [one * 1000 for one in seconds])
    axes.bar_label(drawn, [_percent(one / sum(seconds)) for one in seconds], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left", fontsize=9)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
