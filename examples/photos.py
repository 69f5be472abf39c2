"""Search in photographs by text: photographs and texts become vectors of one space, and the nearest
photographs are the answer.

    python -m examples.photos
    python -m examples.photos --model openai/clip-vit-base-patch32
    python -m examples.photos --photos ~/photos --ask "a dog on a beach" \\
        --model google/siglip-base-patch16-224

Without --model a small CLIP with random weights runs (examples/random_models.py), so that
everything works without a network; its ranking means nothing, and the output says so. Photographs
are those that scikit-image, scikit-learn and matplotlib bring, as far as they are installed; PHOTOS
has their licences. The contact sheet is one HTML page that loads nothing from a network.
"""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import shoal
from PIL import Image

from examples import common, random_models
from examples.common import Advice, Floats

# (package, file in it, description, licence)
PHOTOS = (
    ("skimage", "data/astronaut.png", "a woman in a space suit", "NASA, public domain"),
    ("skimage", "data/brick.png", "a brick wall", "CC0"),
    ("skimage", "data/camera.png", "a man with a camera", "CC0, Lav Varshney"),
    ("skimage", "data/chelsea.png", "a cat", "CC0, Stéfan van der Walt"),
    ("skimage", "data/coffee.png", "a cup of coffee", "CC0, Rachel Michetti"),
    ("skimage", "data/coins.png", "old coins", "Brooklyn Museum, no known restrictions"),
    ("skimage", "data/grass.png", "grass", "CC0"),
    ("skimage", "data/hubble_deep_field.jpg", "galaxies", "NASA, public domain"),
    ("skimage", "data/moon.png", "the surface of the Moon", "NASA, public domain"),
    ("skimage", "data/motorcycle_left.png", "a motorcycle", "CC0, Daniel Scharstein"),
    ("skimage", "data/retina.jpg", "the inside of an eye", "CC0, Mikael Häggström"),
    ("skimage", "data/rocket.jpg", "a rocket that takes off", "SpaceX, public domain"),
    ("sklearn", "datasets/images/china.jpg", "a Chinese temple", "CC BY 2.0, danielbuechele"),
    ("sklearn", "datasets/images/flower.jpg", "a flower", "CC BY 2.0, vultilion"),
    (
        "matplotlib",
        "mpl-data/sample_data/grace_hopper.jpg",
        "an officer in uniform",
        "US Navy, public domain",
    ),
)
KINDS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".gif", ".bmp", ".avif")
THUMB = 192
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True, slots=True)
class Photo:
    file: Path
    shows: str = ""
    """The text that searches for it; empty for the user's photographs."""
    licence: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: str | None
    model: str
    photos: Path | None
    ask: tuple[str, ...]
    output: Path
    limit: int
    top: int
    json: bool


@dataclass(frozen=True, slots=True)
class Checks:
    """Invariants that hold with any weights."""

    photos: int
    found_themselves: int
    """Photographs that rank first for a PNG of the same pixels."""
    lowest_cosine: float
    """Lowest cosine of a photograph with its PNG; should be 1."""
    halves_found: int
    """Photographs that rank first for a copy at half the size."""
    dimensions: tuple[int, int]
    """Dimensions of image vectors and of text vectors."""


def arguments(given: Sequence[str] | None) -> Options:
    parser = common.options(__doc__ or "", embedder=False)
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="a model that reads texts and images, such as openai/clip-vit-base-patch32",
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="your photographs")
    parser.add_argument(
        "--ask",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="texts to search for; default: the photographs' descriptions",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/photos"),
        metavar="FOLDER",
        help="folder for thumbnails and contact sheet",
    )
    parser.add_argument(
        "--limit", type=common.at_least(1), default=1_000, metavar="N", help="photographs to search"
    )
    parser.add_argument(
        "--top",
        type=common.at_least(1),
        default=3,
        metavar="N",
        help="photographs to show for each text",
    )
    found = vars(parser.parse_args(given))
    return Options(**found | {"ask": tuple(found["ask"])})


def gathered(options: Options) -> list[Photo]:
    """Return the photographs to search. Raises Advice if there are none."""
    if options.photos is not None:
        files = sorted(file for file in options.photos.rglob("*") if file.suffix.lower() in KINDS)
        if not files:
            raise Advice(f"{options.photos} has no photographs ({', '.join(KINDS)})")
        return [Photo(file) for file in files[: options.limit]]
    found = []
    for package, path, shows, licence in PHOTOS:
        spec = find_spec(package)
        file = Path(spec.origin).parent / path if spec is not None and spec.origin else Path(path)
        if file.is_file():
            found.append(Photo(file, shows, licence))
    if not found:
        raise Advice(
            "no package with photographs is installed: pip install scikit-image, or name a "
            "folder by --photos"
        )
    return found[: options.limit]


async def vectors(
    client: shoal.AsyncClient, model: str, items: Sequence[shoal.tasks.Item], what: str
) -> Floats:
    """Encode items as unit vectors, [items, dimensions]."""
    with common.progress(what, len(items)) as show:
        answer = await client.encode(
            model,
            items,
            normalize=True,
            timeout=common.TIMEOUT,
            on_progress=lambda done, total: show(done),
        )
    return answer.dequantize()


async def search(options: Options) -> None:
    photos = gathered(options)
    asked = list(options.ask) or [photo.shows for photo in photos if photo.shows]
    if not asked:
        raise Advice("--photos needs texts to search for: --ask 'a red boat' 'my cat'")
    files = [photo.file for photo in photos]
    async with common.model_or_random(
        options.endpoint, options.model, random_models.CLIP, random_models.write_clip
    ) as (
        client,
        model,
    ):
        await client.encode(model, files[:1], timeout=common.TIMEOUT)  # loads the model
        began = time.perf_counter()
        found = await vectors(client, model, files, "encoding photographs")
        seconds = time.perf_counter() - began
        texts = await vectors(
            client, model, [f"a photo of {text}" for text in asked], "encoding texts"
        )
        checks = await checked(client, model, files, found, texts)
    scores = texts @ found.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, : options.top]
    thumbs = thumbnails(photos, options.output)
    sheet = options.output / "index.html"
    note = "" if options.model else random_models.WARNING
    sheet.write_text(contact_sheet(asked, photos, thumbs, scores, best, note), encoding="utf-8")
    right = (
        [photos[ranked[0]].shows == text for text, ranked in zip(asked, best, strict=True)]
        if not options.ask
        else []
    )
    if options.json:
        common.print_json(
            {
                "model": model,
                "random": not options.model,
                "photos": len(photos),
                "images_per_second": len(files) / seconds,
                "checks": asdict(checks),
                "right_first": sum(right) / len(right) if right and options.model else None,
                "sheet": str(sheet),
                "ranking": {
                    text: [str(photos[one].file) for one in ranked]
                    for text, ranked in zip(asked, best, strict=True)
                },
            }
        )
        return
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    print(
        f"{model}: {len(files)} photographs, {megabytes:.1f} MB, in {seconds:.2f} s: "
        f"{len(files) / seconds:.1f} a second"
    )
    if note:
        print(note)
    headings = ("searched for", f"cosine, thumbnail in {options.output}")
    lines = [
        (text, "\n".join(f"{scores[row, one]:.3f} {thumbs[one]}" for one in best[row]))
        for row, text in enumerate(asked)
    ]
    common.table(f"the best {best.shape[1]} of {len(photos)} photographs", headings, lines)
    if right and options.model:
        print(f"the photograph that was meant is first for {sum(right)} of {len(right)} texts")
    print(check_summary(checks))
    print(f"contact sheet: {sheet}")


async def checked(
    client: shoal.AsyncClient, model: str, files: Sequence[Path], found: Floats, texts: Floats
) -> Checks:
    """Search for copies of the photographs: the same pixels as PNG, and half the size."""
    images = [Image.open(file).convert("RGB") for file in files]
    same = await vectors(client, model, images, "the same pixels as PNG")
    halves = [
        one.resize((max(one.width // 2, 1), max(one.height // 2, 1)), Image.Resampling.LANCZOS)
        for one in images
    ]
    smaller = await vectors(client, model, halves, "copies of half the size")
    cosines = np.einsum("nd,nd->n", same, found)
    own = np.arange(len(files))
    # Two photographs may be the same file.
    nearest = np.isclose((same @ found.T).max(axis=1), cosines, atol=1e-6)
    return Checks(
        photos=len(files),
        found_themselves=int((nearest & (cosines > 0.999)).sum()),
        lowest_cosine=float(cosines.min()),
        halves_found=int(((smaller @ found.T).argmax(axis=1) == own).sum()),
        dimensions=(found.shape[1], texts.shape[1]),
    )


def check_summary(checks: Checks) -> str:
    return (
        f"with any weights: {checks.found_themselves} of {checks.photos} photographs are nearest "
        f"to a PNG of the same pixels (cosine at least {checks.lowest_cosine:.4f}), "
        f"{checks.halves_found} to a copy of half the size; images have {checks.dimensions[0]} "
        f"dimensions, texts {checks.dimensions[1]}"
    )


def thumbnails(photos: Sequence[Photo], folder: Path) -> list[str]:
    """Write thumbnails and return their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, photo in enumerate(photos):
        image = Image.open(photo.file).convert("RGB")
        image.thumbnail((THUMB, THUMB))
        name = f"{photo.file.stem[:64]}.jpg"
        names.append(f"{number}-{name}" if name in names else name)
        image.save(folder / names[-1], quality=85)
    return names


def contact_sheet(
    asked: Sequence[str],
    photos: Sequence[Photo],
    thumbs: Sequence[str],
    scores: Floats,
    best: np.ndarray,
    note: str,
) -> str:
    """Render a page with the best photographs of each text, then all photographs and licences."""

    def figure(number: int, caption: str) -> str:
        name = html.escape(photos[number].file.name)
        image = f'<img src="{html.escape(thumbs[number])}" alt="{name}">'
        return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"

    rows = [
        f"<h2>{html.escape(text)}</h2><div>"
        + "".join(figure(one, f"{scores[row, one]:.3f}") for one in best[row])
        + "</div>"
        for row, text in enumerate(asked)
    ]
    everything = "".join(
        figure(number, f"{photo.file.name} {photo.licence}") for number, photo in enumerate(photos)
    )
    warning = f"<p><strong>{html.escape(note)}</strong></p>" if note else ""
    style = (
        "body{font:14px "
        "sans-serif;margin:2em}div{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0;width:200px}"
    )
    return (
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>Photographs</title><style>{style}</style>'
        f"<h1>Photographs by text</h1>{warning}{''.join(rows)}<h2>All "
        f"{len(photos)}</h2><div>{everything}</div></html>{os.linesep}"
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    return common.run(lambda: search(options))


if __name__ == "__main__":
    sys.exit(main())
