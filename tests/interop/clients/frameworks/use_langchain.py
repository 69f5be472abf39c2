"""LangChain's embeddings and rerankers of OpenAI, Cohere, Hugging Face, Ollama and Voyage.

VoyageAIEmbeddings counts tokens with tokenizers from Hugging Face's hub, which is not reachable
here.
"""

import asyncio
import os
from functools import reduce
from operator import add
from typing import Any

import openai
from checking import (
    ALONE,
    BASE,
    CALLER,
    LIMITED,
    MODEL,
    QUERY,
    SYSTEM,
    TEXTS,
    USER,
    VECTORS,
    WAITED,
    WRITER,
    check,
    distance,
    is_streamed,
    is_written,
    ranked,
    refused,
    waits,
)
from checking import TOKENS as MOST
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_voyageai import VoyageAIRerank

TOKENS = os.environ["INTEROP_TOKENS"]
documents = [Document(text, metadata={"index": index}) for index, text in enumerate(TEXTS)]


def openai_embeddings(base: str, **more: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        base_url=f"{base}/v1", api_key="any", model=more.pop("model", MODEL), **more
    )


as_texts = openai_embeddings(BASE, check_embedding_ctx_length=False)
slow = openai_embeddings(LIMITED, check_embedding_ctx_length=False)
cohere = CohereEmbeddings(base_url=BASE, cohere_api_key="any", model=MODEL)
hub = HuggingFaceEndpointEmbeddings(
    model_kwargs={"model": f"{BASE}/tei/{MODEL}"}, huggingfacehub_api_token="any"
)
ollama = OllamaEmbeddings(base_url=BASE, model=MODEL)


def embed(embeddings: Any) -> float:
    return max(
        distance(embeddings.embed_documents(TEXTS), VECTORS),
        distance([embeddings.embed_query(TEXTS[0])], ALONE),
    )


def as_tokens() -> float:
    """Unmodified LangChain sends ids of cl100k_base."""
    return embed(openai_embeddings(TOKENS))


def rerank(ranker: Any) -> float:
    found = ranker.compress_documents(documents, QUERY)
    return ranked(
        (document.metadata["index"], document.metadata["relevance_score"]) for document in found
    )


def chat(model: Any) -> None:
    messages = [("system", SYSTEM), ("human", USER)]
    is_written(model.invoke(messages).content)
    is_streamed((part.content for part in model.stream(messages)), is_written)


def tools(model: Any) -> None:
    places = {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
    }
    function = {
        "name": "weather",
        "description": "The weather.",
        "parameters": {**places, "additionalProperties": False},
    }
    tool = {"type": "function", "function": function}
    bound = model.bind_tools([tool], tool_choice="weather")
    messages = [("human", "a text")]
    (call,) = bound.invoke(messages).tool_calls
    assert (call["name"], call["args"]["place"] in ("here", "there")) == ("weather", True)
    parts = list(bound.stream(messages))
    assert any(part.tool_call_chunks for part in parts)
    (streamed,) = reduce(add, parts).tool_calls
    assert (streamed["name"], streamed["args"]["place"] in ("here", "there")) == ("weather", True)
    conversation = [
        *messages,
        AIMessage("", tool_calls=[call]),
        ToolMessage("sun", tool_call_id=call["id"]),
    ]
    assert isinstance(bound.invoke(conversation), AIMessage)


def errors() -> None:
    refused(
        openai.NotFoundError,
        lambda: openai_embeddings(
            BASE, model="nobody", check_embedding_ctx_length=False
        ).embed_query("a"),
    )
    refused(
        openai.BadRequestError, lambda: openai_embeddings(BASE).embed_query("a"), ("param", "input")
    )


check("OpenAIEmbeddings(check_embedding_ctx_length=False)", lambda: embed(as_texts))
check("OpenAIEmbeddings, token ids (SHOAL_CL100K)", as_tokens)
check(
    "OpenAIEmbeddings.aembed_documents",
    lambda: distance(asyncio.run(as_texts.aembed_documents(TEXTS)), VECTORS),
)
check(
    f"OpenAIEmbeddings {WAITED}",
    lambda: waits(lambda: distance(slow.embed_documents(TEXTS), VECTORS)),
)
check(
    "ChatOpenAI, invoke and stream",
    lambda: chat(ChatOpenAI(base_url=f"{BASE}/v1", api_key="any", model=WRITER, max_tokens=MOST)),
)
check(
    "ChatOpenAI.bind_tools, invoke and stream",
    lambda: tools(ChatOpenAI(base_url=f"{BASE}/v1", api_key="any", model=CALLER, max_tokens=200)),
)
check(
    "ChatOllama, invoke and stream",
    lambda: chat(ChatOllama(base_url=BASE, model=WRITER, num_predict=MOST)),
)
check("CohereEmbeddings", lambda: embed(cohere))
check(
    "CohereRerank",
    lambda: rerank(
        CohereRerank(base_url=BASE, cohere_api_key="any", model=MODEL, top_n=len(TEXTS))
    ),
)
check("HuggingFaceEndpointEmbeddings", lambda: embed(hub))
check("OllamaEmbeddings", lambda: embed(ollama))
check(
    "VoyageAIRerank",
    lambda: rerank(VoyageAIRerank(base_url=f"{BASE}/v1", voyage_api_key="any", model=MODEL)),
)
check("errors", errors)
