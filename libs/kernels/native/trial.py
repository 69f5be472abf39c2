"""Test the library once per process against torch's operators: attention, every row function, and
whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import BatchLayout, cumulated
from libs.kernels.native import paged, panels, resize, rows
from libs.kernels.native.attention import attend_with
from libs.kernels.native.layer import LayerParts, Linear, NativeLayer, NormWeights
from libs.kernels.native.library import Native

_BOUNDS: Final = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def wrong(loaded: Native) -> str:
    """Return the name of a deviating kernel; empty if none deviates."""
    trials: dict[str, Callable[[Native, torch.dtype, float], bool]] = {
        "softmax": _attends,
        "norms": _norms,
        "gates": _gates,
        "rotations": _rotates,
        "sums": _reduces,
        "embeddings": _embeds,
        "pages": _pages,
        "layers": _layers,
        "images": _images,
    }
    for what, trial in trials.items():
        if not all(trial(loaded, dtype, bound) for dtype, bound in _BOUNDS.items()):
            return what
    return ""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _is_near(got: Tensor | None, wanted: Tensor, bound: float) -> bool:
    return got is not None and torch.allclose(got.float(), wanted, rtol=bound, atol=bound)


def _attends(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    """Test a batch with grouped heads, a prefix, and tails of all vectors."""
    queries, keys = (1, 5, 19, 70), (1, 5, 19, 75)
    fused, bias, layout = (
        _random(sum(keys), 4 + 2 + 2, 20),
        _random(4, 2 * 75 + 1),
        BatchLayout.from_lengths(queries, keys),
    )
    q, k, v = fused.to(dtype).split_with_sizes((4, 2, 2), dim=1)
    q = q[: sum(queries)]
    for causal, window, added in ((False, None, None), (True, 30, bias)):
        got = attend_with(loaded, q, k, v, layout, 0.25, causal, window, added)
        if not _is_near(
            got,
            _plain(q.float(), k.float(), v.float(), queries, keys, causal, window, added),
            bound,
        ):
            return False
    return True


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> Tensor:
    parts = []
    ends = (torch.tensor(lengths[:-1]).cumsum(0) for lengths in (queries, keys, keys))
    for own, theirs, values in zip(
        *(t.tensor_split(at) for t, at in zip((q, k, v), ends, strict=True)), strict=True
    ):
        theirs, values = (
            t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (theirs, values)
        )
        scores = torch.einsum("ihd,jhd->hij", own, theirs) * 0.25
        distance = (
            torch.arange(len(theirs)) - torch.arange(len(own))[:, None] - (len(theirs) - len(own))
        )
        if bias is not None:
            scores = scores + bias[:, distance + bias.shape[1] // 2]
        unseen = (distance > 0) & causal
        if window is not None:
            unseen |= distance.abs() > window
        parts.append(
            torch.einsum(
                "hij,jhd->ihd", scores.masked_fill(unseen, float("-inf")).softmax(-1), values
            )
        )
    return torch.cat(parts)


def _norms(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    x, weight, bias = (
        _random(3, 4, 45).to(dtype)[:, 1:],
        _random(45).to(dtype),
        _random(45).to(dtype),
    )
    layer = rows.norm(x, weight, bias, 1e-5, library=loaded)
    rms = rows.norm(x, weight, None, 1e-5, rms=True, shift=1.0, library=loaded)
    own = x.float()
    return _is_near(
        layer, F.layer_norm(own, (45,), weight.float(), bias.float(), 1e-5), bound
    ) and _is_near(rms, F.rms_norm(own, (45,), weight.float() + 1, 1e-5), bound)


def _gates(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    x = 2 * _random(3, 90).to(dtype)
    first, second = x.float().chunk(2, dim=1)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "quick_gelu": lambda t: t * (1.702 * t).sigmoid(),
    }
    return all(
        _is_near(
            rows.gate_up(x, name, gate_last=False, library=loaded), function(first) * second, bound
        )
        and _is_near(
            rows.gate_up(x, name, gate_last=True, library=loaded), function(second) * first, bound
        )
        for name, function in functions.items()
    )


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[1]
    low, high, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _rotates(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    x, cos, sin = _random(3, 5, 90).to(dtype), _random(3, 37), _random(1, 3, 37)[0]
    wanted = _turned(x[:, :3].float(), cos, sin)
    return _is_near(rows.rotate(x[:, :3], cos, sin, library=loaded), wanted, bound)


def _reduces(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    x, lengths = _random(76, 45).to(dtype), (1, 5, 70)
    parts = x.float().split_with_sizes(lengths)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda t: t.sum(0),
        "mean": lambda t: t.mean(0),
        "max": lambda t: t.amax(0),
    }
    return all(
        _is_near(
            rows.reduce(x, how, cumulated(lengths, "cpu"), library=loaded),
            torch.stack([each(part) for part in parts]),
            bound,
        )
        for how, each in functions.items()
    )


def _embeds(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    table, places = _random(9, 45).to(dtype), _random(4, 45).to(dtype)
    numbers, positions = (
        torch.tensor((8, 0, 3), dtype=torch.int32),
        torch.tensor((0, 3, 1), dtype=torch.int32),
    )
    wanted = table.float()[numbers.long()] + places.float()[positions.long()]
    return _is_near(rows.embed(table, numbers, places, positions, library=loaded), wanted, bound)


def _pages(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    """Test grouped heads, a head size that does not fill a vector, the last queries of sequences
    across pages, and a window.
    """
    queries, keys, numbers = (
        (1, 3),
        (7, 67),
        torch.tensor(((3, 0, 0), (2, 0, 1)), dtype=torch.int32),
    )
    k, v = (_random(sum(keys), 2, size).to(dtype)[..., :20] for size in (20, 21))
    q = _random(sum(queries), 6, 20).to(dtype)
    memory = torch.zeros(4, 2, 20, 32, dtype=dtype), torch.zeros(4, 2, 32, 20, dtype=dtype)
    layout = BatchLayout.from_lengths(queries, keys)
    got = paged.attend(
        q, k, v, memory, layout, layout.cu_keys, numbers, 0.25, True, 40, None, loaded
    )
    return _is_near(
        got, _plain(q.float(), k.float(), v.float(), queries, keys, True, 40, None), bound
    )


def _layers(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    """Test BERT's form, and one with every feature of other models. True also if weights are not
    packed as the kernels need.
    """
    if not loaded.has_layers(dtype):
        return True
    layout = BatchLayout.from_lengths((3, 17), (3, 17))
    chosen = BatchLayout.from_lengths((1, 1), (3, 17)), torch.tensor((2, 19), dtype=torch.int32)
    x = _random(20, 48).to(dtype)
    rotation = _random(20, 6), _random(1, 20, 6)[0]
    for post in (True, False):
        try:
            weights, parts = _layer(dtype, post=post)
        except (AttributeError, NotImplementedError, RuntimeError):
            return True
        if not NativeLayer.takes(parts, dtype, loaded):
            return True
        layer, turn = NativeLayer(parts, dtype), None if post else rotation
        wanted = _plain_layer(x.float(), weights, parts, (3, 17), turn)
        got = layer.forward(x, layout, None, turn, None, loaded)
        few = layer.forward(x, chosen[0], chosen[1], turn, None, loaded)
        # In bfloat16, errors of one step grow in the next ones.
        if not (
            _is_near(got, wanted, 4 * bound) and _is_near(few, wanted[chosen[1].long()], 4 * bound)
        ):
            return False
    return True


def _images(loaded: Native, dtype: torch.dtype, bound: float) -> bool:
    """Test bytes, whatever the type: torch uses int16 weights, so results may differ by one."""
    x = torch.arange(21 * 37 * 3).mul(79).remainder(256).to(torch.uint8).view(21, 37, 3)
    got = resize.resized(x.numpy(), (9, 50), resize.BICUBIC, loaded)
    wanted = F.interpolate(
        x.permute(2, 0, 1)[None].float(), (9, 50), mode="bicubic", antialias=True
    )[0].permute(1, 2, 0)
    return got is not None and _is_near(torch.from_numpy(got), wanted.clamp(0, 255), 2.0)


def _layer(dtype: torch.dtype, *, post: bool) -> tuple[list[Tensor], LayerParts]:
    """Return a layer of 4 heads of 16 with random weights, with its plain linear weights."""
    kv_heads, up = (4, 80) if post else (2, 128)
    shapes = (16 * (4 + 2 * kv_heads), 48), (48, 64), (up, 48), (48, up if post else 64)
    weights = [(_random(*shape) * 0.2).to(dtype) for shape in shapes]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 2048) for weight in weights]
    biases = [_random(shape[0]).to(dtype) if post else None for shape in shapes]
    qkv, out, inner, down = (
        Linear(panels.address(each, weight), bias, weight.shape[1], weight.shape[0])
        for each, weight, bias in zip(packed, weights, biases, strict=True)
    )
    norms = [
        NormWeights(_random(1, size)[0].to(dtype), _random(2, size)[1].to(dtype) if post else None)
        for size in (48, 48, 16, 16)
    ]
    parts = LayerParts(
        qkv, out, inner, down, attention_norm=norms[0], ffn_norm=norms[1],
        q_norm=None if post else norms[2],
        k_norm=None if post else norms[3], heads=4, kv_heads=kv_heads, dim=16,
        scale=0.25, causal=not post,
        window=None if post else 9, post=post, rms=not post, eps=1e-5,
        shift=0.0 if post else 1.0, gated=not post,
        gate_last=False, activation="gelu" if post else "silu",
    )  # fmt: skip
    # The packed weights live as long as the plain ones, which the caller keeps.
    return [*weights, *packed], parts


def _plain_layer(
    x: Tensor,
    weights: list[Tensor],
    parts: LayerParts,
    lengths: tuple[int, ...],
    rotation: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the layer in float32."""

    def linear(x: Tensor, number: int, one: Linear) -> Tensor:
        return F.linear(x, weights[number].float(), None if one.bias is None else one.bias.float())

    def norm(x: Tensor, one: NormWeights | None) -> Tensor:
        if one is None:
            return x
        if parts.rms:
            return F.rms_norm(x, x.shape[-1:], one.weight.float() + parts.shift, parts.eps)
        return F.layer_norm(
            x,
            x.shape[-1:],
            one.weight.float(),
            None if one.bias is None else one.bias.float(),
            parts.eps,
        )

    fused = linear(x if parts.post else norm(x, parts.attention_norm), 0, parts.qkv).view(
        len(x), -1, parts.dim
    )
    q, k, v = fused.split_with_sizes((parts.heads, parts.kv_heads, parts.kv_heads), dim=1)
    if parts.q_norm is not None:
        q, k = norm(q, parts.q_norm), norm(k, parts.k_norm)
    if rotation is not None:
        q, k = _turned(q, *rotation), _turned(k, *rotation)
    mixed = _plain(q, k, v, lengths, lengths, parts.causal, parts.window, None).flatten(1)
    total = linear(mixed, 1, parts.out) + x
    normed = norm(total, parts.attention_norm if parts.post else parts.ffn_norm)
    inner = linear(normed, 2, parts.up)
    if parts.gated:
        first, second = inner.chunk(2, dim=1)
        inner = F.silu(first) * second
    else:
        inner = F.gelu(inner)
    total = linear(inner, 3, parts.down) + (normed if parts.post else total)
    return norm(total, parts.ffn_norm) if parts.post else total
