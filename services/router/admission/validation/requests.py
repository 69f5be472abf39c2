"""Validate requests (protos/shoal/v1/inference.proto). Pure: the message and the model's card in,
sizes out.

This is a request's first step in the router, after `routes.py` has chosen its lane. Every error
that can be found without a tokenizer is found here and reported with the path of its field. Rules
that depend on the model are checked here if the model's card is known, otherwise by the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from shoal.requests.items import media_type
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from libs import embedding_id
from libs.documents.conversion import sniffing
from libs.errors import InvalidInput, TaskNotSupported
from libs.image_size import read_image_size
from libs.names import is_adapter_name, is_model_id
from libs.work_estimate import answer_tokens
from services.router.admission.validation import (
    answer_bounds,
    chunking,
    image_price,
    limits,
    schemas,
    texts,
    windows,
)
from services.router.admission.validation.sizes import NO_IMAGES, ImageSizes, Sizes

_EMPTY_ITEM_BYTES: Final = 2
"""Serialised size of an item with an empty content: protobuf's tag and length."""

TEXT_LAYER_TOKENS: Final = 16
"""The price in tokens of a page if only its text layer is read, which takes a few milliseconds of
CPU and no time of the device.
"""

Card = models_pb2.ModelCard
Task = models_pb2.Task


@dataclass(frozen=True, slots=True)
class _Items:
    """The sizes of items in bytes of text, and the images of items by index."""

    sizes: list[int]
    images: dict[int, ImageSizes]


class _Enum(Protocol):
    """The methods of a generated enum that are used here."""

    def values(self) -> Sequence[int]: ...
    def keys(self) -> Sequence[str]: ...


def check_encode(request: pb.EncodeRequest, card: Card | None) -> Sizes:
    """Check an Encode request and return its sizes. Raises InvalidInput or TaskNotSupported."""
    _check_names(request.model, request.adapter)
    _check_enum(request.role, pb.Role, "role")
    _check_enum(request.data_type, tensor_pb2.DataType, "data_type")
    check_common(request.truncation, request.priority)
    windows.refuse(request.truncation, "divide texts by chunking to encode all of them")
    limits.INSTRUCTION.check(len(request.instruction), "instruction")
    _check_embedding_id(request.expect_embedding_id)
    limits.REPRESENTATIONS.check(len(request.representations), "representations")
    for index, form in enumerate(request.representations):
        field = f"representations[{index}]"
        _check_enum(form, pb.Representation, field)
        _refuse(form == pb.REPRESENTATION_UNSPECIFIED, f"{field} must name a representation", field)
    if card is not None:
        _check_task(card, models_pb2.TASK_ENCODE, "model")
    _check_forms(request, card)
    files = _check_files(request.files)
    divides = request.HasField("chunking")
    if divides:
        _refuse_image_chunks(card)
    items = _check_items(request.items, "items", card, files, divided=divides)
    shared = files.read("items", items.images.values())
    sizes = Sizes(
        items.sizes,
        per_sequence_bytes=_utf8(request.instruction),
        images=items.images,
        per_job_images=shared,
    )
    if divides:
        forms = answer_bounds.requested_forms(request, card)
        divided = chunking.check(request, has_token_vectors=pb.REPRESENTATION_MULTI_VECTOR in forms)
        sizes = replace(
            sizes,
            items=[item.bytes for item in divided],
            chunks=[item.chunks for item in divided],
            budgets=[item.budget for item in divided],
        )
    return _check_readable(sizes, "items")


def _check_embedding_id(expected: str) -> None:
    limits.EMBEDDING_ID.check(len(expected), embedding_id.FIELD)
    _refuse(
        bool(expected) and not embedding_id.is_valid_expectation(expected),
        f"{embedding_id.FIELD} must be the `embedding_id` of an answer, such as"
        " 3f0c9a1be24d5768.float32, or the 16 digits before its point",
        embedding_id.FIELD,
    )


def _refuse_image_chunks(card: Card | None) -> None:
    if card is not None and models_pb2.INPUT_KIND_IMAGE in card.inputs:
        raise TaskNotSupported(
            f"{card.model} reads images: chunks are for models of text only", field="chunking"
        )


def check_score(request: pb.ScoreRequest, card: Card | None) -> Sizes:
    """Check a Score request and return its sizes. Raises InvalidInput or TaskNotSupported."""
    _check_names(request.model, request.adapter)
    _check_enum(request.scale, pb.ScoreScale, "scale")
    check_common(request.truncation, request.priority)
    _refuse(not request.HasField("query"), "query is required", "query")
    if card is not None:
        _check_task(card, models_pb2.TASK_SCORE, "model")
        only_multi = list(card.representations) == [pb.REPRESENTATION_MULTI_VECTOR]
        no_scale = request.scale == pb.SCORE_SCALE_PROBABILITY and only_multi
        _refuse(no_scale, f"{card.model} sums maxima: its scores are not probabilities", "scale")
    limits.INSTRUCTION.check(len(request.instruction), "instruction")
    limits.QUERY.check(
        len(request.query.text) + sum(len(part.text) for part in request.query.parts), "query.text"
    )
    files = _check_files(request.files)
    _refuse_divided(request.query, "query")
    size, shown = _check_item(request.query, "query", card, files)
    query = size + _utf8(request.instruction)
    documents = _check_items(request.documents, "documents", card, files)
    shared = files.read("documents", [shown, *documents.images.values()])
    shown = ImageSizes(shown.bytes + shared.bytes, shown.tokens, shown.pages)
    # A cross-encoder reads the query with every document; an embedding model reads it once per job.
    reads_pairs = card is None or not card.representations
    sizes = Sizes(documents.sizes, images=documents.images, per_job_images=shown)
    sizes = (
        replace(sizes, per_sequence_bytes=query)
        if reads_pairs
        else replace(sizes, per_job_bytes=query)
    )
    return _check_readable(windows.divided(request, sizes, card, "documents"), "documents")


def check_extract(request: pb.ExtractRequest, card: Card | None) -> Sizes:
    """Check an Extract request and return its sizes. Raises InvalidInput or TaskNotSupported."""
    _check_names(request.model, request.adapter)
    check_common(request.truncation, request.priority)
    task = request.WhichOneof("task")
    if task is None:
        raise InvalidInput(
            "one task is required: entities, classify, relations, regions, text or structure",
            field="task",
        )
    if card is not None and not _gives_text_layers(request, card):
        _check_task(card, Task.Value(f"TASK_{task.upper()}"), task)
    if task == "structure":
        return _check_structure(request, card)
    labels: Sequence[str] = ()
    if task == "entities":
        labels = _check_entities(request.entities, card)
    elif task == "classify":
        labels = _check_classify(request.classify, card)
    elif task == "relations":
        labels = _check_relations(request, card)
    elif task == "regions":
        labels = _check_labels(request.regions.labels, "regions.labels", None, required=True)
        _check_threshold(request.regions, "regions", 0.0)
    else:
        _check_text(request.text, len(request.items))
    given = task == "relations" and (card is None or card.given_entities)
    files = _check_files(request.files)
    items = _check_items(
        request.items,
        "items",
        card,
        files,
        given=given,
        seeded=task == "text",
        returned=task == "text" and request.text.item_role == pb.Turn.ROLE_TOOL,
    )
    shared = files.read("items", items.images.values())
    if task == "text" and request.text.text_layer == pb.TextTask.TEXT_LAYER_ONLY:
        items.images.update({index: _price_text_layers(own) for index, own in items.images.items()})
    if _generates_regions(request, card):  # the model reads each image once per label
        items.images.update(
            {
                index: replace(own, tokens=own.tokens * len(labels))
                for index, own in items.images.items()
            }
        )
    repeated = labels or (card.labels if card is not None and task == "classify" else ())
    if task not in ("text", "regions"):  # any number of regions may have the same label
        _check_repeated_names(
            len(items.sizes), sum(limits.SCORE_BYTES + _utf8(label) for label in repeated), task
        )
    sizes = _with_labels(items.sizes, task, labels, request.classify.hypothesis, card)
    if task == "text":
        reported = request.text.instruction + request.text.template_values + request.text.tools
        calls = sum(
            _utf8(call.arguments) for turn in request.text.turns for call in turn.tool_calls
        )
        before_each = _utf8(reported) + sum(_utf8(turn.text) for turn in request.text.turns) + calls
        sizes = replace(
            sizes, per_sequence_bytes=before_each, per_job_bytes=_utf8(request.text.json_schema)
        )
    sizes = replace(sizes, images=items.images, per_job_images=shared)
    sizes = replace(sizes, generated=_check_generated(request, card, items))
    return _check_readable(windows.divided(request, sizes, card, "items"), "items")


def _check_structure(request: pb.ExtractRequest, card: Card | None) -> Sizes:
    """Check a structure task and return its sizes.

    The model reads the schema before each text. An answer repeats the names of the schema for each
    item, and those of relations and fields for each instance found. Raises InvalidInput.
    """
    size, answered = schemas.check(request.structure)
    files = _check_files(request.files)
    items = _check_items(request.items, "items", card, files)
    shared = files.read("items", items.images.values())
    _check_repeated_names(len(items.sizes), answered, "structure")
    sizes = Sizes(items.sizes, per_sequence_bytes=size, images=items.images, per_job_images=shared)
    return _check_readable(windows.divided(request, sizes, card, "items"), "items")


def _check_generated(request: pb.ExtractRequest, card: Card | None, items: _Items) -> Sequence[int]:
    """Return the maximum number of tokens that a model may generate for each item; empty if it
    generates none. Raises InvalidInput if the total is too large.
    """
    texts = [items.images.get(index, NO_IMAGES).pages or 1 for index in range(len(items.sizes))]
    if _generates_regions(request, card):
        labels = len(request.regions.labels)
        return answer_bounds.check_generated(
            [count * labels for count in texts], answer_tokens(0), "name fewer regions.labels"
        )
    if not request.HasField("text"):
        return ()
    is_generated = request.text.text_layer != pb.TextTask.TEXT_LAYER_ONLY
    return answer_bounds.check_generated(
        texts,
        answer_tokens(request.text.max_tokens) if is_generated else 0,
        "set a smaller text.max_tokens",
    )


def _generates_regions(request: pb.ExtractRequest, card: Card | None) -> bool:
    """Return whether the model generates regions, as one text for each label."""
    return request.HasField("regions") and card is not None and models_pb2.TASK_TEXT in card.tasks


def _check_repeated_names(items: int, names: int, task: str) -> None:
    """Raise InvalidInput if the labels that an answer repeats for each item would take too many
    bytes.

    Args:
        items: The number of items.
        names: Bytes of labels that an answer may repeat for one item.
    """
    most = limits.ANSWERED.most
    if items * names > most:
        raise InvalidInput(
            f"items has {items:,} entries, and an answer may repeat {names:,} bytes of {task}"
            " labels"
            f" for each: send at most {most // names:,} items at a time, or fewer or shorter"
            " labels",
            field="items",
        )


def _with_labels(
    items: list[int], task: str, labels: Sequence[str], hypothesis: str, card: Card | None
) -> Sizes:
    """Return the sizes of items with labels, by how often the model reads the labels. Only lengths
    are added up, no text is built.

    Args:
        items: Bytes of each item.
        hypothesis: The template of a text for one label, in which `{}` stands for the label.
    """
    places = max(1, hypothesis.count("{}"))
    names = sum(map(_utf8, labels)) * places + _utf8(hypothesis) * len(labels)
    if task == "classify":
        if card is not None and card.open_labels and labels:  # each text is paired with each label
            return Sizes(
                items, per_sequence_bytes=-(-names // len(labels)), sequences_per_item=len(labels)
            )
        # An embedding model reads them once per job. A model without a card is assumed to be an
        # embedding model.
        before_each = (
            card is not None and not card.labels and models_pb2.TASK_ENCODE not in card.tasks
        )
    else:
        # A model without fixed labels reads the labels before each text.
        before_each = task in ("entities", "relations") and (card is None or not card.labels)
    return (
        Sizes(items, per_sequence_bytes=names)
        if before_each
        else Sizes(items, per_job_bytes=names, per_job_texts=len(labels))
    )


def _check_readable(sizes: Sizes, field: str) -> Sizes:
    """Return the sizes. Raises InvalidInput if a worker would have to read too many bytes."""
    per_job_bytes = sizes.per_job_bytes + sizes.per_job_images.bytes
    total, count, most = sum(sizes.read) + per_job_bytes, len(sizes.items), limits.READ.most
    if total > most:
        allowed = max(0, most - per_job_bytes) // -(-(total - per_job_bytes) // count)
        instead = (
            f"send at most {allowed:,} items at a time" if allowed else "send less with each item"
        )
        raise InvalidInput(
            f"{field} has {count:,} entries that make a worker read {total:,} bytes, including the"
            f" texts repeated for each; at most {most:,} are allowed: {instead}",
            field=field,
        )
    return sizes


def check_model(model: str, field: str = "model") -> None:
    """Raise InvalidInput for an invalid model id. `field` is its path in the request."""
    _check_names(model, "", "", field)


def _check_names(
    model: str,
    adapter: str,
    model_hint: str = ", or be an alias of the mesh (`shoal alias list`)",
    model_field: str = "model",
) -> None:
    _refuse(not model, f"{model_field} is required, such as `org/name`", model_field)
    form = "`org/name` or `org/name@revision`, of A-Z a-z 0-9 . _ - and at most 128 characters each"
    for name, field, is_name in (
        (model, model_field, is_model_id),
        (adapter, "adapter", is_adapter_name),
    ):
        if not name:
            continue
        limits.ID.check(len(name), field)
        if not is_name(name):
            own = (
                ", or the name of an adapter included in the model, such as `text-matching`"
                if field == "adapter"
                else model_hint
            )
            raise InvalidInput(f"{field} must have the form {form}{own}", field=field)


def check_common(truncation: int, priority: int) -> None:
    """Raise InvalidInput for unknown values of the enums Truncation and Priority."""
    _check_enum(truncation, pb.Truncation, "truncation")
    _check_enum(priority, pb.Priority, "priority")


def _check_enum(value: int, kind: _Enum, field: str) -> None:
    # proto3 enums are open: an unknown number is received unchanged. 0 is a member of each enum.
    if value and value not in kind.values():
        raise InvalidInput(
            f"{field} is {value}, which is none of {', '.join(kind.keys())}", field=field
        )


def text_alone(item: pb.Item) -> str | None:
    """Return the text of an item with no field but `text`, else None.

    Reading an empty repeated field takes memory (57 bytes were measured for `parts`), so the set
    fields are listed instead.
    """
    match item.ListFields():
        case [(field, text)] if field.number == pb.Item.TEXT_FIELD_NUMBER:
            return str(text)
    return None


def _check_items(
    items: Sequence[pb.Item],
    field: str,
    card: Card | None,
    files: RequestFiles,
    *,
    given: bool = False,
    seeded: bool = False,
    divided: bool = False,
    returned: bool = False,
) -> _Items:
    """Check the items, and return their sizes.

    Args:
        given: Whether items may have entities, which the task takes as input.
        seeded: Whether items may have seeds for sampling.
        divided: Texts are divided into chunks: items may have spans and contexts, which are not
            checked here, and the text of documents is read.
        returned: Items are the return values of functions, which may be empty texts.
    """
    _refuse(not items, f"{field} is empty: 1..{limits.ITEMS.most:,} are allowed", field)
    limits.ITEMS.check(len(items), field)
    found = _Items([], {})
    any_text = takes(card, models_pb2.INPUT_KIND_TEXT)
    for index, item in enumerate(items):
        size = item.ByteSize()
        text = text_alone(item)
        is_plain = text is not None and media_type(text) is None
        if not (is_plain and any_text and _EMPTY_ITEM_BYTES < size <= limits.TEXT.most):
            if not divided:
                _refuse_divided(item, f"{field}[{index}]")
            size, shown = _check_item(
                item,
                f"{field}[{index}]",
                card,
                files,
                given=given,
                seeded=seeded,
                divided=divided,
                returned=returned,
            )
            if shown.bytes or shown.pages:
                found.images[index] = shown
        found.sizes.append(size)
    return found


def _refuse_divided(item: pb.Item, path: str) -> None:
    for name, is_set in (("spans", bool(item.spans)), ("context", bool(item.context))):
        _refuse(is_set, f"{path}.{name} is for an EncodeRequest with chunking", f"{path}.{name}")


def takes(card: Card | None, kind: models_pb2.InputKind) -> bool:
    """Return whether a model accepts inputs of this kind, according to its card."""
    if card is None:
        return True
    if card.inputs:
        return kind in card.inputs
    reads_images = {models_pb2.TASK_REGIONS, models_pb2.TASK_TEXT}.intersection(card.tasks)
    return kind == models_pb2.INPUT_KIND_TEXT or (
        kind == models_pb2.INPUT_KIND_IMAGE and bool(reads_images)
    )


def _check_item(
    item: pb.Item,
    path: str,
    card: Card | None,
    files: RequestFiles,
    *,
    given: bool = False,
    seeded: bool = False,
    divided: bool = False,
    returned: bool = False,
) -> tuple[int, ImageSizes]:
    """Check one item, and return its serialised size in bytes and its images. The flags are as in
    `_check_items`. Raises InvalidInput or TaskNotSupported.
    """
    is_unread = item.HasField("seed") and not seeded
    _refuse(is_unread, f"{path}.seed is for the task text with generated answers", f"{path}.seed")
    content, known = item.WhichOneof("content"), item.entities
    message = (
        f"{path}.entities are for the task relations, with a model that does not find them itself"
    )
    _refuse(bool(known) and not given, message, f"{path}.entities")
    if item.parts:
        _refuse(
            content is not None,
            f"{path} has both parts and {content}, the short form of one part",
            f"{path}.parts",
        )
        _refuse(
            bool(known),
            f"{path}.entities are for an item with text, not with parts",
            f"{path}.entities",
        )
        return _check_parts(item.parts, path, card, files, divided=divided)
    if content is None:
        raise InvalidInput(f"{path} must have text or an image", field=path)
    if content == "image":
        return 0, _check_image(item.image, f"{path}.image", card)
    text = item.text
    _check_item_text(text, f"{path}.text", card, may_be_empty=returned)
    _check_given(known, len(text), f"{path}.entities")
    return pb.Item(
        text=text
    ).ByteSize() if known or item.spans or item.context else item.ByteSize(), NO_IMAGES


def _check_parts(
    parts: Sequence[pb.Part],
    path: str,
    card: Card | None,
    files: RequestFiles,
    *,
    divided: bool = False,
) -> tuple[int, ImageSizes]:
    limits.PARTS.check(len(parts), f"{path}.parts")
    size = file_bytes = tokens = pages = 0
    for index, part in enumerate(parts):
        own, content = f"{path}.parts[{index}]", part.WhichOneof("content")
        if content is None:
            raise InvalidInput(f"{own} must have text, an image or a document", field=own)
        if content == "text":
            _check_item_text(part.text, f"{own}.text", card)
            size += part.ByteSize()
            continue
        if content == "image":
            shown = _check_image(part.image, f"{own}.image", card)
        else:
            shown = _check_document(part.document, f"{own}.document", card, files, divided)
        file_bytes, tokens, pages = (
            file_bytes + shown.bytes,
            tokens + shown.tokens,
            pages + shown.pages,
        )
    limits.TEXT.check(size, f"{path}.parts")
    (limits.CHUNKED_PAGES if divided else limits.ITEM_PAGES).check(pages, f"{path}.parts")
    return size, ImageSizes(file_bytes, tokens, pages)


def _check_item_text(
    text: str, path: str, card: Card | None, *, may_be_empty: bool = False
) -> None:
    if not takes(card, models_pb2.INPUT_KIND_TEXT):
        raise TaskNotSupported(f"{'' if card is None else card.model} takes no texts", field=path)
    _refuse(not text and not may_be_empty, f"{path} is empty", path)
    if media_type(text) is not None:
        raise InvalidInput(
            f"{path} is a file in base64 (data:…;base64,), not a text: send the bytes of an image"
            " as image.data, of a document as document.data; the Python client and HTTP read such"
            " texts as files",
            field=path,
        )
    limits.TEXT.check(_utf8(text), path)


def _check_image(image: pb.Image, path: str, card: Card | None) -> ImageSizes:
    if not takes(card, models_pb2.INPUT_KIND_IMAGE):
        name = "" if card is None else card.model
        raise TaskNotSupported(
            f"{name} takes no images, and the item is one (the bytes of an image file, or a text "
            "that begins with data:image/…;base64,): send plain text, or name a model that reads "
            "images",
            field=path,
        )
    data = image.data
    _refuse(not data, f"{path}.data is empty", f"{path}.data")
    limits.IMAGE.check(len(data), f"{path}.data")
    size = read_image_size(data)
    if size is not None:
        limits.IMAGE_PIXELS.check(size.height * size.width, f"{path}.data")
    images = card.images if card is not None and card.HasField("images") else None
    tokens = image_price.image_tokens(size, images) + image_price.decoding_tokens(
        size, limits.IMAGE_PIXELS.most
    )
    return ImageSizes(len(data), tokens)


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """The files of a request, to which items refer by index, and the indices used so far."""

    files: Sequence[bytes]
    named: set[int]

    def read(self, field: str, items: Iterable[ImageSizes]) -> ImageSizes:
        """Return the total bytes of the files. Call it after all items were checked.

        Raises InvalidInput for a file that no item uses, and for too many pages.
        """
        limits.REQUEST_PAGES.check(sum(item.pages for item in items), field)
        unused = next((index for index in range(len(self.files)) if index not in self.named), None)
        if unused is not None:
            raise InvalidInput(f"files[{unused}] is not used by any item", field=f"files[{unused}]")
        return ImageSizes(sum(map(len, self.files)), 0) if self.files else NO_IMAGES


def _check_files(files: Sequence[bytes]) -> RequestFiles:
    limits.FILES.check(len(files), "files")
    for index, data in enumerate(files):
        limits.FILE.check(len(data), f"files[{index}]")
        _check_format(data, f"files[{index}]")
    return RequestFiles(files, set())


def _check_format(data: bytes, path: str) -> None:
    """Raise InvalidInput for bytes that are not a supported document. Only the worker recognizes
    the exact format.
    """
    if sniffing.family(data) is None:
        raise InvalidInput(f"{path}: {sniffing.refusal(data)}", field=path)


def _check_document(
    document: pb.Document, path: str, card: Card | None, files: RequestFiles, divided: bool
) -> ImageSizes:
    """Check a document, and return the price of its requested pages, each as the largest image that
    the model takes: routers cannot parse documents, so they do not know the size of pages.

    Args:
        divided: The text of the pages is divided into chunks. Then the price covers only reading
        the
            text from the pages; `chunking.py` prices the text.
    """
    kind = models_pb2.INPUT_KIND_DOCUMENT_TEXT if divided else models_pb2.INPUT_KIND_DOCUMENT
    if not takes(card, kind):
        raise _no_documents(card, path)
    source = document.WhichOneof("source")
    if source is None:
        raise InvalidInput(f"{path} must have data, or the number of a file", field=path)
    if source == "file":
        message = f"{path}.file is {document.file}; the request has {len(files.files)} files"
        _refuse(document.file >= len(files.files), message, f"{path}.file")
        files.named.add(document.file)
    else:
        limits.DOCUMENT.check(len(document.data), f"{path}.data")
        _check_format(document.data, f"{path}.data")
    limits.DPI.check(document.dots_per_inch, f"{path}.dots_per_inch")
    first, last = document.first_page or 1, document.last_page
    _refuse(
        0 < last < first,
        f"{path}.last_page is {last}, before the first page, {first}",
        f"{path}.last_page",
    )
    pages = last - first + 1 if last else limits.UNKNOWN_PAGES.most
    if divided:
        limits.CHUNKED_PAGES.check(pages, f"{path}.last_page")
        return ImageSizes(len(document.data), pages * TEXT_LAYER_TOKENS, pages)
    limits.ITEM_PAGES.check(pages, f"{path}.last_page")
    images = card.images if card is not None and card.HasField("images") else None
    return ImageSizes(
        len(document.data), pages * image_price.page_tokens(document.dots_per_inch, images), pages
    )


def _no_documents(card: Card | None, path: str) -> TaskNotSupported:
    name = "" if card is None else card.model
    if card is not None and models_pb2.INPUT_KIND_DOCUMENT_TEXT in card.inputs:
        return TaskNotSupported(
            f"{name} takes documents only with `chunking`, which divides their text (of `shoal "
            "encode`: --chunk sentences)",
            field=path,
        )
    return TaskNotSupported(f"{name} takes no documents", field=path)


def _gives_text_layers(request: pb.ExtractRequest, card: Card) -> bool:
    """Return whether the request is for text that the text layer of the pages (the text stored in a
    PDF) may contain, so that no model needs to generate it.
    """
    is_asked = (
        request.WhichOneof("task") == "text"
        and request.text.text_layer != pb.TextTask.TEXT_LAYER_NEVER
    )
    return (
        is_asked
        and not texts.asks_model(request.text)
        and models_pb2.INPUT_KIND_DOCUMENT in card.inputs
    )


def _price_text_layers(item: ImageSizes) -> ImageSizes:
    """Return the price of an item if only the text layers of its pages are read."""
    return ImageSizes(item.bytes, item.pages * TEXT_LAYER_TOKENS, item.pages)


def _check_given(entities: Sequence[pb.Entity], characters: int, field: str) -> None:
    """Check the entities that a client sends with a text of `characters` characters. Raises
    InvalidInput.
    """
    limits.ENTITIES.check(len(entities), field)
    for index, entity in enumerate(entities):
        path, place = f"{field}[{index}]", f"{entity.start}..{entity.end}"
        outside = not entity.start < entity.end <= characters
        _refuse(outside, f"{path} is at {place}, which is outside the text's 0..{characters}", path)
        limits.ENTITY.check(entity.end - entity.start, path)
        limits.ENTITY.check(len(entity.text), f"{path}.text")
        limits.ENTITY_LABEL.check(len(entity.label), f"{path}.label")


def _check_task(card: Card, task: int, field: str) -> None:
    if task in card.tasks:
        return
    able = ", ".join(_task_name(known) for known in card.tasks) or "nothing"
    raise TaskNotSupported(
        f"{card.model} has no task {_task_name(task)}; it has: {able}", field=field
    )


def _task_name(task: int) -> str:
    if task not in Task.values():
        return f"task {task}"
    if task == models_pb2.TASK_TEXT:
        return "text (generation and OCR)"
    return Task.Name(models_pb2.Task.ValueType(task)).removeprefix("TASK_").lower()


def _check_forms(request: pb.EncodeRequest, card: Card | None) -> None:
    """Check representations, data type and dimensions against each other and the model. Raises
    InvalidInput or TaskNotSupported.
    """
    forms = list(request.representations)
    if card is not None:
        for index, form in enumerate(forms):
            if form not in card.representations:
                able = ", ".join(_form_name(known) for known in card.representations)
                field = f"representations[{index}]"
                raise TaskNotSupported(
                    f"{card.model} has no {_form_name(form)} form; it has: {able}", field=field
                )
        _check_dimensions(request.dimensions, card)
    default = [pb.REPRESENTATION_DENSE] if card is None else list(card.representations)[:1]
    asked = set(forms or default)
    quantised = request.data_type in {tensor_pb2.DATA_TYPE_UINT8, tensor_pb2.DATA_TYPE_BINARY}
    _refuse(
        quantised and not asked <= {pb.REPRESENTATION_DENSE},
        "UINT8 and BINARY are for dense vectors only",
        "data_type",
    )
    limits.POOLING.check(request.pooling_factor, "pooling_factor")
    is_known, multi = bool(forms) or card is not None, pb.REPRESENTATION_MULTI_VECTOR in asked
    message = "only multi-vectors are pooled, and none is requested: leave it 0"
    _refuse(request.pooling_factor > 1 and is_known and not multi, message, "pooling_factor")
    is_int8, sparse = (
        request.data_type == tensor_pb2.DATA_TYPE_INT8,
        pb.REPRESENTATION_SPARSE in asked,
    )
    _refuse(is_int8 and sparse, "INT8 is for dense vectors and multi-vectors only", "data_type")


def _check_dimensions(dimensions: int, card: Card) -> None:
    _refuse(
        dimensions > 0 and not card.dimensions,
        f"{card.model} has no dense vectors to shorten",
        "dimensions",
    )
    message = f"dimensions is {dimensions}; {card.model} has {card.dimensions}"
    _refuse(dimensions > card.dimensions, message, "dimensions")


def _form_name(form: int) -> str:
    if form not in pb.Representation.values():
        return f"form {form}"
    return (
        pb.Representation.Name(pb.Representation.ValueType(form))
        .removeprefix("REPRESENTATION_")
        .lower()
    )


def _check_entities(task: pb.EntitiesTask, card: Card | None) -> Sequence[str]:
    _check_enum(task.aggregation, pb.Aggregation, "entities.aggregation")
    _check_threshold(task, "entities", 0.0)
    return _check_labels(task.labels, "entities.labels", card)


def _check_relations(request: pb.ExtractRequest, card: Card | None) -> Sequence[str]:
    task = request.relations
    _check_threshold(task, "relations", 0.0)
    labels = _check_labels(task.labels, "relations.labels", None, required=True)
    kinds = _check_labels(task.entity_labels, "relations.entity_labels", None)
    given = any(item.entities for item in request.items)
    if card is not None and card.given_entities:
        _refuse(
            not given,
            f"{card.model} relates given entities, and no item has any",
            "items[0].entities",
        )
    message = (
        "between which entities? Name relations.entity_labels, or, for a model that relates given"
        " entities, items[i].entities"
    )
    _refuse(not given and not kinds, message, "relations.entity_labels")
    return [*labels, *kinds]


def _check_classify(task: pb.ClassifyTask, card: Card | None) -> Sequence[str]:
    embeds = card is None or models_pb2.TASK_ENCODE in card.tasks
    _check_threshold(task, "classify", -1.0 if embeds else 0.0)
    no_place = bool(task.hypothesis) and "{}" not in task.hypothesis
    _refuse(
        no_place, "classify.hypothesis must hold {} where the label goes", "classify.hypothesis"
    )
    limits.HYPOTHESIS.check(len(task.hypothesis), "classify.hypothesis")
    limits.PLACES.check(task.hypothesis.count("{}"), "classify.hypothesis")
    return _check_labels(task.labels, "classify.labels", card)


def _check_text(task: pb.TextTask, items: int) -> None:
    _check_enum(task.kind, pb.TextTask.Kind, "text.kind")
    _check_enum(task.text_layer, pb.TextTask.TextLayer, "text.text_layer")
    texts.check(task, items)
    layers_alone = task.text_layer == pb.TextTask.TEXT_LAYER_ONLY and texts.asks_model(task)
    _refuse(
        layers_alone,
        "a text layer is not a generated answer: let the model read the pages",
        "text.text_layer",
    )
    edges = (task.region.left, task.region.top, task.region.right, task.region.bottom)
    is_box = (
        all(map(math.isfinite, edges)) and 0 <= edges[0] < edges[2] and 0 <= edges[1] < edges[3]
    )
    _refuse(
        task.HasField("region") and not is_box,
        "text.region needs 0 <= left < right and 0 <= top < bottom",
        "text.region",
    )


def _check_labels(
    labels: Sequence[str], field: str, card: Card | None, *, required: bool = False
) -> Sequence[str]:
    needed = required or (card is not None and not card.labels)
    _refuse(needed and not labels, f"{field} is empty: name 1..{limits.LABELS.most} labels", field)
    limits.LABELS.check(len(labels), field)
    fixed = frozenset(card.labels) if card is not None and not card.open_labels else frozenset()
    for index, label in enumerate(labels):
        path = f"{field}[{index}]"
        _refuse(not label, f"{path} is empty", path)
        limits.LABEL.check(len(label), path)
        if fixed and label not in fixed:
            raise InvalidInput(
                f"{path} is not one of the model's labels: {', '.join(sorted(fixed)[:32])}",
                field=path,
            )
    return labels


def _check_threshold(
    task: pb.EntitiesTask | pb.ClassifyTask | pb.RelationsTask | pb.RegionsTask,
    name: str,
    lowest: float,
) -> None:
    if not task.HasField("threshold"):
        return
    value, field = task.threshold, f"{name}.threshold"
    _refuse(
        math.isnan(value) or not lowest <= value <= 1.0,
        f"{field} is {value:g}; it must be in {lowest:g}..1",
        field,
    )


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _refuse(wrong: bool, message: str, field: str) -> None:
    if wrong:
        raise InvalidInput(message, field=field)
