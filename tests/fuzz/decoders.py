"""Code that decodes untrusted bytes, in this process: requests, jobs, answers, heartbeats, and
operators' files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import shoal.errors
import shoal.requests.codec
import shoal.requests.merging
import shoal.transport.failures
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import mesh_pb2, models_pb2, tensor_pb2, worker_pb2

from libs.catalog.cards import entries
from libs.catalog.pools import Pools, read_pools
from libs.errors import InvalidInput, ShoalError
from libs.fleet import FleetSnapshot
from libs.fleet.affinity import busy_shares, score
from libs.fleet.snapshot import WorkerRecord
from libs.queue import LaneGauges, LaneKey
from libs.serving.calls import decode
from libs.serving.security.tokens import read_tokens
from services.router.admission import pricing, splitting
from services.router.admission.routing.routes import Routes, choose_lane, why_broken
from services.router.admission.routing.routes import Target as LaneTarget
from services.router.admission.tenants import parse_tenants
from services.router.admission.validation import answer_bounds, reports, requests, tokens
from services.router.admission.validation.sizes import Sizes
from services.router.lanes import codec
from services.router.lanes.codec import JobHeader
from services.router.state.view import known_models
from services.scheduler.demand import Demand
from services.scheduler.planning import placement
from services.scheduler.simulate.trace import read_trace
from services.scheduler.view import MeshSnapshot
from services.worker.mesh import codec as worker_codec
from services.worker.mesh import job_codec
from tests.fuzz import messages, mutate
from tests.fuzz.target import Broken, Random, Target, Try, plain

MODELS: Final = ("org/name", "org/name@v1", "a/b", "tiny/fuzz")
POOLS: Final = ("cpu", "l4-spot")
WORDS: Final[Mapping[str, Sequence[Any]]] = {
    "model": MODELS, "pool": POOLS, "adapter": ("", "", "org/adapter"), "worker_id": ("w1", "w2"),
    "labels": ("PER", "ORG", "O"),
    "text": ("a text", "zwei Wörter", "x" * 200), "top_n": (0, 1, 2), "wait_seconds": (0.0, 0.01),
    "budget_jobs": (1, 8, 256),
    "batch_tokens": (0, 2048), "pools": POOLS, "hypothesis": ("", "about {}"), "load_model": MODELS,
    "epoch": ("e1",),
    "label": ("person", "city", "a"), "name": ("tone", "kind", "a"), "choices": ("old", "new"),
    "description": ("", "what"),
}  # fmt: skip

CARDS: Final = (
    None,
    models_pb2.ModelCard(
        model="org/name",
        tasks=[models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE, models_pb2.TASK_CLASSIFY],
        representations=[pb.REPRESENTATION_DENSE],
        dimensions=8,
        max_tokens=16,
        tokens_per_byte=0.25,
    ),
    models_pb2.ModelCard(
        model="org/name", tasks=[models_pb2.TASK_STRUCTURE], max_tokens=64, tokens_per_byte=0.25
    ),
    models_pb2.ModelCard(
        model="org/name",
        tasks=[models_pb2.TASK_ENTITIES, models_pb2.TASK_RELATIONS],
        labels=["PER", "ORG"],
        given_entities=True,
    ),
)

Request = (
    pb.EncodeRequest
    | pb.ScoreRequest
    | pb.ExtractRequest
    | pb.TokenizeRequest
    | pb.DetokenizeRequest
)
_VERBS: Final[
    Sequence[tuple[type[Request], Callable[[Any, models_pb2.ModelCard | None], Sizes]]]
] = (
    (pb.EncodeRequest, requests.check_encode),
    (pb.ScoreRequest, requests.check_score),
    (pb.ExtractRequest, requests.check_extract),
    (pb.TokenizeRequest, tokens.check_tokenize),
    (pb.DetokenizeRequest, tokens.check_detokenize),
)
_ITEMS: Final = [pb.Item(text="a text"), pb.Item(text="another")]
GOOD: Final[Mapping[type[Message], Message]] = {
    pb.EncodeRequest: pb.EncodeRequest(model="org/name", items=_ITEMS),
    pb.ScoreRequest: pb.ScoreRequest(
        model="org/name", query=pb.Item(text="a query"), documents=_ITEMS
    ),
    pb.ExtractRequest: pb.ExtractRequest(
        model="org/name", items=_ITEMS, classify=pb.ClassifyTask(labels=["good", "bad"])
    ),
    pb.TokenizeRequest: pb.TokenizeRequest(model="org/name", texts=["a text", "another"]),
    pb.DetokenizeRequest: pb.DetokenizeRequest(
        model="org/name", sequences=[pb.TokenIds(ids=[1, 2, 3])]
    ),
}


# requests: from the wire to jobs, and on the worker to work


_REQUESTS: Final = [messages.Maker(kind, WORDS, GOOD[kind]) for kind, _ in _VERBS]


def _make_request(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), others=known)
    number = random.randrange(len(_VERBS))
    return bytes([number]) + _REQUESTS[number].make(random)


def _try_request(data: bytes) -> None:
    kind, check = _VERBS[data[0] % len(_VERBS) if data else 0]
    with suppress(InvalidInput):
        decode._refuse_crowded(kind, data[1:])  # parse() only checks large requests
    try:
        request = decode.parse(kind, data[1:])
    except InvalidInput:
        return
    assert isinstance(request, Request)
    for card in CARDS:
        try:
            sizes = check(request, card)
        except InvalidInput as refused:
            _check_sayable(refused)
        else:
            _check_jobs(request, sizes, card)


def _check_jobs(request: Request, sizes: Sizes, card: models_pb2.ModelCard | None) -> None:
    if isinstance(request, pb.TokenizeRequest | pb.DetokenizeRequest):
        with suppress(InvalidInput):
            answer_bounds.check_tokens(request, card, readable=4 << 20)
        costs, repeated = pricing.price_reading(sizes), 0
    else:
        costs, repeated = pricing.price(sizes, card, request.truncation)
    parts = splitting.split(costs, 64, repeated)
    covered = [index for part in parts for index in range(part.first, part.first + part.count)]
    if covered != list(range(len(sizes.items))):
        raise Broken("the jobs of a request are not its items, each once")
    names = [f"job-{part.first}" for part in parts]
    make: Callable[..., list[bytes]] = codec.job_payloads
    for payload in make(request, parts, names, JobHeader("r", 1, 0)):
        _try_job(payload)


def _check_sayable(error: ShoalError) -> None:
    """Check that the error's fields can be put into messages."""
    worker_codec.failed(error)
    codec.failed(error)


# fields: bytes that may not be a valid message, as every service parses them


_KINDS: Final[Sequence[type[Message]]] = (
    pb.EncodeRequest,
    pb.ScoreRequest,
    pb.ExtractRequest,
    worker_pb2.HeartbeatRequest,
    worker_pb2.CompleteRequest,
    worker_pb2.PullRequest,
)
_FIELDS: Final = [messages.Maker(kind, WORDS) for kind in _KINDS]


def _make_fields(random: Random, known: Sequence[bytes]) -> bytes:
    number = random.randrange(len(_KINDS))
    way = random.random()
    if way < 0.3 and known:
        return mutate.mutated(random, random.choice(known), others=known)
    return bytes([number]) + (
        _FIELDS[number].make(random) if way < 0.6 else random.randbytes(random.randrange(40))
    )


def _try_fields(data: bytes) -> None:
    kind = _KINDS[data[0] % len(_KINDS) if data else 0]
    try:
        message = decode.parse(kind, data[1:])
    except InvalidInput as refused:
        if not refused.message:
            raise Broken("a refusal says nothing") from None
        return
    with suppress(InvalidInput):
        decode._refuse_crowded(kind, data[1:])
    message.SerializeToString()


# jobs: the input of a worker


_JOBS: Final = messages.Maker(
    worker_pb2.Job,
    WORDS,
    *(
        worker_pb2.Job(job_id="j", **{name: GOOD[kind]})  # type: ignore[arg-type]
        for name, (kind, _) in zip(
            ("encode", "score", "extract", "tokenize", "detokenize"), _VERBS, strict=True
        )
    ),
)


def _make_job(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), others=known)
    return _JOBS.make(random)


def _try_job(data: bytes) -> None:
    try:
        job = job_codec.read_job(data)
    except DecodeError:
        return
    try:
        job_codec.to_work(job)
    except ShoalError as refused:
        worker_codec.failed(refused, first_item=job.first_item)


# results: what workers answer, through the router to the client


def _tensor(random: Random) -> tensor_pb2.Tensor:
    rows, width = random.choice((0, 1, 2, 3)), random.choice((1, 2, 8, 12))
    kinds = [
        tensor_pb2.DATA_TYPE_FLOAT32,
        tensor_pb2.DATA_TYPE_FLOAT16,
        tensor_pb2.DATA_TYPE_BFLOAT16,
        tensor_pb2.DATA_TYPE_INT8,
    ]
    kind, size = random.choice(list(zip(kinds, (4, 2, 2, 1), strict=True)))
    shape = [rows, width] if random.random() < 0.8 else [rows]
    data = random.randbytes(rows * size * (width if len(shape) == 2 else 1))
    made = tensor_pb2.Tensor(data_type=kind, shape=shape, data=data)
    if random.random() < 0.2:
        made.scale = random.randbytes(4 * rows)
    return made


def _random_answer(random: Random, kind: type[Message]) -> Message:
    if kind is pb.EncodeResponse:
        made = pb.EncodeResponse(model_revision="r")
        if random.random() < 0.7:
            made.dense.CopyFrom(_tensor(random))
        if random.random() < 0.4:
            values = _tensor(random)
            made.multi_vector.CopyFrom(
                tensor_pb2.Ragged(values=values, offsets=[0, values.shape[0]])
            )
        if random.random() < 0.4:
            rows = random.randrange(4)
            values = tensor_pb2.Tensor(
                data_type=tensor_pb2.DATA_TYPE_FLOAT32,
                shape=[rows],
                data=random.randbytes(4 * rows),
            )
            indices = np.arange(rows, dtype="<u4").tobytes()
            made.sparse.CopyFrom(
                tensor_pb2.SparseMatrix(
                    columns=9, offsets=[0, rows], indices=indices, values=values
                )
            )
        return made
    if kind is pb.ScoreResponse:
        rows = random.randrange(4)
        scores = tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[rows], data=random.randbytes(4 * rows)
        )
        return pb.ScoreResponse(scores=scores, ranking=range(rows))
    return messages.message(random, kind, WORDS)


_ANSWERS: Final[Sequence[type[Message]]] = (pb.EncodeResponse, pb.ScoreResponse, pb.ExtractResponse)
_OUTCOMES: Final = ("encode", "score", "extract")


_RESULTS: Final = messages.Maker(
    worker_pb2.JobResult, WORDS, worker_pb2.JobResult(failure=worker_pb2.Failure(reason="X"))
)


def _make_results(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a byte for the verb, then one to three results, each after its length."""
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), others=known)
    verb = random.randrange(3)
    made = bytes([verb])
    for _ in range(random.randrange(1, 4)):
        result = worker_pb2.JobResult()
        getattr(result, _OUTCOMES[verb]).CopyFrom(_random_answer(random, _ANSWERS[verb]))
        way = random.random()
        data = _RESULTS.make(random) if way < 0.3 else result.SerializeToString()
        made += _piece(data if way < 0.7 else mutate.mutated(random, data))
    return made


def _try_results(data: bytes) -> None:
    verb, parts = data[0] % 3 if data else 0, []
    for part in _pieces(data[1:]):
        try:
            parts.append(codec.job_result(part))
        except ShoalError as failed:
            codec.failed(failed)
            return
    try:
        if verb == 0:
            merged: Message = codec.merge_encode(parts)
        elif verb == 1:
            merged = codec.merge_score(parts, 2)
        else:
            merged = codec.merge_extract(parts)
    except ShoalError:
        return
    # A client can read every result that a router passes on.
    _walk(_DECODERS[verb](type(merged).FromString(merged.SerializeToString())))


def _piece(data: bytes) -> bytes:
    data = data[:65_535]
    return len(data).to_bytes(2, "little") + data


def _pieces(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 2 <= len(data):
        length = int.from_bytes(data[position : position + 2], "little")
        yield data[position + 2 : position + 2 + length]
        position += 2 + length


# answers: messages of a server to a client

_DECODERS: Final[Sequence[Callable[[Any], Any]]] = (
    shoal.requests.codec.encode_result,
    shoal.requests.codec.score_result,
    shoal.requests.codec.extract_result,
    shoal.requests.codec.model,
    shoal.requests.codec.mesh,
    partial(shoal.requests.codec.placement, "org/name"),
)
_SENT: Final[Sequence[type[Message]]] = (
    *_ANSWERS,
    models_pb2.Model,
    mesh_pb2.Mesh,
    mesh_pb2.ExplainPlacementResponse,
)
_STATUS: Final = 6


_SENDERS: Final = [messages.Maker(kind, WORDS) for kind in _SENT]


def _make_answer(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), others=known)
    kind = random.randrange(7)
    if kind == _STATUS:
        return bytes([kind]) + _status(random)
    if kind < 3 and random.random() < 0.6:
        data = _random_answer(random, _SENT[kind]).SerializeToString()
        return bytes([kind]) + (data if random.random() < 0.3 else mutate.mutated(random, data))
    return bytes([kind]) + _SENDERS[kind].make(random)


def _status(random: Random) -> bytes:
    """Return a google.rpc.Status with Shoal's details, or a modified one."""
    status = status_pb2.Status(code=3, message=mutate.text(random))
    parts: list[type[Message]] = [
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
    ]
    for kind in parts:
        made = messages.message(
            random,
            kind,
            {"domain": ["shoal"], "reason": ["QUEUE_FULL"], "field": ["items[3].text"]},
        )
        status.details.add().Pack(made)
        if random.random() < 0.2:
            status.details[-1].value = random.randbytes(5)
    data = status.SerializeToString()
    return data if random.random() < 0.6 else mutate.mutated(random, data)


def _try_answer(data: bytes) -> None:
    kind = data[0] % 7 if data else 0
    if kind == _STATUS:
        error = shoal.transport.failures.decode("INVALID_ARGUMENT", "", data[1:], address="x")
        error.move("items", range(5, 10))
        str(error)
        return
    message = messages.parsed(_SENT[kind], data[1:])
    if message is None:
        return
    try:
        result = _DECODERS[kind](message)
        _walk(result)
        if kind == 0:
            _walk(shoal.requests.merging.merge_encode([result, result]))
        elif kind == 1:
            _walk(shoal.requests.merging.merge_score([result, result], top_n=1))
    except shoal.errors.ShoalError as error:
        str(error)


def _walk(found: object) -> None:
    """Access all parts of an answer, like its reader."""
    if isinstance(found, shoal.EncodeResult):
        if "dense" in found.representations:
            found.dequantize()
        for form in set(found.representations) - {"dense"}:
            rows = found.sparse if form == "sparse" else found.multi_vector
            if len(rows) < 10_000:
                list(rows)
        return
    if is_dataclass(found):
        for each in fields(found):
            _walk(getattr(found, each.name))
    elif isinstance(found, tuple):
        for one in found:
            _walk(one)


# heartbeats: reports of workers, and all decisions based on them


def _heartbeats(worker_id: str) -> Iterator[worker_pb2.HeartbeatRequest]:
    for state in (
        models_pb2.MODEL_STATE_RESIDENT,
        models_pb2.MODEL_STATE_COLD,
        models_pb2.MODEL_STATE_WARM,
    ):
        made = worker_pb2.HeartbeatRequest(
            worker_id=worker_id, pool="cpu", memory_bytes=1 << 30, batch_tokens=2048
        )
        model = made.models.add(model="org/name", state=state, bytes=1000, tokens_per_second=100.0)
        model.card.CopyFrom(CARDS[1] or models_pb2.ModelCard())
        yield made


_HEARTBEATS: Final = [
    messages.Maker(worker_pb2.HeartbeatRequest, WORDS, *_heartbeats(f"w{number}"))
    for number in range(3)
]


def _make_heartbeats(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), others=known)
    made = b""
    for number in range(random.randrange(1, 4)):
        made += _piece(_HEARTBEATS[number].make(random))
    return made


_GAUGES: Final = {
    lane: LaneGauges(lane, 3, 5000, 100, 10, 5, 1, 0, 1, 20_000)
    for lane in (
        LaneKey("cpu", "org/name"),
        LaneKey("l4-spot", "a/b"),
        LaneKey("cpu", "tiny/fuzz", "org/adapter"),
    )
}


def _try_heartbeats(data: bytes) -> None:
    workers: dict[str, WorkerRecord] = {}
    cards: dict[str, models_pb2.ModelCard] = {}
    failures: dict[str, dict[str, worker_pb2.Failure]] = {}
    for piece in _pieces(data):
        heartbeat = messages.parsed(worker_pb2.HeartbeatRequest, piece)
        if not isinstance(heartbeat, worker_pb2.HeartbeatRequest):
            continue
        try:
            reports.check_heartbeat(heartbeat)
        except InvalidInput as refused:
            _check_sayable(refused)
            continue
        workers[heartbeat.worker_id] = WorkerRecord.from_heartbeat(heartbeat, 100_000, {})
        for model in heartbeat.models:
            if model.HasField("card"):
                cards[model.model] = model.card
            if model.state == models_pb2.MODEL_STATE_FAILED:
                failures.setdefault(model.model, {})[heartbeat.worker_id] = model.failure
    _decide(FleetSnapshot(workers, cards, failures, 100_500))


def _decide(fleet: FleetSnapshot) -> None:
    """Make the decisions of routers and schedulers. An exception would let one worker stop the
    mesh.
    """
    busy = busy_shares(fleet, _GAUGES.values())
    for lane in _GAUGES:
        choose_lane(
            LaneTarget(lane.model, lane.adapter), Routes(), fleet, {("cpu", lane.model): 5000}, 10.0
        )
        failure = why_broken(lane, fleet)
        if failure is not None:
            codec.failed(codec.from_failure(failure))
        splitting.job_target(10_000, lane, fleet)
        sizes = Sizes([100, 1 << 26], per_sequence_bytes=10, per_job_bytes=10)
        pricing.price(sizes, fleet.card(lane.model), pb.TRUNCATION_UNSPECIFIED)
        for worker_id, worker in fleet.workers.items():
            score(worker, lane.model, busy[worker_id])
    for model in known_models(fleet, _GAUGES):
        shoal.requests.codec.model(models_pb2.Model.FromString(model.SerializeToString()))
    for request in GOOD.values():
        _check_against(request, fleet.card("org/name"))
    placement.plan(placement.PlanInput(fleet, _GAUGES, rates=dict.fromkeys(_GAUGES, 10.0)))
    Demand(Pools()).update(MeshSnapshot(fleet, _GAUGES, 1.0))


def _check_against(request: Message, card: models_pb2.ModelCard | None) -> None:
    check = dict(_VERBS)[type(request)]  # type: ignore[index]
    with suppress(InvalidInput):
        check(request, card)


# files of operators

_YAML: Final = (
    b"model: ", b"- ", b"pools: [", b"]", b"{", b"}", b"detect:\n  kind: dense\n",
    b"prompts:\n  query: 'q '\n", b"---\n", b"&a ",
    b"*a",
    b"!!python/object ", b"!!int ", b"? ", b": ", b"|\n", b">-\n", b"'", b'"', b"#", b"\n", b"\n  ",
    b"\xef\xbb\xbf", b"\x00",
    b"<<: *a\n",
    b"memory_bytes: 1e999\n", b"max_tokens: " + b"9" * 5000, b"spot: yes\n", b"device: cpu\n",
    b"9" * 400 + b"GiB", b"[" * 20,
    b"tokens:\n", b"- token: ", b"sha256: ", b"subject: s\n", b"role: client\n", b"tenants:\n",
    b"weight: ", b"default: ",
    b"requests_per_second: ",
    b"0x10", b"0b1", b"1:30", b".inf", b".nan", b"~", b"1_000", "٣".encode(), b"\xf0\x9f\x92\x80",
    b"2001-01-01",
)  # fmt: skip
_CARDS: Final = (
    (
        b"model: org/name\npools: [cpu, l4-spot]\nmax_tokens: 512\nmemory_bytes: 1000\ndtype: "
        b"float32\npinned: true\n"
    ),
    b"model: [org/a, org/b@v1]\nprompts:\n  query: 'find: '\n  document: ''\ndefault_prompt: "
    b"query\nrevision: abc\n---\n"
    b"model: org/c\ndetect:\n  kind: yes_no\n  answers: ['yes', 'no']\n"
    b"  template: '{{ query }}'\n  normalize: false\n  pooling: mean\n",
)
_POOLS: Final = (
    b"default: cpu\npools:\n  cpu: {device: cpu, max_workers: 3}\n  l4-spot:\n    device: cuda\n "
    b"   memory_bytes: 22.5GiB\n"
    b"    spot: true\n    cold_start_seconds: 30\n    target_utilization: 0.5\n    fallback_for: "
    b"cpu\n",
)
_TOKENS: Final = (
    b"tokens:\n- {token: 0123456789abcdef, subject: a, role: client, tenant: t}\n- sha256: '"
    + b"ab" * 32
    + b"'\n  subject: b\n  role: admin\n",
)
_TENANTS: Final = (
    b"default: {weight: 1, requests_per_second: 10}\ntenants:\n  a: {weight: 2.5, "
    b"tokens_per_second: 1e6, burst_seconds: 2}\n"
    b"  b: {queued_tokens: 1000}\n",
)
_TRACE: Final = (
    b"time_seconds,model,tokens,adapter,bytes,load_seconds,warm_seconds,tokens_per_second\n0.5,org/name,100,,1000,2.5,0.1,50000\n"
    b"1.5,org/name,7,org/adapter,,,,\n",
)
_CSV: Final = (
    b",",
    b"\n",
    b'"',
    b'""',
    b"nan",
    b"inf",
    b"-1",
    b"1e400",
    b"9" * 400,
    b"\x00",
    b"\r",
    b"\xff",
    b"time_seconds",
    b"x" * 4000,
)


_MAX_TEXT: Final = 4000
"""PyYAML takes seconds for some kilobytes of brackets; operators write these files."""


def _text_file(
    bases: Sequence[bytes], words: Sequence[bytes]
) -> Callable[[Random, Sequence[bytes]], bytes]:
    def make(random: Random, known: Sequence[bytes]) -> bytes:
        chosen = random.choice(known) if known and random.random() < 0.1 else random.choice(bases)
        return mutate.mutated(random, chosen, words, bases)[:_MAX_TEXT]

    return make


@contextmanager
def _reading(read: Callable[[Path], object], name: str) -> Iterator[Try]:
    """Try each input as a file of that name in memory."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        path = Path(folder) / name

        def attempt(data: bytes) -> None:
            path.write_bytes(data)
            with suppress(InvalidInput):
                read(path)

        yield attempt


def _tenants(path: Path) -> object:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    return parse_tenants(text, "tenants.yaml")


TARGETS: Final = (
    Target("requests", _make_request, plain(_try_request), guided=True, share=3.0),
    Target("fields", _make_fields, plain(_try_fields), share=7.0),
    Target("jobs", _make_job, plain(_try_job), share=7.0),
    Target("results", _make_results, plain(_try_results), guided=True, share=3.0),
    Target("answers", _make_answer, plain(_try_answer), guided=True, share=3.0),
    Target("heartbeats", _make_heartbeats, plain(_try_heartbeats)),
    Target(
        "cards",
        _text_file(_CARDS, _YAML),
        lambda: _reading(lambda path: entries(path.parent), "a.yaml"),
        share=0.5,
    ),
    Target(
        "pools", _text_file(_POOLS, _YAML), lambda: _reading(read_pools, "pools.yaml"), share=0.5
    ),
    Target(
        "tokens",
        _text_file(_TOKENS, _YAML),
        lambda: _reading(read_tokens, "tokens.yaml"),
        share=0.5,
    ),
    Target(
        "tenants",
        _text_file(_TENANTS, _YAML),
        lambda: _reading(_tenants, "tenants.yaml"),
        share=0.5,
    ),
    Target(
        "traces",
        _text_file(_TRACE, _CSV),
        lambda: _reading(read_trace, "trace.csv"),
        guided=True,
        share=2.0,
    ),
)
