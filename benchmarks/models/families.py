"""Measure each family's packed forward: `python -m benchmarks.models.families`, or `make
bench-families`.

For every family the same random weights, texts and data type go through (a) Shoal's packed forward,
(b) transformers' padded forward in arrival order, as a server gets its texts, and sorted by length,
which is its best case, and (c) sentence-transformers, which sorts too and includes tokenising.
Engines take turns within a round; ratios are of neighbours in time, so that the machine's drift
cancels. Texts have the log-normal length mix of `benchmarks/common/texts.py`.

Needs torch, transformers, safetensors and tokenizers; sentence-transformers where it is installed;
Triton and the CUDA build of torch on a GPU. `--shapes published` measures real models' shapes
instead of small ones and adds model FLOP utilisation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.texts import real_texts
from libs.kernels.linear.packed import has_bfloat16
from libs.models import EncodeWork, InputSequence, PackedModel, load_model
from libs.models.interface.pending import PendingBatch
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.recipes import RECIPES

BATCH = 32
POSITIONS = 512
TARGET = 2.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Dense bfloat16 TFLOP/s of the datasheets, without sparsity.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """A family at a size.

    Attributes:
        config: Further keys of transformers' configuration.
    """

    name: str
    kind: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 2000
    config: Mapping[str, object] = field(default_factory=dict)


# Sizes of published checkpoints; tokenizers and vocabularies stay small, since looking up a row
# costs the same in any table.
PUBLISHED = (
    FamilyShape("MiniLM-L6", "bert", 384, 6, 12, config={"intermediate_size": 1536}),
    FamilyShape("BERT-base", "bert", 768, 12, 12, config={"intermediate_size": 3072}),
    FamilyShape("BERT-large", "bert", 1024, 24, 16, config={"intermediate_size": 4096}),
    FamilyShape(
        "ModernBERT-base",
        "modernbert",
        768,
        22,
        12,
        config={"intermediate_size": 1152, "local_attention": 128},
    ),
    FamilyShape(
        "Qwen3-0.6B",
        "qwen3",
        1024,
        28,
        16,
        config={"intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128},
    ),
    FamilyShape(
        "EmbeddingGemma-300M",
        "gemma3_text",
        768,
        24,
        3,
        config={
            "intermediate_size": 1152,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * 4,
        },
    ),
)


@dataclass(frozen=True, slots=True)
class FamilySpeed:
    """Results of one shape in one data type.

    Attributes:
        seconds: By engine, one number a round.
    """

    shape: str
    dtype: str
    tokens: int
    seconds: dict[str, list[float]]
    flops: float  # of one round, the matrix products of linear layers and attention
    peak: float | None  # of the device, a second

    def tokens_per_second(self, engine: str) -> float | None:
        return self.tokens / median(self.seconds[engine]) if engine in self.seconds else None

    def ratio(self, peer: str) -> float | None:
        """Return the speed of packed relative to a peer: the median of the rounds' ratios."""
        if peer not in self.seconds:
            return None
        return median(
            other / own
            for own, other in zip(self.seconds["packed"], self.seconds[peer], strict=True)
        )

    @property
    def utilisation(self) -> float | None:
        return (
            None if self.peak is None else self.flops / median(self.seconds["packed"]) / self.peak
        )


def small_shapes(names: Sequence[str]) -> list[FamilyShape]:
    """Every family of the parity table, of the size of a small embedder."""
    return [FamilyShape(kind, kind, 384, 6, 6) for kind in RECIPES if not names or kind in names]


def measure(
    shape: FamilyShape, dtype: str, device: torch.device, texts: int, rounds: int, batch_tokens: int
) -> FamilySpeed:
    """Measure one shape.

    Args:
        batch_tokens: Budget of packed batches in tokens; 0: batches of 32 texts, for all engines
            alike.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = write_checkpoint(
            shape.kind, Path(name), hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
            positions=POSITIONS,
            vocabulary=shape.vocabulary, config=shape.config, dtype=DTYPES[dtype],
        )  # fmt: skip
        mix = real_texts(texts, directory=directory)
        model = load_model(directory, "bench/model", device, DTYPES[dtype])
        sequences = model.prepare(EncodeWork(mix.texts)).sequences
        engines: dict[str, Callable[[], object]] = {
            "packed": packed_run(model, sequences, batch_tokens)
        }
        reference: torch.nn.Module = random_model(
            shape.kind, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
            positions=POSITIONS,
            vocabulary=shape.vocabulary, config=shape.config,
        )  # fmt: skip
        reference.to(device=device, dtype=DTYPES[dtype])
        engines["transformers"] = padded_run(reference, sequences, device)
        by_length = sorted(sequences, key=lambda sequence: -sequence.tokens)
        engines["transformers sorted"] = padded_run(reference, by_length, device)
        if (
            importlib.util.find_spec("sentence_transformers") is not None
            and not RECIPES[shape.kind].like
        ):
            engines["sentence-transformers"] = sentence_transformers_run(
                directory, mix.texts, device, DTYPES[dtype]
            )
        seconds = take_turns(engines, rounds, device)
    tokens = sum(sequence.tokens for sequence in sequences)
    return FamilySpeed(
        shape.name, dtype, tokens, seconds, flops(reference, shape, sequences), peak(device, dtype)
    )


def packed_run(
    model: PackedModel, sequences: Sequence[InputSequence], batch_tokens: int
) -> Callable[[], object]:
    """Run batches as a worker does: on an asynchronous device the next one is launched before the
    last one is collected.
    """
    batches = split_into_batches(sequences, batch_tokens)
    if model.queue is None:
        return lambda: [model.forward("dense", batch) for batch in batches]

    def run() -> list[object]:
        answers: list[object] = []
        before: PendingBatch | None = None
        for batch in batches:
            following = model.launch("dense", batch)
            if before is not None:
                answers.append(before.collect())
            before = following
        return [*answers, before.collect()] if before is not None else answers

    return run


def split_into_batches(
    sequences: Sequence[InputSequence], batch_tokens: int
) -> list[list[InputSequence]]:
    """Return batches in arrival order: 32 each, or as many as fit a budget."""
    if not batch_tokens:
        return [list(sequences[first : first + BATCH]) for first in range(0, len(sequences), BATCH)]
    batches: list[list[InputSequence]] = [[]]
    held = 0
    for sequence in sequences:
        if batches[-1] and held + sequence.tokens > batch_tokens:
            batches.append([])
            held = 0
        batches[-1].append(sequence)
        held += sequence.tokens
    return batches


def padded_run(
    model: torch.nn.Module, sequences: Sequence[InputSequence], device: torch.device
) -> Callable[[], object]:
    """Run transformers as it is used: a padded batch and its mask. Mean pooling is counted, as it
    is for packed.
    """
    batches = []
    for first in range(0, len(sequences), BATCH):
        some = [
            torch.from_numpy(sequence.ids).long() for sequence in sequences[first : first + BATCH]
        ]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(one) for one in some], batch_first=True
        )
        batches.append((ids, mask))

    @torch.inference_mode()
    def run() -> object:
        pooled = []
        for ids, mask in batches:
            on_device, seen = ids.to(device), mask.to(device)
            hidden = model(input_ids=on_device, attention_mask=seen).last_hidden_state.float()
            pooled.append(((hidden * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)).cpu())
        return pooled

    return run


def sentence_transformers_run(
    directory: Path, texts: list[str], device: torch.device, dtype: torch.dtype, batch: int = BATCH
) -> Callable[[], object]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(
        str(directory), model_kwargs={"dtype": dtype}, max_seq_length=POSITIONS
    )
    width = transformer.get_embedding_dimension()
    model = SentenceTransformer(
        modules=[transformer, Pooling(width, pooling_mode="mean")], device=str(device)
    )
    return lambda: model.encode(texts, batch_size=batch, show_progress_bar=False)


def take_turns(
    engines: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Each engine once a round, after one round to warm up; who is first turns."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = timed(engines[name], device)
            if number:
                seconds[name].append(took)
    return seconds


def timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def flops(
    reference: torch.nn.Module, shape: FamilyShape, sequences: Sequence[InputSequence]
) -> float:
    """Two a weight of each linear layer and token, and the two products of attention, of one pass
    over all sequences.
    """
    weights = sum(
        module.weight.numel()
        for module in reference.modules()
        if isinstance(module, torch.nn.Linear)
    )
    size = shape.config.get("head_dim", shape.hidden // shape.heads)
    assert isinstance(size, int)
    width = shape.layers * shape.heads * size
    return sum(2.0 * weights * item.tokens + 4.0 * width * item.tokens**2 for item in sequences)


def peak(device: torch.device, dtype: str) -> float | None:
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


HEAD = (
    f"{'model':22} {'dtype':9} {'packed tok/s':>13} {'x padded':>9} {'x sorted':>9} {'x s-t':>7} "
    f"{'MFU':>6}"
)


def line(one: FamilySpeed) -> str:
    """Return a table line. x: speed of packed relative to transformers in arrival order, sorted by
    length, and to sentence-transformers.
    """
    ratios = [
        one.ratio(peer) for peer in ("transformers", "transformers sorted", "sentence-transformers")
    ]
    texts = [f"{value:.2f}" if value is not None else "-" for value in ratios]
    used = "-" if one.utilisation is None else f"{one.utilisation:.0%}"
    own = one.tokens_per_second("packed") or math.nan
    return (
        f"{one.shape:22} {one.dtype:9} {own:13,.0f} {texts[0]:>9} {texts[1]:>9} {texts[2]:>7} "
        f"{used:>6}"
    )


def dtypes(device: torch.device) -> list[str]:
    """Return the data types that the device multiplies natively."""
    if device.type == "cuda":
        return ["bfloat16"]
    return list(DTYPES) if has_bfloat16() else ["float32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(RECIPES)}; default all")
    parser.add_argument("--shapes", choices=("small", "published"), default="small")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        action="append",
        help="default: those that the device multiplies itself",
    )
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=0, help="of torch on a CPU; default all cores"
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=0,
        help="tokens of a packed batch; default batches of 32 texts for all",
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    shapes = small_shapes(wanted.families) if wanted.shapes == "small" else list(PUBLISHED)
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
    for number, shape in enumerate(shapes, 1):
        for dtype in wanted.dtype or dtypes(device):
            print(f"[{number}/{len(shapes)}] {shape.name} {dtype}", file=sys.stderr)
            results.append(
                measure(shape, dtype, device, wanted.texts, wanted.rounds, wanted.batch_tokens)
            )
            print(line(results[-1]), flush=True)
    peers = [(one, one.ratio("transformers")) for one in results]
    slow = [
        f"{one.shape} {one.dtype} {ratio:.2f}"
        for one, ratio in peers
        if ratio is not None and ratio < TARGET
    ]
    print(f"below {TARGET} x transformers' padded forward: {', '.join(slow) or 'none'}")
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()
