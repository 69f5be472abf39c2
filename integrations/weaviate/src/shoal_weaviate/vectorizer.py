"""`ShoalVectorizer`: self-provided vectors of Weaviate's collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shoal import ModelHandle
from shoal.tasks import Role
from weaviate.classes.config import Configure
from weaviate.classes.data import DataObject

Form = Literal["dense", "multi_vector"]
Vectors = dict[str, Any]


class ShoalVectorizer:
    """Makes objects with one named vector for each of `forms`, all of one forward pass: "dense",
    "multi_vector".

    Methods with the prefix `a` are coroutines. Other arguments are those of `shoal.ModelHandle`.

    Args:
        model: The id of a model that supports the forms, `org/name`.
        names: Other names of the vectors, by form.
    """

    def __init__(
        self,
        model: str,
        *,
        forms: Sequence[Form] = ("dense",),
        names: Mapping[Form, str] | None = None,
        **settings: Any,
    ) -> None:
        if not forms or set(forms) - {"dense", "multi_vector"}:
            raise ValueError(
                f'forms are "dense" and "multi_vector", not {list(forms)}: Weaviate stores no '
                "others"
            )
        self.forms = tuple(forms)
        self.names = {form: (names or {}).get(form, form) for form in self.forms}
        self.handle = ModelHandle(model, **settings)

    def vector_config(self) -> list[Any]:
        """The `vector_config` for `collections.create`: Weaviate computes none of these vectors."""
        makers = {
            "dense": Configure.Vectors.self_provided,
            "multi_vector": Configure.MultiVectors.self_provided,
        }
        return [makers[form](name=self.names[form]) for form in self.forms]

    def vectors(self, texts: Sequence[str], role: Role = "document") -> list[Vectors]:
        """Return, for each text, its vectors by name."""
        return self._named(len(texts), self.handle.forms(texts, self.forms, role))

    async def avectors(self, texts: Sequence[str], role: Role = "document") -> list[Vectors]:
        return self._named(len(texts), await self.handle.aforms(texts, self.forms, role))

    def objects(
        self, rows: Sequence[Mapping[str, Any]], text_key: str = "text"
    ) -> list[DataObject[Any, Any]]:
        """Objects for `collection.data.insert_many`, with the rows as properties and the vectors of
        their texts.
        """
        return _objects(rows, self.vectors([row[text_key] for row in rows]))

    async def aobjects(
        self, rows: Sequence[Mapping[str, Any]], text_key: str = "text"
    ) -> list[DataObject[Any, Any]]:
        return _objects(rows, await self.avectors([row[text_key] for row in rows]))

    def near(self, text: str, form: Form | None = None) -> dict[str, Any]:
        """The arguments of `collection.query.near_vector` for a query by one form, default the
        first.
        """
        (vectors,) = self.vectors([text], "query")
        return self._near(vectors, form)

    async def anear(self, text: str, form: Form | None = None) -> dict[str, Any]:
        (vectors,) = await self.avectors([text], "query")
        return self._near(vectors, form)

    def _near(self, vectors: Vectors, form: Form | None) -> dict[str, Any]:
        name = self.names[form or self.forms[0]]
        return {"near_vector": vectors[name], "target_vector": name}

    def _named(self, rows: int, found: Mapping[Any, list[Any]]) -> list[Vectors]:
        return [{self.names[form]: found[form][row] for form in self.forms} for row in range(rows)]


def _objects(
    rows: Sequence[Mapping[str, Any]], vectors: Sequence[Vectors]
) -> list[DataObject[Any, Any]]:
    return [
        DataObject(properties=dict(row), vector=named)
        for row, named in zip(rows, vectors, strict=True)
    ]
