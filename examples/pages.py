"""Visual retrieval of PDF pages. Pages are rendered; each page and each question becomes a
multi-vector. A page's score is the sum, over the question's vectors, of the highest similarity to
one of the page's vectors (MaxSim, arXiv 2407.01449).

    python -m examples.pages
    python -m examples.pages --model vidore/colSmol-256M
    python -m examples.pages --pdf report.pdf --ask "What did it cost in 2024?" \\
        --model vidore/colqwen2-v1.0

Without --model a small ColSmol with random weights runs (examples/random_models.py), so that
everything works without a network; its ranking means nothing, and the output says so. Without --pdf
the pages are those of two manuals that Debian's packages libtasn1-doc and shared-mime-info bring.
Needs pypdfium2.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from textwrap import shorten

import numpy as np
import shoal
from shoal.results import Ragged

from examples import common, random_models
from examples.common import Advice, Floats

MANUALS = (
    Path("/usr/share/doc/shared-mime-info/shared-mime-info-spec.pdf"),
    Path("/usr/share/doc/libtasn1-doc/libtasn1.pdf"),
)
# Questions, each with words from the text of the pages that answer it. The models do not read this
# text: they see images of pages.
QUESTIONS = (
    (
        "How do I store a MIME type in an extended attribute?",
        "Storing the MIME type using Extended Attributes",
    ),
    (
        "What does the first line of a magic file look like?",
        "The file starts with the magic string",
    ),
    ("Which element nests treematch?", "treematch elements can be nested"),
    ("Command line options of asn1Parser", "Invoking asn1Parser"),
    ("How are comments written in an ASN.1 file?", "The parser is case sensitive"),
    (
        "How do I turn an error number into a string?",
        "Returns a string with a description of an error",
    ),
    ("May I sell copies of this manual?", "VERBATIM COPYING"),
)
FORMATS = ("float32", "float16", "int8")
MEASURED = 4
"""Pages that are encoded once more for each format of numbers, and scored by the mesh."""


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    image: bytes
    """The rendered page, a PNG."""
    text: str
    """The PDF's text of the page, which the model does not see."""


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    model: str
    pdf: tuple[Path, ...]
    ask: tuple[str, ...]
    dpi: int
    limit: int
    top: int
    json: bool


@dataclass(frozen=True, slots=True)
class Checks:
    """Invariants that hold with any weights."""

    pages: int
    found_themselves: int
    """Pages that rank first for their own vectors as the question."""
    score_error: float
    """Largest difference between the mesh's scores and those computed here, relative to the
    largest score.
    """
    same_first: tuple[str, ...]
    """Formats of MEASURED with the same best page as float32 for the first question."""


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "", embedder=False)
    parser.add_argument(
        "--model", default="", metavar="MODEL", help="a model of pages, such as vidore/colSmol-256M"
    )
    parser.add_argument("--pdf", type=Path, nargs="+", default=(), metavar="FILE", help="your PDFs")
    parser.add_argument(
        "--ask",
        nargs="+",
        default=(),
        metavar="QUESTION",
        help="questions to ask instead of those of the example",
    )
    parser.add_argument(
        "--dpi", type=common.at_least(20), default=96, help="resolution of rendered pages"
    )
    parser.add_argument(
        "--limit", type=common.at_least(1), default=60, metavar="N", help="pages to search"
    )
    parser.add_argument(
        "--top",
        type=common.at_least(1),
        default=3,
        metavar="N",
        help="pages to show for each question",
    )
    found = vars(parser.parse_args(given))
    return Options(**found | {"pdf": tuple(found["pdf"]), "ask": tuple(found["ask"])})


def rendered(files: Sequence[Path], dpi: int, limit: int) -> list[Page]:
    """Render pages of all files in turn, up to the limit. Raises Advice if there are none."""
    try:
        import pypdfium2
    except ImportError as error:
        raise Advice(
            f"rendering PDFs needs a package that is not installed ({error}): pip install pypdfium2"
        ) from None
    found: list[list[Page]] = []
    for file in files:
        try:
            document = pypdfium2.PdfDocument(file)
        except (OSError, pypdfium2.PdfiumError) as error:
            raise Advice(f"{file} cannot be read as a PDF: {error}") from None
        pages = []
        for number in range(min(len(document), limit)):
            page, out = document[number], BytesIO()
            page.render(scale=dpi / 72).to_pil().convert("RGB").save(out, "PNG")
            pages.append(
                Page(
                    f"{file.stem} p. {number + 1}",
                    out.getvalue(),
                    page.get_textpage().get_text_bounded(),
                )
            )
        found.append(pages)
    turns = (pages[number] for number in range(limit) for pages in found if number < len(pages))
    return sorted(
        islice(turns, limit),
        key=lambda page: [file.stem for file in files].index(page.name.rpartition(" p. ")[0]),
    )


def sources(options: Options) -> list[Path]:
    files = list(options.pdf) or [file for file in MANUALS if file.is_file()]
    if not files:
        raise Advice(
            "no PDFs found: name some with --pdf, or `apt-get install libtasn1-doc "
            "shared-mime-info`"
        )
    return files


def questions(options: Options, pages: Sequence[Page]) -> list[tuple[str, list[int]]]:
    """Return the questions with the pages that answer them.

    Answers to the questions of --ask are unknown. QUESTIONS without an answer are left out.
    """
    if options.ask:
        return [(text, []) for text in options.ask]
    if options.pdf:
        raise Advice("--pdf needs questions: --ask 'What did it cost?'")
    found = [
        (text, [number for number, page in enumerate(pages) if words in page.text])
        for text, words in QUESTIONS
    ]
    return [(text, right) for text, right in found if right] or [(QUESTIONS[0][0], [])]


def maxsim(question: np.ndarray, pages: Ragged | Sequence[np.ndarray]) -> Floats:
    """Return the MaxSim score of each page for a question, [pages]."""
    rows = question.astype(np.float32)
    return np.array(
        [(rows @ page.astype(np.float32).T).max(axis=1).sum() for page in pages], np.float32
    )


async def encode(
    client: shoal.AsyncClient,
    model: str,
    pages: Sequence[Page],
    what: str,
    number_format: str = "float32",
) -> Ragged:
    with common.progress(what, len(pages)) as show:
        answer = await client.encode(
            model,
            [page.image for page in pages],
            role="document",
            data_type=number_format,  # type: ignore[arg-type]
            timeout=common.TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    return answer.multi_vector


def mean_page_bytes(vectors: Ragged, number_format: str) -> float:
    """Return the mean bytes per page, on the wire and in an index.

    int8 has a float32 scale per vector.
    """
    width = vectors.values.shape[1]
    vector_bytes = {"float32": 4 * width, "float16": 2 * width, "int8": width + 4}[number_format]
    return float(vector_bytes * len(vectors.values) / len(vectors))


async def checked(
    client: shoal.AsyncClient,
    model: str,
    pages: Sequence[Page],
    found: Ragged,
    question: str,
    asked: np.ndarray,
) -> tuple[Checks, dict[str, float]]:
    """Check the invariants, and return the bytes per page in each format."""
    some = list(pages[:MEASURED])
    sizes = {"float32": mean_page_bytes(found, "float32")}
    here = maxsim(asked, [found[number] for number in range(len(some))])
    same = ["float32"]
    for number_format in FORMATS[1:]:
        smaller = await encode(client, model, some, f"the same in {number_format}", number_format)
        sizes[number_format] = (
            sizes["float32"]
            * mean_page_bytes(smaller, number_format)
            / mean_page_bytes(smaller, "float32")
        )
        if maxsim(asked, smaller).argmax() == here.argmax():
            same.append(number_format)
    answer = await client.score(
        model, question, [page.image for page in some], timeout=common.TIMEOUT
    )
    best = [int(maxsim(own, found).argmax()) for own in found]
    twins = [
        number == one or np.array_equal(found[number], found[one])
        for number, one in enumerate(best)
    ]
    error = float(np.abs(np.asarray(answer.scores) - here).max() / np.abs(here).max())
    return Checks(len(pages), sum(twins), error, tuple(same)), sizes


async def retrieve(options: Options) -> None:
    began = time.perf_counter()
    pages = rendered(sources(options), options.dpi, options.limit)
    seconds = {"rendering": time.perf_counter() - began}
    asked = questions(options, pages)
    async with common.model_or_random(
        options.endpoint, options.model, random_models.COLSMOL, random_models.write_colsmol
    ) as (
        client,
        model,
    ):
        await client.encode(model, [pages[0].image], timeout=common.TIMEOUT)  # loads the model
        began = time.perf_counter()
        found = await encode(client, model, pages, "encoding pages")
        seconds["encoding"] = time.perf_counter() - began
        texts = [text for text, _ in asked]
        rows = (
            await client.encode(model, texts, role="query", timeout=common.TIMEOUT)
        ).multi_vector
        began = time.perf_counter()
        scores = np.stack([maxsim(one, found) for one in rows])
        seconds["MaxSim"] = (time.perf_counter() - began) / len(texts)
        checks, sizes = await checked(client, model, pages, found, texts[0], rows[0])
    best = np.argsort(-scores, axis=1, kind="stable")[:, : options.top]
    right = [
        bool(ranked[0] in answers)
        for (_, answers), ranked in zip(asked, best, strict=True)
        if answers
    ]
    report(
        options,
        model,
        pages,
        asked,
        scores,
        best,
        right,
        checks,
        seconds,
        sizes,
        len(found.values) / len(pages),
    )


def report(
    options: Options,
    model: str,
    pages: Sequence[Page],
    asked: Sequence[tuple[str, list[int]]],
    scores: Floats,
    best: np.ndarray,
    right: Sequence[bool],
    checks: Checks,
    seconds: Mapping[str, float],
    sizes: Mapping[str, float],
    vectors: float,
) -> None:
    if options.json:
        common.print_json(
            {
                "model": model,
                "random": not options.model,
                "pages": len(pages),
                "vectors_per_page": vectors,
                "seconds": dict(seconds),
                "bytes_per_page": dict(sizes),
                "checks": asdict(checks),
                "right_first": sum(right) / len(right) if right and options.model else None,
                "ranking": {
                    text: [pages[one].name for one in ranked]
                    for (text, _), ranked in zip(asked, best, strict=True)
                },
            }
        )
        return
    rendering, encoding = (
        1000 * seconds[stage] / len(pages) for stage in ("rendering", "encoding")
    )
    print(
        f"{model}: {len(pages)} pages of {vectors:.0f} vectors; {rendering:.0f} ms to render a "
        f"page, {encoding:.0f} ms to encode it"
    )
    print("bytes of a page: " + ", ".join(f"{size:,.0f} as {name}" for name, size in sizes.items()))
    if not options.model:
        print(random_models.WARNING)
    lines = [
        (
            shorten(text, 40),
            "\n".join(f"{scores[row, one]:.2f} {pages[one].name}" for one in best[row]),
        )
        for row, (text, _) in enumerate(asked)
    ]
    common.table(
        f"MaxSim, {1000 * seconds['MaxSim']:.1f} ms a question", ("question", "score, page"), lines
    )
    if right and options.model:
        print(f"a page with the answer is first for {sum(right)} of {len(right)} questions")
    print(
        f"with any weights: {checks.found_themselves} of {checks.pages} pages are the best for "
        "their own vectors; scores of the "
        f"mesh and those computed here differ by {checks.score_error:.1e}; the same page is "
        f"first as {', '.join(checks.same_first)}"
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: retrieve(options))


if __name__ == "__main__":
    sys.exit(main())
