"""The price of a request's texts and images in estimated tokens."""

from __future__ import annotations

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.router.admission import pricing
from services.router.admission.pricing import price
from services.router.admission.splitting import job_target, split
from services.router.admission.validation import image_price, limits
from services.router.admission.validation.requests import check_encode, check_extract, check_score
from services.router.admission.validation.sizes import Sizes
from tests.router.parts import MODEL
from tests.router.test_image_price import (
    BOTH,
    FIXED,
    begin_pull,
    make_image_file,
    picture,
    png_header,
)
from tests.router.test_rules import LANE, fleet, worker


def test_padded_texts_cost_their_padded_length() -> None:
    """SigLIP reads images and texts as items, as a query, and as labels; an image is not a text."""
    known = begin_pull()
    known.max_tokens = 64
    known.representations.append(pb.REPRESENTATION_DENSE)
    known.images.CopyFrom(
        models_pb2.ImageInput(height=224, width=224, patch=16, max_tokens=196, text_tokens=64)
    )
    shown = picture(make_image_file(9, 9, "PNG"))
    encode = pb.EncodeRequest(
        model=MODEL, items=[pb.Item(text="cat"), shown, pb.Item(text="x" * 400)]
    )
    assert pricing.price(check_encode(encode, known), known, pb.TRUNCATION_END)[0] == [
        64,
        196 + 2,
        64,
    ]
    asked = check_score(
        pb.ScoreRequest(model=MODEL, query=pb.Item(text="cat"), documents=[shown]), known
    )
    assert pricing.price(asked, known, pb.TRUNCATION_END) == ([196 + 2], 64)
    task = pb.ClassifyTask(labels=["cat", "dog", "cow"])
    labels = check_extract(pb.ExtractRequest(model=MODEL, items=[shown], classify=task), known)
    assert pricing.price(labels, known, pb.TRUNCATION_END) == ([196 + 2], 3 * 64)


def test_admission_prices_texts_and_images_separately() -> None:
    request = pb.EncodeRequest(
        model=MODEL, items=[pb.Item(text="x" * 98), picture(make_image_file(9, 9, "PNG"))]
    )
    sizes = check_encode(request, begin_pull())
    assert sizes.items == [100, 0]
    assert sizes.read == [100, len(request.items[1].image.data)]
    costs, once = pricing.price(sizes, begin_pull(), pb.TRUNCATION_END)
    assert (costs, once) == ([32, 52], 0)
    score = pb.ScoreRequest(model=MODEL, query=request.items[1], documents=request.items)
    assert pricing.price(check_score(score, begin_pull()), begin_pull(), pb.TRUNCATION_END) == (
        [32, 52],
        50,
    )


def test_image_is_priced_by_its_pixels_whatever_size_its_model_makes_of_it() -> None:
    """A WebP of 34 bytes and 50 megapixels takes a worker a second, and a thumbnail a
    millisecond.
    """
    bomb, thumbnail, unknown = (
        picture(png_header(7_000, 7_000)),
        picture(make_image_file(200, 200, "PNG")),
        picture(b"no image"),
    )
    request = pb.EncodeRequest(model=MODEL, items=[bomb, thumbnail, unknown])
    small = FIXED.max_tokens + pricing.SPECIAL_TOKENS
    assert pricing.price(check_encode(request, begin_pull()), begin_pull(), pb.TRUNCATION_END)[
        0
    ] == [
        small + 49_000_000 // image_price.PIXELS_PER_TOKEN,
        small,
        small + limits.IMAGE_PIXELS.most // image_price.PIXELS_PER_TOKEN,
    ]


def test_page_is_priced_by_its_dots_per_inch() -> None:
    read = begin_pull(inputs=(*BOTH, models_pb2.INPUT_KIND_DOCUMENT))
    parts = [
        pb.Part(
            document=pb.Document(data=b"%PDF-1.7", first_page=1, last_page=3, dots_per_inch=dots)
        )
        for dots in (0, 144, 400)
    ]
    request = pb.EncodeRequest(model=MODEL, items=[pb.Item(parts=[part]) for part in parts])
    default, same, fine = pricing.price(check_encode(request, read), read, pb.TRUNCATION_END)[0]
    assert default == same == 3 * (FIXED.max_tokens + 30) + pricing.SPECIAL_TOKENS
    assert fine == 3 * (FIXED.max_tokens + 236) + pricing.SPECIAL_TOKENS


def test_item_of_parts_costs_the_sum_of_its_parts() -> None:
    shown = pb.Part(image=pb.Image(data=make_image_file(9, 9, "PNG")))
    request = pb.EncodeRequest(
        model=MODEL, items=[pb.Item(parts=[pb.Part(text="x" * 98), shown, shown])]
    )
    assert pricing.price(check_encode(request, begin_pull()), begin_pull(), pb.TRUNCATION_END)[
        0
    ] == [132]


def test_price_follows_bytes_and_stops_at_the_models_longest_sequence() -> None:
    card = models_pb2.ModelCard(model="a/b", tokens_per_byte=0.5, max_tokens=50)
    assert price(
        Sizes([10, 1000], per_sequence_bytes=10, per_job_bytes=20), card, pb.TRUNCATION_END
    ) == ([12, 50], 10)
    assert price(Sizes([1000]), card, pb.TRUNCATION_NONE) == ([502], 0)
    assert price(Sizes([10]), None, pb.TRUNCATION_END) == ([5], 0)


def test_labels_read_with_each_text_are_priced_for_each() -> None:
    """Models without fixed labels read the request's labels with each text; others never read
    them.
    """
    items = [pb.Item(text="abc"), pb.Item(text="abcdef")]
    entities = pb.ExtractRequest(
        model="t/m", items=items, entities=pb.EntitiesTask(labels=["ab", "cde"])
    )
    relations = pb.ExtractRequest(
        model="t/m", items=items, relations=pb.RelationsTask(labels=["in"], entity_labels=["city"])
    )
    zero_shot = models_pb2.ModelCard(
        model="t/m", tasks=[models_pb2.TASK_ENTITIES, models_pb2.TASK_RELATIONS]
    )
    fixed = models_pb2.ModelCard(
        model="t/m", tasks=[models_pb2.TASK_ENTITIES], labels=["ab", "cde"]
    )
    sizes = check_extract(entities, zero_shot)
    plain = check_extract(relations, None)
    relations.items[1].entities.add(start=0, end=3, label="a kind of entity")
    assert check_extract(relations, None) == plain
    relations.items[1].ClearField("entities")
    assert (sizes.per_sequence_bytes, sizes.per_job_bytes) == (5, 0)
    assert (
        check_extract(relations, zero_shot).per_sequence_bytes
        == check_extract(relations, None).per_sequence_bytes
        == 6
    )
    assert (
        check_extract(entities, fixed).per_sequence_bytes,
        check_extract(entities, fixed).per_job_bytes,
    ) == (0, 5)


WRITES = models_pb2.ModelCard(
    model=MODEL,
    tasks=[models_pb2.TASK_TEXT, models_pb2.TASK_REGIONS],
    max_tokens=512,
    inputs=[
        models_pb2.INPUT_KIND_TEXT,
        models_pb2.INPUT_KIND_IMAGE,
        models_pb2.INPUT_KIND_DOCUMENT,
    ],
)


def costs(request: pb.ExtractRequest, card: models_pb2.ModelCard | None = WRITES) -> list[int]:
    request.model = MODEL
    found, _ = price(check_extract(request, card), card, request.truncation)
    return found


def test_texts_to_generate_are_priced_and_spread_over_the_workers() -> None:
    request = pb.ExtractRequest(items=[pb.Item(text="a")] * 255, text=pb.TextTask(max_tokens=4096))
    found = costs(request)
    assert found == [2 + 4096] * 255
    ten = fleet(*(worker(f"w{number}") for number in range(10)))
    jobs = split(found, job_target(sum(found), LANE, ten))
    assert len(jobs) >= 100, "not one job for one worker"
    assert sum(job.tokens for job in jobs) == sum(found), "which lanes and quotas count"
    request.text.max_tokens = 0
    assert costs(request, None) == [2 + 256] * 255


def test_each_page_is_a_text_to_generate() -> None:
    document = pb.Document(file=0, last_page=64)
    request = pb.ExtractRequest(
        items=[pb.Item(parts=[pb.Part(document=document)])],
        files=[b"%PDF-1.7"],
        text=pb.TextTask(max_tokens=100),
    )
    read = costs(request)
    request.text.max_tokens = 300
    assert costs(request) == [read[0] + 64 * 200]
    request.text.text_layer = pb.TextTask.TEXT_LAYER_ONLY
    (layers,) = costs(request)
    request.text.max_tokens = 100
    assert costs(request) == [layers], "nothing is generated"


def test_regions_are_generated_only_by_a_model_that_writes() -> None:
    request = pb.ExtractRequest(
        items=[pb.Item(image=pb.Image(data=b"p"))], regions=pb.RegionsTask(labels=["cat"])
    )
    detector = models_pb2.ModelCard()
    detector.CopyFrom(WRITES)
    detector.tasks[:] = [models_pb2.TASK_REGIONS]
    assert costs(request)[0] == costs(request, detector)[0] + 256


def test_each_label_of_generated_regions_costs_the_image_and_an_answer() -> None:
    request = pb.ExtractRequest(
        items=[picture(make_image_file(9, 9, "PNG"))], regions=pb.RegionsTask(labels=["a"])
    )
    (one,) = costs(request)
    image = one - 2 - 256
    assert image > 0
    request.regions.labels[:] = map(str, range(256))
    assert costs(request) == [2 + 256 * (image + 256)]
    detector = models_pb2.ModelCard()
    detector.CopyFrom(WRITES)
    detector.tasks[:] = [models_pb2.TASK_REGIONS]
    assert costs(request, detector) == [2 + image], "one pass finds all labels"
