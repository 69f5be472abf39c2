"""Hybrid search over this repository's pages (dense + sparse + rerank), with the quality of each
stage.

    python -m examples.rag
    python -m examples.rag --ask "What happens to my request when a worker dies?"
    python -m examples.rag --store qdrant --reranker cross-encoder/ms-marco-MiniLM-L-6-v2 \\
        --sparse naver/splade-v3

Passages are encoded alone (dense) and as late chunks of their whole pages (late), which one pass
over a page gives. Quality is nDCG@10 over the questions of examples/data/questions.tsv, each with
the section that answers it (gain 2) and those that help (gain 1). A section's rank is that of its
best passage. The store searches dense vectors; this script searches sparse ones, which not every
store supports.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import shoal
from rich.console import Console
from rich.table import Table
from shoal.errors import TaskNotSupported

from examples import common
from examples.common import Advice, Floats

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/*.md", "docs/design/*.md")
NOT_SEARCHED = ("docs/examples.md",)
"""It quotes the questions."""
CHARACTERS = 800
"""Maximum length of a passage, about 200 tokens: the bundled model reads 256."""
FOUND = 50
"""Passages that each search returns."""
FUSED = 60
"""The constant of reciprocal rank fusion, as in Cormack, Clarke and Buettcher (SIGIR 2009)."""
PACKAGES = {
    "qdrant": ("qdrant_client", "qdrant-client"),
    "chroma": ("chromadb", "chromadb"),
    "lancedb": ("lancedb", "lancedb"),
}
STAGES = ("sparse", "dense", "late", "hybrid", "reranked")
"""Embedders that have no late chunks have no stage `late`."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a section.

    `section` is `page > heading`; `title` is the page's title and the heading.
    """

    section: str
    title: str
    text: str

    @property
    def searched(self) -> str:
        return f"{self.title}. {self.text}"

    @property
    def sentences(self) -> list[str]:
        """Return the sentences, each with the heading, and the whole passage."""
        heading = self.section.partition(" > ")[2]
        found = [
            sentence for sentence in re.split(r"(?<=[.:;|])\s+", self.text) if len(sentence) > 20
        ]
        return [self.searched, *(f"{heading}: {sentence}" for sentence in found)]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the gains of the sections that answer it or help."""

    text: str
    gains: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    embedder: str
    sparse: str
    reranker: str
    store: str
    ask: str
    questions: Path
    pages: tuple[str, ...]
    json: bool
    limit: int
    candidates: int


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "")
    parser.add_argument(
        "--sparse",
        default="",
        metavar="MODEL",
        help="a sparse model, such as naver/splade-v3; without one BM25",
    )
    parser.add_argument(
        "--reranker",
        default=common.MINILM,
        metavar="MODEL",
        help="the model that scores question and passage",
    )
    parser.add_argument(
        "--store",
        choices=("memory", *PACKAGES),
        default="memory",
        help="store of dense vectors",
    )
    parser.add_argument(
        "--ask", default="", metavar="QUESTION", help="print the best sections for a question"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        default=common.DATA / "questions.tsv",
        metavar="FILE",
        help="questions and answers",
    )
    add_pages(parser)
    parser.add_argument(
        "--limit", type=common.at_least(1), default=1_000, metavar="N", help="questions to ask"
    )
    parser.add_argument(
        "--candidates", type=common.at_least(10), default=20, metavar="N", help="passages to rerank"
    )
    found = vars(parser.parse_args(given))
    return Options(**found | {"pages": tuple(found["pages"])})


def add_pages(parser: argparse.ArgumentParser) -> None:
    """Add the option for the pages to search."""
    parser.add_argument(
        "--pages",
        nargs="+",
        default=PAGES,
        metavar="GLOB",
        help="pages to search, relative to the repository",
    )


def passages(patterns: Sequence[str], root: Path = ROOT) -> list[Passage]:
    """Split the pages at headings, then at blank lines and table rows.

    Raises Advice if no page is found.
    """
    found = []
    for page in sorted({page for pattern in patterns for page in root.glob(pattern)}):
        name = page.relative_to(root).as_posix()
        if name in NOT_SEARCHED:
            continue
        parts = sections(page.read_text(encoding="utf-8"))
        for heading, body in parts:
            title = heading if heading == parts[0][0] else f"{parts[0][0]}. {heading}"
            found += [Passage(f"{name} > {heading}", title, text) for text in pieces(body)]
    if not found:
        raise Advice(
            f"{root} has no pages {' '.join(patterns)}: name others by --pages, or run this in a "
            "checkout of the repository"
        )
    return found


def sections(page: str) -> list[tuple[str, str]]:
    """Yield headings with their text; a `#` in a fence is a comment."""
    found: list[tuple[str, list[str]]] = []
    is_code = False
    for line in page.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code and re.match(r"#+ ", line):
            found.append((line.lstrip("# ").strip(), []))
        elif found:
            found[-1][1].append(line)
    return [(heading, "\n".join(lines)) for heading, lines in found]


def pieces(body: str) -> list[str]:
    """Join neighbouring blocks up to CHARACTERS; split longer blocks between words."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=[|-] )", body):
        text = " ".join(
            word for word in block.split() if not re.fullmatch(r"[|:-]{3,}|```\w*", word)
        )
        for cut in (text[begin : begin + CHARACTERS] for begin in range(0, len(text), CHARACTERS)):
            if found and len(found[-1]) + len(cut) < CHARACTERS:
                found[-1] += f" {cut}"
            else:
                found.append(cut)
    return found


def questions(file: Path, library: Sequence[Passage], limit: int) -> list[Question]:
    """Read the judged questions that the pages answer.

    Raises Advice for an invalid line or a missing section.
    """
    known = {passage.section for passage in library}
    pages = {section_page(section) for section in known}
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Advice(f"{file} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        text, *judged = line.split("\t")
        if len(judged) != 2:
            raise Advice(
                f"{file}:{number}: expected a question, a section and other sections, separated by "
                "tabs"
            )
        best, others = judged
        gains = {section: 1 for section in others.split(" | ") if section} | {best: 2}
        if section_page(best) not in pages and (ROOT / section_page(best)).exists():
            continue
        gains = {
            section: gain
            for section, gain in gains.items()
            if section_page(section) in pages or section == best
        }
        if gone := gains.keys() - known:
            raise Advice(
                f"{file}:{number}: section {sorted(gone)[0]!r} does not exist: name the one that "
                f"answers {text!r} now"
            )
        found.append(Question(text, gains))
    return found[:limit]


def section_page(section: str) -> str:
    return section.partition(" > ")[0]


class Store(Protocol):
    """An index of dense unit vectors, [passages, dimensions]."""

    def add(self, vectors: Floats, library: Sequence[Passage]) -> None: ...

    def search(self, vector: Floats, number: int) -> list[int]:
        """Return the numbers of the nearest passages, nearest first."""
        ...


class Memory:
    """A matrix in memory."""

    def add(self, vectors: Floats, library: Sequence[Passage]) -> None:
        self._vectors = vectors

    def search(self, vector: Floats, number: int) -> list[int]:
        return [
            int(found) for found in np.argsort(-(self._vectors @ vector), kind="stable")[:number]
        ]


class Qdrant:
    """Qdrant's client in this process, without a server."""

    def __init__(self, package: Any) -> None:
        self._models = package.models
        self._client = package.QdrantClient(":memory:")

    def add(self, vectors: Floats, library: Sequence[Passage]) -> None:
        models = self._models
        size = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
        self._client.create_collection("pages", vectors_config=size)
        points = [
            models.PointStruct(id=number, vector=vector.tolist(), payload=asdict(passage))
            for number, (vector, passage) in enumerate(zip(vectors, library, strict=True))
        ]
        self._client.upsert("pages", points)

    def search(self, vector: Floats, number: int) -> list[int]:
        return [
            int(point.id)
            for point in self._client.query_points(
                "pages", query=vector.tolist(), limit=number
            ).points
        ]


class Chroma:
    """Chroma in this process, in memory. Its default embedder is not used."""

    def __init__(self, package: Any) -> None:
        settings = package.config.Settings(anonymized_telemetry=False)
        self._pages = package.EphemeralClient(settings).create_collection(
            "pages",
            embedding_function=None,
            configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
        )

    def add(self, vectors: Floats, library: Sequence[Passage]) -> None:
        self._pages.add(
            ids=[str(number) for number in range(len(library))],
            embeddings=vectors,
            documents=[passage.text for passage in library],
            metadatas=[{"section": passage.section} for passage in library],
        )

    def search(self, vector: Floats, number: int) -> list[int]:
        return [
            int(found)
            for found in self._pages.query(query_embeddings=vector[None], n_results=number)["ids"][
                0
            ]
        ]


class Lance:
    """LanceDB in a temporary folder."""

    def __init__(self, package: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-lancedb-")
        self._base = package.connect(self._folder.name)

    def add(self, vectors: Floats, library: Sequence[Passage]) -> None:
        rows = [
            {"number": number, "vector": vector, **asdict(passage)}
            for number, (vector, passage) in enumerate(zip(vectors, library, strict=True))
        ]
        self._pages = self._base.create_table("pages", rows)

    def search(self, vector: Floats, number: int) -> list[int]:
        return [
            int(row["number"])
            for row in self._pages.search(vector).distance_type("cosine").limit(number).to_list()
        ]


def open_store(name: str) -> Store:
    """Create a store. Raises Advice if its package is not installed."""
    if name == "memory":
        return Memory()
    module, package = PACKAGES[name]
    try:
        found = import_module(module)
    except ImportError as error:
        raise Advice(
            f"--store {name} needs a package that is not installed ({error}): pip install {package}"
        ) from None
    makers: dict[str, type[Qdrant] | type[Chroma] | type[Lance]] = {
        "qdrant": Qdrant,
        "chroma": Chroma,
        "lancedb": Lance,
    }
    return makers[name](found)


class Bm25:
    """BM25 (k1 1.2, b 0.75) over words without their endings."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(words(text)) for text in texts]
        mean = sum(bag.total() for bag in bags) / len(bags)
        holders = Counter(word for bag in bags for word in bag)
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for number, bag in enumerate(bags):
            rest = 1.2 * (0.25 + 0.75 * bag.total() / mean)
            for word, times in bag.items():
                rare = math.log(1 + (len(bags) - holders[word] + 0.5) / (holders[word] + 0.5))
                self._weights.setdefault(word, []).append(
                    (number, rare * times * 2.2 / (times + rest))
                )

    def search(self, text: str, number: int) -> list[int]:
        scores: defaultdict[int, float] = defaultdict(float)
        for word in set(words(text)):
            for passage, weight in self._weights.get(word, ()):
                scores[passage] += weight
        return sorted(scores, key=lambda passage: (-scores[passage], passage))[:number]


_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by can do does for from has have how i if in is it its me my no "
        "not of on or so than that the their "
        "then there they this to was what when where which who why will with you your",
    )
)
_PLURAL = re.compile(r"(?<=[^s]{3})s$")
_ENDING = re.compile(r"(ing|ed|es|s|e|ly|ion|er)$")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without stop words and plural endings."""
    found = [
        _PLURAL.sub("", word)
        for word in re.findall(r"[a-z0-9]+", text.lower())
        if word not in _COMMON
    ]
    return [_ENDING.sub("", word) if len(word) > 4 else word for word in found]


async def sparse_search(
    client: shoal.AsyncClient, options: Options, texts: Sequence[str], asked: Sequence[str]
) -> list[list[int]]:
    """Return each question's best passages, by BM25 or by a sparse model."""
    if not options.sparse:
        index = Bm25(texts)
        return [index.search(text, FOUND) for text in asked]
    with common.progress("encoding passages, sparse", len(texts)) as show:
        documents = await client.encode(
            options.sparse,
            texts,
            role="document",
            representations="sparse",
            timeout=common.TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    queries = await client.encode(
        options.sparse, asked, role="query", representations="sparse", timeout=common.TIMEOUT
    )
    found = []
    for columns, weights in queries.sparse:
        query = np.zeros(documents.sparse.shape[1], np.float32)
        query[columns] = weights
        products = np.add.reduceat(
            np.append(documents.sparse.data * query[documents.sparse.indices], 0.0),
            documents.sparse.indptr[:-1],
        ) * (np.diff(documents.sparse.indptr) > 0)
        found.append([int(number) for number in np.argsort(-products, kind="stable")[:FOUND]])
    return found


def fuse(*rankings: Sequence[int]) -> list[int]:
    """Fuse rankings by reciprocal rank."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for place, number in enumerate(ranking):
            scores[number] += 1 / (FUSED + 1 + place)
    return sorted(scores, key=lambda number: (-scores[number], number))


async def search(
    client: shoal.AsyncClient,
    store: Store,
    options: Options,
    library: Sequence[Passage],
    asked: Sequence[str],
) -> tuple[dict[str, list[list[int]]], dict[str, float]]:
    """Return each stage's passages per question, best first, and the seconds of indexing and of
    each stage.
    """
    await common.warm(client, options.embedder)
    texts = [passage.searched for passage in library]
    clock = Clock()
    store.add(
        await common.encode(client, options.embedder, texts, "encoding passages", "document"),
        library,
    )
    clock.stop("indexing")
    sparse = await sparse_search(client, options, texts, asked)
    clock.stop("sparse")
    vectors = await common.encode(client, options.embedder, asked, "encoding questions", "query")
    dense = [store.search(vector, FOUND) for vector in vectors]
    clock.stop("dense")
    late = await late_search(client, options, library, vectors)
    clock.stop("late")
    hybrid = [fuse(*rankings)[:FOUND] for rankings in zip(dense, sparse, strict=True)]
    clock.stop("hybrid")
    reranked = await rerank(client, options, library, asked, hybrid)
    clock.stop("reranked")
    found = {"sparse": sparse, "dense": dense, "hybrid": hybrid, "reranked": reranked}
    return found | ({"late": late} if late else {}), clock.seconds


async def late_search(
    client: shoal.AsyncClient, options: Options, library: Sequence[Passage], asked: Floats
) -> list[list[int]]:
    """Return each question's best passages by their vectors as late chunks of their pages, which
    reflect the text around them; nothing if the embedder has no late chunks.

    Args:
        asked: The vectors of the questions.
    """
    texts: list[str] = []
    spans: list[list[tuple[int, int]]] = []
    for _, own in groupby(library, key=lambda passage: section_page(passage.section)):
        text, places = "", list[tuple[int, int]]()
        for passage in own:
            text += "\n\n" if text else ""
            places.append((len(text), len(text) + len(passage.searched)))
            text += passage.searched
        texts.append(text)
        spans.append(places)
    try:
        answer = await client.encode(
            options.embedder,
            texts,
            role="document",
            representations="dense",
            normalize=True,
            chunking=shoal.Chunking("spans", late=True, spans=spans),
            timeout=common.TIMEOUT,
        )
    except TaskNotSupported:
        return []
    store = Memory()
    store.add(answer.dequantize(), library)
    return [store.search(vector, FOUND) for vector in asked]


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def stop(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self._since = now - self._since, now


async def rerank(
    client: shoal.AsyncClient,
    options: Options,
    library: Sequence[Passage],
    asked: Sequence[str],
    found: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Reorder each question's best passages by the reranker's scores.

    If the reranker is the embedder, its score of a passage adds nothing to the retrieval cosine.
    Passages are ranked by their best sentence, and this ranking is fused with the earlier one.
    """
    is_embedder = options.reranker == options.embedder

    async def one(text: str, numbers: Sequence[int]) -> list[int]:
        parts = [
            library[number].sentences if is_embedder else [library[number].searched]
            for number in numbers
        ]
        answer = await client.score(
            options.reranker,
            text,
            [part for each in parts for part in each],
            timeout=common.TIMEOUT,
        )
        ends = np.cumsum([len(each) for each in parts])
        best = np.maximum.reduceat(answer.scores, [0, *ends[:-1]])
        ranked = [numbers[place] for place in np.argsort(-best, kind="stable")]
        return fuse(numbers, ranked) if is_embedder else ranked

    calls = [
        lambda text=text, numbers=numbers[: options.candidates]: one(text, numbers)
        for text, numbers in zip(asked, found, strict=True)
    ]
    return await common.gather("reranking", calls)


def ndcg(
    found: Sequence[int], library: Sequence[Passage], gains: Mapping[str, int], depth: int = 10
) -> float:
    """Return nDCG over sections, each at the rank of its best passage."""
    return compute_ndcg([library[number].section for number in found], gains, depth)


def compute_ndcg(found: Sequence[str], gains: Mapping[str, int], depth: int = 10) -> float:
    """Return nDCG of names, best first; repeated ones count where they are first."""
    ranked = list(dict.fromkeys(found))[:depth]
    gained = sum(gains.get(name, 0) / math.log2(place + 2) for place, name in enumerate(ranked))
    ideal = sorted(gains.values(), reverse=True)[:depth]
    return gained / sum(gain / math.log2(place + 2) for place, gain in enumerate(ideal))


def exact(found: Sequence[int], library: Sequence[Passage], gains: Mapping[str, int]) -> bool:
    """Return True if the first passage is from the section that answers the question."""
    return bool(found) and gains.get(library[found[0]].section) == max(gains.values())


async def evaluate(options: Options) -> None:
    library = passages(options.pages)
    asked = questions(options.questions, library, options.limit)
    if not asked:
        raise Advice(
            f"{options.questions} has no question that these pages answer: name others by "
            "--pages or --questions"
        )
    store = open_store(options.store)
    async with common.mesh(options.endpoint) as client:
        found, seconds = await search(
            client, store, options, library, [question.text for question in asked]
        )
    quality = {
        stage: {
            "ndcg_10": float(
                np.mean(
                    [
                        ndcg(ranked, library, one.gains)
                        for ranked, one in zip(found[stage], asked, strict=True)
                    ]
                )
            ),
            "right_first": float(
                np.mean(
                    [
                        exact(ranked, library, one.gains)
                        for ranked, one in zip(found[stage], asked, strict=True)
                    ]
                )
            ),
            "milliseconds_per_question": 1000 * seconds[stage] / len(asked),
        }
        for stage in STAGES
        if stage in found
    }
    if options.json:
        common.print_json(
            {
                "passages": len(library),
                "questions": len(asked),
                "store": options.store,
                "index_seconds": seconds["indexing"],
                "stages": quality,
            }
        )
        return
    print(
        f"embedder {options.embedder}, sparse {options.sparse or 'BM25'}, reranker "
        f"{options.reranker}{note(options)}"
    )
    print(
        f"{len(library):,} passages indexed in {seconds['indexing']:.1f} s, dense vectors in "
        f"{options.store}"
    )
    common.table(
        f"{len(asked)} questions",
        ("stage", "nDCG@10", "right section first", "ms a question"),
        [
            (
                stage,
                f"{one['ndcg_10']:.3f}",
                f"{one['right_first']:.2f}",
                f"{one['milliseconds_per_question']:,.1f}",
            )
            for stage, one in quality.items()
        ],
    )


def note(options: Options) -> str:
    return (
        " (the embedder itself: by best sentence, fused with hybrid)"
        if options.reranker == options.embedder
        else ""
    )


async def print_answer(options: Options) -> None:
    """Print the best sections for --ask."""
    library = passages(options.pages)
    store = open_store(options.store)
    async with common.mesh(options.endpoint) as client:
        found, _ = await search(client, store, options, library, [options.ask])
    best = [library[number] for number in found["reranked"][0][:5]]
    if options.json:
        common.print_json([asdict(passage) for passage in best])
        return
    drawn = Table(title=options.ask, title_justify="left", show_lines=True)
    drawn.add_column("section")
    drawn.add_column("passage", ratio=1)
    for passage in best:
        drawn.add_row(
            passage.section, passage.text if len(passage.text) <= 300 else passage.text[:299] + "…"
        )
    Console().print(drawn)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: print_answer(options) if options.ask else evaluate(options))


if __name__ == "__main__":
    sys.exit(main())
