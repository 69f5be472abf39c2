"""Models that write: prefill and decode steps over keys and values in pages, with continuous
batching.

The seam, in the order of use; but for `load_writer` all of it belongs to the device thread:

    writer = load_writer(directory, torch.device("cpu"), torch.bfloat16)
    loop = DecodeLoop(writer, pages=1024)     # takes 1024 * writer.page_bytes of memory, and never more
    request = Request(prompt=ids, most=200)   # of a causal model: the prompt's token ids
    request = Request(states=writer.encode([ids])[0])
    loop.needs(request)            # pages for prompt and longest answer, known before; never are more taken
    loop.has_room(request)         # whether so many are unclaimed
    sequence = loop.add(request)   # claims them
    loop.next_step()               # the cost of the next step: Step(kind, rows, keys), or None
    for written in loop.step():    # one forward: prefill of what has joined (at most `most_rows` tokens), or a token each
        written.sequence, written.ids, written.finish   # finish: None, "stop" or "length"
    loop.cancel(sequence)          # returns its pages at once; its finish is "cancelled"

Families: llama, mistral, qwen2, qwen3, gemma, gemma3_text; BART, mBART, T5, mT5. Encoder-decoder
models are asked with the encoder's hidden states [tokens, hidden]; the request's prompt is then
what the decoder begins with (None: its start token).

`written.ids` are new token ids, the stop token included; under beam search all of them come when it
ends. `Settings` are what generation_config.json says: greedy, or beams where `num_beams` asks for
them. They are changed by `dataclasses.replace` and given in `Request.settings`; `vocabulary` bounds
the ids that may be chosen. `Request.allows` is a grammar: it is called with what was written so
far, and returns the ids that may follow, as bits (`grammars`).

A model whose encoder is something else, such as a tower of images, computes `states` itself.
`families.bart.load_decoder` loads the decoder alone, with a table of names and the width of the
states: `DECODER_WEIGHTS` for a whole BART, `DECODER_ALONE` for a decoder.
"""

from libs.models.generation.decoding.loop import DecodeLoop, Written
from libs.models.generation.decoding.sequences import DecodeSequence, Finish, Request, Step
from libs.models.generation.decoding.settings import Settings
from libs.models.generation.decoding.writer import Writer
from libs.models.generation.loading import load_writer

__all__ = [
    "DecodeLoop",
    "DecodeSequence",
    "Finish",
    "Request",
    "Settings",
    "Step",
    "Writer",
    "Written",
    "load_writer",
]
