"""The base of all components of shoal-haystack: configuration, serialisation and connections."""

from __future__ import annotations

from typing import Any, Self

from haystack import Document, default_from_dict, default_to_dict
from haystack.utils import Secret

from shoal import ModelHandle

TOKEN = Secret.from_env_var("SHOAL_TOKEN", strict=False)


class ModelBase:
    """A component that calls one model.

    Args:
        model: The model's id, `org/name`.
        address: Routers, `host:port` separated by commas; default SHOAL_ADDRESS, otherwise
            127.0.0.1:50051.
        token: A Secret; one from a variable is written as the variable's name, one from a string
            cannot be written.
        timeout: Seconds for a request, retries included.
        query_instruction: A text that replaces the model's prompt of queries.
        options: Further arguments of the calls of `shoal.Client`, such as {"dimensions": 256}.
    """

    def __init__(
        self,
        model: str,
        *,
        address: str | None = None,
        tenant: str = "",
        token: Secret | None = TOKEN,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        self._written: dict[str, Any] = {
            "model": model,
            "address": address,
            "tenant": tenant,
            "token": token,
            "timeout": timeout,
            "query_instruction": query_instruction,
            "options": options,
        }
        self._handle = ModelHandle(
            model,
            address=address,
            tenant=tenant,
            token=token.resolve_value() if token else None,
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )

    def to_dict(self) -> dict[str, Any]:
        """Serialise the component. Raises ValueError for a token not from the environment."""
        return default_to_dict(self, **self._written)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create a component from the output of `to_dict`."""
        return default_from_dict(cls, data)

    def close(self) -> None:
        """Close the connection; the next run opens a new one."""
        self._handle.close()

    async def close_async(self) -> None:
        """Close the running event loop's connection; the next run opens a new one."""
        await self._handle.aclose()

    @property
    def _meta(self) -> dict[str, Any]:
        return {"model": self._handle.model}


def checked_text(text: object) -> str:
    """Raise TypeError for a value that is not a string."""
    if not isinstance(text, str):
        raise TypeError(
            f"a text is embedded, not {type(text).__name__}; documents are for the document "
            "embedder"
        )
    return text


def checked(documents: object) -> list[Document]:
    """Raise TypeError for a value that is not a list of documents."""
    if not isinstance(documents, list) or not all(
        isinstance(document, Document) for document in documents
    ):
        raise TypeError("a list of Documents is taken; a text is for the text embedder")
    return documents


def texts(
    documents: list[Document],
    meta_fields: list[str] = [],  # noqa: B006
    separator: str = "\n",
) -> list[str]:
    """Return each document's text for the model: its meta fields that are set, then its content."""
    return [
        separator.join(
            [
                *(str(document.meta[name]) for name in meta_fields if document.meta.get(name)),
                document.content or "",
            ]
        )
        for document in documents
    ]
