"""Functions of Chroma and LanceDB: store texts and find them."""

import os
import tempfile
from typing import Any

import chromadb
import lancedb
from checking import BASE, LIMITED, MODEL, TEXTS, VECTORS, WAITED, check, distance, refused, waits
from chromadb.utils.embedding_functions import (
    HuggingFaceEmbeddingServer,
    OllamaEmbeddingFunction,
    OpenAIEmbeddingFunction,
)
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector

os.environ["OPENAI_API_KEY"] = "any"
KNOWN = "text-embedding-3-small"
"""An alias with dimensions: LanceDB accepts only three names."""


def openai_embeddings(base: str, model: str = MODEL) -> OpenAIEmbeddingFunction:
    return OpenAIEmbeddingFunction(api_key="any", api_base=f"{base}/v1", model_name=model)


def stored(function: Any, name: str) -> float:
    """Return the vectors of a collection; the requested text must be the first result."""
    collection = chromadb.EphemeralClient().create_collection(name, embedding_function=function)
    collection.add(ids=[str(index) for index in range(len(TEXTS))], documents=TEXTS)
    assert collection.query(query_texts=[TEXTS[4]], n_results=2)["ids"][0][0] == "4"
    found = collection.get(include=["embeddings"])
    order = sorted(range(len(TEXTS)), key=lambda index: int(found["ids"][index]))
    return distance((found["embeddings"][index] for index in order), VECTORS)


def in_lancedb() -> float:
    width = len(VECTORS[0])
    function = get_registry().get("openai").create(name=KNOWN, dim=width, base_url=f"{BASE}/v1")

    class Row(LanceModel):  # type: ignore[misc]
        text: str = function.SourceField()
        vector: Vector(width) = function.VectorField()  # type: ignore[valid-type]

    with tempfile.TemporaryDirectory() as folder:
        table = lancedb.connect(folder).create_table("texts", schema=Row)
        table.add([{"text": text} for text in TEXTS])
        assert table.search(TEXTS[4]).limit(1).to_list()[0]["text"] == TEXTS[4]
        rows = {row["text"]: row["vector"] for row in table.to_arrow().to_pylist()}
    return distance((rows[text] for text in TEXTS), VECTORS)


check("chromadb OpenAIEmbeddingFunction", lambda: stored(openai_embeddings(BASE), "openai"))
check(
    "chromadb HuggingFaceEmbeddingServer",
    lambda: stored(HuggingFaceEmbeddingServer(f"{BASE}/tei/{MODEL}/embed"), "tei"),
)
check(
    "chromadb OllamaEmbeddingFunction",
    lambda: stored(OllamaEmbeddingFunction(BASE, MODEL), "ollama"),
)
check(
    f"chromadb OpenAIEmbeddingFunction {WAITED}",
    lambda: waits(lambda: distance(openai_embeddings(LIMITED)(TEXTS), VECTORS)),
)
check(
    "chromadb errors", lambda: refused(Exception, lambda: openai_embeddings(BASE, "nobody")(["a"]))
)
check("lancedb openai (an alias)", in_lancedb)
