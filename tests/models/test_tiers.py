"""A model's tensors in one piece of memory, taken off the device and brought back: the same
numbers, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.sparse_encoder import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
from torch import nn

from libs.kernels.linear import packed
from libs.models import (
    EncodeWork,
    EntitiesWork,
    GeneratedIds,
    Output,
    PackedModel,
    SparseRow,
    Work,
    load_model,
)
from libs.models.runtime.loaded.tiers import Arena, find_tensors
from tests.parity.boundary_models import make_boundary
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner_models import make_reference

TEXTS = ["a text", "another text, and a longer one", "x"]
WORK = EncodeWork(TEXTS)

Make = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not use oneDNN's layouts, which cannot be moved."""
    monkeypatch.setattr(packed, "prepacking_works", lambda dtype: False)


def _embedder(kind: str) -> Make:
    return lambda root: write_checkpoint(kind, root / "model", sentence=SentenceFiles(dense=16))


def _splade(root: Path) -> Path:
    """Its decoder is the token table."""
    transformer = Transformer(
        str(write_checkpoint("bert", root / "base", head="masked_lm")), transformer_task="fill-mask"
    )
    SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").save(str(root / "model"))
    return root / "model"


def _recurrent(root: Path) -> Path:
    """Its LSTM's weights have separate memory."""
    return make_reference(root, {}).directory


def _boundary(root: Path) -> Path:
    return make_boundary(root, {}).directory


MODELS: dict[str, tuple[Make, Work]] = {
    "bert": (_embedder("bert"), WORK),
    "modernbert": (_embedder("modernbert"), WORK),
    "deberta": (_embedder("deberta-v2"), WORK),
    "qwen3": (_embedder("qwen3"), WORK),
    "t5": (_embedder("t5"), WORK),
    "nomic": (_embedder("nomic_bert"), WORK),
    "splade": (_splade, WORK),
    "gliner2.5": (_boundary, EntitiesWork(TEXTS, labels=("person", "city"))),
    "gliner": (_recurrent, EntitiesWork(TEXTS, labels=("person", "city"))),
}


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> PackedModel:
    """Half of its numbers are bfloat16 and those of its heads float32, as on an
    accelerator.
    """
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def outputs(model: PackedModel, work: Work) -> list[NDArray[np.generic]]:
    prepared = model.prepare(work)
    return [
        array
        for output in model.forward(prepared.head, prepared.sequences)
        for array in _arrays(output)
    ]


def _arrays(output: Output) -> list[NDArray[np.generic]]:
    if isinstance(output, SparseRow):
        return [output.indices, output.values]
    assert not isinstance(output, GeneratedIds)
    return (
        [array for part in output for array in _arrays(part)]
        if isinstance(output, tuple)
        else [output]
    )


def held(model: PackedModel) -> list[torch.Tensor]:
    return find_tensors(*model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_model_gives_the_same_when_it_was_away(tmp_path: Path, name: str) -> None:
    make, work = MODELS[name]
    model = load(make(tmp_path))
    wanted = outputs(model, work)
    before = {id(tensor) for tensor in held(model) if tensor.numel()}
    shared = _shared(held(model))

    model.gather()
    assert model.host_bytes == model.bytes
    for _ in range(2):
        _assert_same(outputs(model, work), wanted)
        resident = _storages(held(model))
        parked = model.park()
        assert parked.host_bytes == model.bytes
        stowed = _storages(held(model))
        assert len(stowed) == 1, "one piece of host memory"
        assert not stowed & resident, "nothing is left of the device's"
        assert parked.resume() is model
    tensors = [tensor for tensor in held(model) if tensor.numel()]
    recurrent = [
        module
        for head in model.heads.values()
        for module in _modules(head)
        if isinstance(module, nn.RNNBase)
    ]
    own = {
        parameter.untyped_storage().data_ptr()
        for module in recurrent
        for parameter in module.parameters()
    }
    assert bool(own) == (name == "gliner")
    assert len(_storages(tensors) - own) == 1, "one piece of device memory"
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    assert before == {id(tensor) for tensor in tensors}, "the same tensors, elsewhere"
    assert _shared(held(model)) == shared, "what shared memory still does"


def _modules(head: object) -> list[nn.Module]:
    return list(head.modules()) if isinstance(head, nn.Module) else []


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _shared(tensors: list[torch.Tensor]) -> set[frozenset[int]]:
    """Groups of tensors that begin at the same place."""
    groups: dict[int, set[int]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.data_ptr(), set()).add(id(tensor))
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def _assert_same(ours: list[NDArray[np.generic]], wanted: list[NDArray[np.generic]]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_tied_decoder_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    model = load(_splade(tmp_path))
    model.gather()
    head = model.heads["sparse"]
    assert head._table[0] is model.backbones[0].encoder.token_weight  # type: ignore[attr-defined]
    assert model.bytes < 1.2 * sum(tensor.nbytes for tensor in held(model)), (
        "no more than gaps for alignment"
    )


def test_without_a_copy_in_host_memory_parking_makes_one(tmp_path: Path) -> None:
    model = load(MODELS["bert"][0](tmp_path))
    wanted = outputs(model, WORK)
    model.gather()
    model.drop_host_copy()
    assert model.host_bytes == 0
    _assert_same(outputs(model, WORK), wanted)
    model.park().resume()
    assert model.host_bytes == model.bytes
    _assert_same(outputs(model, WORK), wanted)


def test_on_a_cpu_a_parked_model_stays_where_it_is(tmp_path: Path) -> None:
    model = load(MODELS["bert"][0](tmp_path))
    assert model.host_bytes == 0
    wanted, before = outputs(model, WORK), _storages(held(model))
    parked = model.park()
    assert (parked.host_bytes, _storages(held(model))) == (model.bytes, before)
    _assert_same(outputs(parked.resume(), WORK), wanted)


class _Odd(nn.Module):
    """Tensors in every place where one may be, some of them views of others."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(1000, dtype=torch.float32)
        self.weight = nn.Parameter(base[100:200].view(10, 10), requires_grad=False)
        self.register_buffer("rows", base[150:180].view(torch.int32), persistent=False)
        self.transposed = base[400:450].view(5, 10).T
        self.pair = (torch.ones(3, dtype=torch.bfloat16), [torch.tensor(7, dtype=torch.int64)])
        self.named = {"x": {"y": torch.full((2, 2), 5.0, dtype=torch.float16)}}
        self.none = torch.empty(0)
        self.again = self.weight


def test_views_of_any_type_and_shape_keep_their_places() -> None:
    odd = _Odd()
    tensors = find_tensors(odd)
    assert len(tensors) == 7, "each once"
    wanted = [tensor.clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    arena = Arena([odd], torch.device("cpu"))
    arena.stow()
    arena.bring()
    for tensor, value, stride in zip(tensors, wanted, strides, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == stride
    odd.weight[5, 0] = -1.0
    assert isinstance(odd.rows, torch.Tensor)
    assert odd.rows[0] == torch.tensor(-1.0).view(torch.int32), "still the same memory"
    assert arena.bytes < 2600, "only the used parts of a large base"
