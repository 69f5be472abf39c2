"""Models that write: prefill and decode steps over keys and values in pages, with continuous batching.

The seam, in the order of use; everything but `encode` belongs to the device thread:

    writer = load_writer(directory, torch.device("cpu"), torch.bfloat16)   # llama, mistral, qwen2/3, gemma, gemma3, BART, mBART, T5, mT5
    loop = DecodeLoop(writer, pages=1024)                                  # memory: 1024 * writer.page_bytes
    request = Request(prompt=ids, most=200)                                # causal: the prompt's token ids
    request = Request(states=writer.encode([ids])[0])                      # encoder-decoder: the encoder's hidden states [tokens, hidden];
                                                                           # `prompt` is then what the decoder begins with (None: its start token)
    loop.needs(request)            # pages for prompt and longest answer, known before; never are more taken
    loop.has_room(request)         # whether so many are unclaimed
    sequence = loop.add(request)   # claims them; between steps
    loop.next_step()               # the cost of the next step: Step(kind, rows, keys), or None
    for written in loop.step():    # one forward: the prefill of what has joined (at most `most_rows` tokens), or a token of each sequence
        written.sequence, written.ids, written.finish                      # finish: None, "stop", "length"
    loop.cancel(sequence)          # between steps: returns its pages at once; its finish is "cancelled"

`written.ids` are new token ids, the stop token included; under beam search all of them come when it ends. `Settings` are what
generation_config.json says (greedy, or beams where `num_beams` asks for them); change them by `dataclasses.replace` and give them in
`Request.settings`: `vocabulary` bounds the ids that may be chosen. `Request.allows` is a grammar: called with what was written so far, it
returns the ids that may follow (None: any).

A model of another kind (a tower before a BART decoder) builds its decoder by `seq2seq.bart.decoder` or `load_writer`'s parts, computes
`states` itself, and uses the same loop: `Writer(decoder, head, settings)` needs no encoder of its own.
"""

from libs.models.generation.loading import load_writer
from libs.models.generation.loop import DecodeLoop, Written
from libs.models.generation.sequences import DecodeSequence, Finish, Request, Step
from libs.models.generation.settings import Settings
from libs.models.generation.writer import Writer

__all__ = ["DecodeLoop", "DecodeSequence", "Finish", "Request", "Settings", "Step", "Writer", "Written", "load_writer"]
