"""Extract entities and relations from documents into a graph: a GraphML file and an HTML page that
draws it without a network.

    python -m examples.graph
    python -m examples.graph --query Belgium
    python -m examples.graph --documents my/texts --labels person,company,product \\
        --relations "works for,makes"
    python -m examples.graph --extractor urchade/gliner_small-v2.1

The documents are definitions of places, battles and people from WordNet 3.0 (licence in
examples/data/LICENSE-WordNet). WordNet also has each entry's kind and the place that it lies in, so
the example can measure quality. With --extractor a model finds the entities, and the relations if
it supports them. Without one, capitalised words are candidates, and an embedder compares their
context with the labels. That is much less accurate; the output names the method.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import shoal

from examples import common
from examples.common import Advice

LABELS = (
    "country",
    "state",
    "city",
    "island",
    "river",
    "lake",
    "sea",
    "mountain",
    "battle",
    "person",
)
NO_ENTITY = "nationality"
"""The label of capitalised words that are not entities (French, Asian). The embedder chooses
between it and the other labels; the graph leaves these words out.
"""
PLACES = frozenset(LABELS) - {"battle", "person"}
WATERS = frozenset({"river", "lake", "sea"})
LANDS = frozenset({"country", "state"})
RELATIONS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "is in": (PLACES - {"sea"} | {"battle"}, PLACES - WATERS),
    "is the capital of": (frozenset({"city"}), LANDS),
    "flows into": (frozenset({"river"}), WATERS),
    "is next to": (PLACES - WATERS, WATERS),
    "is from": (frozenset({"person"}), PLACES - WATERS),
    "was fought by": (frozenset({"battle"}), frozenset({"person"})),
}
"""Relations, with the kinds of their heads and tails. With --labels, any kinds may be related."""
MENTIONS = 4
"""Mentions from which an entity's kind is inferred; more add little."""
_WORD = r"[A-Z][\w'\u2019-]*"
_NAME = re.compile(rf"{_WORD}(?:(?: of(?: the)?| de| la| du| del)? {_WORD})*")


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    """The entity that the document is about; empty if unknown."""
    text: str


@dataclass(frozen=True, slots=True)
class Mention:
    """An entity's name in a document, its first letter at `start`."""

    document: int
    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Edge:
    head: str
    tail: str
    relation: str
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Graph:
    kinds: Mapping[str, str]
    """Kinds of entities, by name."""
    edges: Sequence[Edge]
    how: str
    """The method by which entities and relations were found."""


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    embedder: str
    extractor: str
    documents: Path | None
    labels: tuple[str, ...]
    relations: tuple[str, ...]
    threshold: float
    query: str
    output: Path
    json: bool
    limit: int


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "")
    parser.add_argument(
        "--extractor",
        default="",
        metavar="MODEL",
        help="a model that finds entities, such as GLiNER",
    )
    parser.add_argument(
        "--documents",
        type=Path,
        metavar="FOLDER",
        help="your own *.txt and *.md; a paragraph is a document",
    )
    parser.add_argument(
        "--labels", type=several, default=LABELS, metavar="A,B", help="the kinds of entities"
    )
    parser.add_argument(
        "--relations",
        type=several,
        default=tuple(RELATIONS),
        metavar="A,B",
        help="relations between two entities",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="minimum score of an extractor's entities",
    )
    parser.add_argument(
        "--query", default="", metavar="NAME", help="print the relations of an entity"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/graph"),
        metavar="PATH",
        help="output path, without .graphml and .html",
    )
    parser.add_argument(
        "--limit", type=common.at_least(1), default=400, metavar="N", help="documents to read"
    )
    return Options(**vars(parser.parse_args(given)))


def several(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


class Known:
    """WordNet's entries: their kinds, and the entries of which they are parts."""

    def __init__(self) -> None:
        self._rows = common.rows("entries")
        names = [row[2].split("; ") for row in self._rows]
        kinds: defaultdict[str, set[str]] = defaultdict(set)
        for row, own in zip(self._rows, names, strict=True):
            for name in own:
                kinds[name].add(row[1])
        self.kinds = {name: next(iter(own)) for name, own in kinds.items() if len(own) == 1}
        """Kinds, by name; ambiguous names are left out."""
        self.within: defaultdict[str, set[str]] = defaultdict(set)
        """The names of all entries that contain a name, by that name."""
        for number, own in enumerate(names):
            wholes = {name for whole in self._above(number) for name in names[whole]}
            for name in own:
                self.within[name] |= wholes

    def _above(self, number: int) -> set[int]:
        found: set[int] = set()
        waiting = [number]
        while waiting:
            for whole in map(int, filter(None, self._rows[waiting.pop()][4].split("; "))):
                if whole not in found:
                    found.add(whole)
                    waiting.append(whole)
        return found

    def documents(self, limit: int) -> list[Document]:
        """Return entries that name another one in their definition; a quarter are people.

        The sample is the same in each run.
        """
        people: list[Document] = []
        others: list[Document] = []
        for _, kind, names, definition, _ in self._rows:
            if any(name in self.kinds for name in _NAME.findall(definition)):
                title = names.split("; ")[0]
                (people if kind == "person" else others).append(
                    Document(title, f"{title}: {definition}")
                )
        drawn = random.Random(18)
        chosen = [
            *drawn.sample(others, min(len(others), limit - limit // 4)),
            *drawn.sample(people, min(len(people), limit // 4)),
        ]
        return chosen[:limit]


def own_documents(folder: Path, limit: int) -> list[Document]:
    files = sorted(
        file for file in folder.rglob("*") if file.suffix in (".txt", ".md") and file.is_file()
    )
    if not files:
        raise Advice(f"{folder} has no *.txt or *.md: name a folder that has")
    blocks = [
        block
        for file in files
        for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace"))
    ]
    # XML has no control characters.
    texts = (
        " ".join(re.sub(r"[\x00-\x1f\x7f\ufffe\uffff]", " ", block).split()) for block in blocks
    )
    return [Document("", text) for text in texts if len(text) >= 20][:limit]


def candidates(documents: Sequence[Document]) -> list[Mention]:
    """Return titles and words capitalised within a sentence."""
    found = []
    for number, document in enumerate(documents):
        if document.title:
            found.append(Mention(number, document.title, 0))
        found += [
            Mention(number, match[0], match.start())
            for match in _NAME.finditer(document.text, len(document.title))
            if not re.search(r"(^|[.!?] )$", document.text[: match.start()])
        ]
    return found


def around(document: Document, mention: Mention) -> str:
    """Return a mention with its context: the words after a title, or mostly those before others."""
    if mention.start == 0:
        return " ".join(document.text.split()[:10])
    before, after = (
        document.text[: mention.start].split()[-4:],
        document.text[mention.start + len(mention.name) :].split()[:2],
    )
    return f"{mention.name}. {' '.join([*before, mention.name, *after])}"


async def judged(
    client: shoal.AsyncClient, options: Options, documents: Sequence[Document]
) -> tuple[dict[str, str], list[Mention]]:
    """Classify names with the embedder, by cosine of the name and its contexts with each label."""
    mentions = candidates(documents)
    contexts: defaultdict[str, list[str]] = defaultdict(list)
    for mention in mentions:
        if len(contexts[mention.name]) < MENTIONS:
            contexts[mention.name].append(around(documents[mention.document], mention))
    pairs = [(name, text) for name, texts in contexts.items() for text in (name, *texts)]
    labels = [*options.labels, NO_ENTITY]
    with common.progress("finding entities", len(pairs)) as show:
        answer = await client.classify(
            options.embedder,
            [text for _, text in pairs],
            labels,
            timeout=common.TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (name, text), item in zip(pairs, answer, strict=True):
        weight = 1.0 if text == name else 1.0 / len(contexts[name])
        for label in item.labels:
            sums[name][label.label] += weight * label.score
    best = {name: max(labels, key=lambda label: scores[label]) for name, scores in sums.items()}
    kinds = {name: kind for name, kind in best.items() if kind != NO_ENTITY}
    return kinds, [mention for mention in mentions if mention.name in kinds]


async def extracted(
    client: shoal.AsyncClient, options: Options, documents: Sequence[Document]
) -> tuple[dict[str, str], list[Mention]]:
    """Classify names with an entity model, by the label with the highest total score."""
    with common.progress("extracting entities", len(documents)) as show:
        answer = await client.entities(
            options.extractor,
            [document.text for document in documents],
            options.labels,
            threshold=options.threshold,
            timeout=common.TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    mentions = []
    for number, item in enumerate(answer):
        for entity in item.entities:
            sums[entity.text][entity.label] += entity.score
            mentions.append(Mention(number, entity.text, entity.start))
    return {
        name: max(scores, key=lambda label: scores[label]) for name, scores in sums.items()
    }, mentions


async def related(
    client: shoal.AsyncClient,
    options: Options,
    documents: Sequence[Document],
    kinds: Mapping[str, str],
    mentions: Sequence[Mention],
) -> list[Edge]:
    """Find relations with the embedder.

    Each pair of a document's title (without one, each entity) and another entity gets the relation
    for which a statement such as "Suez is in Egypt" is nearest to the document.
    """
    pairs = dict.fromkeys(_pairs(documents, mentions))
    statements = [
        (head, tail, number, relation)
        for head, tail, number in pairs
        for relation in options.relations
        if _may_be(relation, kinds[head], kinds[tail], options)
    ]
    if not statements:
        return []
    texts = [f"{head} {relation} {tail}" for head, tail, _, relation in statements]
    said = await common.encode(client, options.embedder, texts, "comparing statements", "query")
    numbers = sorted({number for _, _, number, _ in statements})
    read = await common.encode(
        client,
        options.embedder,
        [documents[number].text for number in numbers],
        "with documents",
        "document",
    )
    places = {number: place for place, number in enumerate(numbers)}
    scores = np.einsum("sd,sd->s", said, read[[places[number] for _, _, number, _ in statements]])
    best: dict[tuple[str, str], Edge] = {}
    for (head, tail, number, relation), score in zip(statements, scores.tolist(), strict=True):
        if (head, tail) not in best or score > best[head, tail].score:
            best[head, tail] = Edge(head, tail, relation, score, documents[number].text)
    return list(best.values())


def _pairs(
    documents: Sequence[Document], mentions: Iterable[Mention]
) -> Iterable[tuple[str, str, int]]:
    """Yield head, tail and document number. With a title, the head is the first entity."""
    named: defaultdict[int, list[str]] = defaultdict(list)
    for mention in mentions:
        named[mention.document].append(mention.name)
    for number, names in named.items():
        own = list(dict.fromkeys(names))
        heads = own[:1] if documents[number].title else own
        yield from ((head, tail, number) for head in heads for tail in own if head != tail)


def _may_be(relation: str, head: str, tail: str, options: Options) -> bool:
    if relation not in RELATIONS or options.labels != LABELS:
        return True
    heads, tails = RELATIONS[relation]
    return head in heads and tail in tails


async def extracted_relations(
    client: shoal.AsyncClient, options: Options, documents: Sequence[Document]
) -> tuple[dict[str, str], list[Edge]]:
    """Extract entities and relations with a model that finds both."""
    answer = await client.relations(
        options.extractor,
        [document.text for document in documents],
        options.relations,
        entity_labels=options.labels,
        threshold=options.threshold,
        timeout=common.TIMEOUT,
    )
    kinds: dict[str, str] = {}
    edges = []
    for document, item in zip(documents, answer, strict=True):
        for one in item.relations:
            kinds |= {one.head.text: one.head.label, one.tail.text: one.tail.label}
            edges.append(Edge(one.head.text, one.tail.text, one.label, one.score, document.text))
    return kinds, edges


async def build(
    client: shoal.AsyncClient, options: Options, documents: Sequence[Document]
) -> Graph:
    """Find entities and relations, with the extractor if there is one, else with the embedder."""
    await common.warm(client, options.embedder)
    if not options.extractor:
        kinds, mentions = await judged(client, options, documents)
        edges = await related(client, options, documents, kinds, mentions)
        how = (
            "No extractor: capitalised words, judged by similarity to the labels with "
            f"{options.embedder}; relations likewise."
        )
        return Graph(kinds, edges, how)
    kinds, mentions = await extracted(client, options, documents)
    card = (await client.models.get(options.extractor)).card
    if card is not None and "relations" in card.tasks:
        more, edges = await extracted_relations(client, options, documents)
        return Graph(
            more | kinds, edges, f"Entities and relations extracted by {options.extractor}."
        )
    edges = await related(client, options, documents, kinds, mentions)
    how = (
        f"Entities extracted by {options.extractor}; relations judged by similarity with "
        f"{options.embedder}."
    )
    return Graph(kinds, edges, how)


def quality(graph: Graph, known: Known, documents: Sequence[Document]) -> dict[str, float]:
    """Compare the graph with WordNet.

    - `kind_accuracy`: share of entities with the right kind, where WordNet has exactly one.
    - `is_in_precision`: share of "is in" edges between known places that WordNet has. This is a
      lower bound, because WordNet is far from complete.
    - `is_in_recall`: share of WordNet's "is in" pairs within one document that the graph has.
    """
    judged = [
        graph.kinds[name] == kind for name, kind in known.kinds.items() if name in graph.kinds
    ]
    named = {document.title: set(_NAME.findall(document.text)) for document in documents}
    true = {
        (head, tail)
        for head, names in named.items()
        for tail in names & known.within.get(head, set())
        if head != tail
    }
    heads = {head for head, _ in true}
    found = {
        (edge.head, edge.tail)
        for edge in graph.edges
        if edge.relation == "is in" and edge.head in heads
    }
    found = {(head, tail) for head, tail in found if tail in known.kinds}
    return {
        "kinds_known": len(judged),
        "kind_accuracy": sum(judged) / max(1, len(judged)),
        "is_in_known": len(true),
        "is_in_precision": len(found & true) / max(1, len(found)),
        "is_in_recall": len(found & true) / max(1, len(true)),
    }


def write_graphml(graph: Graph, file: Path) -> None:
    """Write GraphML that networkx, Gephi, yEd and Neo4j's apoc.import.graphml can read."""
    root = ElementTree.Element("graphml", xmlns="http://graphml.graphdrawing.org/xmlns")
    for key, target, kind in (
        ("kind", "node", "string"),
        ("relation", "edge", "string"),
        ("score", "edge", "double"),
        ("text", "edge", "string"),
    ):
        ElementTree.SubElement(
            root, "key", {"id": key, "for": target, "attr.name": key, "attr.type": kind}
        )
    body = ElementTree.SubElement(root, "graph", edgedefault="directed")
    for name, kind in graph.kinds.items():
        node = ElementTree.SubElement(body, "node", id=name)
        ElementTree.SubElement(node, "data", key="kind").text = kind
    for edge in graph.edges:
        line = ElementTree.SubElement(body, "edge", source=edge.head, target=edge.tail)
        for key, value in (
            ("relation", edge.relation),
            ("score", f"{edge.score:.4f}"),
            ("text", edge.text),
        ):
            ElementTree.SubElement(line, "data", key=key).text = value
    ElementTree.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def write_html(graph: Graph, file: Path) -> None:
    """Write one HTML file that contains the graph, without entities that have no edge."""
    linked = {name for edge in graph.edges for name in (edge.head, edge.tail)}
    shown = {
        "how": graph.how,
        "nodes": [
            {"id": name, "kind": kind} for name, kind in graph.kinds.items() if name in linked
        ],
        "edges": [asdict(edge) for edge in graph.edges],
    }
    # Escaped: a document could contain "</script>".
    text = json.dumps(shown).replace("<", "\\u003c")
    template = Path(__file__).with_name("graph.html").read_text(encoding="utf-8")
    file.write_text(template.replace("/*GRAPH*/", text), encoding="utf-8")


def query(graph: Graph, name: str) -> list[Edge]:
    """Return an entity's edges, best first. Raises Advice if the graph does not have it."""
    if name not in graph.kinds:
        near = [known for known in graph.kinds if name.lower() in known.lower()][:5]
        raise Advice(
            f"the graph has no {name!r}"
            + (f"; it has {', '.join(near)}" if near else ": read more documents (--limit)")
        )
    return sorted(
        (edge for edge in graph.edges if name in (edge.head, edge.tail)),
        key=lambda edge: -edge.score,
    )


async def run(options: Options) -> None:
    known = Known() if options.documents is None else None
    documents = (
        known.documents(options.limit)
        if known is not None
        else own_documents(options.documents or Path(), options.limit)
    )
    async with common.mesh(options.endpoint) as client:
        graph = await build(client, options, documents)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    graphml, page = (
        options.output.with_name(options.output.name + ending) for ending in (".graphml", ".html")
    )
    write_graphml(graph, graphml)
    write_html(graph, page)
    measured = (
        quality(graph, known, documents) if known is not None and options.labels == LABELS else {}
    )
    asked = query(graph, options.query) if options.query else []
    if options.json:
        common.print_json(
            {
                "documents": len(documents),
                "entities": len(graph.kinds),
                "relations": len(graph.edges),
                "how": graph.how,
                "files": [str(graphml), str(page)],
                "quality": measured,
                "query": [asdict(edge) for edge in asked],
            }
        )
        return
    report(graph, documents, measured)
    for edge in asked:
        print(f"{edge.head} {edge.relation} {edge.tail} ({edge.score:.2f}): {edge.text}")
    print(f"written: {graphml} and {page}, which a browser draws")


def report(graph: Graph, documents: Sequence[Document], measured: Mapping[str, float]) -> None:
    print(graph.how)
    kinds = sorted(set(graph.kinds.values()))
    count = [
        (kind, str(sum(own == kind for own in graph.kinds.values())), *_example(graph, kind))
        for kind in kinds
    ]
    common.table(
        f"{len(graph.kinds)} entities in {len(documents)} documents",
        ("kind", "entities", "most related"),
        count,
    )
    relations = sorted({edge.relation for edge in graph.edges})
    lines = []
    for relation in relations:
        own = [edge for edge in graph.edges if edge.relation == relation]
        best = max(own, key=lambda edge: edge.score)
        lines.append((relation, str(len(own)), f"{best.head} {relation} {best.tail}"))
    common.table(f"{len(graph.edges)} relations", ("relation", "edges", "surest"), lines)
    if measured:
        headings = ("against WordNet", "value", "of")
        common.table(
            "quality",
            headings,
            [
                (
                    "kind of entity, accuracy",
                    f"{measured['kind_accuracy']:.3f}",
                    f"{measured['kinds_known']:.0f} entities",
                ),
                ("is in, precision (at least)", f"{measured['is_in_precision']:.3f}", ""),
                (
                    "is in, recall",
                    f"{measured['is_in_recall']:.3f}",
                    f"{measured['is_in_known']:.0f} pairs",
                ),
            ],
        )


def _example(graph: Graph, kind: str) -> tuple[str]:
    degrees: defaultdict[str, int] = defaultdict(int)
    for edge in graph.edges:
        degrees[edge.head] += 1
        degrees[edge.tail] += 1
    return (
        max(
            (name for name, own in graph.kinds.items() if own == kind),
            key=lambda name: degrees[name],
        ),
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
