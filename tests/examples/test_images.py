"""The examples of images, shortened, against one mesh with models of random weights.

The quality is not tested: such a model ranks by chance. The assertions hold with any weights, and
fail if files, preparation, encoders or results are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shoal
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from examples import pages, photos, random_models
from examples.photos import PHOTOS, Options, gathered
from tests.parity.vlm_models import _EngineProcessor
from tests.support.cluster import Cluster

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

LINES = (
    "Shoal is a mesh for inference.",
    "A lane is a queue of jobs for one model.",
    "Workers pull jobs; a router answers.",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of the models by their names."""
    found = {
        name: tmp_path_factory.mktemp("made")
        for name in (random_models.CLIP, random_models.COLSMOL)
    }
    random_models.write_clip(found[random_models.CLIP])
    random_models.write_colsmol(found[random_models.COLSMOL])
    return found


@pytest.fixture(scope="module")
def endpoint(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = ":".join(f"{name}={folder}" for name, folder in made.items())
    with Cluster(tmp_path_factory.mktemp("mesh"), models=models) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def pdf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pages."""
    sheets = []
    for number, line in enumerate(LINES):
        sheet = Image.new("RGB", (600, 800), "white")
        ImageDraw.Draw(sheet).multiline_text(
            (40, 40), "\n".join([f"{number + 1}. {line}"] * (8 * number + 4)), "black"
        )
        sheets.append(sheet)
    file = tmp_path_factory.mktemp("pdf") / "made.pdf"
    sheets[0].save(file, save_all=True, append_images=sheets[1:])
    return file


def printed(example: Any, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert example.main(options) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_photos(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--endpoint",
        endpoint,
        "--model",
        random_models.CLIP,
        "--limit",
        "8",
        "--output",
        str(tmp_path / "sheet"),
    )
    found = json.loads(printed(photos, capsys, *options, "--json"))
    checks = found["checks"]
    assert found["photos"] == checks["found_themselves"] == 8
    assert checks["dimensions"] == [64, 64]
    assert checks["lowest_cosine"] > 0.9999
    assert len(found["ranking"]) == 8
    assert all(len(set(ranked)) == 3 for ranked in found["ranking"].values())
    sheet = Path(found["sheet"]).read_text()
    assert sheet.count("<img") == 8 * 3 + 8
    assert "https://" not in sheet
    assert len(list((tmp_path / "sheet").glob("*.jpg"))) == 8


def test_pages(endpoint: str, pdf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--endpoint",
        endpoint,
        "--model",
        random_models.COLSMOL,
        "--pdf",
        str(pdf),
        "--ask",
        *LINES,
    )
    found = json.loads(printed(pages, capsys, *options, "--json"))
    assert found["pages"] == found["checks"]["found_themselves"] == 3
    assert found["checks"]["score_error"] <= 1e-5
    # 4 x 3 tiles and the whole page, each 16 vectors of 128 numbers, in addition to the prompt's.
    assert found["vectors_per_page"] > 13 * 16
    sizes = found["bytes_per_page"]
    assert sizes["float32"] == found["vectors_per_page"] * 128 * 4
    assert sizes["float32"] == 2 * sizes["float16"]
    assert sizes["int8"] == pytest.approx(found["vectors_per_page"] * (128 + 4))
    assert [len(ranked) for ranked in found["ranking"].values()] == [3, 3, 3]


@torch.inference_mode()
def test_vectors_are_those_of_transformers(endpoint: str, made: dict[str, Path], pdf: Path) -> None:
    """The same checkpoints are used: photographs and texts of one, pages of the other."""
    folder = made[random_models.CLIP]
    files = [
        photo.file for photo in gathered(Options(None, "", None, (), Path(), 3, 1, json=False))
    ]
    clip = transformers.CLIPModel.from_pretrained(folder).eval()
    images = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    pixels = images([Image.open(file).convert("RGB") for file in files], return_tensors="pt")
    wanted = [
        clip.get_image_features(**pixels),
        clip.get_text_features(**tokenizer(["a cat"], return_tensors="pt")),
    ]
    rows = np.concatenate([getattr(one, "pooler_output", one).numpy() for one in wanted])
    page = pages.rendered([pdf], 72, 1)[0].image
    with shoal.Client(endpoint) as client:
        ours = client.encode(random_models.CLIP, [*files, "a cat"]).dense
        vectors = client.encode(random_models.COLSMOL, [page]).multi_vector[0]
    assert np.abs(ours - rows).max() <= 1e-5 * np.abs(rows).max()
    theirs = _colsmol(made[random_models.COLSMOL], page)
    assert np.abs(vectors - theirs).max() <= 1e-5 * np.abs(theirs).max()


def _colsmol(folder: Path, page: bytes) -> np.ndarray:
    """Compute vectors as colpali-engine: the language model's states, projected, of length 1."""
    from io import BytesIO

    model = transformers.Idefics3Model.from_pretrained(folder).eval()
    head = load_file(folder / "model.safetensors")
    images = transformers.Idefics3ImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|im_end|>"
    )
    processor = _EngineProcessor(images, tokenizer, image_seq_len=16)
    batch = processor.process_images(
        [Image.open(BytesIO(page)).convert("RGB")], return_tensors="pt"
    )
    states = model(**batch).last_hidden_state[0] @ head["linear.weight"].T + head["linear.bias"]
    return torch.nn.functional.normalize(states, dim=-1).numpy()


def test_readable_output(
    endpoint: str, pdf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--endpoint",
        endpoint,
        "--model",
        random_models.CLIP,
        "--limit",
        "3",
        "--output",
        str(tmp_path),
    )
    said = printed(photos, capsys, *options, "--ask", "a cat")
    assert "3 of 3 photographs are nearest to a PNG of the same pixels" in said
    said = printed(
        pages,
        capsys,
        "--endpoint",
        endpoint,
        "--model",
        random_models.COLSMOL,
        "--pdf",
        str(pdf),
        "--ask",
        "a lane",
    )
    assert "3 of 3 pages are the best for their own vectors" in said


def test_random_model_says_so() -> None:
    """An example without --model says that its ranking means nothing, also on the contact sheet."""
    row = np.zeros((1, 1), np.float32)
    sheet = photos.contact_sheet(
        ["<b>"],
        [photos.Photo(Path("a&b.png"))],
        ["a.jpg"],
        row,
        np.zeros((1, 1), int),
        random_models.WARNING,
    )
    assert "means nothing" in sheet
    assert "&lt;b&gt;" in sheet
    assert "a&amp;b.png" in sheet


def test_errors_name_the_remedy(
    pdf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(example: Any, *options: str) -> str:
        assert example.main(options) == 1
        return " ".join(capsys.readouterr().err.split())

    assert "needs --model" in fails(photos, "--endpoint", "127.0.0.1:1")
    assert "has no photographs" in fails(photos, "--photos", str(tmp_path))
    assert "--ask" in fails(pages, "--pdf", str(pdf))
    (tmp_path / "no.pdf").write_bytes(b"no")
    assert "cannot be read as a PDF" in fails(
        pages, "--pdf", str(tmp_path / "no.pdf"), "--ask", "what"
    )


@pytest.mark.parametrize("example", [photos, pages])
def test_help(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--model" in capsys.readouterr().out


def test_every_photograph_has_a_licence() -> None:
    assert all(licence for _, _, _, licence in PHOTOS)
