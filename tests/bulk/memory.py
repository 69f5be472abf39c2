"""`python -m tests.bulk.memory INPUT OUTPUT`: run a job and print its peak memory."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from shoal.bulk.places import Folder

from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import recipe, run


class ForgetfulClient(FakeClient):
    """Does not keep the texts."""

    async def _ask(self, texts, options):  # type: ignore[no-untyped-def]
        found = await super()._ask(texts, options)
        self.texts.clear()
        self.expected.clear()
        self.timeouts.clear()
        return found


def main() -> None:
    source, output = sys.argv[1:]
    asyncio.run(
        run(Folder(Path(output)), source, ForgetfulClient(), made=recipe(keep=(), chunk_rows=500))
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
