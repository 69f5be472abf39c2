"""Images through the mesh: CLIP and SigLIP directories without specific code, next to a text
model.
"""

from __future__ import annotations

import base64
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import grpc
import numpy as np
import pytest
import shoal
import torch
from numpy.typing import NDArray
from PIL import Image
from shoal import errors
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, models_pb2_grpc

from tests.parity.image_models import pictures, processor, write_checkpoint
from tests.parity.image_repositories import TEXTS, Family, Reference, write_repository
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

FILES = pictures()
FAMILIES: tuple[Family, ...] = ("clip", "siglip", "openclip")


def relative_error(ours: NDArray[np.number], theirs: NDArray[np.number]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.fixture(scope="module")
def references(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Family, Reference]:
    made = {
        family: write_repository(family, tmp_path_factory.mktemp(family) / "made")
        for family in FAMILIES
    }
    for family, reference in made.items():
        reference.directory.rename(checkpoints / "random" / f"{family}-images")
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_images_of_one_request(
    client: shoal.Client, references: dict[Family, Reference], family: Family
) -> None:
    """Vectors share a space, are in the items' order, and equal those of each item alone."""
    model, theirs = f"random/{family}-images", references[family]
    mixed: list[str | bytes] = [FILES[0], TEXTS[0], FILES[1], FILES[4], TEXTS[2]]
    result = client.encode(model, mixed)
    wanted = np.concatenate(
        [
            theirs.images(FILES[:1]),
            theirs.texts(TEXTS[:1]),
            theirs.images([FILES[1], FILES[4]]),
            theirs.texts([TEXTS[2]]),
        ]
    )
    assert relative_error(result.dense, wanted) <= 1e-5
    assert 0 < result.usage.image_tokens < result.usage.input_tokens
    alone = [client.encode(model, [item]) for item in mixed]
    assert relative_error(np.concatenate([one.dense for one in alone]), result.dense) <= 1e-5
    assert sum(one.usage.image_tokens for one in alone) == result.usage.image_tokens
    assert sum(one.usage.input_tokens for one in alone) == result.usage.input_tokens


def test_text_that_is_an_image_in_base64_is_embedded_as_the_image(
    client: shoal.Client, references: dict[Family, Reference], mesh: Cluster
) -> None:
    del references
    uri = f"data:image/png;base64,{base64.b64encode(FILES[0]).decode()}"
    found, wanted = (
        client.encode("random/clip-images", [uri]),
        client.encode("random/clip-images", [FILES[0]]),
    )
    assert relative_error(found.dense, wanted.dense) <= 1e-6
    assert found.usage == wanted.usage
    with pytest.raises(errors.TaskNotSupported, match=r"is an image|takes no images"):
        client.encode("random/bert-embed", ["a text", uri])
    with grpc.insecure_channel(mesh.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=r"send the bytes of an image as image\.data"):
            stub.Encode(pb.EncodeRequest(model="random/clip-images", items=[pb.Item(text=uri)]))


def test_image_and_text_models_on_one_worker(
    client: shoal.Client, references: dict[Family, Reference]
) -> None:
    """All requests are concurrent on one worker."""
    del references
    asked: list[tuple[str, list[str | bytes]]] = [
        ("random/clip-images", [*FILES[:3]]),
        ("random/bert-embed", [*TEXTS]),
        ("random/siglip-images", [*FILES[:2], *TEXTS]),
    ] * 4
    before = [client.encode(model, items).dense for model, items in asked[:3]]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: client.encode(*one).dense, asked))
    for number, rows in enumerate(found):
        assert relative_error(rows, before[number % 3]) <= 1e-5


def test_dinov3(client: shoal.Client, checkpoints: Path) -> None:
    """The model only accepts images, in model-specific sizes."""
    directory = checkpoints / "random" / "dinov3-images"
    theirs = write_checkpoint("dinov3", directory)
    shown = [FILES[1], FILES[4], FILES[6]]
    with torch.inference_mode():
        given = [processor("dinov3")(Image.open(BytesIO(data)))["pixel_values"] for data in shown]
        wanted = np.concatenate(
            [theirs(pixel_values=pixels).pooler_output.numpy() for pixels in given]
        )
    assert relative_error(client.encode("random/dinov3-images", shown).dense, wanted) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_labels(
    client: shoal.Client, references: dict[Family, Reference], family: Family
) -> None:
    model, theirs = f"random/{family}-images", references[family]
    for query in (TEXTS[1], FILES[2]):
        first = theirs.texts([query]) if isinstance(query, str) else theirs.images([query])
        rows = theirs.images(FILES[:4])
        wanted = rows @ first[0] / np.linalg.norm(rows, axis=-1) / np.linalg.norm(first)
        assert relative_error(client.score(model, query, FILES[:4]).scores, wanted) <= 1e-5
    labels = ["a cat", "a dog", "fishes"]
    answer = client.classify(model, FILES[:2], labels)
    for item, row in zip(
        answer.results, theirs.labels(FILES[:2], labels, alone=family != "clip"), strict=True
    ):
        found = {one.label: one.score for one in item.labels}
        assert relative_error(np.array([found[label] for label in labels]), row) <= 1e-5


def test_card_of_image_models(
    client: shoal.Client, mesh: Cluster, references: dict[Family, Reference]
) -> None:
    del references
    client.encode("random/clip-images", [FILES[0]])
    with grpc.insecure_channel(mesh.address) as channel:
        stub = models_pb2_grpc.ModelServiceStub(channel)

        def card() -> models_pb2.ModelCard:
            asked = models_pb2.ListModelsRequest()
            cards = {model.model: model.card for model in stub.ListModels(asked).models}
            return cards.get("random/clip-images", models_pb2.ModelCard())

        # The heartbeat with the loaded model's complete card may not have arrived yet.
        wait_until(lambda: card().HasField("images"), 60, "the complete card")
        found = card()
    assert list(found.inputs) == [
        models_pb2.INPUT_KIND_TEXT,
        models_pb2.INPUT_KIND_IMAGE,
        models_pb2.INPUT_KIND_DOCUMENT,
    ]
    assert found.images == models_pb2.ImageInput(
        height=36, width=36, patch=8, extra_tokens=1, max_tokens=17
    )


def test_item_of_parts(mesh: Cluster, references: dict[Family, Reference]) -> None:
    """One part equals its short form. These models refuse several parts, with the item's path."""
    del references
    shown = pb.Part(image=pb.Image(data=FILES[0]))
    with grpc.insecure_channel(mesh.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        short = stub.Encode(
            pb.EncodeRequest(
                model="random/clip-images", items=[pb.Item(image=shown.image), pb.Item(text="a")]
            )
        )
        items = [pb.Item(parts=[shown]), pb.Item(parts=[pb.Part(text="a")])]
        long = stub.Encode(pb.EncodeRequest(model="random/clip-images", items=items))
        assert (long.dense.shape, long.dense.data_type) == (
            short.dense.shape,
            short.dense.data_type,
        )
        rows = [np.frombuffer(one.dense.data, np.float32) for one in (long, short)]
        assert relative_error(*rows) <= 1e-6  # the text was computed twice
        items.append(pb.Item(parts=[pb.Part(text="a"), shown]))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Encode(pb.EncodeRequest(model="random/clip-images", items=items))
        error = errors.from_rpc(caught.value) if hasattr(errors, "from_rpc") else caught.value
        assert "not 2 parts" in str(error)


def png(height: int, width: int, pixels: bytes) -> bytes:
    """Return a grey PNG with this size in its header and these compressed pixels."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def zipped() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a.png", FILES[0])
    return out.getvalue()


NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 255, (90, 80, 3), dtype=np.uint8))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a bomb": (
        png(50_000, 50_000, zlib.compress(bytes(1 << 20))),
        "2,500,000,000 pixels; at most 50,000,000",
    ),
    "a bomb that the router cannot read": (
        saved(Image.new("1", (8_000, 8_000)), "TIFF", big_tiff=True),
        "at most 50,000,000",
    ),
    "truncated": (saved(NOISE, "JPEG")[:900], "truncated or damaged"),
    "a header that lies": (png(5_000, 5_000, zlib.compress(bytes(100))), "truncated or damaged"),
    "too large a file": (bytes((16 << 20) + 1), "16,777,217 bytes; at most 16,777,216"),
    "a drawing": (
        b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "not an image in a supported format",
    ),
    "an archive": (zipped(), "not an image in a supported format"),
    "half a header": (FILES[0][:20], "no image of a format|truncated or damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_by_their_path(
    client: shoal.Client, references: dict[Family, Reference], name: str
) -> None:
    """The next good request is answered."""
    data, message = HOSTILE[name]
    with pytest.raises(errors.InvalidInput, match=message) as caught:
        client.encode("random/clip-images", [FILES[0], "a text", data])
    assert caught.value.field.startswith("items[2].image")
    assert (
        relative_error(
            client.encode("random/clip-images", FILES[:1]).dense,
            references["clip"].images(FILES[:1]),
        )
        <= 1e-5
    )


def test_too_large_request_is_refused(
    client: shoal.Client, references: dict[Family, Reference]
) -> None:
    """Send 100 MB, which no router reads."""
    with pytest.raises(errors.ShoalError) as caught:
        client.encode("random/clip-images", [FILES[0], bytes(100 << 20)])
    assert caught.value.field == "items[1].image.data"
    assert (
        relative_error(
            client.encode("random/clip-images", FILES[:1]).dense,
            references["clip"].images(FILES[:1]),
        )
        <= 1e-5
    )


def test_animation_is_its_first_frame(
    client: shoal.Client, references: dict[Family, Reference]
) -> None:
    first, *rest = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green", "blue")]
    moving = saved(first, "GIF", save_all=True, append_images=rest)
    wanted = references["clip"].images([saved(first, "PNG")])
    assert relative_error(client.encode("random/clip-images", [moving]).dense, wanted) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_image_is_computed_once(
    client: shoal.Client, references: dict[Family, Reference], family: Family
) -> None:
    """Repeats in one request and in the next are found in the cache, separately by tenant. Cached
    vectors equal computed ones, and cost as many tokens.
    """
    model, theirs = f"random/{family}-images", references[family]
    files = [FILES[3], FILES[5], FILES[3]]
    first = client.encode(model, files)
    assert relative_error(first.dense, theirs.images(files)) <= 1e-5
    again = client.encode(model, [FILES[5], FILES[3], FILES[3], FILES[5]])
    assert again.timings.forward_seconds == 0
    assert relative_error(again.dense, first.dense[[1, 0, 0, 1]]) <= 1e-5
    assert again.usage.image_tokens * 3 == first.usage.image_tokens * 4
    scored = client.score(model, FILES[5], [FILES[3]])
    assert scored.timings.forward_seconds == 0, "one image against others"
    mixed = client.encode(model, [FILES[3], TEXTS[0]])
    assert mixed.timings.forward_seconds > 0
    assert (
        relative_error(
            mixed.dense, np.concatenate([theirs.images(FILES[3:4]), theirs.texts(TEXTS[:1])])
        )
        <= 1e-5
    )
    with shoal.Client(client.address, tenant="another") as other:
        apart = other.encode(model, [FILES[5]])
    assert apart.timings.forward_seconds > 0
    assert relative_error(apart.dense, again.dense[:1]) <= 1e-5
