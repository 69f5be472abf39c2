"""V-SPLADE against its formulas over transformers' ModernVBERT on random weights: pages, queries,
scores, and refusals.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from libs.catalog.overrides import Hints, Overrides
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.image_size import read_image_size
from libs.models import load_model
from libs.models.images.vlm.loading import load_vision_language
from libs.models.interface.results import EncodeResult, ScoreResult, SparseRows
from libs.models.interface.work import ClassifyWork, EncodeWork, Part, ScoreWork, Work
from libs.models.runtime.packed_model import PackedModel
from services.router.admission.validation import image_price
from services.worker.mesh.codec import to_card
from tests.parity.v_splade_models import Layout, VSplade, v_splade
from tests.parity.vlm_models import QUERIES, opened, pages

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FLOAT_BOUND = 1e-5
QUERY_BOUND = 1e-6
TEXTS = [
    *QUERIES,
    "free software is free as in freedom: free, free",
    "[CLS] a [MASK] <end_of_utterance> b",
]
FILES = pages()


@pytest.fixture(scope="module", params=["export", "whole"])
def theirs(request: pytest.FixtureRequest) -> VSplade:
    layout: Layout = request.param
    return v_splade(layout)


@pytest.fixture(scope="module")
def directory(theirs: VSplade, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(theirs.layout)
    theirs.save(folder)
    return folder


@pytest.fixture(scope="module")
def model(directory: Path) -> PackedModel:
    return loaded(directory)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    v_splade().save(tmp_path)
    return tmp_path


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "some/model", CPU, dtype)


def images(*numbers: int, name: str = "items") -> dict[int, tuple[Part, ...]]:
    """Return the files as the only parts of the items with these indices."""
    return {
        place: (Part(FILES[number], f"{name}[{place}].image"),)
        for place, number in enumerate(numbers)
    }


def encoded(model: PackedModel, work: EncodeWork) -> Tensor:
    """Return the vectors, [items, columns]."""
    prepared = model.prepare(work)
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, EncodeResult)
    assert result.sparse is not None
    return dense(result.sparse)


def dense(rows: SparseRows) -> Tensor:
    found = torch.zeros(len(rows.offsets) - 1, rows.columns)
    for number, row in enumerate(found):
        begin, end = rows.offsets[number : number + 2]
        row[torch.from_numpy(rows.indices[begin:end].astype(np.int64))] = torch.from_numpy(
            rows.values.values[begin:end]
        )
    return found


def of_pages(model: PackedModel, *numbers: int) -> Tensor:
    return encoded(model, EncodeWork([""] * len(numbers), role="document", parts=images(*numbers)))


def worst(got: Tensor, wanted: Tensor) -> float:
    """Return the largest error of a row, relative to its largest weight."""
    assert got.shape == wanted.shape
    return ((got - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max().item()


def test_pages_equal_the_formulas(theirs: VSplade, model: PackedModel) -> None:
    """All pages are compared in one batch and alone."""
    wanted = theirs.pages([opened(data) for data in FILES])
    everything = range(len(FILES))
    together = of_pages(model, *everything)
    assert 0.2 < (wanted > 0).float().mean() < 0.8
    assert worst(together, wanted) <= FLOAT_BOUND
    assert (
        worst(torch.cat([of_pages(model, number) for number in everything]), wanted) <= FLOAT_BOUND
    )


def test_bfloat16_is_as_good_as_the_reference(theirs: VSplade, directory: Path) -> None:
    shown = [opened(data) for data in FILES]
    exact = theirs.pages(shown)
    halved = replace(theirs, model=copy.deepcopy(theirs.model).to(torch.bfloat16)).pages(
        shown, torch.bfloat16
    )
    own = of_pages(loaded(directory, torch.bfloat16), *range(len(FILES)))
    assert (own - exact).norm() <= 3 * (halved - exact).norm()


def test_queries_equal_the_formulas_and_need_no_forward(
    theirs: VSplade, model: PackedModel
) -> None:
    wanted = theirs.queries(TEXTS)
    for role in ("query", ""):
        prepared = model.prepare(EncodeWork(TEXTS, role=role))
        assert not prepared.sequences
        assert prepared.tokens == sum(
            len(ids)
            for ids in theirs.processor.tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
        )
        result = model.finish(prepared, [])
        assert isinstance(result, EncodeResult)
        assert result.sparse is not None
        assert worst(dense(result.sparse), wanted) <= QUERY_BOUND


def test_texts_and_pages_share_a_job(theirs: VSplade, model: PackedModel) -> None:
    """Results are in the order of items; image tokens are those of pages."""
    page = {1: (Part(FILES[1], "items[1].image"),), 3: (Part(FILES[0], "items[3].image"),)}
    work = EncodeWork([TEXTS[0], "", TEXTS[3], ""], parts=page)
    prepared = model.prepare(work)
    assert prepared.fields == ("items[1].image", "items[3].image")
    assert 0 < prepared.image_tokens < prepared.tokens - prepared.looked_up
    queries, shown = (
        theirs.queries([TEXTS[0], TEXTS[3]]),
        theirs.pages([opened(FILES[1]), opened(FILES[0])]),
    )
    assert (
        worst(encoded(model, work), torch.stack([queries[0], shown[0], queries[1], shown[1]]))
        <= FLOAT_BOUND
    )


def test_scores_are_dot_products(theirs: VSplade, model: PackedModel) -> None:
    """Texts are scored against pages, and pages against pages."""
    shown = theirs.pages([opened(data) for data in FILES[:4]])
    documents = images(0, 1, 2, 3, name="documents")
    page = (Part(FILES[1], "query.image"),)
    by_text, by_page = (
        ScoreWork(TEXTS[3], [""] * 4, parts=documents),
        ScoreWork("", [""] * 4, query_parts=page, parts=documents),
    )
    for work, query in ((by_text, theirs.queries([TEXTS[3]])[0]), (by_page, shown[1])):
        prepared = model.prepare(work)
        result = model.finish(prepared, model.forward_all(prepared))
        assert isinstance(result, ScoreResult)
        np.testing.assert_allclose(result.scores, (shown @ query).numpy(), rtol=2e-5)


def test_item_of_pages_and_text_equals_the_formulas(theirs: VSplade, model: PackedModel) -> None:
    """Two pages and a text within the template's frame are one item."""
    parts = (
        Part(FILES[0], "items[0].parts[0]"),
        Part("of a licence", "items[0].parts[1]"),
        Part(FILES[1], "items[0].parts[2]"),
    )
    found = encoded(model, EncodeWork([""], parts={0: parts}))
    text = "<|begin_of_text|>User:<image>of a licence<image><end_of_utterance>\nAssistant:"
    batch = theirs.processor(
        text=text, images=[opened(FILES[0]), opened(FILES[1])], return_tensors="pt"
    )
    with torch.inference_mode():
        logits = theirs.model.head(theirs.model.backbone(**batch).last_hidden_state[0])
    wanted = torch.log1p(torch.relu(logits)).max(0).values[None] * theirs.mask()
    assert worst(found, wanted) <= FLOAT_BOUND


def test_card_sets_the_price_of_a_page(model: PackedModel, theirs: VSplade) -> None:
    card = model.card
    assert (card.kind, card.tasks, card.representations, card.scoring) == (
        "images",
        ("encode", "score"),
        ("sparse",),
        "dot",
    )
    assert card.inputs == ("text", "image")
    assert card.sparse is not None
    assert card.sparse.columns == theirs.columns
    sizes = to_card(card).images
    for data in FILES:
        (sequence,) = model.prepare(
            EncodeWork([""], parts={0: (Part(data, "items[0].image"),)})
        ).sequences
        price = image_price.image_tokens(read_image_size(data), sizes)
        assert sequence.tokens / 2 <= price <= 3 * sequence.tokens + 16


REFUSED: list[tuple[Work, type[Exception], str, str]] = [
    (
        EncodeWork(["a"], representations=("dense",)),
        TaskNotSupported,
        "representations[0]",
        "has no dense vectors; its vectors: sparse",
    ),
    (
        EncodeWork(["", "a"], role="document", parts=images(0)),
        TaskNotSupported,
        "items[1].text",
        "are queries",
    ),
    (
        ScoreWork("a", ["", "b"], parts=images(0, name="documents")),
        TaskNotSupported,
        "documents[1].text",
        "are queries",
    ),
    (
        ScoreWork("a", [""], scale="probability", parts=images(0, name="documents")),
        InvalidInput,
        "scale",
        "of sparse vectors",
    ),
    (EncodeWork(["a <image>"]), InvalidInput, "items[0].text", "image token"),
    (
        EncodeWork(["a"], instruction="Find it."),
        InvalidInput,
        "instruction",
        "takes no instruction",
    ),
    (EncodeWork(["a"], dimensions=8), InvalidInput, "dimensions", "only dense vectors"),
    (EncodeWork(["a"], data_type="int8"), InvalidInput, "data_type", "int8 is supported for dense"),
    (
        EncodeWork([""], pooling_factor=2, parts=images(0)),
        InvalidInput,
        "pooling_factor",
        "only multi-vectors",
    ),
    (EncodeWork(["word " * 5_000], truncation="none"), InputTooLong, "items[0].text", "tokens"),
    (ClassifyWork(["a"], labels=("b",)), TaskNotSupported, "classify", "cannot classify"),
]


@pytest.mark.parametrize(("work", "error", "field", "message"), REFUSED)
def test_unsupported_requests_are_refused(
    model: PackedModel, work: Work, error: type[Exception], field: str, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        model.prepare(work)
    assert getattr(caught.value, "field") == field  # noqa: B009


def test_only_the_strongest_weights_are_returned(export: Path) -> None:
    file = export / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_active_dims": 3}))
    wanted = v_splade().queries(TEXTS[:1])
    kept = wanted[0] >= wanted[0].topk(3).values[-1]
    assert worst(encoded(loaded(export), EncodeWork(TEXTS[:1])), wanted * kept) <= QUERY_BOUND


def test_int8_is_not_used_for_images(export: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(export, "some/model", CPU, torch.int8, Overrides("here", dtype="int8"))
    assert model.data_type in ("float32", "bfloat16")
    assert "was requested in int8, which only text encoders support" in caplog.text


def test_adapter_of_the_text_encoder_equals_the_merged_model(
    export: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The adapter is saved by PEFT under NAVER's names: pages change as with the merged weight,
    queries do not.
    """
    theirs = v_splade()
    stem, folder = "text_model.layers.1.mlp.Wo", tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(2)
    changed = copy.deepcopy(theirs.model)
    weight = changed.backbone.get_submodule(stem).weight
    a, b = (
        torch.randn(*size, generator=generator) * 0.2
        for size in ((3, weight.shape[1]), (len(weight), 3))
    )
    weight.data += 12 / 3 * (b @ a)
    begin = f"base_model.model.encoder.encoder.model.{stem}"
    save_file(
        {f"{begin}.lora_A.weight": a, f"{begin}.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": ["Wo"]})
    )
    model = loaded(export)
    model.add_adapter("some/adapter", folder)
    prepared = model.prepare(EncodeWork(["", TEXTS[0]], parts=images(1)))
    adapted = [replace(one, adapter="some/adapter") for one in prepared.sequences]
    result = model.finish(prepared, model.forward(prepared.head, adapted))
    assert isinstance(result, EncodeResult)
    assert result.sparse is not None
    wanted = torch.cat(
        [replace(theirs, model=changed).pages([opened(FILES[1])]), theirs.queries(TEXTS[:1])]
    )
    assert worst(dense(result.sparse), wanted) <= FLOAT_BOUND


def test_broken_checkpoints_are_refused_by_key_or_tensor(export: Path) -> None:
    file = export / "model.safetensors"
    whole = load_file(file)
    table = "encoder.encoder.model.text_model.embeddings.tok_embeddings.additional_embedding.weight"
    cases = [
        (
            {"query_encoder.projection.weight": torch.zeros(2, 48)},
            "query.projection.weight. has the shape",
        ),
        (
            {"query_encoder.embeddings.weight": torch.zeros(7, 48)},
            "query.embeddings.weight. has the shape",
        ),
        ({"encoder.mlm_head.decoder.bias": torch.zeros(7)}, "decoder.bias. has the shape"),
        ({"encoder.mlm_head.norm.bias": torch.zeros(7)}, "norm.bias. has the shape"),
        ({"query_encoder.lora_A": torch.zeros(400, 3)}, "query.lora_A. is unknown"),
        ({table: torch.zeros(22, 7)}, "additional_embedding.weight. is .22, 7. of float32"),
    ]
    for changed, message in cases:
        save_file(whole | changed, file)
        with pytest.raises(ModelBroken, match=message):
            loaded(export)
    for name in (
        "query_encoder.projection.bias",
        "query_encoder.embeddings.weight",
        "encoder.mlm_head.dense.weight",
    ):
        save_file({key: value for key, value in whole.items() if key != name}, file)
        with pytest.raises(
            ModelBroken, match=name.partition("_")[2].partition(".")[2].rpartition(".")[0]
        ):
            loaded(export)


def test_unusable_template_is_refused(export: Path) -> None:
    file = export / "chat_template.jinja"
    assert file.is_file()
    file.write_text("{% for turn in messages %}{{ turn.role }}{% endfor %}")
    with pytest.raises(ModelBroken, match="no place for the image"):
        loaded(export)
    file.unlink()
    with pytest.raises(ModelBroken, match="is missing: pages need"):
        loaded(export)


@pytest.mark.parametrize("kind", ["dense", "multi_vector", "yes_no"])
def test_card_of_another_kind_is_refused(export: Path, kind: str) -> None:
    hints = Hints(kind=kind)
    with pytest.raises(ModelBroken, match="sparse vectors alone"):
        load_model(export, "some/model", CPU, torch.float32, Overrides("a card", detect=hints))


def test_tensors_identify_the_model(export: Path) -> None:
    """The tensors identify the model, not the name in its code."""
    file = export / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "v_splade"}))
    model = load_vision_language(export, dtype=torch.float32, device=CPU)
    assert list(model.backbones[0].heads) == ["sparse"]
    assert worst(of_pages(loaded(export), 1), v_splade().pages([opened(FILES[1])])) <= FLOAT_BOUND
