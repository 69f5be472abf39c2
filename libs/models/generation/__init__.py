"""Generative models: prefill and decode steps over paged keys and values, with continuous batching.

The interface, in the order of use. All except `load_language_model` belongs to the device thread:

    model = load_language_model(directory, torch.device("cpu"), torch.bfloat16)
    loop = DecodeLoop(model, pages=1024)      # allocates 1024 * model.page_bytes, and never more
    request = SequenceRequest(prompt=ids, most=200)   # causal model: the prompt's token ids
    request = SequenceRequest(states=model.encode([ids])[0])
    loop.needs(request)            # pages for prompt and longest answer; never exceeded
    loop.has_room(request)         # whether this many pages are unclaimed
    sequence = loop.add(request)   # claims them
    loop.next_step()               # cost of the next step: StepCost(kind, rows, keys), or None
    for delta in loop.step():      # one forward: a prefill of `most_rows` tokens, or a token each
        delta.sequence, delta.ids, delta.finish   # finish: None, "stop" or "length"
    loop.cancel(sequence)          # frees its pages; its finish is "cancelled"

Families: llama, mistral, qwen2, qwen3, gemma, gemma3_text; BART, mBART, T5, mT5. Requests to
encoder-decoder models carry the encoder's hidden states [tokens, hidden]; the request's prompt is
then the decoder's (None: its start token).

`delta.ids` are new token ids, including the stop token; beam search returns all of them when it
ends. `DecodeSettings` are read from generation_config.json: greedy, or beams if `num_beams` is set.
Change them with `dataclasses.replace` and pass them in `SequenceRequest.settings`; `vocabulary`
bounds the ids that may be chosen. `SequenceRequest.allows` is a grammar: called with the ids
generated so far, it returns the ids that may follow as bits (`grammars`).

A model with another kind of encoder, such as an image tower, computes `states` itself.
`families.bart.load_decoder` loads only the decoder, with a table of names and the width of the
states: `DECODER_WEIGHTS` for a whole BART, `DECODER_ALONE` for a decoder.
"""

from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.loop import DecodeLoop, StepDelta
from libs.models.generation.decoding.sequences import (
    DecodeSequence,
    Finish,
    SequenceRequest,
    StepCost,
)
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.loading import load_language_model

__all__ = [
    "DecodeLoop",
    "DecodeSequence",
    "DecodeSettings",
    "Finish",
    "LanguageModel",
    "SequenceRequest",
    "StepCost",
    "StepDelta",
    "load_language_model",
]
