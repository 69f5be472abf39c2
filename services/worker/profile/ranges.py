"""Names the parts of a model's forward pass for torch's profiler, only while profiling. Model code
is independent of it.

Modules call each other's methods directly, so hooks of `nn.Module` would not run. Instead, the
methods that do a part's work are wrapped in profiler ranges on one model's module instances, and
unwrapped at the end. Native kernels, which the profiler does not see, are wrapped too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from torch import nn
from torch.profiler import record_function

from libs.kernels import native
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.native.layer import NativeLayer
from libs.models import PackedModel
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import Attention, Layer, Norm
from libs.models.text.heads.linear import HeadLinear
from services.worker.profile.trace import NATIVE, PREFIX, Part

P = ParamSpec("P")
R = TypeVar("R")

# Time within nested ranges counts for the innermost one: a projection within `project` is GEMM, and
# a norm within an embedding is norm.
_METHODS: Final[tuple[tuple[type[nn.Module], Part, tuple[str, ...]], ...]] = (
    (PackedLinear, "GEMM", ("forward", "add")),
    (HeadLinear, "GEMM", ("forward",)),
    (Attention, "attention", ("project", "mix")),
    (Norm, "norm", ("forward", "add")),
    (nn.LayerNorm, "norm", ("forward",)),
    (Layer, "layer", ("fused",)),
    (TokenEmbedding, "embedding", ("forward",)),
)


@contextmanager
def named_parts(model: PackedModel) -> Iterator[None]:
    """Run the model's modules in profiler ranges named `shoal.<part>` within this context."""
    wrapped: list[tuple[nn.Module, str]] = []
    heads = [head for head in model.heads.values() if isinstance(head, nn.Module)]
    kernels = {name: getattr(native, name) for name in native.KERNELS}
    at_once = NativeLayer.forward
    try:
        for name, kernel in kernels.items():
            setattr(
                native,
                name,
                _in_range(NATIVE + ("attention" if name == "attend" else name), kernel),
            )
        NativeLayer.forward = _in_range(NATIVE + "layer", at_once)  # type: ignore[method-assign]
        for module in {each for root in model.modules() for each in root.modules()}:
            for part, method in _profiled_methods(module, module in heads):
                setattr(module, method, _in_range(PREFIX + part, getattr(module, method)))
                wrapped.append((module, method))
        yield
    finally:
        NativeLayer.forward = at_once  # type: ignore[method-assign]
        for name, kernel in kernels.items():
            setattr(native, name, kernel)
        for module, method in wrapped:
            delattr(module, method)


def _profiled_methods(module: nn.Module, is_head: bool) -> Iterator[tuple[Part, str]]:
    if is_head:
        yield "pooling", "forward"
    for kind, part, methods in _METHODS:
        if isinstance(module, kind):
            yield from ((part, method) for method in methods)


def _in_range(name: str, method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with record_function(name):
            return method(*args, **kwargs)

    return call
