"""Put descriptions of goods into a tree of 10,000 categories: retrieve by embedding, rerank,
classify the branch.

    python -m examples.taxonomy
    python -m examples.taxonomy --reranker cross-encoder/ms-marco-MiniLM-L-6-v2 \\
        --extractor knowledgator/gliclass-base-v3.0

The tree is WordNet 3.0's artefacts and food (licence in examples/data/LICENSE-WordNet). An item is
the definition of a leaf category. Categories are indexed by their names and their parents, never by
their own definitions, so an item can be placed only by its meaning.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import shoal
from numpy.typing import NDArray

from examples import common
from examples.common import Floats

LABEL_CHARACTERS = 1_000
"""Maximum length of a label; the mesh refuses one of more than 1,024."""


@dataclass(frozen=True, slots=True)
class Category:
    """A category. `above` is its parent's number, -1 for a root."""

    above: int
    names: tuple[str, ...]
    definition: str


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality and speed of one stage. `items_per_second` does not include indexing the tree."""

    stage: str
    accuracy_1: float
    """Share of items with the right category first."""
    accuracy_5: float
    """Share of items with the right category among the first five."""
    branch: float
    """Share of items with a first category below the right one."""
    items_per_second: float


class Tree:
    """The first `size` categories; parents precede children, so any prefix is a tree."""

    def __init__(self, size: int) -> None:
        rows = common.rows("categories")
        self.categories = [
            Category(int(above) if above else -1, tuple(names.split("; ")), definition)
            for _, above, names, definition in rows[:size]
        ]
        inner = {category.above for category in self.categories}
        self.leaves = [number for number in range(len(self.categories)) if number not in inner]

    def short(self, number: int) -> str:
        """Return a category's text for the index: its names and its parent's."""
        category = self.categories[number]
        above = (
            f", a kind of {self.categories[category.above].names[0]}" if category.above >= 0 else ""
        )
        return ", ".join(category.names) + above

    def long(self, number: int) -> str:
        """Return a category's names with its parent's definition, for the reranker."""
        above = self.categories[number].above
        return (
            f"{self.short(number)} ({self.categories[above].definition})"
            if above >= 0
            else self.short(number)
        )

    def branch(self, number: int) -> str:
        """Return the parent category as a label."""
        above = self.categories[number].above
        if above < 0:
            return self.categories[number].names[0]
        category = self.categories[above]
        return f"{', '.join(category.names)}: {category.definition}"[:LABEL_CHARACTERS]


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "")
    parser.add_argument(
        "--reranker",
        default=common.MINILM,
        metavar="MODEL",
        help="the model that scores item and category",
    )
    parser.add_argument(
        "--extractor",
        default=common.MINILM,
        metavar="MODEL",
        help="the model that classifies items into branches",
    )
    parser.add_argument(
        "--limit", type=common.at_least(1), default=300, metavar="N", help="items to place"
    )
    parser.add_argument(
        "--categories",
        type=common.at_least(100),
        default=10_000,
        metavar="N",
        help="size of the tree",
    )
    parser.add_argument(
        "--candidates",
        type=common.at_least(5),
        default=20,
        metavar="N",
        help="categories to rerank for each item",
    )
    parser.add_argument(
        "--seed", type=common.at_least(0), default=18, help="seed of the sample of items"
    )
    return Options(**vars(parser.parse_args(given)))


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    embedder: str
    reranker: str
    extractor: str
    json: bool
    limit: int
    categories: int
    candidates: int
    seed: int


async def place(options: Options) -> None:
    tree = Tree(options.categories)
    truth = random.Random(options.seed).sample(tree.leaves, min(options.limit, len(tree.leaves)))
    items = [tree.categories[number].definition for number in truth]
    async with common.mesh(options.endpoint) as client:
        await common.warm(client, options.embedder)
        began = time.perf_counter()
        texts = [tree.short(number) for number in range(len(tree.categories))]
        index = await common.encode(
            client, options.embedder, texts, "indexing the tree", "document"
        )
        indexed = time.perf_counter() - began

        began = time.perf_counter()
        vectors = await common.encode(client, options.embedder, items, "encoding items", "query")
        near = vectors @ index.T
        candidates = np.argsort(-near, axis=1, kind="stable")[:, : options.candidates]
        retrieved = np.take_along_axis(near, candidates, axis=1)
        seconds = [time.perf_counter() - began]
        reranked = await rerank(client, options.reranker, tree, items, candidates)
        seconds.append(time.perf_counter() - began)
        branches = await classify(client, options.extractor, tree, items, candidates)
        seconds.append(time.perf_counter() - began)
    # Scores of different models are not comparable: standardise them within each item.
    scores = [
        retrieved,
        alike(retrieved) + alike(reranked),
        alike(retrieved) + alike(reranked) + alike(branches),
    ]
    stages = ("embedding alone", "+ rerank", "+ classify")
    found = [
        judge(tree, stage, truth, candidates, score, spent)
        for stage, score, spent in zip(stages, scores, seconds, strict=True)
    ]
    if options.json:
        common.print_json(
            {
                "categories": len(texts),
                "items": len(items),
                "index_seconds": indexed,
                "stages": [asdict(one) for one in found],
            }
        )
        return
    report(tree, options, found, indexed)
    examples(tree, items, truth, candidates, scores)


async def rerank(
    client: shoal.AsyncClient,
    model: str,
    tree: Tree,
    items: Sequence[str],
    candidates: NDArray[np.intp],
) -> Floats:
    """Score each item with its candidates, [items, candidates]."""

    async def one(item: str, near: NDArray[np.intp]) -> Floats:
        return (
            await client.score(
                model, item, [tree.long(number) for number in near], timeout=common.TIMEOUT
            )
        ).scores

    calls = [
        lambda item=item, near=near: one(item, near)
        for item, near in zip(items, candidates, strict=True)
    ]
    return np.stack(await common.gather("reranking", calls))


async def classify(
    client: shoal.AsyncClient,
    model: str,
    tree: Tree,
    items: Sequence[str],
    candidates: NDArray[np.intp],
) -> Floats:
    """Score each item with the branches of its candidates, [items, candidates]."""

    async def one(item: str, near: NDArray[np.intp]) -> list[float]:
        branches = [tree.branch(number) for number in near]
        answer = await client.classify(
            model, item, list(dict.fromkeys(branches)), multi_label=True, timeout=common.TIMEOUT
        )
        scores = {label.label: label.score for label in answer[0].labels}
        return [scores[branch] for branch in branches]

    calls = [
        lambda item=item, near=near: one(item, near)
        for item, near in zip(items, candidates, strict=True)
    ]
    return np.asarray(await common.gather("classifying", calls), np.float32)


def alike(scores: Floats) -> Floats:
    """Standardise each row to mean 0 and deviation 1."""
    spread = scores.std(axis=1, keepdims=True)
    found: Floats = (scores - scores.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-9)
    return found


def judge(
    tree: Tree,
    stage: str,
    truth: Sequence[int],
    candidates: NDArray[np.intp],
    scores: Floats,
    seconds: float,
) -> Quality:
    ranked = best(candidates, scores)
    wanted = np.asarray(truth)
    above = np.asarray([category.above for category in tree.categories])
    return Quality(
        stage,
        float(np.mean(ranked[:, 0] == wanted)),
        float(np.mean((ranked[:, :5] == wanted[:, None]).any(axis=1))),
        float(np.mean(above[ranked[:, 0]] == above[wanted])),
        len(wanted) / seconds,
    )


def best(candidates: NDArray[np.intp], scores: Floats) -> NDArray[np.intp]:
    """Sort the candidates of each item, best first."""
    return np.take_along_axis(candidates, np.argsort(-scores, axis=1, kind="stable"), axis=1)


def report(tree: Tree, options: Options, found: Sequence[Quality], indexed: float) -> None:
    models = (
        f"embedder {options.embedder}, reranker {options.reranker}, extractor {options.extractor}"
    )
    print(f"{models}\n{len(tree.categories):,} categories indexed in {indexed:.1f} s")
    common.table(
        f"{min(options.limit, len(tree.leaves)):,} items into {len(tree.categories):,} categories",
        ("stage", "accuracy@1", "accuracy@5", "right branch", "items/s"),
        [
            (
                one.stage,
                f"{one.accuracy_1:.3f}",
                f"{one.accuracy_5:.3f}",
                f"{one.branch:.3f}",
                f"{one.items_per_second:,.0f}",
            )
            for one in found
        ],
    )


def examples(
    tree: Tree,
    items: Sequence[str],
    truth: Sequence[int],
    candidates: NDArray[np.intp],
    scores: Sequence[Floats],
) -> None:
    """Print five items, each with the best category of the first and of the last stage."""
    alone, last = best(candidates, scores[0])[:, 0], best(candidates, scores[-1])[:, 0]
    for item, wanted, first, final in list(zip(items, truth, alone, last, strict=True))[:5]:
        print(
            f"{item}\n  is {tree.short(wanted)}; embedding alone: {tree.short(first)}; all "
            f"stages: {tree.short(final)}"
        )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: place(options))


if __name__ == "__main__":
    sys.exit(main())
