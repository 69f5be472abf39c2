"""Measure the share of a model's throughput that is left with adapters: `python -m
benchmarks.models.lora`, or `make bench-lora`.

The same random weights (the shape of all-MiniLM-L6), texts and data type go through
`PackedModel.forward` in batches of n tokens: without adapters, with one for all texts, and with
eight that take turns text by text, so that every batch holds all of them. Once with adapters of
rank 8 on queries, keys, values and the attention's output, once on every linear layer. Engines take
turns within a round; ratios are of neighbours in time, so that the machine's drift cancels. Texts
have the log-normal length mix of `benchmarks/common/texts.py`.

Needs torch, safetensors, tokenizers, and peft to write the adapters.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.texts import real_texts
from benchmarks.models.families import DTYPES, dtypes, take_turns
from libs.models import EncodeWork, InputSequence, PackedModel, load_model
from tests.parity.adapters import write_adapter
from tests.parity.checkpoints import random_model, write_checkpoint

TARGET = 0.8
ADAPTERS = 8
RANK = 8
HIDDEN, LAYERS, HEADS, POSITIONS, VOCABULARY = 384, 6, 12, 512, 2000
CONFIG = {"intermediate_size": 1536}
TARGETS: dict[str, list[str]] = {
    "q, k, v, o": ["query", "key", "value", "attention.output.dense"],
    "all linear layers": ["query", "key", "value", "dense"],
}


@dataclass(frozen=True, slots=True)
class LoraSpeed:
    """Results of one set of layers in one data type and batch size.

    Attributes:
        seconds: By engine, one number a round.
    """

    targets: str
    dtype: str
    batch_tokens: int
    tokens: int
    adapter_bytes: int
    seconds: dict[str, list[float]]

    def tokens_per_second(self, engine: str) -> float:
        return self.tokens / median(self.seconds[engine])

    def ratio(self, engine: str) -> float:
        """Return the share of the throughput without adapters: the median of the rounds' ratios."""
        return median(
            base / own for base, own in zip(self.seconds["base"], self.seconds[engine], strict=True)
        )


def measure(
    targets: str, dtype: str, device: torch.device, texts: int, rounds: int, batch_tokens: int
) -> LoraSpeed:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_checkpoint(
            "bert", root / "base", hidden=HIDDEN, layers=LAYERS, heads=HEADS, positions=POSITIONS,
            vocabulary=VOCABULARY,
            config=CONFIG, dtype=DTYPES[dtype],
        )  # fmt: skip
        model = load_model(root / "base", "bench/model", device, DTYPES[dtype])
        names = [f"bench/adapter-{number}" for number in range(ADAPTERS)]
        taken = 0
        for seed, adapter in enumerate(names):
            base = random_model(
                "bert",
                hidden=HIDDEN,
                layers=LAYERS,
                heads=HEADS,
                positions=POSITIONS,
                vocabulary=VOCABULARY,
                config=CONFIG,
            )
            write_adapter(base, root / adapter, seed=seed, r=RANK, target_modules=TARGETS[targets])
            taken += model.add_adapter(adapter, root / adapter)
        sequences = model.prepare(
            EncodeWork(real_texts(texts, directory=root / "base").texts)
        ).sequences
    turns = [
        replace(sequence, adapter=names[place % ADAPTERS])
        for place, sequence in enumerate(sequences)
    ]
    engines = {
        "base": run(model, sequences, batch_tokens),
        "one adapter": run(
            model, [replace(sequence, adapter=names[0]) for sequence in sequences], batch_tokens
        ),
        "mixed": run(model, turns, batch_tokens),
    }
    seconds = take_turns(engines, rounds, device)
    return LoraSpeed(
        targets, dtype, batch_tokens, sum(one.tokens for one in sequences), taken, seconds
    )


def run(
    model: PackedModel, sequences: Sequence[InputSequence], batch_tokens: int
) -> Callable[[], object]:
    batches: list[list[InputSequence]] = [[]]
    held = 0
    for sequence in sequences:
        if batches[-1] and held + sequence.tokens > batch_tokens:
            batches.append([])
            held = 0
        batches[-1].append(sequence)
        held += sequence.tokens
    return lambda: [model.forward("dense", batch) for batch in batches]


HEAD = (
    f"{'adapters on':18} {'dtype':9} {'batch':>6} {'base tok/s':>11} {'one':>6} {'mixed':>6} "
    f"{'bytes of 8':>11}"
)


def line(one: LoraSpeed) -> str:
    """Return a table line. one, mixed: shares of the throughput without adapters."""
    base, single, mixed = (
        one.tokens_per_second("base"),
        one.ratio("one adapter"),
        one.ratio("mixed"),
    )
    return (
        f"{one.targets:18} {one.dtype:9} {one.batch_tokens:6} {base:11,.0f} {single:6.2f} "
        f"{mixed:6.2f} {one.adapter_bytes:11,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        action="append",
        help="default: those that the device multiplies itself",
    )
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="of torch on a CPU; default all cores"
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        action="append",
        help="tokens of a packed batch; default 512 and 2048",
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    print(
        f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads, {wanted.texts} "
        f"texts, {wanted.rounds} rounds"
    )
    print(HEAD, "-" * len(HEAD), sep="\n", flush=True)
    results = []
    for dtype in wanted.dtype or dtypes(device):
        for batch_tokens in wanted.batch_tokens or [512, 2048]:
            measured = partial(
                measure, dtype=dtype, device=device, texts=wanted.texts, rounds=wanted.rounds
            )
            for targets in TARGETS:
                print(f"{targets}, {dtype}, {batch_tokens} tokens", file=sys.stderr)
                results.append(measured(targets, batch_tokens=batch_tokens))
                print(line(results[-1]), flush=True)
    slow = [
        f"{one.targets} {one.dtype} {one.batch_tokens}"
        for one in results
        if one.ratio("mixed") < TARGET
    ]
    print(f"mixed below {TARGET} x the throughput without adapters: {', '.join(slow) or 'none'}")
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()
