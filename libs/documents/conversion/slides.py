"""PPTX to Markdown: the texts, tables and notes of each slide, in the order of the file, which is
PowerPoint's reading order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.etree.ElementTree import Element

from . import markup
from .archive import ZipArchive, local
from .limits import ConversionLimits
from .paging import DocumentPages

_TITLES: Final = frozenset({"title", "ctrTitle"})
_SMALL: Final = frozenset({"dt", "ftr", "sldNum", "hdr"})
"""Placeholders that repeat on each slide: date, footer and number."""
_NUMBERED: Final = frozenset({"buChar", "buAutoNum", "buBlip"})


def convert(archive: ZipArchive, part: str, limits: ConversionLimits, pages: DocumentPages) -> None:
    """Add a page for each slide, or more if it is long.

    Args:
        part: The name of the presentation's main part.
    """
    presentation, relations = archive.xml(part), archive.relations(part)
    for slide in _all(presentation, "sldId"):
        target = next(
            (
                relations[value][1]
                for name, value in slide.attrib.items()
                if name.startswith("{") and local(name) == "id" and value in relations
            ),
            None,
        )
        if target is not None:
            pages.add("\n\n".join(block for block in _slide(archive, target) if block))


def _slide(archive: ZipArchive, part: str) -> Iterator[str]:
    """Yield the blocks of a slide: its title, the other shapes, and the notes."""
    shapes = [*_shapes(archive.xml(part))]
    for shape in sorted(shapes, key=lambda one: _placeholder(one) not in _TITLES):
        yield _block(shape)
    notes = next((to for kind, to in archive.relations(part).values() if kind == "notesSlide"), "")
    if notes in archive.names:
        texts = [
            "\n\n".join(text for text, _, _ in _paragraphs(shape))
            for shape in _shapes(archive.xml(notes))
            if _placeholder(shape) == "body"
        ]
        if any(texts):
            yield "### Notes\n\n" + "\n\n".join(filter(None, texts))


def _shapes(parent: Element) -> Iterator[Element]:
    """Yield shapes and frames, those of groups too. Of alternative contents the first is used."""
    for child in parent:
        tag = local(child.tag)
        if tag == "AlternateContent":
            yield from _shapes(next(iter(child), Element("none")))
        elif tag in ("sp", "graphicFrame"):
            yield child
        else:
            yield from _shapes(child)


def _block(shape: Element) -> str:
    tables = [*_all(shape, "tbl")]
    if tables:
        return "\n\n".join(
            "\n".join(markup.table(_cells(row) for row in _all(table, "tr"))) for table in tables
        )
    kind = _placeholder(shape)
    if kind in _SMALL:
        return ""
    if kind in _TITLES:
        text = " ".join(text for text, _, _ in _paragraphs(shape))
        return f"# {text}" if text else ""
    blocks, was_item = "", False
    for text, level, has_bullet in _paragraphs(shape):
        is_item = has_bullet if has_bullet is not None else bool(kind) and kind != "subTitle"
        line = f"{'  ' * level}- {text}" if is_item else text
        blocks += ("" if not blocks else "\n" if is_item and was_item else "\n\n") + line
        was_item = is_item
    return blocks


def _placeholder(shape: Element) -> str:
    """Return the type of a shape's placeholder; empty if it is none."""
    found = next(_all(shape, "ph"), None)
    return "" if found is None else found.get("type", "obj")


def _paragraphs(shape: Element) -> Iterator[tuple[str, int, bool | None]]:
    """Yield the text of each paragraph that has one, its level, and whether it has a bullet; None
    if its layout decides that.
    """
    for paragraph in _all(shape, "p"):
        text = " ".join(_text(paragraph).split())
        if not text:
            continue
        properties = next((one for one in paragraph if local(one.tag) == "pPr"), None)
        names = set() if properties is None else {local(one.tag) for one in properties}
        level = "" if properties is None else properties.get("lvl", "")
        bullet = False if "buNone" in names else True if names & _NUMBERED else None
        yield text, int(level) if level in "012345678" and level else 0, bullet


def _cells(row: Element) -> list[str]:
    return [" ".join(_text(one) for one in _all(cell, "p")) for cell in _all(row, "tc")]


def _text(paragraph: Element) -> str:
    parts = (
        " " if local(one.tag) == "br" else one.text or ""
        for one in paragraph.iter()
        if local(one.tag) in ("t", "br")
    )
    return "".join(parts)


def _all(parent: Element, tag: str) -> Iterator[Element]:
    return (one for one in parent.iter() if local(one.tag) == tag)
