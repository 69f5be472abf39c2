"""The verb, model, tokens and stages of one HTTP request, gathered while it is answered. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any, Final

from google.protobuf.message import Message
from shoal.v1 import inference_pb2 as pb

STAGES: Final = ("queue", "prepare", "wait", "forward", "finish", "total")
"""The stages of `Timings`."""
_SECONDS: Final = attrgetter(*(f"{stage}_seconds" for stage in STAGES))
_VERBS: Final[dict[type, str]] = {
    pb.EncodeRequest: "encode",
    pb.ScoreRequest: "score",
    pb.ExtractRequest: "extract",
    pb.TokenizeRequest: "tokenize",
    pb.DetokenizeRequest: "detokenize",
}
_ANSWERS: Final = (
    pb.EncodeResponse,
    pb.ScoreResponse,
    pb.ExtractResponse,
    pb.TokenizeResponse,
    pb.DetokenizeResponse,
)


def truncated_inputs(reply: Any) -> int:
    """Return how many texts, queries and labels of an answer's request were cut."""
    if not isinstance(reply, _ANSWERS):
        return 0
    return int(reply.usage.truncated_items + reply.usage.truncated_query)


@dataclass(slots=True)
class Cost:
    """The verb and usage of a request.

    Attributes:
        verb: encode, score, extract, tokenize, detokenize, or generate (Extract with a text task);
            empty if the mesh was not called for any of these.
        model: The model's id, with aliases resolved.
        input_tokens: Tokens that models read.
        output_tokens: Tokens that models generated.
        truncated_inputs: Texts, queries and labels of which tokens were cut, of the call that had
            most.
        seconds: Time per stage in the order of STAGES, summed over several calls.
        prompt_copies: Copies of each prompt that models read, of the last call.
    """

    verb: str = ""
    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    truncated_inputs: int = 0
    seconds: tuple[float, ...] = (0.0,) * len(STAGES)
    prompt_copies: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of prompts as usage counts them: once, however many answers follow."""
        return self.input_tokens // self.prompt_copies

    def note_request(self, message: Message) -> None:
        """Record the verb and the model of a request for inference."""
        verb = _VERBS.get(type(message))
        if verb is None:
            return
        is_generation = isinstance(message, pb.ExtractRequest) and message.HasField("text")
        self.verb = "generate" if is_generation else verb
        self.model = getattr(message, "model", "")

    def note_reply(self, reply: Any) -> None:
        """Add the tokens and stages of an answer; a stream reports them in its last part."""
        if isinstance(reply, pb.ExtractStreamResponse):
            reply = reply.response
        if not isinstance(reply, _ANSWERS):
            return
        usage = reply.usage
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.truncated_inputs = max(self.truncated_inputs, truncated_inputs(reply))
        self.seconds = tuple(map(add, self.seconds, _SECONDS(reply.timings)))
