"""A real gRPC server on loopback that answers as a router does, from arithmetic instead of models.

`python -m tests.api.fake_router [port]` serves one in its own process, to be killed.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf import any_pb2, duration_pb2, struct_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from shoal.v1 import (
    aliases_pb2,
    aliases_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    multiplex_pb2,
    tensor_pb2,
)

from services.router.lanes.chunks import split
from tests.api import wire
from tests.api.fake_multiplex import Handler, multiplex

DIMENSIONS = 12
VOCABULARY = 200
MODEL = "org/small"
LEADER = mesh_pb2.SchedulerStatus(scheduler_id="s1", plan=7, age_seconds=0.5)
MAX_CHARACTERS = 50
"""Length limit of a text that may not be truncated."""
BROKEN = "org/broken"
"""A model that cannot be loaded."""
DOWNLOADING = "org/downloading"
"""A model that one worker has downloaded 43 % of, and another nothing yet."""


def make_vector(text: str) -> wire.Floats:
    """Return a vector that is different for each text."""
    return np.array(
        [len(text), *(ord(text[index % len(text)]) % 97 - 48.5 for index in range(DIMENSIONS - 1))],
        dtype=np.float32,
    )


@dataclass(frozen=True)
class Refusal:
    """The error of a call. An empty reason sends no details, as a server that is not a router."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "no"
    field: str = ""
    retry_after: float | None = None


@dataclass(frozen=True)
class Call:
    """A received call."""

    method: str
    request: Message
    metadata: dict[str, str]
    seconds_left: float
    certificate: bytes = b""
    """The client's certificate, PEM."""

    @property
    def request_id(self) -> str:
        return self.metadata["x-request-id"]


def _word_chunks(
    texts: Sequence[str], request: inference_pb2.EncodeRequest
) -> inference_pb2.Chunks:
    """Each word is a chunk, of a token a letter, and those of documents are on page 7."""
    pages = [7 if item.parts else 0 for item in request.items]
    found = [[match.span() for match in re.finditer(r"\S+", text)] for text in texts]
    spans = [span for own in found for span in own]
    return inference_pb2.Chunks(
        offsets=np.cumsum([0, *map(len, found)]).tolist(),
        starts=[start for start, _ in spans],
        ends=[end for _, end in spans],
        tokens=[end - start for start, end in spans],
        pages=[page for page, own in zip(pages, found, strict=True) for _ in own]
        if any(pages)
        else (),
        texts=[word for text in texts for word in text.split()]
        if request.chunking.return_text
        else (),
    )


@dataclass
class FakeRouter:
    """Records calls; fails the next ones with `refusals`, in order; holds them while `gate` is
    shut. Streams have messages of about `chunk_bytes`; after the first, the next ones fail with
    `breaks` (None: go on), and are held while `middle` is shut."""

    calls: list[Call] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    breaks: list[Refusal | None] = field(default_factory=list)
    chunk_bytes: int = 1 << 20
    middle: threading.Event = field(default_factory=threading.Event)
    halves: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    revision: Callable[[int], str] = lambda number: "r1"
    embedding_id: Callable[[int], str] = lambda number: ""
    aliases: dict[str, aliases_pb2.Alias] = field(default_factory=dict)
    dimensions: dict[str, int] = field(default_factory=dict)
    active: int = 0
    most_active: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.gate.set()
        self.middle.set()

    def begin_call(self, method: str, request: Message, context: grpc.ServicerContext) -> int:
        """Record a call and return its number. Every method begins with this."""
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        with self._lock:
            shown = context.auth_context().get("x509_pem_cert") or [b""]
            self.calls.append(
                Call(method, request, metadata, context.time_remaining() or 0.0, bytes(shown[0]))
            )
            number = len(self.calls)
            refusal = self.refusals.pop(0) if self.refusals else None
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()  # The caller has left already.
        while not self.gate.wait(0.01) and not ended.is_set():
            pass
        with self._lock:
            self.active -= 1
        if refusal is not None:
            refuse(context, refusal)
        return number

    def halfway(self, context: grpc.ServicerContext) -> None:
        """Pause after the first message of a stream; `halves` controls it."""
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        with self._lock:
            self.halves += 1
        refusal = None
        while refusal is None and not ended.is_set():
            with self._lock:
                refusal = self.breaks.pop(0) if self.breaks else None
            if self.middle.wait(0.01):
                break
        with self._lock:
            self.halves -= 1
        if refusal is not None:
            refuse(context, refusal)


def refuse(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    details: list[Message] = []
    if refusal.reason:
        details.append(error_details_pb2.ErrorInfo(reason=refusal.reason, domain="shoal"))
    if refusal.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=refusal.field, description=refusal.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(refusal.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code: Any = refusal.code.value[0]
    status = rpc_status.to_status(
        status_pb2.Status(code=code, message=refusal.message, details=packed)
    )
    context.abort_with_status(status)
    raise AssertionError("abort returned")


def _text_of(item: inference_pb2.Item) -> str:
    """Return an item's text. That of an image is its size, and that of a document its bytes."""
    if item.HasField("image"):
        return f"{len(item.image.data)} bytes"
    return item.parts[0].document.data.decode() if item.parts else item.text


def _texts(
    name: str,
    request: inference_pb2.EncodeRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.ExtractRequest,
    context: grpc.ServicerContext,
) -> list[str]:
    """Return the request's texts.

    As a router, refuse a request without texts, the first empty text and, without truncation, the
    first text that is too long.
    """
    items = getattr(request, name)
    texts = [_text_of(item) for item in items]
    limit = (
        MAX_CHARACTERS
        if request.truncation == inference_pb2.TRUNCATION_NONE
        else max(map(len, texts), default=0)
    )
    if not texts:
        refuse(
            context,
            Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", f"{name} is empty", name),
        )
    for index, text in enumerate(texts):
        path = f"{name}[{index}].text"
        if not text and items[index].WhichOneof("content") == "text":
            refuse(
                context,
                Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", f"{path} is empty", path
                ),
            )
        if len(text) > limit:
            refuse(
                context,
                Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG", f"{path} is too long", path
                ),
            )
    return texts


def _usage(texts: list[str]) -> inference_pb2.Usage:
    return inference_pb2.Usage(input_tokens=sum(len(text.split()) for text in texts))


def _timings(number: int) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        queue_seconds=0.001 * number, forward_seconds=0.01, total_seconds=0.02
    )


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    def Encode(
        self, request: inference_pb2.EncodeRequest, context: Any
    ) -> inference_pb2.EncodeResponse:
        return self._encoded("Encode", request, context)

    def _encoded(
        self, method: str, request: inference_pb2.EncodeRequest, context: Any
    ) -> inference_pb2.EncodeResponse:
        number = self._router.begin_call(method, request, context)
        texts = _texts("items", request, context)
        revision = self._router.revision(number)
        response = inference_pb2.EncodeResponse(
            model_revision=revision,
            embedding_id=self._router.embedding_id(number),
            usage=_usage(texts),
            timings=_timings(number),
        )
        alias = self._router.aliases.get(request.model)
        if alias is not None:
            response.alias.model, response.alias.next_model = alias.model, alias.next_model
            response.alias.previous_model = alias.previous_model
            response.alias.revision = alias.revision
        forms = list(request.representations) or [inference_pb2.REPRESENTATION_DENSE]
        dimensions = request.dimensions or self._router.dimensions.get(request.model, DIMENSIONS)
        if request.HasField("chunking"):
            response.chunks.CopyFrom(_word_chunks(texts, request))
            texts = [word for text in texts for word in text.split()]
        if inference_pb2.REPRESENTATION_DENSE in forms:
            dense = np.stack([make_vector(text)[:dimensions] for text in texts])
            response.dense.CopyFrom(wire.tensor(dense, request.data_type))
        if inference_pb2.REPRESENTATION_SPARSE in forms:
            response.sparse.CopyFrom(
                wire.sparse([{ord(letter): 1.5 for letter in text} for text in texts], VOCABULARY)
            )
        if inference_pb2.REPRESENTATION_MULTI_VECTOR in forms:
            rows = [np.stack([make_vector(word) for word in text.split()]) for text in texts]
            response.multi_vector.CopyFrom(wire.ragged(rows, request.data_type))
        return response

    def EncodeStream(
        self, request: inference_pb2.EncodeRequest, context: Any
    ) -> Iterator[inference_pb2.EncodeResponse]:
        whole = self._encoded("EncodeStream", request, context)
        totals = inference_pb2.EncodeResponse(usage=whole.usage, timings=whole.timings)
        for number, chunk in enumerate(split(whole, totals, self._router.chunk_bytes)):
            if number == 1:
                self._router.halfway(context)
            yield chunk

    def Multiplex(
        self, request_iterator: Any, context: Any
    ) -> Iterator[multiplex_pb2.MultiplexResponse]:
        handlers: dict[str, Handler] = {
            "encode": (inference_pb2.EncodeRequest, self.Encode),
            "score": (inference_pb2.ScoreRequest, self.Score),
            "extract": (inference_pb2.ExtractRequest, self.Extract),
        }
        return multiplex(handlers, request_iterator, context)

    def Score(
        self, request: inference_pb2.ScoreRequest, context: Any
    ) -> inference_pb2.ScoreResponse:
        number = self._router.begin_call("Score", request, context)
        texts = _texts("documents", request, context)
        words = set(request.query.text.split())
        scores = np.array([len(words & set(text.split())) for text in texts], dtype=np.float32)
        ranking = np.argsort(-scores, kind="stable")[: request.top_n or None].tolist()
        return inference_pb2.ScoreResponse(
            scores=wire.tensor(scores, tensor_pb2.DATA_TYPE_FLOAT32),
            ranking=ranking,
            model_revision="r1",
            usage=_usage(texts),
            timings=_timings(number),
        )

    def Extract(
        self, request: inference_pb2.ExtractRequest, context: Any
    ) -> inference_pb2.ExtractResponse:
        number = self._router.begin_call("Extract", request, context)
        texts = _texts("items", request, context)
        found = _FINDERS.get(request.WhichOneof("task") or "", _labels)
        results = [found(text, request) for text in texts]
        return inference_pb2.ExtractResponse(
            results=results, model_revision="r1", usage=_usage(texts), timings=_timings(number)
        )

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """A token is a character, its id the character's number; LONGEST are kept."""
        number = self._router.begin_call("Tokenize", request, context)
        results = []
        for index, text in enumerate(request.texts):
            if request.truncation == inference_pb2.TRUNCATION_NONE and len(text) > MAX_CHARACTERS:
                path = f"texts[{index}]"
                refuse(
                    context,
                    Refusal(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "INPUT_TOO_LONG",
                        f"{path} is too long",
                        path,
                    ),
                )
            result = inference_pb2.Tokenization(
                count=len(text), kept_tokens=min(len(text), MAX_CHARACTERS)
            )
            if not request.count_only:
                result.ids.extend(map(ord, text))
                result.starts.extend(range(len(text)))
                result.ends.extend(range(1, len(text) + 1))
                result.tokens.extend(f"_{letter}" for letter in text if request.return_tokens)
                result.kept_end = result.kept_tokens
            results.append(result)
        usage = inference_pb2.Usage(input_tokens=sum(result.count for result in results))
        revision = self._router.revision(number)
        return inference_pb2.TokenizeResponse(
            results=results,
            max_tokens=MAX_CHARACTERS,
            model_revision=revision,
            usage=usage,
            timings=_timings(number),
        )

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        number = self._router.begin_call("Detokenize", request, context)
        texts = ["".join(map(chr, one.ids)) for one in request.sequences]
        usage = inference_pb2.Usage(input_tokens=sum(map(len, texts)))
        return inference_pb2.DetokenizeResponse(
            texts=texts, model_revision="r1", usage=usage, timings=_timings(number)
        )

    def ExtractStream(
        self, request: inference_pb2.ExtractRequest, context: Any
    ) -> Iterator[inference_pb2.ExtractStreamResponse]:
        """Stream the first half of each text, void; then each text again; then the result."""
        response = self.Extract(request, context)
        for is_anew in (False, True):
            texts = [
                result.text if is_anew else result.text[: len(result.text) // 2]
                for result in response.results
            ]
            yield inference_pb2.ExtractStreamResponse(
                deltas=[
                    inference_pb2.ExtractDelta(item=item, text=text, restarted=is_anew)
                    for item, text in enumerate(texts)
                    if text
                ]
            )
        yield inference_pb2.ExtractStreamResponse(response=response)


def _capitals(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """Capitalised words are entities of the first label."""
    entities = []
    begin = 0
    for word in text.split(" "):
        if word[:1].isupper():
            label = request.entities.labels[0] if request.entities.labels else "NAME"
            entities.append(
                inference_pb2.Entity(
                    start=begin, end=begin + len(word), label=label, score=0.5, text=word
                )
            )
        begin += len(word) + 1
    return inference_pb2.Extraction(entities=entities)


def _neighbours(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """Each capitalised word stands in the first relation to the next one."""
    entities = _capitals(text, request).entities
    label = request.relations.labels[0]
    return inference_pb2.Extraction(
        relations=[
            inference_pb2.Relation(head=head, tail=tail, label=label, score=0.75)
            for head, tail in pairwise(entities)
        ]
    )


def _labels(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """A label fits as well as its letters occur."""
    scores = {
        label: len(set(label) & set(text)) / len(set(label)) for label in request.classify.labels
    }
    best = sorted(scores.items(), key=lambda pair: -pair[1])
    return inference_pb2.Extraction(
        labels=[inference_pb2.LabelScore(label=label, score=score) for label, score in best]
    )


def _boxes(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """The same box for each label but "nothing", the first the best."""
    del text
    return inference_pb2.Extraction(
        regions=[
            inference_pb2.Region(
                left=50, top=60, right=90, bottom=95, label=label, score=0.75 - 0.25 * number
            )
            for number, label in enumerate(request.regions.labels)
            if label != "nothing"
        ]
    )


def _things(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """Return one instance of each structure and the first label of each question.

    All fields of a structure have the first word of the text.
    """
    word = text.split(" ", 1)[0]
    value = inference_pb2.StructureValue(text=word, score=0.75, start=0, end=len(word))
    return inference_pb2.Extraction(
        classifications=[
            inference_pb2.Classification(
                name=one.name,
                labels=[inference_pb2.LabelScore(label=one.labels[0].label, score=0.5)],
            )
            for one in request.structure.classifications
        ],
        structures=[
            inference_pb2.Structure(
                name=one.name,
                fields=[
                    inference_pb2.StructureField(name=field.name, values=[value])
                    for field in one.fields
                ],
            )
            for one in request.structure.structures
        ],
    )


def _about(text: str, request: inference_pb2.ExtractRequest) -> inference_pb2.Extraction:
    """A text that is cut off, or a form."""
    if request.text.json_schema:
        form = struct_pb2.Struct(fields={"about": struct_pb2.Value(string_value=text)})
        return inference_pb2.Extraction(
            text="{…}", json=form, finish_reason=inference_pb2.FINISH_REASON_STOP
        )
    return inference_pb2.Extraction(
        text=f"a text about {text}", finish_reason=inference_pb2.FINISH_REASON_LENGTH
    )


_FINDERS = {
    "entities": _capitals,
    "relations": _neighbours,
    "regions": _boxes,
    "structure": _things,
    "text": _about,
}


def _model(name: str, state: models_pb2.ModelState, *, pinned: bool = False) -> models_pb2.Model:
    card = models_pb2.ModelCard(
        model=name,
        revision="r1",
        family="bert",
        tasks=[models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE],
        representations=[
            inference_pb2.REPRESENTATION_DENSE,
            inference_pb2.REPRESENTATION_MULTI_VECTOR,
        ],
        dimensions=DIMENSIONS,
        max_tokens=256,
        bytes=90_000_000,
        data_type="bfloat16",
        prompts=["query"],
    )
    place = models_pb2.ModelPlace(
        worker_id="w1",
        state=state,
        bytes=90_000_000,
        load_seconds=0.5,
        pinned=pinned,
        host_bytes=2**26,
        adapters=["org/lora"],
    )
    return models_pb2.Model(model=name, state=state, card=card, places=[place], queued_tokens=7)


def _coming() -> models_pb2.Model:
    places = [
        models_pb2.ModelPlace(
            worker_id=f"w{number}",
            state=models_pb2.MODEL_STATE_DOWNLOADING,
            downloaded_bytes=done,
            download_bytes=100 << 20,
        )
        for number, done in enumerate((43 << 20, 0))
    ]
    return models_pb2.Model(
        model=DOWNLOADING, state=models_pb2.MODEL_STATE_DOWNLOADING, places=places
    )


class _Models(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Any
    ) -> models_pb2.ListModelsResponse:
        self._router.begin_call("ListModels", request, context)
        broken = models_pb2.Model(
            model=BROKEN, state=models_pb2.MODEL_STATE_FAILED, last_error="[no] tensor 'a.b'"
        )
        return models_pb2.ListModelsResponse(
            models=[broken, _coming(), _model(MODEL, models_pb2.MODEL_STATE_RESIDENT)]
        )

    def GetModel(
        self, request: models_pb2.GetModelRequest, context: Any
    ) -> models_pb2.GetModelResponse:
        self._router.begin_call("GetModel", request, context)
        if request.model == DOWNLOADING:
            return models_pb2.GetModelResponse(model=_coming())
        if request.model != MODEL:
            refuse(
                context,
                Refusal(
                    grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", f"no worker knows {request.model}"
                ),
            )
        return models_pb2.GetModelResponse(model=_model(MODEL, models_pb2.MODEL_STATE_RESIDENT))

    def LoadModel(
        self, request: models_pb2.LoadModelRequest, context: Any
    ) -> models_pb2.LoadModelResponse:
        self._router.begin_call("LoadModel", request, context)
        if request.model == BROKEN:
            refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_LOAD_FAILED"))
        return models_pb2.LoadModelResponse(
            model=_model(request.model, models_pb2.MODEL_STATE_RESIDENT)
        )

    def EvictModel(
        self, request: models_pb2.EvictModelRequest, context: Any
    ) -> models_pb2.EvictModelResponse:
        self._router.begin_call("EvictModel", request, context)
        return models_pb2.EvictModelResponse(worker_ids=["w1"])

    def PinModel(
        self, request: models_pb2.PinModelRequest, context: Any
    ) -> models_pb2.PinModelResponse:
        """A model that no worker has in memory is not pinned, as a router does it."""
        self._router.begin_call("PinModel", request, context)
        is_absent = request.model == DOWNLOADING
        state = models_pb2.MODEL_STATE_COLD if is_absent else models_pb2.MODEL_STATE_RESIDENT
        return models_pb2.PinModelResponse(
            model=_model(request.model, state, pinned=request.pinned and not is_absent)
        )


class _Aliases(aliases_pb2_grpc.AliasServiceServicer):
    """Revisions count from 1."""

    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    def ListAliases(
        self, request: aliases_pb2.ListAliasesRequest, context: Any
    ) -> aliases_pb2.ListAliasesResponse:
        self._router.begin_call("ListAliases", request, context)
        return aliases_pb2.ListAliasesResponse(aliases=self._router.aliases.values())

    def SetAlias(
        self, request: aliases_pb2.SetAliasRequest, context: Any
    ) -> aliases_pb2.SetAliasResponse:
        self._router.begin_call("SetAlias", request, context)
        before = self._router.aliases.get(request.alias.name, aliases_pb2.Alias()).revision
        if request.HasField("expect_revision") and request.expect_revision != before:
            refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "ALIAS_CHANGED"))
        request.alias.revision = before + 1
        self._router.aliases[request.alias.name] = request.alias
        return aliases_pb2.SetAliasResponse(alias=request.alias)

    def RemoveAlias(
        self, request: aliases_pb2.RemoveAliasRequest, context: Any
    ) -> aliases_pb2.RemoveAliasResponse:
        self._router.begin_call("RemoveAlias", request, context)
        removed = self._router.aliases.pop(request.name, None) is not None
        return aliases_pb2.RemoveAliasResponse(removed=removed)


class _Mesh(mesh_pb2_grpc.MeshServiceServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    def GetMesh(self, request: mesh_pb2.GetMeshRequest, context: Any) -> mesh_pb2.GetMeshResponse:
        self._router.begin_call("GetMesh", request, context)
        return mesh_pb2.GetMeshResponse(mesh=self._mesh())

    def WatchMesh(
        self, request: mesh_pb2.WatchMeshRequest, context: Any
    ) -> Iterator[mesh_pb2.WatchMeshResponse]:
        self._router.begin_call("WatchMesh", request, context)
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()  # The call ended before it began here; no callback would end this thread.
        while not ended.is_set():
            yield mesh_pb2.WatchMeshResponse(mesh=self._mesh())
            ended.wait(request.interval_seconds)

    def _mesh(self) -> mesh_pb2.Mesh:
        worker = mesh_pb2.WorkerStatus(
            worker_id="w1",
            pool="cpu",
            device="cpu",
            memory_bytes=2**33,
            used_bytes=2**27,
            resident=[MODEL],
            draining=True,
        )
        noticed = mesh_pb2.WorkerStatus(
            worker_id="w2",
            pool="l4-spot",
            device="cuda",
            host_memory_bytes=2**33,
            host_used_bytes=2**28,
            preempted_in_seconds=25.0,
        )
        noticed.device_seconds, noticed.wasted_seconds = 200.0, 5.0
        worker.kernels = "avx512"
        lane = mesh_pb2.LaneStatus(
            pool="cpu",
            model=MODEL,
            queued_jobs=3,
            queued_tokens=1234,
            done_jobs=99,
            oldest_seconds=2.5,
        )
        return mesh_pb2.Mesh(
            workers=[worker, noticed],
            models=[_model(MODEL, models_pb2.MODEL_STATE_RESIDENT)],
            lanes=[lane],
            router_id="router-1",
            scheduler=LEADER,
            pools=[mesh_pb2.PoolStatus(pool="cpu", desired_workers=2)],
        )

    def ExplainPlacement(
        self, request: mesh_pb2.ExplainPlacementRequest, context: Any
    ) -> mesh_pb2.ExplainPlacementResponse:
        self._router.begin_call("ExplainPlacement", request, context)
        workers = [
            mesh_pb2.PlacementReason(
                worker_id="w1", pool="cpu", reason="it is in pool cpu", score=0.25
            ),
            mesh_pb2.PlacementReason(
                worker_id="w2",
                pool="l4-spot",
                eligible=True,
                reason="it holds the model",
                score=0.75,
            ),
        ]
        return mesh_pb2.ExplainPlacementResponse(
            workers=workers, summary="1 holds it.", scheduler=LEADER, plan="one copy is enough"
        )


@contextmanager
def serving(
    router: FakeRouter,
    *,
    port: int = 0,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> Iterator[FakeRouter]:
    """Serves `router` on loopback until the block ends; calls in flight are then cut off, as by a
    kill.
    """
    with ThreadPoolExecutor(32) as threads:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        server = grpc.server(threads, interceptors=list(interceptors), options=options)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(router), server)
        models_pb2_grpc.add_ModelServiceServicer_to_server(_Models(router), server)
        aliases_pb2_grpc.add_AliasServiceServicer_to_server(_Aliases(router), server)
        mesh_pb2_grpc.add_MeshServiceServicer_to_server(_Mesh(router), server)
        checks = health.HealthServicer()
        checks.set("", health_pb2.HealthCheckResponse.SERVING)
        checks.set("shoal.v1.ModelService", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        target = f"127.0.0.1:{port}"
        bound = (
            server.add_secure_port(target, credentials)
            if credentials
            else server.add_insecure_port(target)
        )
        router.address = f"127.0.0.1:{bound}"
        server.start()
        try:
            yield router
        finally:
            router.gate.set()
            router.middle.set()
            server.stop(None).wait()


def _main() -> None:
    """Serve a router that holds every Encode call, and print a line when the first arrives."""
    router = FakeRouter()
    router.gate.clear()
    with serving(router, port=int(sys.argv[1]) if sys.argv[1:] else 0):
        print(router.address, flush=True)
        while not router.calls:
            threading.Event().wait(0.01)
        print(router.calls[0].request_id, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _main()
