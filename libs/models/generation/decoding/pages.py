"""The pool of key/value pages: a request claims pages for its longest answer, and takes them as it
grows.
"""

from __future__ import annotations


class PagePool:
    """`total` numbered pages. A claim never holds more pages than it claimed; pages may be
    shared.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.claimed = 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def taken(self) -> int:
        """Pages in use."""
        return self.total - len(self._free)

    @property
    def unclaimed(self) -> int:
        return self.total - self.claimed

    def claim(self, pages: int) -> PageClaim | None:
        """Claim pages; None if fewer are unclaimed."""
        if pages > self.unclaimed:
            return None
        self.claimed += pages
        return PageClaim(self, pages)

    def take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def drop(self, page: int) -> bool:
        """Release one holder of a page, and return whether the page is free now."""
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        self._free.append(page)
        return True


class PageClaim:
    """One sequence's right to `pages` pages, of which it has taken `taken`."""

    def __init__(self, pool: PagePool, pages: int) -> None:
        self.pages, self.taken = pages, 0
        self._pool = pool

    def take(self) -> int:
        """Take a page. Raises RuntimeError beyond the claim, which is a bug."""
        if self.taken == self.pages:
            raise RuntimeError(
                f"the sequence has already taken all {self.pages} pages of its claim"
            )
        self.taken += 1
        return self._pool.take()

    def share(self, page: int) -> None:
        self._pool.share(page)

    def is_shared(self, page: int) -> bool:
        return self._pool.is_shared(page)

    def drop(self, page: int) -> None:
        self.taken -= self._pool.drop(page)

    def end(self) -> None:
        """Return the claim, after all pages are dropped."""
        self._pool.claimed -= self.pages
        self.pages = 0
