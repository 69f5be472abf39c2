"""Load checkpoint files into model weights. Loading fails with the tensor's name if a tensor of a
file is not accounted for.

Only safetensors are read, single or sharded, mapped into memory without a copy; the store converts
torch checkpoints beforehand. The registry calls this when it loads a model.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from libs.catalog.checkpoint.files import (
    NOT_OPENED,
    locate,
    need_config,
    shard_names,
    tensor_entries,
)
from libs.errors import ModelBroken
from libs.kernels.linear.packed import PackedLinear


@dataclass(frozen=True, slots=True)
class Maybe:
    """A rule for names that a checkpoint may omit, such as those of a decoder tied to the
    embeddings.
    """

    target: str


@dataclass(frozen=True, slots=True)
class InFile:
    """A rule for a large, optional table of which a head needs few rows: a view of the mapped file,
    as stored.
    """

    target: str


@dataclass(frozen=True, slots=True)
class AllowedExtra:
    """A rule for names that a checkpoint may hold although its config.json describes a model
    without them.
    """

    target: str


Rule = str | tuple[str, int] | AllowedExtra | None
"""The destination of a checkpoint's tensor: our name | (our name, slot of a fused weight) |
optional place | known and ignored.

A weight that some checkpoints fuse and others do not has rules of both kinds.
"""

HeadRule = str | Maybe | InFile | None
"""A rule of a head: the name in its state | the name, if present | the name of a view, if present |
known and ignored.

Rules are kept in literal tables `checkpoint stem -> rule`. A stem is a tensor's name without the
family's prefix and without its last part (`weight`, `bias`); `{}` stands for a layer's number. A
tensor without such a part is listed by its whole name, and so is the destination of such a rule.
"""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_OLD_ENDINGS = {
    "gamma": "weight",
    "beta": "bias",
}  # LayerNorm's in checkpoints converted from TensorFlow
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Entry:
    file: str
    mapping: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    update: LowRankUpdate | None = None


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An adapter's update of a weight of [outputs, inputs]: scale b a.

    Attributes:
        a: [rank, inputs]
        b: [outputs, rank]
        magnitude: DoRA's length of each row of the sum, [outputs]; None to keep the sum.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


class TensorFile:
    """The tensors of a checkpoint directory by name; nothing is read until `read`."""

    def __init__(self, source: str, entries: Mapping[str, _Entry]) -> None:
        self.source = source
        self._entries = entries

    @staticmethod
    def open(root: Path, folder: str = "") -> TensorFile:
        """Open the safetensors in a folder of a checkpoint.

        Raises ModelBroken, naming the file, if none exist, and for pickles, damaged files and files
        outside `root`.
        """
        directory = root / folder
        if (directory / SINGLE).is_file():
            return TensorFile(SINGLE, _read_header(root, str(Path(folder) / SINGLE)))
        if (directory / INDEX).is_file():
            return TensorFile(INDEX, _read_shards(root, folder))
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
        )
        if pickles:
            raise ModelBroken(f"{pickles[0]}: {NOT_OPENED}")
        raise ModelBroken(f"{SINGLE}: no such file, nor {INDEX}")

    @staticmethod
    def open_file(root: Path, name: str) -> TensorFile:
        """Open one safetensors file of any name, given as a path from the checkpoint's root."""
        return TensorFile(name, _read_header(root, name))

    def split(self, prefix: str) -> tuple[TensorFile, TensorFile]:
        """Return the tensors that begin with a prefix, with the prefix removed, and all others."""
        own, rest = self.partition(lambda name: name.startswith(prefix))
        return own.renamed(lambda name: name.removeprefix(prefix)), rest

    def partition(self, is_wanted: Callable[[str], bool]) -> tuple[TensorFile, TensorFile]:
        """Return the tensors with wanted names, and all others."""
        own = {name: entry for name, entry in self._entries.items() if is_wanted(name)}
        rest = {name: entry for name, entry in self._entries.items() if name not in own}
        return TensorFile(self.source, own), TensorFile(self.source, rest)

    def renamed(self, name: Callable[[str], str]) -> TensorFile:
        """Return the same tensors, renamed by `name`."""
        return TensorFile(
            self.source, {name(stored): entry for stored, entry in self._entries.items()}
        )

    def with_zeros(self, shapes: Mapping[str, tuple[int, ...]]) -> TensorFile:
        """Add float32 tensors of zeros by name. Raises ModelBroken for a name that exists
        already.
        """
        for name in shapes:
            if name in self._entries:
                raise ModelBroken(
                    f"{self.tensor_file(name)}: tensor {name!r} has no place in the model that "
                    "config.json describes"
                )
        zeros = {
            name: _Entry(
                self.source, mmap.mmap(-1, max(1, prod(shape) * 4)), torch.float32, shape, 0
            )
            for name, shape in shapes.items()
        }
        return TensorFile(self.source, {**self._entries, **zeros})

    def joined(self, first: str, second: str) -> TensorFile:
        """Append the rows of `second` to those of `first`, under its name: a copy in memory.

        Raises ModelBroken if one is missing, or if their rows differ in size or type.
        """
        for name in (first, second):
            if name not in self._entries:
                raise ModelBroken(f"{self.source}: tensor {name!r} is missing")
        one, other = self.read(first), self.read(second)
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            place = f"{self.tensor_file(second)}: tensor {second!r}"
            raise ModelBroken(
                f"{place} is {_describe(other)}; {first!r}must match it:  {_describe(one)}"
            )
        rows = torch.cat((one, other))
        mapping = mmap.mmap(-1, max(1, rows.nbytes))
        if rows.numel():
            torch.frombuffer(mapping, dtype=rows.dtype, count=rows.numel()).copy_(rows.flatten())
        entries = {name: entry for name, entry in self._entries.items() if name != second}
        entries[first] = _Entry(
            self._entries[first].file, mapping, rows.dtype, tuple(rows.shape), 0
        )
        return TensorFile(self.source, entries)

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor_file(self, name: str) -> str:
        """Return the file that holds a tensor, for error messages."""
        return self._entries[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def merged(self, updates: Mapping[str, LowRankUpdate]) -> TensorFile:
        """Add updates to some tensors, in float32. Raises ModelBroken for a tensor that is missing
        or misshapen.
        """
        entries = dict(self._entries)
        for name, update in updates.items():
            entry, wanted = entries.get(name), (len(update.b), update.a.shape[1])
            if entry is None or entry.shape != wanted:
                found = (
                    "it is missing" if entry is None else f"it has the shape {list(entry.shape)}"
                )
                raise ModelBroken(
                    f"{self.source}: an adapter updates the tensor {name!r} of shape "
                    f"{list(wanted)}: {found}"
                )
            entries[name] = _Entry(
                entry.file, entry.mapping, entry.dtype, entry.shape, entry.begin, update
            )
        return TensorFile(self.source, entries)

    def read(self, name: str) -> Tensor:
        """Return the tensor as a read-only view of the memory-mapped file, read on first use; a
        float32 copy if it has an update.
        """
        entry = self._entries[name]
        count = prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        stored = torch.frombuffer(
            entry.mapping, dtype=entry.dtype, count=count, offset=entry.begin
        ).view(entry.shape)
        if entry.update is None:
            return stored
        update = entry.update
        merged = stored.float() + update.scale * (update.b.float() @ update.a.float())
        if update.magnitude is None:
            return merged
        scale: Tensor = update.magnitude.float() / torch.linalg.vector_norm(merged, dim=1)
        return merged * scale[:, None]


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _read_shards(root: Path, folder: str) -> dict[str, _Entry]:
    index = need_config(root, str(Path(folder) / INDEX))
    entries: dict[str, _Entry] = {}
    for file in sorted(shard_names(index)):
        found = _read_header(root, str(Path(folder) / file))
        twice = next((name for name in found if name in entries), None)
        if twice is not None:
            raise ModelBroken(
                f"{INDEX}: tensor {twice!r} is in {entries[twice].file!r} and in {file!r}"
            )
        entries |= found
    for name, place in index.part("weight_map").values.items():
        if name not in entries or Path(entries[name].file).name != place:
            raise ModelBroken(f"{INDEX}: tensor {name!r} is not in {place!r}")
    return entries


def _read_header(root: Path, name: str) -> dict[str, _Entry]:
    """Map the tensors of a file into memory."""
    found = tensor_entries(root, name)
    path = locate(root, name)
    if path is None:
        raise ModelBroken(f"{name}: missing from {root}")
    try:
        with path.open("rb") as file:
            # The mapping is private and writable because torch warns of read-only buffers. Nothing
            # is written, so pages stay shared with the page cache.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelBroken(f"{name}: cannot be read: {error}") from error
    entries: dict[str, _Entry] = {}
    for tensor, entry in found.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelBroken(
                f"{name}: tensor {tensor!r} has type {entry.dtype}, which is not supported"
            )
        entries[tensor] = _Entry(name, mapping, dtype, entry.shape, entry.begin)
    return entries


def load(
    model: nn.Module,
    tensors: TensorFile,
    *,
    table: Mapping[str, Rule],
    prefixes: Sequence[str],
    head_table: Mapping[str, HeadRule],
    dtype: torch.dtype,
    device: torch.device,
    as_stored: bool = False,
) -> dict[str, Tensor]:
    """Fill a model that was built on the meta device, and return the head's tensors in float32
    under the names of its table.

    Tensors are cast and moved only where needed. A head's rule takes precedence over the family's.

    Args:
        prefixes: Prefixes that the family's names may have. The one on the token embeddings, or
            else on the last norm, decides.
        as_stored: Do not cast the weights of linear layers that will be quantised, so they take no
            memory in addition to the mapped file.

    Raises ModelBroken with file and tensor.
    """
    prefix = _prefix(tensors, table, prefixes)
    left = {_modern(name.removeprefix(prefix)): name for name in tensors.names()}
    if len(left) < len(tensors.names()):
        raise ModelBroken(
            f"{tensors.source}: duplicate tensors, with and without the prefix {prefix!r}"
        )
    _fill(model, tensors, left, _sources(table), prefix, dtype, device, as_stored)
    state = head_state(tensors, left, head_table, device)
    for name, stored in left.items():
        found = find(name, table)
        if found is None:
            raise ModelBroken(
                f"{tensors.tensor_file(stored)}: tensor {stored!r} is unknown to this family of "
                "models"
            )
        if not isinstance(table[found.stem], AllowedExtra | None):
            raise ModelBroken(
                f"{tensors.tensor_file(stored)}: tensor {stored!r} has no place in the model that "
                "config.json describes"
            )
    return state


def stored_tensor(
    tensors: TensorFile, table: Mapping[str, Rule], prefixes: Sequence[str], ours: str, ending: str
) -> Tensor | None:
    """Return the tensor `ours.ending` in float32, joined from its stored parts; None if the file
    has none of it.
    """
    prefix = _prefix(tensors, table, prefixes)
    pattern, number = _numbered(ours)
    names = set(tensors.names())
    for form in _sources(table).get(pattern, []):
        stored = [f"{prefix}{stem.format(number)}.{ending}" for stem in form]
        if names.issuperset(stored):
            return torch.cat([tensors.read(name).float() for name in stored])
    return None


def _prefix(tensors: TensorFile, table: Mapping[str, Rule], prefixes: Sequence[str]) -> str:
    # Image encoders have no token embeddings.
    anchor = next(
        stem for place in ("embed.token", "norm") for stem, rule in table.items() if rule == place
    )
    names = set(tensors.names())
    for prefix in prefixes:
        if f"{prefix}{anchor}.weight" in names:
            return prefix
    raise ModelBroken(
        f"{tensors.source}: tensor '{anchor}.weight' is missing (prefixes tried: "
        f"{', '.join(map(repr, prefixes))})"
    )


def _fill(
    model: nn.Module,
    tensors: TensorFile,
    left: dict[str, str],
    sources: Mapping[str, Sequence[Sequence[str]]],
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    as_stored: bool,
) -> None:
    """Assign tensors to every parameter, removing their names from `left`."""
    state: dict[str, Tensor] = {}
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)
    }
    slots = {name: module.slots for name, module in linears.items()}
    waiting = {
        f"{name}.weight" for name, module in linears.items() if as_stored and not module.exact
    }
    for ours, parameter in model.state_dict().items():
        stem, _, ending = ours.rpartition(".")
        pattern, number = _numbered(stem)
        forms = sources.get(ours) or [
            [f"{source.format(number)}.{ending}" for source in form] for form in sources[pattern]
        ]
        wanted = next((form for form in forms if form[0] in left), forms[0])
        missing = next((name for name in wanted if name not in left), None)
        if missing is not None:
            raise ModelBroken(f"{tensors.source}: tensor {prefix + missing!r} is missing")
        stored = [left.pop(name) for name in wanted]
        _check_shapes(
            tensors, stored, tuple(parameter.shape), slots.get(stem), whole_name=ours in sources
        )
        own = None if ours in waiting else dtype
        parts = [tensors.read(name).to(device=device, dtype=own) for name in stored]
        state[ours] = parts[0].view(parameter.shape) if len(parts) == 1 else torch.cat(parts)
    model.load_state_dict(state, strict=True, assign=True)


def _check_shapes(
    tensors: TensorFile,
    stored: Sequence[str],
    whole: tuple[int, ...],
    slots: tuple[int, ...] | None,
    *,
    whole_name: bool,
) -> None:
    """Raise ModelBroken for a wrong shape. Parts of a fused weight are slices of its first
    dimension, each of its slot's size.

    `whole_name`: the tensor has a rule for its whole name, such as a class token, to which
    transformers adds leading dimensions of 1.
    """
    sizes = whole[:1] if slots is None or len(stored) == 1 else slots
    for name, size in zip(stored, sizes, strict=True):
        wanted = (size, *whole[1:])
        shape = tensors.shape(name)
        extra = len(shape) - len(wanted)
        if whole_name and extra > 0 and set(shape[:extra]) == {1}:
            shape = shape[extra:]
        if shape != wanted:
            place = f"{tensors.tensor_file(name)}: tensor {name!r}"
            raise ModelBroken(
                f"{place} has shape {list(shape)}; config.json asks for {list(wanted)}"
            )


def head_state(
    tensors: TensorFile, left: dict[str, str], table: Mapping[str, HeadRule], device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of the head's table, and remove them from `left`, which maps names without
    a prefix to names in the files.
    """
    state: dict[str, Tensor] = {}
    filled: set[str] = set()
    for name in list(left):
        found = find(name, table)
        if found is None:
            continue
        filled.add(found.stem)
        stored = left.pop(name)
        rule = table[found.stem]
        if rule is not None:
            target = rule if isinstance(rule, str) else rule.target
            ours = ".".join(filter(None, (target.format(found.number), found.ending)))
            tensor = tensors.read(stored)
            state[ours] = (
                tensor
                if isinstance(rule, InFile)
                else tensor.to(device=device, dtype=torch.float32)
            )
    for stem, rule in table.items():
        if isinstance(rule, str) and stem not in filled:
            raise ModelBroken(
                f"{tensors.source}: tensor {stem!r} is missing, which the model's head needs"
            )
    return state


@dataclass(frozen=True, slots=True)
class Found:
    """A table's match for a name: the whole name, or its stem, ending and layer number."""

    stem: str
    ending: str = ""
    number: str = ""


def find(name: str, table: Mapping[str, object]) -> Found | None:
    if name in table:
        return Found(name)
    stem, _, ending = name.rpartition(".")
    if stem in table:
        return Found(stem, ending)
    pattern, number = _numbered(stem)
    return Found(pattern, ending, number) if pattern in table else None


def _numbered(stem: str) -> tuple[str, str]:
    """Replace the layer number: `layers.3.attn.out` -> (`layers.{}.attn.out`, `3`)."""
    number = _NUMBER.search(stem)
    if number is None:
        return stem, ""
    return f"{stem[: number.start(1)]}{{}}{stem[number.end(1) :]}", number[1]


def _sources(table: Mapping[str, Rule]) -> dict[str, list[list[str]]]:
    """Map each of our stems to its stored forms: one stem of the checkpoint, or several in the
    order of their slots.
    """
    whole: dict[str, list[list[str]]] = {}
    parts: dict[str, dict[int, str]] = {}
    for stem, rule in table.items():
        if isinstance(rule, tuple):
            parts.setdefault(rule[0], {})[rule[1]] = stem
        elif rule is not None:
            whole.setdefault(rule.target if isinstance(rule, AllowedExtra) else rule, []).append(
                [stem]
            )
    slots = {ours: [[filled[slot] for slot in sorted(filled)]] for ours, filled in parts.items()}
    return {ours: whole.get(ours, []) + slots.get(ours, []) for ours in whole | slots}


def _modern(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{_OLD_ENDINGS[ending]}" if ending in _OLD_ENDINGS else name
