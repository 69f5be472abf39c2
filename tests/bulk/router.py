"""`python -m tests.bulk.router`: a fake router in its own process, until its stdin is closed."""

from __future__ import annotations

import sys

from tests.api.fake_router import FakeRouter, serving

EMBEDDING_ID = "0123456789abcdef.float32"


def main() -> None:
    with serving(FakeRouter(embedding_id=lambda number: EMBEDDING_ID)) as router:
        print(router.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
