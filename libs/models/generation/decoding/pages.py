"""Who has which page of key/value memory: pages are claimed for the longest answer at first, and
taken as it grows.
"""

from __future__ import annotations


class PagePool:
    """`total` pages by number. What a claim takes at once is never more than it claimed; whoever
    shares a page holds it too.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.claimed = 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def taken(self) -> int:
        """Pages that hold keys and values now."""
        return self.total - len(self._free)

    @property
    def unclaimed(self) -> int:
        return self.total - self.claimed

    def claim(self, pages: int) -> Claim | None:
        """None: there are not so many."""
        if pages > self.unclaimed:
            return None
        self.claimed += pages
        return Claim(self, pages)

    def take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def drop(self, page: int) -> bool:
        """One holder less; whether it was the last, and the page is free."""
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        self._free.append(page)
        return True


class Claim:
    """One sequence's right to `pages` pages. `taken`: how many it has."""

    def __init__(self, pool: PagePool, pages: int) -> None:
        self.pages, self.taken = pages, 0
        self._pool = pool

    def take(self) -> int:
        """A page. Raises RuntimeError beyond the claim, which is a fault of ours."""
        if self.taken == self.pages:
            raise RuntimeError(f"a sequence takes more than the {self.pages} pages that it claimed")
        self.taken += 1
        return self._pool.take()

    def share(self, page: int) -> None:
        self._pool.share(page)

    def is_shared(self, page: int) -> bool:
        return self._pool.is_shared(page)

    def drop(self, page: int) -> None:
        self.taken -= self._pool.drop(page)

    def end(self) -> None:
        """Returns the claim, once all pages are dropped."""
        self._pool.claimed -= self.pages
        self.pages = 0
