"""Recipes of vectors: which facts of a card and which options change an id, and how a mismatch is
explained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs.catalog.card import Card, DenseModule, LateInteraction, SparseOutput, StaticQueries
from libs.embedding_id import embedding_id
from libs.errors import EmbeddingIdMismatch
from libs.models import embedding_recipe
from libs.models.embedding_recipe import EmbeddingIdentity, VectorOptions, identity_maker
from libs.models.interface.work import Chunking, EncodeWork, Role, with_truncation

FILES = "ab" * 32
ADAPTER = "cd" * 32
CARD = Card(
    model="org/model",
    revision="r1",
    family="bert",
    kind="dense",
    tasks=("encode", "score"),
    representations=("dense",),
    max_tokens=256,
    dimensions=384,
    prompts={"query": "query: ", "passage": "passage: ", "title": "Title: "},
    pooling=("mean",),
    normalize=True,
)
PLAIN = VectorOptions()
LATE_CARD = replace(CARD, kind="dense", late=LateInteraction(query_tokens=32))
IMAGES_CARD = replace(CARD, kind="images")
STATIC_CARD = replace(
    CARD, kind="sparse", sparse=SparseOutput(100, queries=StaticQueries("", "idf"))
)


def compute_id(card: Card = CARD, options: VectorOptions = PLAIN, **given: str) -> str:
    identity = EmbeddingIdentity(card, given.get("files", FILES), given.get("format", "float32"))
    return identity.compute_id(options, given.get("adapter", ""))


def test_recipe_of_a_plain_request_is_fixed() -> None:
    identity = EmbeddingIdentity(CARD, FILES, "float32")
    assert identity.recipe(PLAIN).canonical() == (
        '{"card":{"kind":"dense","pooling":["mean"]},'
        f'"files":"{FILES}","max_tokens":256,"normalize":true,"truncation":"end","version":1}}'
    )


def test_recipe_of_all_facts_is_fixed() -> None:
    card = replace(
        LATE_CARD,
        pool_prompt=False,
        lowercase=True,
        modules=(DenseModule("2_Dense", 384, 128, bias=True, activation="tanh"),),
        own_adapters=("retrieval",),
        role_adapters={"query": "retrieval"},
    )
    recipe = EmbeddingIdentity(card, FILES, "float32").recipe(
        VectorOptions(role="query", dimensions=64, pooling_factor=2)
    )
    assert recipe.canonical() == (
        '{"adapter":"own:retrieval","card":{"kind":"dense","late":{"query_tokens":32},'
        '"lowercase":true,"modules":[{"activation":"tanh","bias":true,"folder":"2_Dense",'
        '"in_features":384,"out_features":128}],"pool_prompt":false,"pooling":["mean"]},'
        f'"dimensions":64,"files":"{FILES}","max_tokens":256,"normalize":true,"pooling_factor":2,'
        '"prompt":"query: ","role":"query","truncation":"end","version":1}'
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other/name"},
        {"revision": "r2"},
        {"tasks": ("encode",)},
        {"prompts": {**CARD.prompts, "title": "Other: "}},
        {"pools": ("l4",)},
        {"pinned": True},
        {"memory_bytes": 1 << 30},
        {"created_unix_seconds": 1},
        {"notes": ("a head is not served",)},
        {"dtype": "float32"},
    ],
)
def test_facts_that_change_no_number_keep_the_id(changes: dict[str, Any]) -> None:
    assert compute_id(replace(CARD, **changes)) == compute_id()


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": ("cls",)},
        {"pooling": ("mean", "cls")},
        {"pool_prompt": False},
        {"normalize": False},
        {"lowercase": True},
        {"max_tokens": 128},
        {"truncation": "start"},
        {"default_prompt": "title"},
        {"late": LateInteraction()},
        {"kind": "hybrid"},
        {"template": "{{ text }}"},
        {"modules": (DenseModule("2_Dense", 384, 384, bias=True, activation="identity"),)},
    ],
)
def test_facts_that_change_numbers_change_the_id(changes: dict[str, Any]) -> None:
    assert compute_id(replace(CARD, **changes)) != compute_id()


def test_files_adapter_and_number_format_change_the_id() -> None:
    options = VectorOptions(adapter="org/adapter")
    ids = {
        compute_id(),
        compute_id(files=ADAPTER),
        compute_id(format="bfloat16"),
        compute_id(options=options, adapter=ADAPTER),
        compute_id(options=options, adapter=FILES),
    }
    assert len(ids) == 5


def test_adapters_with_the_same_files_have_the_same_id() -> None:
    one, other = VectorOptions(adapter="org/one"), VectorOptions(adapter="org/other")
    assert compute_id(options=one, adapter=ADAPTER) == compute_id(options=other, adapter=ADAPTER)


def test_role_counts_by_its_prompt_alone() -> None:
    bare = replace(CARD, prompts={})
    roles = [VectorOptions(role=role) for role in ("", "query", "document")]
    assert len({compute_id(bare, one) for one in roles}) == 1
    assert len({compute_id(CARD, one) for one in roles}) == 3


QUERY, DOCUMENT = VectorOptions(role="query"), VectorOptions(role="document")


@pytest.mark.parametrize(
    ("card", "model_default", "default"),
    [
        (LATE_CARD, "", DOCUMENT),
        (STATIC_CARD, "", DOCUMENT),
        (
            replace(
                CARD,
                kind="sparse",
                sparse=SparseOutput(100, queries=StaticQueries("", "idf", True)),
            ),
            "",
            QUERY,
        ),
        (IMAGES_CARD, "query", QUERY),
        (IMAGES_CARD, "document", DOCUMENT),
    ],
)
def test_no_role_has_the_id_of_the_role_that_it_defaults_to(
    card: Card, model_default: Role, default: VectorOptions
) -> None:
    identity = EmbeddingIdentity(replace(card, prompts={}), FILES, "float32", model_default)
    assert identity.compute_id(QUERY) != identity.compute_id(DOCUMENT)
    assert identity.compute_id(PLAIN) == identity.compute_id(default)


def test_role_does_not_count_in_image_models_that_ignore_it() -> None:
    bare = replace(IMAGES_CARD, prompts={})
    assert compute_id(bare, QUERY) == compute_id(bare, DOCUMENT) == compute_id(bare)


def test_form_of_an_image_model_changes_the_id() -> None:
    other = replace(IMAGES_CARD, representations=("multi_vector",))
    assert compute_id(IMAGES_CARD) != compute_id(other)


def test_queries_with_another_encoder_have_its_facts() -> None:
    queries = replace(CARD, prompts={}, pooling=("cls",))
    card = replace(CARD, prompts={}, queries=queries)
    query, document = VectorOptions(role="query"), VectorOptions(role="document")
    assert compute_id(card, query) != compute_id(card, document) == compute_id(card)
    asked = replace(card, query_default=True)
    assert compute_id(asked) == compute_id(asked, query) != compute_id(asked, document)


def test_two_encoders_that_differ_by_their_folders_alone_have_two_ids() -> None:
    bare = replace(CARD, prompts={})
    card = replace(
        bare,
        encoder_folder="document_0_Transformer",
        queries=replace(bare, encoder_folder="query_0_Transformer"),
    )
    assert compute_id(card, QUERY) != compute_id(card, DOCUMENT)


def test_queries_of_a_router_have_the_truncation_that_is_applied() -> None:
    queries = replace(CARD, pooling=("cls",), truncation="end")
    identity = EmbeddingIdentity(
        replace(CARD, truncation="start", queries=queries), FILES, "float32"
    )
    asked = EncodeWork(["a"], role="query", truncation="default")
    work = with_truncation(asked, identity._card)
    assert isinstance(work, EncodeWork)
    assert identity.compute_id(QUERY) == identity.compute_id(VectorOptions.from_work(work))
    assert identity.recipe(QUERY).truncation == "start"


@pytest.mark.parametrize(
    "work",
    [
        EncodeWork(["a"], dimensions=384),
        EncodeWork(["a"], normalize=True),
        EncodeWork(["a"], truncation="none"),
        EncodeWork(["a"], truncation="default"),
        EncodeWork(["a"], pooling_factor=1),
        EncodeWork(["a"], data_type="int8"),
        EncodeWork(["a"], representations=("dense",)),
        EncodeWork(["other", "texts"]),
        EncodeWork(["a"], chunking=Chunking("tokens", 10)),
    ],
)
def test_work_with_the_same_numbers_has_the_same_id(work: EncodeWork) -> None:
    assert compute_id(options=VectorOptions.from_work(work)) == compute_id()


@pytest.mark.parametrize(
    ("work", "difference"),
    [
        (EncodeWork(["a"], role="query"), "that of role 'query'"),
        (EncodeWork(["a"], role="document"), "that of role 'document'"),
        (EncodeWork(["a"], dimensions=128), "that of 128 dimensions"),
        (EncodeWork(["a"], normalize=False), "that of vectors that are not normalized"),
        (EncodeWork(["a"], adapter="org/adapter"), "that of the adapter 'org/adapter'"),
        (EncodeWork(["a"], truncation="start"), "that of texts cut at their start"),
        (EncodeWork(["a"], chunking=Chunking(late=True)), "that of late chunks"),
        (EncodeWork(["a"], dimensions=100), "the files of org/model, its card"),
        (EncodeWork(["a"], role="query", dimensions=128), "several options changed"),
    ],
)
def test_mismatch_names_the_option_that_differs(work: EncodeWork, difference: str) -> None:
    identity, adapters = EmbeddingIdentity(CARD, FILES, "float32"), {"org/adapter": ADAPTER}
    options = VectorOptions.from_work(work)
    expected = identity.compute_id(options, adapters.get(work.adapter, ""))
    identity.check(options, expected, adapters)
    with pytest.raises(EmbeddingIdMismatch) as raised:
        identity.check(PLAIN, expected, adapters)
    assert difference in raised.value.message
    assert expected in raised.value.message
    assert identity.compute_id(PLAIN) in raised.value.message
    with pytest.raises(EmbeddingIdMismatch):
        identity.check(options, identity.compute_id(PLAIN), adapters)


def test_mismatch_of_the_number_format_alone_is_named() -> None:
    identity = EmbeddingIdentity(CARD, FILES, "bfloat16")
    with pytest.raises(EmbeddingIdMismatch, match="only the number format differs"):
        identity.check(PLAIN, compute_id(), {})
    identity.check(PLAIN, compute_id().partition(".")[0], {})


def test_number_of_cached_ids_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def counted(*given: Any) -> str:
        computed.append("")
        return embedding_id(*given)

    monkeypatch.setattr(embedding_recipe, "embedding_id", counted)
    identity = EmbeddingIdentity(CARD, FILES, "float32")
    assert len({identity.compute_id(PLAIN) for _ in range(10)}) == len(computed) == 1
    for number in range(embedding_recipe.MAX_CACHED_IDS):
        identity.compute_id(VectorOptions(instruction=str(number)))
    identity.compute_id(PLAIN)
    assert len(computed) == embedding_recipe.MAX_CACHED_IDS + 2


def test_repeated_mismatch_is_explained_from_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = EmbeddingIdentity(CARD, FILES, "float32")
    computed: list[str] = []

    def counted(*given: Any) -> str:
        computed.append("")
        return embedding_id(*given)

    def mismatch() -> str:
        with pytest.raises(EmbeddingIdMismatch) as raised:
            identity.check(PLAIN, "f" * 16, {"org/adapter": ADAPTER})
        return raised.value.message

    monkeypatch.setattr(embedding_recipe, "embedding_id", counted)
    first, once = mismatch(), len(computed)
    assert once > 1
    assert [mismatch() for _ in range(10)] == [first] * 10
    assert len(computed) == once


def test_number_format_and_default_role_are_those_of_the_model() -> None:
    class InBfloat16:
        data_type = "bfloat16"
        default_role = "query"

    made = identity_maker(InBfloat16(), IMAGES_CARD)(FILES)
    assert made.compute_id(PLAIN) == EmbeddingIdentity(
        IMAGES_CARD, FILES, "bfloat16", "query"
    ).compute_id(PLAIN)
    assert made.compute_id(PLAIN).endswith(".bfloat16-1")
    assert identity_maker(object(), CARD)(FILES).compute_id(PLAIN).endswith(".float32")
