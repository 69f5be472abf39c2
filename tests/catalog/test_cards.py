"""Cards in YAML: the fields they change, their precedence, errors, and the same rules in the
editors' schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.catalog import schema
from libs.catalog.cards import SHIPPED, parse_folders, read_catalog
from libs.catalog.detect import read_card
from libs.catalog.overrides import Catalog, Overrides
from libs.errors import InvalidInput, ModelBroken
from libs.names import is_model_id
from tests.catalog.test_detect import POOLING, old, write

# It compiles grammars for seconds, which every process would do that only collects this file.
if TYPE_CHECKING:
    import jsonschema

FULL = """
model: org/name
prompts: {query: "q: ", document: "d: "}
default_prompt: query
pools: [l4, cpu]
dtype: float16
revision: v1.0
pinned: true
max_tokens: 77
memory_bytes: 1000000
detect: {kind: dense, pooling: cls, normalize: true, lowercase: true, score_activation: sigmoid}
about: {family: bert, kind: dense, note: a test, ran: "hub, 2026-11-26", missing: a file}
"""


def catalog(folder: Path, text: str, file: str = "cards.yaml") -> Catalog:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text, encoding="utf-8")
    return read_catalog([folder])


def overrides(folder: Path, text: str) -> Overrides:
    found = catalog(folder, text).overrides("org/name")
    assert found is not None
    return found


def test_card_overrides_the_files(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "modules.json": old("Transformer", "Pooling"),
        "1_Pooling/config.json": POOLING,
        "config_sentence_transformers.json": {
            "prompts": {"query": "old: ", "other": "o: "},
            "default_prompt_name": "other",
        },
    }
    directory = write(tmp_path / "model", files)
    plain, card = (
        read_card(directory, "org/name"),
        read_card(directory, "org/name", overrides(tmp_path / "cards", FULL)),
    )
    assert (plain.prompts, plain.max_tokens, plain.pooling, plain.dtype) == (
        {"query": "old: ", "other": "o: "},
        512,
        ("mean",),
        "auto",
    )
    assert card.prompts == {"query": "q: ", "other": "o: ", "document": "d: "}
    assert (card.default_prompt, card.pools, card.dtype) == ("query", ("l4", "cpu"), "float16")
    assert (card.pinned, card.max_tokens, card.memory_bytes) == (True, 77, 1_000_000)
    assert (card.pooling, card.normalize, card.lowercase) == (("cls",), True, True)
    # Which commit a folder holds is not for a card to say.
    assert card.revision == plain.revision


def test_prompt_can_be_taken_away(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "config_sentence_transformers.json": {
            "prompts": {"query": "q: "},
            "default_prompt_name": "query",
        },
    }
    directory = write(tmp_path / "model", files)
    card = read_card(
        directory,
        "org/name",
        overrides(tmp_path / "cards", 'model: org/name\nprompts: {query: ""}\n'),
    )
    assert (card.prompts, card.default_prompt) == ({}, "")


def test_kind_can_be_set(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", {})
    card = read_card(
        directory,
        "org/name",
        overrides(tmp_path / "cards", "model: org/name\ndetect: {kind: token_labels}\n"),
    )
    assert (card.kind, card.tasks) == ("token_labels", ("entities",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "model: org/name\ndefault_prompt: query\n",
            "`default_prompt` is 'query', which is not a prompt of org/name; its prompts are: none",
        ),
        (
            "model: org/name\ndetect: {kind: sequence_labels, pooling: cls}\n",
            "`detect.pooling` can only replace a single pooling mode; the checkpoint's are: none",
        ),
    ],
)
def test_card_that_does_not_fit_the_model_is_refused_when_read(
    tmp_path: Path, text: str, problem: str
) -> None:
    directory = write(tmp_path / "model", {})
    with pytest.raises(ModelBroken) as caught:
        read_card(directory, "org/name", overrides(tmp_path / "cards", text))
    assert caught.value.message == f"{tmp_path}/cards/cards.yaml:1: {problem}"


def test_earlier_folders_go_over_later_ones_and_all_over_the_shipped_cards(tmp_path: Path) -> None:
    model = "intfloat/e5-base-v2"
    first, second = tmp_path / "first", tmp_path / "second"
    catalog(first, f"model: {model}\nmax_tokens: 1\npools: [a]\n")
    catalog(second, f"model: {model}\nmax_tokens: 2\npinned: true\n")
    found = read_catalog(parse_folders(f"{first}:{second}")).overrides(model)
    assert found is not None
    assert (found.max_tokens, found.pools, found.pinned) == (1, ("a",), True)
    assert found.prompts["query"] == "query: "  # shipped
    assert [Path(place.rpartition(":")[0]).parent.name for place in found.source.split(", ")] == [
        "first",
        "second",
        "models",
    ]


def test_revisions_card_overrides_the_models(tmp_path: Path) -> None:
    found = catalog(
        tmp_path,
        "model: org/name\nmax_tokens: 9\nrevision: main\n---\nmodel: org/name@v2\nmax_tokens: 5\n",
    )
    limits = {model: found.overrides(model) for model in ("org/name", "org/name@v1", "org/name@v2")}
    assert [card and card.max_tokens for card in limits.values()] == [9, 9, 5]
    assert found.overrides("org/other") is None
    assert [found.pinned_id(model) for model in ("org/name", "org/name@v1", "org/other")] == [
        "org/name@main",
        "org/name@v1",
        "org/other",
    ]


def test_one_card_for_several_models(tmp_path: Path) -> None:
    found = catalog(tmp_path, "model: [org/a, org/b]\nmax_tokens: 9\n")
    assert [card and card.max_tokens for card in map(found.overrides, ("org/a", "org/b"))] == [9, 9]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "model: org/name\nprompt: x\n",
            "2: the card has no key 'prompt': did you mean 'prompts'?",
        ),
        (
            "model: org/name\ndetect:\n  poling: cls\n",
            "3: `detect` has no key 'poling': did you mean 'pooling'?",
        ),
        ("model: org/name\nzzz: 1\n", "2: the card has no key 'zzz': it may have model, prompts, "),
        ("max_tokens: 1\n", "1: the card has no key 'model', which it needs"),
        (
            "model: org/name\nmodel: org/other\n",
            "2: the card has the key 'model' twice, first in line 1",
        ),
        ("model: name\n", "1: `model` is 'name', which is not a model id"),
        (
            "model: [org/name, org/name]\n",
            "1: `model[1]` is 'org/name', which is listed twice: keep one",
        ),
        (
            "model: org/name\nprompts: {query: no}\n",
            "2: `prompts.query` must be a text, not no: put it in quotes",
        ),
        ("model: org/name\nprompts:\n", "2: `prompts` must be keys with values, not nothing"),
        ("model: org/name\nprompts: {1: x}\n", "2: `prompts` has a key that is not a text"),
        ("model: org/name\npools: []\n", "2: `pools` is an empty list"),
        ("model: org/name\npools: cpu\n", "2: `pools` must be a list, not cpu"),
        ("model: org/name\npinned: yes\n", "2: `pinned` is yes: write true or false"),
        (
            "model: org/name\nmax_tokens: 0\n",
            "2: `max_tokens` is 0, which is not a whole number of at least 1",
        ),
        ("model: org/name\nmax_tokens: many\n", "2: `max_tokens` must be a whole number, not many"),
        (
            "model: org/name\ndtype: fp16\n",
            "2: `dtype` is 'fp16', which is not one of auto, float32, bfloat16, float16",
        ),
        (
            "model: org/name\ndetect: {pooling: men}\n",
            "2: `detect.pooling` is 'men', which is not one of",
        ),
        ("- model: org/name\n", "1: the card must be keys with values, not a list"),
        ("model: [\n", "2: is not YAML"),
        ("model: org/name\n---\nmodel: org/name\n", "3: `model` org/name has a card at "),
    ],
)
def test_errors_have_file_and_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        catalog(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/cards.yaml:{problem}")


def test_missing_folder() -> None:
    with pytest.raises(InvalidInput, match="SHOAL_CATALOG: /nowhere is not a folder"):
        parse_folders("/nowhere")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    import jsonschema

    made = json.loads(schema.FILE.read_text())
    jsonschema.Draft7Validator.check_schema(made)
    return jsonschema.Draft7Validator(made)


def test_schema_accepts_documents_that_the_reader_accepts(
    validator: jsonschema.Draft7Validator,
) -> None:
    shipped = [
        document
        for path in SHIPPED.glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
    ]
    assert len(shipped) > 50
    for document in [yaml.safe_load(FULL), *shipped]:
        validator.validate(document)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"model": "name"},
        {"model": []},
        {"model": ["org/name", "org/name"]},
        {"model": "org/name", "prompt": "x"},
        {"model": "org/name", "prompts": {"query": False}},
        {"model": "org/name", "pools": []},
        {"model": "org/name", "max_tokens": 0},
        {"model": "org/name", "dtype": "fp16"},
        {"model": "org/name", "detect": {"kind": "nonsense"}},
        {"model": "org/name", "pinned": "true"},
    ],
)
def test_schema_refuses_documents_that_the_reader_refuses(
    validator: jsonschema.Draft7Validator, tmp_path: Path, values: dict[str, object]
) -> None:
    assert not validator.is_valid(values)
    with pytest.raises(InvalidInput):
        catalog(tmp_path, yaml.safe_dump(values))


QWEN_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".'
)
QWEN_END = "<think>\n\n</think>\n\n"
WEB = "Given a web search query, retrieve relevant passages that answer the query"
MXBAI_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
MXBAI_PAIR = (
    "query: q\ndocument: d\n"
    "You are a search relevance expert who evaluates how well documents match search queries. "
    "For each query-document pair, "
    "carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:"
)


@pytest.mark.parametrize(
    ("model", "instruction", "system", "user", "end", "answers"),
    [
        (
            "Qwen/Qwen3-Reranker-4B",
            "",
            QWEN_SYSTEM,
            f"<Instruct>: {WEB}\n<Query>: q\n<Document>: d",
            QWEN_END,
            ("yes", "no"),
        ),
        (
            "Qwen/Qwen3-Reranker-4B",
            "told",
            QWEN_SYSTEM,
            "<Instruct>: told\n<Query>: q\n<Document>: d",
            QWEN_END,
            ("yes", "no"),
        ),
        ("mixedbread-ai/mxbai-rerank-base-v2", "", MXBAI_SYSTEM, MXBAI_PAIR, "", ("1", "0")),
        (
            "mixedbread-ai/mxbai-rerank-base-v2",
            "told",
            MXBAI_SYSTEM,
            f"instruction: told\n{MXBAI_PAIR}",
            "",
            ("1", "0"),
        ),
    ],
)
def test_rerankers_use_their_authors_template(
    model: str, instruction: str, system: str, user: str, end: str, answers: tuple[str, str]
) -> None:
    card = read_catalog().overrides(model)
    assert card is not None
    assert card.detect.template is not None
    # Settings of transformers' own environment for chat templates.
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        card.detect.template
    )
    turns = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        f"<|im_start|>assistant\n{end}"
    )
    assert made.render(query="q", document="d", instruction=instruction) == turns
    assert card.detect.answers == answers


@pytest.mark.parametrize(
    "model",
    [
        "org/name",
        "org/name@v1.0-b",
        "a/b",
        "..",
        "org/../x",
        "/org/name",
        "org/name/x",
        "org/",
        "o g/n",
    ],
)
def test_ids_are_those_of_the_store(tmp_path: Path, model: str) -> None:
    text = yaml.safe_dump({"model": model})
    if is_model_id(model):
        assert catalog(tmp_path, text).overrides(model) is not None
    else:
        with pytest.raises(InvalidInput):
            catalog(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1200, "{a: " * 900, "model: org/name\nmax_tokens: " + "9" * 5000,
        "model: org/name\nmemory_bytes: " + "9" * 5000,
        "model: &a [*a]", "model: org/name\nprompts: {\"\\ud800\": x}",
    ],
)  # fmt: skip
def test_yaml_that_would_exhaust_the_reader_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"\.yaml"):
        catalog(tmp_path, text)
