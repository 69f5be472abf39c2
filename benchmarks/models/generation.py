"""Measure the decode loop: `python -m benchmarks.models.generation`, or `make bench-generation`.

The same random weights generate by (a) Shoal's decode loop and (b) transformers'
`generate(do_sample=False)`: one sequence alone, and 16 with prompts and answers of different
lengths. transformers pads prompts to the longest and generates until the longest answer has ended,
as its batches do; only requested tokens count, for both. Engines take turns within a round; ratios
are of neighbours in time. In addition: the time to the first token, and the cost of a step while
another sequence joins.

Needs torch, transformers, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from benchmarks.models.families import DTYPES
from libs.kernels.attention.paged import pages_for
from libs.kernels.native.library import name as native_name
from libs.models.generation import DecodeLoop, LanguageModel, SequenceRequest, load_language_model
from libs.models.generation.decoding.rules import Ids
from tests.parity.checkpoints import random_model, write_checkpoint

VOCABULARY = 32_000
TARGETS = {1: 1.5, 16: 3.0}


class PromptSet:
    """Prompts and the lengths of their answers, drawn from a seed: `count` of them; one has the
    middle of both ranges.
    """

    def __init__(self, count: int, longest: int) -> None:
        random = np.random.default_rng(7)
        lengths = [96] if count == 1 else random.integers(16, 257, count).tolist()
        self.answers = (
            [longest] if count == 1 else random.integers(longest // 8, longest + 1, count).tolist()
        )
        self.prompts: list[Ids] = [
            random.integers(1, VOCABULARY, length).astype(np.int32) for length in lengths
        ]

    @property
    def tokens(self) -> int:
        return sum(self.answers)


def loop_run(language_model: LanguageModel, texts: PromptSet) -> Callable[[], float]:
    """Seconds from the requests to the first token of the first of them; all are written."""
    pages = sum(
        pages_for(len(prompt) + most)
        for prompt, most in zip(texts.prompts, texts.answers, strict=True)
    )
    loop = DecodeLoop(language_model, pages)

    def run() -> float:
        began, first = time.perf_counter(), 0.0
        for prompt, most in zip(texts.prompts, texts.answers, strict=True):
            loop.add(SequenceRequest(prompt, most=most))
        while loop.sequences:
            if loop.step() and not first:
                first = time.perf_counter() - began
        return first

    return run


def reference_run(model: transformers.PreTrainedModel, texts: PromptSet) -> Callable[[], float]:
    longest = max(map(len, texts.prompts))
    ids = torch.zeros((len(texts.prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(texts.prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1

    @torch.inference_mode()
    def run() -> float:
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,  # which the configs of the tests turn off
            max_new_tokens=max(texts.answers),
            pad_token_id=0,
            eos_token_id=None,
        )
        return 0.0

    return run


def take_turns(
    engines: Sequence[Callable[[], float]], rounds: int
) -> tuple[list[list[float]], float]:
    """Seconds of each engine in each round, and the first engine's median time to the first
    token.
    """
    seconds: list[list[float]] = [[] for _ in engines]
    firsts = []
    for number in range(rounds + 1):
        for place in range(len(engines)):
            which = (place + number) % len(engines)
            began = time.perf_counter()
            first = engines[which]()
            if number:
                seconds[which].append(time.perf_counter() - began)
                if which == 0:
                    firsts.append(first)
    return seconds, median(firsts)


def joining(language_model: LanguageModel, texts: PromptSet) -> tuple[float, float]:
    """Seconds of a decode step of 15 sequences, and of the prefill of another one of 128 tokens
    that joins them.
    """
    loop = DecodeLoop(language_model, 16 * 16)
    for prompt in texts.prompts[:15]:
        loop.add(SequenceRequest(prompt[:128], most=200))
    steps, joins = [], []
    while any(not sequence.is_prefilled for sequence in loop.sequences):
        loop.step()
    for _ in range(8):
        for _ in range(4):
            began = time.perf_counter()
            loop.step()
            steps.append(time.perf_counter() - began)
        joined = loop.add(SequenceRequest(np.arange(1, 129, dtype=np.int32), most=100))
        began = time.perf_counter()
        while not joined.is_prefilled:
            loop.step()
        joins.append(time.perf_counter() - began)
        loop.cancel(joined)
    return median(steps), median(joins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kind", default="llama")
    parser.add_argument("--tokens", type=int, default=96, help="of the longest answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--counts", default="1,16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"native kernels: {native_name()}; torch {torch.__version__}; {given.threads} threads")
    size = {
        "hidden": given.hidden,
        "layers": given.layers,
        "heads": given.hidden // 64,
        "positions": 1024,
    }
    config = {
        "vocab_size": VOCABULARY,
        "intermediate_size": given.hidden * 8 // 3 // 64 * 64,
        "num_key_value_heads": given.hidden // 192,
    }
    for name in given.dtypes.split(","):
        dtype = DTYPES[name]
        with tempfile.TemporaryDirectory() as folder:
            directory = write_checkpoint(
                given.kind, Path(folder), head="causal_lm", dtype=dtype, config=config, **size
            )
            language_model = load_language_model(directory, torch.device("cpu"), dtype)
            reference = random_model(given.kind, head="causal_lm", config=config, **size).to(dtype)
            for count in map(int, given.counts.split(",")):
                texts = PromptSet(count, given.tokens)
                (own, theirs), first = take_turns(
                    [loop_run(language_model, texts), reference_run(reference, texts)], given.rounds
                )
                ratio = median(other / mine for mine, other in zip(own, theirs, strict=True))
                found: dict[str, object] = {
                    "dtype": name,
                    "sequences": count,
                    "tokens": texts.tokens,
                    "loop tokens/s": round(texts.tokens / median(own), 1),
                    "transformers tokens/s": round(texts.tokens / median(theirs), 1),
                    "ratio": round(ratio, 2),
                    "target": TARGETS.get(count),
                    "first token ms": round(1000 * first, 1),
                }
                if count == 16:
                    step, join = joining(language_model, texts)
                    found |= {
                        "step of 15 ms": round(1000 * step, 1),
                        "join of 128 tokens ms": round(1000 * join, 1),
                    }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
