"""Outputs of images that were computed before: found by bytes, scope and model, and not decoded
again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from libs.models import (
    EncodeResult,
    EncodeWork,
    PackedModel,
    Part,
    ScoreResult,
    ScoreWork,
    load_model,
)
from libs.models.images import patches
from libs.models.images.vlm import parts
from libs.models.interface.output_cache import CachedOutput, OutputCache
from libs.models.interface.sequences import Prepared
from tests.parity.image_models import pictures
from tests.parity.image_repositories import TEXTS, write_repository
from tests.parity.vlm_models import pages, small

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FILES = pictures()


class Store(dict[bytes, CachedOutput]):
    """Keeps everything."""

    def run(self, model: PackedModel, prepared: Prepared) -> EncodeResult:
        outputs = model.forward_all(prepared)
        for sequence, output in zip(prepared.sequences, outputs, strict=True):
            if sequence.key:
                self[sequence.key] = CachedOutput(output, sequence.tokens)
        result = model.finish(prepared, outputs)
        assert isinstance(result, EncodeResult)
        return result


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return load_model(
        write_repository("clip", tmp_path_factory.mktemp("clip")).directory,
        "tests/clip",
        CPU,
        torch.float32,
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory = tmp_path_factory.mktemp("reader")
    small("colqwen2").save(directory)
    return load_model(directory, "tests/reader", CPU, torch.float32)


def work(files: list[bytes], scope: str | None = "a") -> EncodeWork:
    return EncodeWork(
        [""] * len(files),
        parts={i: (Part(data, f"items[{i}].image", scope),) for i, data in enumerate(files)},
    )


def refuse(*_: object) -> None:
    raise AssertionError("it is decoded")


def test_hit_equals_the_computed_output(clip: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not decoded, has no forward, and costs the same tokens."""
    store = Store()
    assert clip.use_output_cache(store.get)
    prepared = clip.prepare(work([FILES[0], FILES[1], FILES[0]]))
    assert prepared.sequences[0] is prepared.sequences[2], "an image of a request is decoded once"
    first = store.run(clip, prepared)
    assert len(store) == 2
    monkeypatch.setattr(patches, "decoding", refuse)
    again = clip.prepare(work([FILES[1], FILES[0], FILES[0]]))
    assert sorted(again.known) == [0, 1, 2]
    assert not again.groups()
    assert (again.tokens, again.image_tokens) == (prepared.tokens, prepared.image_tokens)
    second = store.run(clip, again)
    assert first.dense is not None
    assert second.dense is not None
    np.testing.assert_array_equal(second.dense.values, first.dense.values[[1, 0, 2]])
    with pytest.raises(AssertionError, match="decoded"):
        clip.prepare(work([FILES[2]]))


@pytest.mark.parametrize("scope", ["b", "", None])
def test_outputs_are_for_their_scope(clip: PackedModel, scope: str | None) -> None:
    store = Store()
    clip.use_output_cache(store.get)
    store.run(clip, clip.prepare(work([FILES[0]])))
    prepared = clip.prepare(work([FILES[0]], scope))
    assert not prepared.known
    assert bool(prepared.sequences[0].key) == (scope is not None)


def test_nothing_has_a_key_without_a_cache(clip: PackedModel) -> None:
    clip.use_output_cache(None)
    assert [one.key for one in clip.prepare(work(FILES[:2])).sequences] == [b"", b""]


def test_keys_distinguish_all_outputs() -> None:
    image, other = Part(b"a", "", "t"), Part(b"ab", "", "t")
    found = [
        OutputCache("r1").key("dense", [image], b""),
        OutputCache("r2").key("dense", [image], b""),
        OutputCache("r1").key("image", [image], b""),
        OutputCache("r1").key("dense", [image], b"1"),
        OutputCache("r1").key("dense", [image, image], b""),
        OutputCache("r1").key("dense", [other], b""),
        OutputCache("r1").key("dense", [replace(image, scope="")], b""),
        OutputCache("r1").key("dense", [replace(image, scope="ta")], b""),
    ]
    assert len(set(found)) == len(found)
    assert OutputCache("r1").key("dense", [image], b"") == found[0]
    assert OutputCache("r1").key("dense", [image, replace(image, scope=None)], b"") == b""


def test_pages_and_prompts(reader: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is found again for the same prompt alone."""
    store, page = Store(), pages()[1]
    reader.use_output_cache(store.get)
    prepared = reader.prepare(work([page, page]))
    first = store.run(reader, prepared)
    reported = EncodeWork(
        [""], parts={0: (Part(page, "items[0].image", "a"), Part(TEXTS[0], "items[0].text"))}
    )
    assert not reader.prepare(reported).known
    monkeypatch.setattr(parts, "decoding", refuse)
    again = reader.prepare(work([page]))
    assert list(again.known) == [0]
    assert again.tokens * 2 == prepared.tokens
    assert again.image_tokens * 2 == prepared.image_tokens > 0
    second = store.run(reader, again)
    assert first.multi_vector is not None
    assert second.multi_vector is not None
    np.testing.assert_array_equal(
        second.multi_vector.values.values, first.multi_vector.values.values[: again.tokens]
    )


def test_query_image_against_many(reader: PackedModel) -> None:
    """Found again in another request, with other documents."""
    store, files = Store(), pages()
    reader.use_output_cache(store.get)

    def asked(documents: list[bytes]) -> tuple[Prepared, ScoreResult]:
        given = {i: (Part(data, f"documents[{i}].image", "a"),) for i, data in enumerate(documents)}
        prepared = reader.prepare(
            ScoreWork(
                "",
                [""] * len(given),
                query_parts=(Part(files[0], "query.image", "a"),),
                parts=given,
            )
        )
        outputs = reader.forward_all(prepared)
        store.update(
            {
                one.key: CachedOutput(output, one.tokens)
                for one, output in zip(prepared.sequences, outputs, strict=True)
                if one.key
            }
        )
        result = reader.finish(prepared, outputs)
        assert isinstance(result, ScoreResult)
        return prepared, result

    _, first = asked([files[1], files[0]])
    again, second = asked([files[0], files[2], files[1]])
    assert sorted(again.known) == [0, 1, 3]
    np.testing.assert_allclose(second.scores[[2, 0]], first.scores, rtol=1e-5)
