"""Another embedding model behind an alias: questions are answered throughout, while the
pages are encoded by the new model, and the alias is switched, rolled back and switched again.

    python -m examples.migration --to sentence-transformers/all-mpnet-base-v2
    python -m examples.migration --to BAAI/bge-small-en-v1.5 --store qdrant

Each answer says which model it is of, and the question is searched in the index of that model. So
no question meets vectors of another model, whenever the alias moves.

Without `--to` the new model is the first three layers of the old one, to run without a download.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import shoal
from safetensors.numpy import load_file, save_file

from examples import common, rag
from examples.common import Advice, Floats
from services.local.settings import packaged_minilm

ALIAS = "pages-example"
CUT_MODEL = "examples/minilm-3-layers"
CUT_LAYERS = 3
DEPTH = 10
"""Number of passages that are compared."""
ANSWERS = 20
"""Number of questions that are answered in each phase of the change."""


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    embedder: str
    to: str
    store: str
    pages: tuple[str, ...]
    json: bool
    limit: int


@dataclass
class Tally:
    """The answers to questions by alias while it moves."""

    answers: Counter[str] = field(default_factory=Counter)
    """Number of answers by model."""
    errors: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each question."""


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "")
    parser.add_argument("--to", default="", metavar="MODEL", help="the new model")
    parser.add_argument(
        "--store", choices=("memory", *rag.PACKAGES), default="memory", help="store of the vectors"
    )
    rag.add_pages(parser)
    parser.add_argument(
        "--limit", type=common.at_least(1), default=1_000, metavar="N", help="questions to ask"
    )
    found = vars(parser.parse_args(given))
    return Options(**found | {"pages": tuple(found["pages"])})


def write_cut_model(directory: Path) -> None:
    """Write the bundled model with its first layers only. Raises Advice if it is not installed."""
    source = packaged_minilm()
    if source is None:
        raise Advice("name the new model by --to, or install the bundled one: make demo")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": CUT_LAYERS}))
    file = directory / "model.safetensors"
    dropped = tuple(f"layer.{n}." for n in range(CUT_LAYERS, config["num_hidden_layers"]))
    tensors = {
        name: tensor
        for name, tensor in load_file(file).items()
        if not any(part in name for part in dropped)
    }
    save_file(tensors, file, metadata={"format": "pt"})


@asynccontextmanager
async def mesh(options: Options) -> AsyncIterator[tuple[shoal.AsyncClient, str]]:
    """Yield a client and the id of the new model."""
    if options.to:
        async with common.mesh(options.endpoint) as client:
            yield client, options.to
        return
    if options.endpoint:
        raise Advice("--endpoint needs --to: a running mesh does not have the cut model")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-cut-")))
        write_cut_model(folder)
        async with common.mesh(None, [f"{CUT_MODEL}={folder}"]) as client:
            yield client, CUT_MODEL


class Search:
    """An index for each model, of which a question uses that of the model that answered."""

    def __init__(self, client: shoal.AsyncClient, store: str, library: Sequence[rag.Passage]):
        self._client, self._store, self._library = client, store, library
        # The state: the index of each model that has encoded the passages.
        self._indexes: dict[str, rag.Store] = {}

    async def index(self, model: str) -> None:
        """Encode all passages by a model into a new index."""
        texts = [passage.searched for passage in self._library]
        vectors = await common.encode(
            self._client, model, texts, f"passages by {model}", "document"
        )
        store = rag.open_store(self._store)
        store.add(vectors, self._library)
        self._indexes[model] = store

    async def answer_question(self, question: str) -> tuple[str, list[int]]:
        """Return the model that the alias stood for, and the best passages in its index."""
        result = await self._client.encode(
            ALIAS, question, role="query", normalize=True, timeout=common.TIMEOUT
        )
        return _model(result), self.best(_model(result), result.dequantize()[0])

    async def compare(self, questions: Sequence[str]) -> dict[str, list[list[int]]]:
        """Return the best passages by both models of the change, by model."""
        result = await self._client.encode(
            ALIAS,
            questions,
            role="query",
            normalize=True,
            both_models=True,
            timeout=common.TIMEOUT,
        )
        if result.other is None or result.alias is None:
            raise Advice(f"the alias {ALIAS} was changed by another caller: run the example again")
        by_model = {_model(result): result, result.alias.other_model: result.other}
        return {
            model: [self.best(model, vector) for vector in found.dequantize()]
            for model, found in by_model.items()
        }

    def best(self, model: str, vector: Floats) -> list[int]:
        return self._indexes[model].search(vector, DEPTH)


def _model(result: shoal.EncodeResult) -> str:
    if result.alias is None:
        raise Advice(f"the alias {ALIAS} was removed by another caller: run the example again")
    return result.alias.model


async def ask(search: Search, questions: Sequence[str], tally: Tally, stop: asyncio.Event) -> None:
    """Ask questions by the alias until `stop`."""
    number = 0
    while not stop.is_set():
        try:
            model, _ = await search.answer_question(questions[number % len(questions)])
        except shoal.ShoalError as error:
            tally.errors.append(str(error))
        else:
            tally.answers[model] += 1
        tally.changed.set()
        number += 1


async def _more_answers(tally: Tally, model: str) -> None:
    """Wait for further answers by a model. Raises Advice for a failed question."""
    wanted = tally.answers[model] + ANSWERS
    while tally.answers[model] < wanted:
        if tally.errors:
            raise Advice(f"a question failed: {tally.errors[0]}")
        tally.changed.clear()
        await tally.changed.wait()


async def migrate(
    client: shoal.AsyncClient, search: Search, old: str, new: str, asked: Sequence[rag.Question]
) -> tuple[Tally, dict[str, list[list[int]]]]:
    """Change the alias from `old` to `new`, back, and again, while questions are asked."""
    aliases, tally, stop = client.aliases, Tally(), asyncio.Event()
    texts = [question.text for question in asked]
    await aliases.set(ALIAS, old)
    await search.index(old)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(search, texts, tally, stop))
        try:
            await _more_answers(tally, old)
            await aliases.start(ALIAS, new)
            await search.index(new)
            rankings = await search.compare(texts)
            for step, model in (
                (aliases.switch, new),
                (aliases.rollback, old),
                (aliases.switch, new),
            ):
                await step(ALIAS, timeout=common.TIMEOUT)
                common.console.print(f"{ALIAS}: {model} answers", highlight=False)
                await _more_answers(tally, model)
            await aliases.finish(ALIAS)
        finally:
            stop.set()
    return tally, rankings


def overlap(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the share of passages that two rankings have in common."""
    return len(set(first) & set(second)) / max(len(first), len(second))


async def run(options: Options) -> None:
    library = rag.passages(options.pages)
    asked = rag.questions(common.DATA / "questions.tsv", library, options.limit)
    async with mesh(options) as (client, new):
        old = options.embedder
        for model in (old, new):
            await common.warm(client, model)
        search = Search(client, options.store, library)
        try:
            tally, rankings = await migrate(client, search, old, new, asked)
        finally:
            await client.aliases.remove(ALIAS)
    shared = [overlap(*pair) for pair in zip(rankings[old], rankings[new], strict=True)]
    quality = {
        model: float(
            np.mean(
                [
                    rag.ndcg(found, library, one.gains)
                    for found, one in zip(rankings[model], asked, strict=True)
                ]
            )
        )
        for model in (old, new)
    }
    if options.json:
        common.print_json(
            {
                "passages": len(library),
                "questions": len(asked),
                "answers": dict(tally.answers),
                "errors": tally.errors,
                "overlap_10": float(np.mean(shared)),
                "ndcg_10": quality,
            }
        )
        return
    print(
        f"{len(library):,} passages in {options.store}; {sum(tally.answers.values()):,} questions "
        f"answered during the change, {len(tally.errors)} failed; "
        f"overlap@{DEPTH} of both models {np.mean(shared):.3f}"
    )
    common.table(
        f"{len(asked)} questions",
        ("model", f"nDCG@{DEPTH}", "answers by the alias"),
        [(model, f"{quality[model]:.3f}", f"{tally.answers[model]:,}") for model in (old, new)],
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
