"""`python -m tools.names`: check that reasons, metrics, Redis keys and settings named in pages,
alerts and dashboards exist in the code.

Part of `make check`. Checked are:

1. Upper-case names with underscores in pages (reasons, settings, values of protos), and those that
   begin with `SHOAL_` elsewhere: words of the code.
2. Values of `reason` and `outcome` in PromQL: reasons of errors.
3. Names that begin with `shoal_`: series of libs/telemetry/metrics.py.
4. Redis keys: `v1:...` anywhere, and names in backticks in docs/design/queue.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Histogram
from shoal.errors import ShoalError as ClientError

from libs.errors import ShoalError
from libs.queue.keys import KEYS
from libs.telemetry import metrics
from tools.references import ROOT, tracked_files

_CHECKED: Final = re.compile(
    r"docs/.+\.md|(?:README|AGENTS|CONTRIBUTING|SECURITY)\.md|(?:k8s|charts)/.+\.(?:ya?ml|json|tpl)"
    r"|tests/telemetry/rules_test\.yaml"
)
_GENERATOR: Final = "tools/k8s/dashboards.py"
"""It composes names. The dashboards that it writes are checked instead."""
_WORD: Final = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
_MATCHER: Final = re.compile(r"\b(?:reason|outcome)(?:=~?|!=|!~)\\?\"([^\"\\]*)")
_SERIES: Final = re.compile(r"(?<![\w./-])shoal_[a-z0-9_]+(?![\w./-]*\.(?:py|md)\b)")
_KEY: Final = re.compile(r"\bv1:(?:\{[^}]*\}:)?([a-z]+)")
_QUEUE_PAGE: Final = "docs/design/queue.md"
_QUEUE_NAME: Final = re.compile(r"`([a-z_]+)`")
_NOT_OURS: Final = frozenset({"default", "shoal_mesh", "PR_SET_PDEATHSIG"})
"""A user of Redis, our package, and a constant of Linux."""


@dataclass(frozen=True)
class KnownNames:
    """The names that exist."""

    words: frozenset[str]
    """Upper-case words of the code."""
    reasons: frozenset[str]
    series: frozenset[str]
    lane_keys: frozenset[str]
    """Names of a lane's keys, as its scripts call them."""
    keys: frozenset[str]
    """First parts of the names of keys in Redis."""

    @staticmethod
    def from_repository(texts: Mapping[str, str]) -> KnownNames:
        code = [text for file, text in texts.items() if not file.endswith(".md")]
        python = "\n".join(text for file, text in texts.items() if file.endswith(".py"))
        return KnownNames(
            words=frozenset(word for text in code for word in _WORD.findall(text)),
            reasons=frozenset({"OK", *_reasons(ShoalError), *_reasons(ClientError)}),
            series=frozenset(_series()),
            lane_keys=frozenset(KEYS),
            keys=frozenset(re.findall(r"\bv1:(?:\{[^\"]*\}:)?([a-z]+)", python)),
        )


def main() -> None:
    texts = {file: (ROOT / file).read_text("utf-8", "replace") for file in tracked_files()}
    checked = {file: text for file, text in texts.items() if _CHECKED.fullmatch(file)}
    code = texts.keys() - checked.keys() - {_GENERATOR}
    known = KnownNames.from_repository({file: texts[file] for file in code})
    faults = [fault for file in sorted(checked) for fault in unknown(file, checked[file], known)]
    for fault in faults:
        print(fault)
    if faults:
        sys.exit(1)
    print("all reasons, metrics, keys and settings referred to exist")


def unknown(file: str, text: str, known: KnownNames) -> Iterator[str]:
    """Yield names in a file that do not exist, each as `file:line: name`."""
    for number, line in enumerate(text.splitlines(), 1):
        named = [
            ("name", word, known.words)
            for word in _WORD.findall(line)
            if file.endswith(".md") or word.startswith("SHOAL_")
        ]
        named += [
            ("reason", reason, known.reasons)
            for matcher in _MATCHER.findall(line)
            for reason in matcher.split("|")
            if reason.isupper()
        ]
        named += [("metric", name, known.series) for name in _SERIES.findall(line)]
        named += [("Redis key", key, known.keys) for key in _KEY.findall(line)]
        if file == _QUEUE_PAGE:
            named += [("Redis key", key, known.lane_keys) for key in _QUEUE_NAME.findall(line)]
        for kind, name, existing in named:
            if name not in existing and name not in _NOT_OURS:
                yield f"{file}:{number}: no {kind} {name}"


def _reasons(base: type[ShoalError | ClientError]) -> Iterator[str]:
    yield base.reason
    for kind in base.__subclasses__():
        yield from _reasons(kind)


def _series() -> Iterator[str]:
    """Yield the names of all series, and the names of histograms."""
    for metric in vars(metrics).values():
        if isinstance(metric, metrics.Series):
            yield from (metric.name, f"{metric.name}_total")[metric.is_counter :]
        elif isinstance(metric, Counter | Histogram):
            family = next(iter(metric.describe()))
            suffixes = (
                ("_total",) if isinstance(metric, Counter) else ("", "_bucket", "_sum", "_count")
            )
            yield from (family.name + suffix for suffix in suffixes)


if __name__ == "__main__":
    main()
