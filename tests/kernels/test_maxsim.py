"""MaxSim in chunks against a loop over documents."""

from __future__ import annotations

import pytest
import torch

from libs.kernels.pooling.maxsim import maxsim
from tests.kernels.largest import Largest

LENGTHS = (1, 4, 30, 9, 2, 2)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
def test_equals_a_loop(chunk: int) -> None:
    query, documents = torch.randn(5, 16), torch.randn(sum(LENGTHS), 16)
    wanted = torch.stack(
        [(part @ query.T).max(0).values.sum() for part in documents.split(LENGTHS)]
    )
    torch.testing.assert_close(
        maxsim(query, documents, LENGTHS, chunk_elements=chunk), wanted, rtol=1e-5, atol=1e-5
    )


def test_no_documents_no_scores() -> None:
    assert maxsim(torch.randn(5, 16), torch.empty(0, 16), ()).shape == (0,)


def test_low_precision_is_scored_in_float32() -> None:
    query, documents = torch.randn(5, 16).bfloat16(), torch.randn(6, 16).bfloat16()
    wanted = (documents.float() @ query.float().T).max(0).values.sum()[None]
    torch.testing.assert_close(maxsim(query, documents, (6,)), wanted)


@pytest.mark.parametrize("tokens", [1, 64])
def test_memory_is_bounded_however_many_documents(tokens: int) -> None:
    """Neither the similarities nor the documents in float32 are ever there for all of them."""
    lengths = (10,) * 100
    query, documents = torch.randn(tokens, 16), torch.randn(sum(lengths), 16).bfloat16()
    with Largest(but=documents) as largest:
        maxsim(query, documents, lengths, chunk_elements=2000)
    assert 0 < largest.numbers <= 2000
