"""Search in long documents: whole documents that the model truncates, plain chunks, late chunks,
and chunks with the document's title (contextual).

    python -m examples.chunks
    python -m examples.chunks --chunk-tokens 200
    python -m examples.chunks --embedder nomic-ai/modernbert-embed-base

The documents are this repository's pages. The mesh reads the files, divides their text and encodes
the chunks in one call of `encode`. Quality is nDCG@10 over the questions of
examples/data/questions.tsv. The sections that answer a question (gain 2) and those that help (gain
1) are judged by hand:

- A page has the highest gain of its sections, and the rank of its best chunk.
- A section has the rank of the best chunk with a part of it. Of several sections in
  one chunk, the one with the largest part is first.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import shoal

from examples import common, rag
from examples.common import Advice, Floats

KINDS = ("cut", "plain", "late", "contextual")


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    embedder: str
    method: shoal.tasks.ChunkMethod
    chunk_tokens: int
    pages: tuple[str, ...]
    json: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A document: its name, its text as the mesh divides it, and where its sections begin."""

    name: str
    file: Path
    text: str
    headings: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def title(self) -> str:
        return self.headings[0]

    def sections(self, start: int, end: int) -> list[str]:
        """Return the sections between two positions, the one with the largest part first."""
        first, last = (max(0, bisect_right(self.starts, at) - 1) for at in (start, end - 1))
        borders = [start, *self.starts[first + 1 : last + 1], end]
        parts = {
            f"{self.name} > {self.headings[first + index]}": after - before
            for index, (before, after) in enumerate(pairwise(borders))
        }
        return sorted(parts, key=lambda section: -parts[section])


@dataclass(frozen=True, slots=True)
class Found:
    """The vectors of one kind, [rows, dimensions], and the sections and page of each row."""

    vectors: Floats
    sections: Sequence[Sequence[str]]
    pages: Sequence[str]
    tokens: int
    seconds: float


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "")
    parser.add_argument(
        "--method",
        choices=("sentences", "tokens", "markdown"),
        default="markdown",
        help="where chunks end",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=common.at_least(1),
        default=128,
        metavar="N",
        help="maximum tokens of a chunk",
    )
    rag.add_pages(parser)
    found = vars(parser.parse_args(given))
    return Options(**found | {"pages": tuple(found["pages"])})


def read_pages(patterns: Sequence[str], root: Path = rag.ROOT) -> list[Page]:
    """Return the pages, with their text in the form in which a mesh divides it."""
    files = sorted({file for pattern in patterns for file in root.glob(pattern)})
    names = [(file.relative_to(root).as_posix(), file) for file in files]
    found = [
        read_page(name, file, file.read_text(encoding="utf-8").strip())
        for name, file in names
        if name not in rag.NOT_SEARCHED
    ]
    if not found:
        raise Advice(f"{root} has no pages {' '.join(patterns)}: name others by --pages")
    return found


def read_page(name: str, file: Path, text: str) -> Page:
    """Find the headings of a page; a `#` in a fence is a comment."""
    headings: list[str] = []
    starts: list[int] = []
    is_code, at = False, 0
    for line in text.splitlines(keepends=True):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and re.match(r"#+ ", line):
            headings.append(line.lstrip("# ").strip())
            starts.append(at)
        at += len(line)
    return Page(name, file, text, tuple(headings) or (name,), tuple(starts) or (0,))


async def encode(
    client: shoal.AsyncClient, options: Options, pages: Sequence[Page], kind: str
) -> Found:
    """Encode the pages: their files, which the mesh reads and divides, or for `cut` their texts."""
    began = time.perf_counter()
    if kind == "cut":
        texts = [page.text for page in pages]
        answer = await client.encode(
            options.embedder, texts, role="document", normalize=True, timeout=common.TIMEOUT
        )
        return Found(
            answer.dequantize(),
            [page.sections(0, len(page.text)) for page in pages],
            [page.name for page in pages],
            answer.usage.input_tokens,
            time.perf_counter() - began,
        )
    chunking = shoal.Chunking(
        options.method,
        max_tokens=options.chunk_tokens,
        late=kind == "late",
        contexts=[f"{page.title}. " for page in pages] if kind == "contextual" else (),
    )
    answer = await client.encode(
        options.embedder,
        [shoal.Document(page.file) for page in pages],
        role="document",
        normalize=True,
        chunking=chunking,
        timeout=common.TIMEOUT,
    )
    chunks = [
        (page, chunk) for page, own in zip(pages, answer.chunks, strict=True) for chunk in own
    ]
    return Found(
        answer.dequantize(),
        [page.sections(chunk.start, chunk.end) for page, chunk in chunks],
        [page.name for page, _ in chunks],
        answer.usage.input_tokens,
        time.perf_counter() - began,
    )


def quality(
    found: Found, vectors: Floats, questions: Sequence[rag.Question], *, has_sections: bool
) -> dict[str, float | None]:
    """Return the mean nDCG@10 of pages and of sections. A whole page has no section."""
    pages: list[float] = []
    sections: list[float] = []
    for vector, question in zip(vectors, questions, strict=True):
        best = np.argsort(-(found.vectors @ vector), kind="stable")
        pages.append(
            rag.compute_ndcg([found.pages[row] for row in best], page_gains(question.gains))
        )
        ranked = [section for row in best for section in found.sections[row]]
        sections.append(rag.compute_ndcg(ranked, question.gains))
    return {
        "pages_ndcg_10": float(np.mean(pages)),
        "sections_ndcg_10": float(np.mean(sections)) if has_sections else None,
    }


def page_gains(gains: Mapping[str, int]) -> dict[str, int]:
    """Return the highest gain of a section of each page."""
    found: dict[str, int] = {}
    for section, gain in gains.items():
        page = rag.section_page(section)
        found[page] = max(gain, found.get(page, 0))
    return found


async def evaluate(options: Options) -> None:
    pages = read_pages(options.pages)
    library = rag.passages(options.pages)
    asked = rag.questions(common.DATA / "questions.tsv", library, 1_000)
    if not asked:
        raise Advice("no question is answered by these pages: name others by --pages")
    results: dict[str, dict[str, float | None]] = {}
    async with common.mesh(options.endpoint) as client:
        await common.warm(client, options.embedder)
        texts = [question.text for question in asked]
        vectors = await common.encode(
            client, options.embedder, texts, "encoding questions", "query"
        )
        for kind in KINDS:
            found = await encode(client, options, pages, kind)
            results[kind] = quality(found, vectors, asked, has_sections=kind != "cut") | {
                "vectors": len(found.vectors),
                "tokens": found.tokens,
                "seconds": found.seconds,
            }
    report(options, pages, len(asked), results)


def report(
    options: Options,
    pages: Sequence[Page],
    questions: int,
    results: Mapping[str, Mapping[str, float | None]],
) -> None:
    if options.json:
        common.print_json({"pages": len(pages), "questions": questions, "kinds": results})
        return
    print(f"embedder {options.embedder}, {options.method} of {options.chunk_tokens} tokens")
    common.table(
        f"{questions} questions, {len(pages)} pages",
        ("kind", "nDCG@10 of pages", "of sections", "vectors", "tokens", "seconds"),
        [
            (
                kind,
                f"{one['pages_ndcg_10']:.3f}",
                "" if one["sections_ndcg_10"] is None else f"{one['sections_ndcg_10']:.3f}",
                f"{one['vectors']:,}",
                f"{one['tokens']:,}",
                f"{one['seconds']:.1f}",
            )
            for kind, one in results.items()
        ],
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: evaluate(options))


if __name__ == "__main__":
    raise SystemExit(main())
