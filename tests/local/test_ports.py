"""The ports of a local mesh."""

from __future__ import annotations

from typing import Any

import pytest

from libs.errors import InvalidInput
from services.local.settings import Settings


@pytest.mark.parametrize(
    "given",
    [
        {"tei_grpc_port": 8081},
        {"http_port": 8080, "tei_grpc_port": 8080},
        {"http_port": 8080, "tei_grpc_port": 50051},
        {"http_port": 8080, "tei_grpc_port": 65536},
    ],
)
def test_port_for_tei_is_the_edges_and_its_own(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings(**given)
    assert caught.value.field == "tei-grpc-port"


def test_two_free_ports_are_not_one() -> None:
    assert Settings(port=0, http_port=0, tei_grpc_port=0).tei_grpc_port == 0
