"""`python -m tools.wordnet FOLDER`: generate the examples' data from WordNet 3.0 in FOLDER.

    tools/debian_package.sh wordnet-base .cache/wordnet
    python -m tools.wordnet .cache/wordnet/usr/share/wordnet

Files in examples/data:

- categories.tsv.gz: 10,000 kinds of goods, parents first. Columns: number, parent's number or
  empty, names, definition.
- entries.tsv.gz: people, places and battles. Columns: number, kind, names, definition, numbers of
  the entries that contain it.

Names and numbers are separated by `; `. The manual page wndb(5WN) describes the input format.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).resolve().parent.parent / "examples" / "data"
CATEGORIES: Final = 10_000
_GOODS: Final = ("00021939", "00021265")
"""Offsets of artifact and food."""
_NOT_GOODS: Final = ("04341686", "04564698", "03315023", "03302121")
"""Offsets below artifact that are not sold: structure, way, facility, excavation."""
_KINDS: Final = {
    "country": ("08544813",),
    "state": ("08654360",),  # state or province
    "city": ("08626283", "08518505"),  # municipality, capital
    "island": ("09316454",),
    "river": ("09411430",),
    "lake": ("09328904",),
    "sea": ("09426788",),
    "mountain": ("09359803", "09403734"),  # mountain, range
    "battle": ("00953559",),
    "person": ("00007846",),
}
"""The kinds of entries: the offsets of the synsets of which they are instances."""


@dataclass(frozen=True, slots=True)
class Synset:
    """A line of data.noun."""

    offset: str
    names: tuple[str, ...]
    definition: str
    pointers: tuple[tuple[str, str], ...]
    """Symbol and offset, nouns only."""

    def targets(self, *symbols: str) -> list[str]:
        return [target for symbol, target in self.pointers if symbol in symbols]


def read(file: Path) -> dict[str, Synset]:
    """Read the synsets of a data file, by offset."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):  # the licence
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        words = int(fields[3], 16)
        names = tuple(fields[4 + 2 * word].replace("_", " ") for word in range(words))
        rest = fields[5 + 2 * words :]
        pointers = tuple(
            (symbol, target)
            for symbol, target, kind in zip(rest[::4], rest[1::4], rest[2::4], strict=False)
            if kind == "n"
        )
        definition = re.split(r"[;:]?\s*\"", gloss.strip())[0].strip(" ;")
        found[fields[0]] = Synset(fields[0], names, definition, pointers)
    return found


def below(
    synsets: Mapping[str, Synset], roots: Iterable[str], *, without: Iterable[str] = ()
) -> dict[str, str]:
    """Return the parent's offset of each synset below `roots`, breadth first; empty for a root."""
    under = defaultdict(list)
    for synset in synsets.values():
        for parent in synset.targets("@"):
            under[parent].append(synset.offset)
    found = dict.fromkeys(roots, "")
    waiting, left_out = list(found), set(without)
    for offset in waiting:
        for child in under[offset]:
            if child not in found and child not in left_out:
                found[child] = offset
                waiting.append(child)
    return found


def categories(synsets: Mapping[str, Synset]) -> Iterable[tuple[str, ...]]:
    found = below(synsets, _GOODS, without=_NOT_GOODS)
    kept = list(found)[:CATEGORIES]
    numbers = {offset: str(number) for number, offset in enumerate(kept)}
    for offset in kept:
        synset = synsets[offset]
        yield (
            numbers[offset],
            numbers.get(found[offset], ""),
            "; ".join(synset.names),
            synset.definition,
        )


def entries(synsets: Mapping[str, Synset]) -> Iterable[tuple[str, ...]]:
    kinds = {kind: frozenset(below(synsets, roots)) for kind, roots in _KINDS.items()}
    found: dict[str, str] = {}
    for synset in synsets.values():
        above = synset.targets("@i")
        kind = next(
            (kind for kind, offsets in kinds.items() if any(parent in offsets for parent in above)),
            "",
        )
        if kind:
            found[synset.offset] = kind
    numbers = {offset: str(number) for number, offset in enumerate(found)}
    for offset, kind in found.items():
        synset = synsets[offset]
        wholes = "; ".join(
            numbers[whole] for whole in synset.targets("#p", "#m") if whole in numbers
        )
        yield numbers[offset], kind, "; ".join(synset.names), synset.definition, wholes


def write(rows: Iterable[tuple[str, ...]], file: Path) -> int:
    """Write rows as gzip, with the same bytes for the same rows."""
    lines = ["\t".join(row) for row in rows]
    file.write_bytes(
        gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=9, mtime=0)
    )
    return len(lines)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    synsets = read(Path(sys.argv[1]) / "data.noun")
    DATA.mkdir(exist_ok=True)
    for name, rows in (("categories", categories(synsets)), ("entries", entries(synsets))):
        print(f"{write(rows, DATA / f'{name}.tsv.gz'):,} rows in {name}.tsv.gz")


if __name__ == "__main__":
    main()
