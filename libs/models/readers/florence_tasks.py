"""Florence-2's tasks: the prompts, and the parsing of answers.

Locations are `<loc_0>` to `<loc_999>`, thousandths of the image's width or height. The parser
follows transformers' Florence2PostProcessor; tests/readers compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from shoal.extractions import Region

from libs.errors import InvalidInput
from libs.models.interface.work import TextWork

BINS: Final = 1000
REGION_FIELD: Final = "text.region"
FIELD: Final = "text.instruction"

Form = Literal["text", "lines", "boxes", "phrases", "proposals", "polygons", "any"]
"""The form of an answer: a text; texts with four corners each; labels with boxes; phrases of a
caption with boxes; boxes alone; polygons; or labels with boxes or polygons."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that Florence-2 was trained for."""

    prompt: str
    """The prompt in words, with `{}` in place of the input."""
    form: Form
    """The form of the answer."""


TASKS: Final = {
    "<OCR>": Task("What is the text in the image?", "text"),
    "<OCR_WITH_REGION>": Task("What is the text in the image, with regions?", "lines"),
    "<CAPTION>": Task("What does the image describe?", "text"),
    "<DETAILED_CAPTION>": Task("Describe in detail what is shown in the image.", "text"),
    "<MORE_DETAILED_CAPTION>": Task(
        "Describe with a paragraph what is shown in the image.", "text"
    ),
    "<OD>": Task("Locate the objects with category name in the image.", "boxes"),
    "<DENSE_REGION_CAPTION>": Task(
        "Locate the objects in the image, with their descriptions.", "boxes"
    ),
    "<REGION_PROPOSAL>": Task("Locate the region proposals in the image.", "proposals"),
    "<CAPTION_TO_PHRASE_GROUNDING>": Task("Locate the phrases in the caption: {}", "phrases"),
    "<REFERRING_EXPRESSION_SEGMENTATION>": Task("Locate {} in the image with mask", "polygons"),
    "<REGION_TO_SEGMENTATION>": Task("What is the polygon mask of region {}", "polygons"),
    "<OPEN_VOCABULARY_DETECTION>": Task("Locate {} in the image.", "any"),
    "<REGION_TO_CATEGORY>": Task("What is the region {}?", "text"),
    "<REGION_TO_DESCRIPTION>": Task("What does the region {} describe?", "text"),
    "<REGION_TO_OCR>": Task("What text is in the region {}?", "text"),
}
"""Tasks by the names in Florence-2's processors."""

DETECTION: Final = TASKS["<OPEN_VOCABULARY_DETECTION>"]
_KINDS: Final = {
    "caption": "<CAPTION>",
    "detailed_caption": "<MORE_DETAILED_CAPTION>",
    "ocr": "<OCR>",
    "ocr_regions": "<OCR_WITH_REGION>",
}
_REGION_KINDS: Final = {
    "caption": "<REGION_TO_DESCRIPTION>",
    "detailed_caption": "<REGION_TO_DESCRIPTION>",
    "ocr": "<REGION_TO_OCR>",
}
BANNED: Final = frozenset({
    "a", "an", "the", "image", "images", "I", "me", "mine", "myself", "you", "your", "yours",
    "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers", "herself", "it",
    "its", "itself", "we", "us", "our", "ours", "ourselves", "they", "them", "their", "theirs",
    "themselves", "one", "oneself", "each", "this", "that", "these", "those", "who", "whom",
    "whose", "which", "what", "all", "another", "any", "anybody", "anyone", "anything", "everybody",
    "everyone", "everything", "few", "many", "nobody", "none", "several", "some", "somebody",
    "someone", "something", "the image", "a group", "a set", "lots", "other objects", "one another",
    "each other",
})  # fmt: skip
"""Phrases of a caption without a location, copied from Microsoft's processor and from the
processor_config.json of transformers' layout."""
_NAMED: Final = re.compile(r"\s*(<[A-Z_]+>)(.*)", re.DOTALL)

_LOCATION: Final = re.compile(r"<loc_(\d+)>")
_LINE: Final = re.compile(r"(.+?)" + r"<loc_(\d+)>" * 8)
_LABELLED: Final = re.compile(r"([^<]+)((?:<loc_\d+>){4,})")
_ALONE: Final = re.compile(r"((?:<loc_\d+>){4,})")
_MARK: Final = r"(?:<loc_\d+>|<sep>|<poly>|</poly>)"
_OUTLINED: Final = re.compile(rf"([^<]+)({_MARK}{{4,}})")
_OUTLINES: Final = re.compile(rf"({_MARK}{{4,}})")
_POLYGON: Final = re.compile(r"<poly>(.*?)</poly>", re.DOTALL)
_RING: Final = re.compile(r"((?:<loc_\d+>)+)(?:<sep>|$)")


def build_prompt(work: TextWork, width: int, height: int) -> tuple[str, Form]:
    """Return the prompt for an image of this size in pixels, and the form of its answer.

    Raises InvalidInput for an unsupported instruction or region.
    """
    place = None if work.region is None else _places(work.region, width, height)
    if not work.instruction.strip():
        names = _KINDS if place is None else _REGION_KINDS
        name = names.get(work.text_kind)
        if name is None:
            raise InvalidInput(
                "lines are found in the whole image only: remove the region, or request ocr",
                field=REGION_FIELD,
            )
        return TASKS[name].prompt.format(place), TASKS[name].form
    named = _NAMED.fullmatch(work.instruction)
    task = None if named is None else TASKS.get(named.group(1))
    if named is None or task is None:
        if place is not None:
            raise InvalidInput(
                "a free instruction cannot have a region: use one of the model's tasks, such as "
                "<REGION_TO_OCR>",
                field=REGION_FIELD,
            )
        return work.instruction, "text"
    name, given = named.group(1), named.group(2).strip()
    if "{}" not in task.prompt:
        if given or place is not None:
            raise InvalidInput(
                f"the task {name} accepts neither a text nor a region",
                field=FIELD if given else REGION_FIELD,
            )
        return task.prompt, task.form
    if place is not None and (given or not name.startswith("<REGION_")):
        raise InvalidInput(
            f"the task {name} accepts a text or a region, not both", field=REGION_FIELD
        )
    if place is None and not given:
        wanted = "a region" if name.startswith("<REGION_") else "a text after it"
        raise InvalidInput(f"the task {name} needs {wanted}", field=FIELD)
    return task.prompt.format(place or given), task.form


def parse_regions(
    written: str, form: Form, width: int, height: int, banned: frozenset[str] = frozenset()
) -> list[Region]:
    """Return the regions of an answer, in order, in pixels of an image of `width` x `height`.

    `banned` are phrases without regions.
    """
    scale = (width, height)
    if form == "text":
        return []
    if form == "lines":
        return [
            _outlined(content.strip(), _scaled(corners, scale))
            for content, *corners in _LINE.findall(written)
        ]
    if form == "polygons" or (form == "any" and "<poly>" in written):
        return list(_polygons(written, scale, labelled=form == "any"))
    if form == "proposals":
        return [
            _box("", four, scale) for found in _ALONE.findall(written) for four in _fours(found)
        ]
    labelled = ((_label(phrase), found) for phrase, found in _LABELLED.findall(written))
    if form == "phrases":
        labelled = ((label, found) for label, found in labelled if label not in banned)
    return [
        _box(_plain(label), four, scale)
        for label, found in labelled
        if label is not None
        for four in _fours(found)
    ]


def _label(phrase: str) -> str | None:
    """Strip the label's whitespace. Returns None for several lines, which are not a label."""
    label = phrase.strip()
    return None if "\n" in phrase.lstrip() else label


def _plain(label: str) -> str:
    return label.encode("ascii", "ignore").decode("ascii")


def _polygons(written: str, scale: tuple[int, int], *, labelled: bool) -> Iterator[Region]:
    """Yield the polygons of an answer.

    An instance has polygons between <poly> and </poly>, with rings separated by <sep>, or rings
    alone.
    """
    found = (
        _OUTLINED.findall(written)
        if labelled
        else [("", each) for each in _OUTLINES.findall(written)]
    )
    for phrase, marks in found:
        label = _label(phrase)
        if label is None:
            continue
        for instance in (
            _POLYGON.findall(marks) if "<poly>" in marks and "</poly>" in marks else [marks]
        ):
            for ring in _RING.findall(instance):
                numbers = _LOCATION.findall(ring)
                corners = _scaled(numbers[: len(numbers) // 2 * 2], scale)
                if len(corners) >= 6:
                    yield _outlined(label, corners)


def _fours(locations: str) -> Iterator[list[str]]:
    numbers = _LOCATION.findall(locations)
    for start in range(0, len(numbers) - 3, 4):
        yield numbers[start : start + 4]


def _scaled(numbers: list[str], scale: tuple[int, int]) -> tuple[float, ...]:
    """Convert x and y locations to whole pixels, at the middle of their thousandth."""
    bins = [np.float32(side / BINS) for side in scale]
    return tuple(
        float(int((np.float32(number) + np.float32(0.5)) * bins[place % 2]))
        for place, number in enumerate(numbers)
    )


def _box(label: str, numbers: list[str], scale: tuple[int, int]) -> Region:
    """Build a box. A model may generate the edges in any order."""
    first, second, third, fourth = _scaled(numbers, scale)
    return Region(
        min(first, third), min(second, fourth), max(first, third), max(second, fourth), label, 1.0
    )


def _outlined(label: str, corners: tuple[float, ...]) -> Region:
    across, down = corners[0::2], corners[1::2]
    return Region(min(across), min(down), max(across), max(down), label, 1.0, corners)


def _places(region: tuple[float, float, float, float], width: int, height: int) -> str:
    """Write a region of an image as location tokens. Raises InvalidInput for one outside the
    image."""
    left, top, right, bottom = region
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise InvalidInput(
            f"the region is not within the image, which has {width:,} x {height:,} pixels",
            field=REGION_FIELD,
        )
    bins = (np.float32(width / BINS), np.float32(height / BINS)) * 2
    numbers = (
        min(BINS - 1, int(np.float32(value) / size))
        for value, size in zip(region, bins, strict=True)
    )
    return "".join(f"<loc_{number}>" for number in numbers)
