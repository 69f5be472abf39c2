"""Splits a forward pass into its parts by a trace of torch's profiler. Pure except for `read`.

A trace is the output of `torch.profiler.profile.export_chrome_trace` (Chrome's Trace Event Format):
spans on threads of the host and on streams of the device.

1. On a CPU each moment is attributed to the innermost operator on the forward pass's thread.
2. On an accelerator it is attributed to the running kernel, and the kernel to the part that
   launched it.
3. Time without either is a gap. Operators' times and gaps are counted separately, so that their sum
   can be checked against the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

Part = Literal[
    "GEMM", "attention", "norm", "layer", "embedding", "pooling", "copy", "other", "gaps"
]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
PREFIX: Final = "shoal."
"""Prefix of profiler range names, followed by the part, or by `forward` for the whole pass."""
FORWARD: Final = PREFIX + "forward"
NATIVE: Final = "native::"
"""Prefix of a range around a kernel that is not a torch operator (`libs/kernels/native`). It counts
as one.
"""

_RANGE: Final = "user_annotation"
_ON_HOST: Final = (_RANGE, "cpu_op", "cuda_runtime", "cuda_driver")
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_BETWEEN_DEVICES: Final = ("HtoD", "DtoH")

# The part of operators outside any part's range. Of nested operators the outermost decides.
_PART_OF: Final[Mapping[str, Part]] = {
    **dict.fromkeys(
        (
            "linear",
            "addmm",
            "addmm_",
            "mm",
            "matmul",
            "bmm",
            "baddbmm",
            "einsum",
            "_linear_pointwise",
            "lstm",
        ),
        "GEMM",
    ),
    **dict.fromkeys(("scaled_dot_product_attention", "_flash_attention_forward"), "attention"),
    **dict.fromkeys(("layer_norm", "rms_norm"), "norm"),
    **dict.fromkeys(("to", "_to_copy", "copy_", "contiguous", "clone", "pin_memory"), "copy"),
    "embedding": "embedding",
}


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """An event from `start` to `end`, in microseconds."""

    kind: str
    name: str
    track: tuple[object, object]
    """Its thread or stream."""
    start: float
    end: float
    link: int = 0
    """Correlation ID shared by a launch and its kernel; 0 for none."""

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Forward:
    """The times of one forward pass, in seconds."""

    seconds: float
    parts: Mapping[Part, float]
    """Time by part, including gaps."""
    inside: Mapping[Part, Mapping[str, float]]
    """Each part's time by operator or kernel; for gaps on a CPU, by enclosing part."""


@dataclass(slots=True)
class _Placed:
    """A span of the host."""

    span: TraceSpan
    part: Part | None
    """None for a range without a part."""
    own: float
    """Its duration without nested spans."""


def read(path: Path) -> list[TraceSpan]:
    """Read all spans of a trace file."""
    with path.open(encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [_span(event) for event in events if event["ph"] == "X"]


def _span(event: Mapping[str, Any]) -> TraceSpan:
    start, link = float(event["ts"]), event.get("args", {}).get("correlation", 0)
    track = (event.get("pid"), event.get("tid"))
    kind = "cpu_op" if event["name"].startswith(NATIVE) else event.get("cat", "")
    return TraceSpan(
        kind, event["name"], track, start, start + float(event.get("dur", 0)), int(link)
    )


def forwards(spans: Iterable[TraceSpan]) -> list[Forward]:
    """Return every forward pass of a trace, in order."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    return [
        _forward(span, ordered) for span in ordered if span.kind == _RANGE and span.name == FORWARD
    ]


def _forward(whole: TraceSpan, spans: Sequence[TraceSpan]) -> Forward:
    placed = _placed(whole, spans)
    parts_of_links = {one.span.link: one.part for one in placed if one.span.link}
    launched = [span for span in spans if span.kind in _ON_DEVICE and span.link in parts_of_links]
    inside: dict[Part, dict[str, float]] = {part: {} for part in PARTS}
    if launched:
        for span in launched:
            _add(inside, _part_of_kernel(span, parts_of_links[span.link]), span.name, span.duration)
        covering = launched
    else:
        for one in placed:
            if one.span.kind == _RANGE:
                _add(inside, "gaps", one.part or "between them", one.own)
            else:
                _add(inside, one.part or "other", one.span.name, one.own)
        covering = [one.span for one in placed if one.span.kind != _RANGE]
    parts: dict[Part, float] = {
        part: sum(inside[part].values()) for part in PARTS if part != "gaps"
    }
    parts["gaps"] = _uncovered(whole, covering) / 1e6
    return Forward(whole.duration / 1e6, parts, inside)


def _add(
    inside: Mapping[Part, dict[str, float]], part: Part, name: str, microseconds: float
) -> None:
    inside[part][name] = inside[part].get(name, 0.0) + microseconds / 1e6


def _placed(whole: TraceSpan, spans: Sequence[TraceSpan]) -> list[_Placed]:
    """Return the host's spans within a forward pass, its whole span first."""
    placed: list[_Placed] = []
    around: list[_Placed] = []
    for span in spans:
        if (
            span.kind not in _ON_HOST
            or span.track != whole.track
            or not whole.start <= span.start < whole.end
        ):
            continue
        while around and around[-1].span.end <= span.start:
            around.pop()
        one = _Placed(span, _part(span, around[-1] if around else None), span.duration)
        if around:
            around[-1].own -= span.duration
        placed.append(one)
        around.append(one)
    return placed


def _part(span: TraceSpan, around: _Placed | None) -> Part | None:
    """Return the part of a span: that of its range, or of the range around an operator. A head's
    matrix products are always GEMM.
    """
    inherited = None if around is None else around.part
    if span.kind == _RANGE:
        return next((part for part in PARTS if span.name == PREFIX + part), inherited)
    if around is not None and around.span.kind != _RANGE:
        return inherited
    own = _PART_OF.get(span.name.rpartition("::")[2], "other")
    if inherited is None:
        return own
    return own if inherited == "pooling" and own == "GEMM" else inherited


def _part_of_kernel(span: TraceSpan, part: Part | None) -> Part:
    if span.kind == "gpu_memcpy" and any(way in span.name for way in _BETWEEN_DEVICES):
        return "copy"
    return part or "other"


def _uncovered(whole: TraceSpan, spans: Iterable[TraceSpan]) -> float:
    """Return how long no span runs. The spans must be ordered by start."""
    gaps, reached = 0.0, whole.start
    for span in spans:
        gaps += max(0.0, min(span.start, whole.end) - reached)
        reached = max(reached, min(span.end, whole.end))
    return gaps + whole.end - reached
