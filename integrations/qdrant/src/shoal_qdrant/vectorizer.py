"""`ShoalVectorizer`: arguments for Qdrant's client to store and search texts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from qdrant_client import models
from shoal import ModelHandle
from shoal.results import Form
from shoal.tasks import Role

_PROBE = "a text of which the vectors are measured"
Vector = list[float] | list[list[float]] | models.SparseVector


class ShoalVectorizer:
    """Makes points of texts with one named vector for each of `forms`, all of one forward pass:
    "dense", "sparse", "multi_vector".

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
        address: str | None = None,
        tenant: str = "",
        token: str | None = None,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not forms:
            raise ValueError("at least one form is needed")
        self.forms = tuple(forms)
        self.names = {form: (names or {}).get(form, form) for form in self.forms}
        self.handle = ModelHandle(
            model,
            address=address,
            tenant=tenant,
            token=token,
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )

    def collection(self, distance: models.Distance = models.Distance.COSINE) -> dict[str, Any]:
        """`vectors_config` and `sparse_vectors_config` for `create_collection`, with the lengths
        that an encoded text has. Multi-vectors are compared by MaxSim and not
        indexed, because they only rerank."""
        return self._collection(self.handle.forms([_PROBE], self.forms), distance)

    async def acollection(
        self, distance: models.Distance = models.Distance.COSINE
    ) -> dict[str, Any]:
        return self._collection(await self.handle.aforms([_PROBE], self.forms), distance)

    def vectors(self, texts: Sequence[str], role: Role = "document") -> list[dict[str, Vector]]:
        """Return, for each text, its vectors by name."""
        return self._named(len(texts), self.handle.forms(texts, self.forms, role))

    async def avectors(
        self, texts: Sequence[str], role: Role = "document"
    ) -> list[dict[str, Vector]]:
        return self._named(len(texts), await self.handle.aforms(texts, self.forms, role))

    def points(
        self,
        texts: Sequence[str],
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[int | str] | None = None,
        *,
        text_key: str = "text",
    ) -> list[models.PointStruct]:
        """Points for `upsert`, with the text in the payload. `ids`: whole numbers or UUIDs; default
        random ones.
        """
        return _points(texts, self.vectors(texts), payloads, ids, text_key)

    async def apoints(
        self,
        texts: Sequence[str],
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[int | str] | None = None,
        *,
        text_key: str = "text",
    ) -> list[models.PointStruct]:
        return _points(texts, await self.avectors(texts), payloads, ids, text_key)

    def query(self, text: str, limit: int = 10, *, candidates: int = 100) -> dict[str, Any]:
        """The arguments of `query_points` for a search by all forms.

        Dense and sparse vectors find `candidates` each, which are fused by their ranks (RRF) or,
        with multi-vectors, ranked by these. `limit`: number of points to return.
        """
        (vectors,) = self.vectors([text], "query")
        return self._search(vectors, limit, candidates)

    async def aquery(self, text: str, limit: int = 10, *, candidates: int = 100) -> dict[str, Any]:
        (vectors,) = await self.avectors([text], "query")
        return self._search(vectors, limit, candidates)

    def _collection(
        self, probe: Mapping[Form, list[Any]], distance: models.Distance
    ) -> dict[str, Any]:
        vectors = {}
        for form in self.forms:
            if form == "dense":
                vectors[self.names[form]] = models.VectorParams(
                    size=len(probe[form][0]), distance=distance
                )
            elif form == "multi_vector":
                vectors[self.names[form]] = models.VectorParams(
                    size=len(probe[form][0][0]),
                    distance=distance,
                    multivector_config=models.MultiVectorConfig(
                        comparator=models.MultiVectorComparator.MAX_SIM
                    ),
                    hnsw_config=models.HnswConfigDiff(m=0),
                )
        sparse = (
            {self.names["sparse"]: models.SparseVectorParams()} if "sparse" in self.forms else None
        )
        return {"vectors_config": vectors, "sparse_vectors_config": sparse}

    def _named(self, rows: int, found: Mapping[Form, list[Any]]) -> list[dict[str, Vector]]:
        return [
            {self.names[form]: _vector(form, found[form][row]) for form in self.forms}
            for row in range(rows)
        ]

    def _search(self, vectors: Mapping[str, Vector], limit: int, candidates: int) -> dict[str, Any]:
        found_by = [self.names[form] for form in self.forms if form != "multi_vector"]
        prefetch = [
            models.Prefetch(query=vectors[name], using=name, limit=candidates) for name in found_by
        ]
        common = {"limit": limit, "with_payload": True}
        if "multi_vector" in self.forms:
            name = self.names["multi_vector"]
            return {"query": vectors[name], "using": name, "prefetch": prefetch or None} | common
        if len(found_by) > 1:
            return {
                "query": models.FusionQuery(fusion=models.Fusion.RRF),
                "prefetch": prefetch,
            } | common
        return {"query": vectors[found_by[0]], "using": found_by[0]} | common


def _vector(form: Form, row: Any) -> Vector:
    vector: Vector = models.SparseVector(indices=row[0], values=row[1]) if form == "sparse" else row
    return vector


def _points(
    texts: Sequence[str],
    vectors: Sequence[Mapping[str, Vector]],
    payloads: Sequence[Mapping[str, Any]] | None,
    ids: Sequence[int | str] | None,
    text_key: str,
) -> list[models.PointStruct]:
    payloads = [{}] * len(texts) if payloads is None else payloads
    ids = [str(uuid.uuid4()) for _ in texts] if ids is None else ids
    return [
        models.PointStruct(id=number, vector=dict(named), payload={text_key: text, **payload})
        for number, text, named, payload in zip(ids, texts, vectors, payloads, strict=True)
    ]
