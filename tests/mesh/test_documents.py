"""PDF documents through the mesh: pages as images for CLIP and ColPali models, text layers, hostile
files, and the command line.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import grpc
import numpy as np
import psutil
import pypdfium2
import pytest
import shoal
from PIL import Image
from shoal import errors
from shoal.cli import main
from shoal.tasks import Document
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, models_pb2_grpc
from typer.testing import CliRunner

from tests.parity.image_repositories import TEXTS, write_repository
from tests.support import offices, pdfs
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MODEL = "random/clip-documents"
THREE = pdfs.document(["first page", "second page", ""])


@pytest.fixture(scope="module", autouse=True)
def clip(mesh: Cluster, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load a model, and wait until every router has its card."""
    made = write_repository("clip", tmp_path_factory.mktemp("clip") / "made")
    made.directory.rename(checkpoints / "random" / "clip-documents")
    with shoal.Client(mesh.address) as client:
        client.encode(MODEL, TEXTS[:1])


def drawn(data: bytes, number: int, dpi: int) -> bytes:
    """Return a page as a PNG."""
    page = pypdfium2.PdfDocument(data)[number - 1]
    out = BytesIO()
    Image.fromarray(page.render(scale=dpi / 72, rev_byteorder=True).to_numpy()).save(out, "PNG")
    return out.getvalue()


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_page_is_an_image(client: shoal.Client) -> None:
    """Items of one file keep their order among texts and images."""
    pages = Document(THREE, dots_per_inch=100).each(1, 3)
    images = [drawn(THREE, number, 100) for number in (1, 2, 3)]
    found = client.encode(MODEL, [pages[2], TEXTS[0], *pages, images[1]])
    wanted = client.encode(MODEL, [images[2], TEXTS[0], *images, images[1]])
    assert relative_error(found.dense, wanted.dense) <= 1e-5
    assert found.usage == wanted.usage
    scores = client.score(MODEL, TEXTS[0], pages).scores
    assert relative_error(scores, client.score(MODEL, TEXTS[0], images).scores) <= 1e-5


def test_many_pages_share_one_file_per_request(client: shoal.Client) -> None:
    data = pdfs.document([f"number {number}" for number in range(1, 41)])
    small = Document(data, dots_per_inch=20)
    rows = client.encode(MODEL, small.each(1, 40)).dense
    alone = client.encode(MODEL, [small.page(17), small.page(40)]).dense
    assert rows.shape[0] == 40
    assert relative_error(rows[[16, 39]], alone) <= 1e-5


def test_single_image_models_accept_one_page(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput, match="not 3 parts") as caught:
        client.encode(MODEL, [TEXTS[0], Document(THREE)])
    assert caught.value.field.startswith("items[1].parts[0]")
    assert client.encode(MODEL, Document(pdfs.document(["alone"]))).dense.shape[0] == 1


@pytest.mark.parametrize("file", pdfs.REAL, ids=lambda file: file.name)
def test_text_layers_of_real_documents_equal_pypdfium2(client: shoal.Client, file: Path) -> None:
    theirs = pypdfium2.PdfDocument(file)
    last = min(len(theirs), 16)
    (found,) = client.extract(MODEL, Document(file, 1, last), shoal.ReadText(kind="ocr"))
    assert found.document_pages == len(theirs)
    assert [page.page for page in found.pages] == [*range(1, last + 1)]
    for page in found.pages:
        assert page.text == theirs[page.page - 1].get_textpage().get_text_bounded()
        assert page.is_text_layer


def test_pages_without_a_text_layer(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput, match="page 3 has no text layer") as caught:
        client.extract(MODEL, [Document(THREE)], shoal.ReadText())
    assert caught.value.field == "items[0].parts[0].document"
    (only,) = client.extract(MODEL, Document(THREE), shoal.ReadText(text_layer="only"))
    assert [(page.text, page.is_text_layer) for page in only.pages] == [
        ("first page", True),
        ("second page", True),
        ("", False),
    ]
    with pytest.raises(errors.InvalidInput):
        client.extract(MODEL, Document(THREE), shoal.ReadText(text_layer="never"))
    with pytest.raises(errors.InvalidInput):
        client.extract(MODEL, "a text", shoal.ReadText())


def test_hostile_documents_are_refused_with_their_path_and_no_worker_dies(
    client: shoal.Client, mesh: Cluster
) -> None:
    workers = [
        psutil.Process(process.pid)
        for name, process in mesh.processes.items()
        if name.startswith("worker")
    ]
    born = [worker.create_time() for worker in workers]
    good = Document(THREE).page(1)
    before = client.encode(MODEL, good).dense
    for name, data in pdfs.hostile().items():
        with pytest.raises(errors.InvalidInput) as caught:
            client.encode(MODEL, [TEXTS[0], good, shoal.Parts(Document(data, 1, 1))])
        assert caught.value.field.startswith("items[2].parts[0].document"), name
    assert relative_error(client.encode(MODEL, good).dense, before) <= 1e-5
    assert [worker.create_time() for worker in workers] == born


REFUSED: dict[str, tuple[pb.Document, str]] = {
    "nothing": (pb.Document(), "document"),
    "no document": (pb.Document(data=b"\x00hello"), "document.data"),
    "a format without images": (pb.Document(data=b"hello"), "document"),
    "a file that is not there": (pb.Document(file=3), "document.file"),
    "pages backwards": (pb.Document(data=THREE, first_page=3, last_page=2), "document.last_page"),
    "too many pages": (pb.Document(data=THREE, first_page=1, last_page=65), "document.last_page"),
    "too many dots": (pb.Document(data=THREE, dots_per_inch=601), "document.dots_per_inch"),
    "beyond the end": (pb.Document(data=THREE, first_page=4), "document"),
    "more than 16 without a last page": (pb.Document(data=pdfs.document(["a"] * 17)), "document"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_documents_are_refused(client: shoal.Client, mesh: Cluster, name: str) -> None:
    document, field = REFUSED[name]
    with grpc.insecure_channel(mesh.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        items = [pb.Item(text="a"), pb.Item(parts=[pb.Part(document=document)])]
        with pytest.raises(grpc.RpcError) as caught:
            stub.Encode(pb.EncodeRequest(model=MODEL, items=items))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match="is not used by any item"):
            stub.Encode(pb.EncodeRequest(model=MODEL, items=items[:1], files=[THREE]))
        models = models_pb2_grpc.ModelServiceStub(channel)
        asked = models_pb2.GetModelRequest(model=MODEL)
        wait_until(
            lambda: models_pb2.INPUT_KIND_DOCUMENT in models.GetModel(asked).model.card.inputs
        )
    assert field in str(caught.value.trailing_metadata()) or field in str(caught.value)


OFFICE = {
    "docx": (offices.word(), "# Annual report"),
    "xlsx": (offices.workbook(), "## Sales 2024"),
    "pptx": (offices.slides(), "# Plans"),
    "epub": (offices.book(), "# Start"),
    "html": (offices.PAGE, "# Title"),
    "eml": (offices.mail(), "# Grüße über alles"),
    "md": (b"# A\n\ntext", "# A"),
}


@pytest.mark.parametrize("name", OFFICE)
def test_other_formats_are_returned_as_markdown(client: shoal.Client, name: str) -> None:
    data, begin = OFFICE[name]
    (found,) = client.extract(MODEL, Document(data), shoal.ReadText(kind="ocr"))
    assert found.pages[0].text.startswith(begin)
    assert all(page.is_text_layer for page in found.pages)
    assert [page.page for page in found.pages] == [*range(1, found.document_pages + 1)]


def test_other_formats_are_refused_where_pages_are_images(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput, match="DOCX file has no pages that can be drawn"):
        client.encode(MODEL, Document(offices.word(), 1, 1))


def test_hostile_files_of_other_formats_are_refused_with_their_path(client: shoal.Client) -> None:
    for name in ("zip bomb", "DOCX with entities", "deep HTML", "XLSX of two far cells"):
        data, problem = offices.hostile()[name]
        with pytest.raises(errors.InvalidInput) as caught:
            client.extract(MODEL, [Document(THREE, 1, 1), Document(data)], shoal.ReadText())
        assert problem in str(caught.value), name
        assert caught.value.field == "items[1].parts[0].document", name


def test_command_writes_markdown_of_a_docx_file(mesh: Cluster, tmp_path: Path) -> None:
    (tmp_path / "report.docx").write_bytes(offices.word())
    command = ["extract", "text", str(tmp_path / "report.docx"), "--model", MODEL]
    result = CliRunner().invoke(main.build(), [*command, "--address", mesh.address])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("# Annual report\n\n# Sales\n")
    assert "## Page" not in result.stdout


def test_text_models_refuse_documents(client: shoal.Client) -> None:
    client.encode("random/bert-embed", "a text")
    with pytest.raises(errors.InvalidInput):
        client.encode("random/bert-embed", Document(THREE, 1, 1))


def test_command_writes_markdown(mesh: Cluster, tmp_path: Path) -> None:
    data = pdfs.document([f"number {number}" for number in range(1, 21)])
    (tmp_path / "report.pdf").write_bytes(data)
    output = tmp_path / "report.md"
    command = [
        "extract",
        "text",
        str(tmp_path / "report.pdf"),
        "--model",
        MODEL,
        "--pages",
        "2-19",
        "--output",
        str(output),
    ]
    result = CliRunner().invoke(main.build(), [*command, "--address", mesh.address])
    assert result.exit_code == 0, result.output
    assert output.read_text() == "".join(
        f"## Page {number}\n\nnumber {number}\n\n" for number in range(2, 20)
    )
    whole = CliRunner().invoke(main.build(), [*command[:5], "--address", mesh.address])
    assert whole.output.count("## Page") == 20
    wrong = CliRunner().invoke(
        main.build(), [*command[:4], "--pages", "5-2", "--address", mesh.address]
    )
    assert wrong.exit_code == 2
