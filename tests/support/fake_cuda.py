"""A CUDA device simulated on the CPU: its tensors report the device `cuda:0` and hold their values
in host memory, so the code's CUDA path computes real results without a GPU.

What fails on a GPU fails here: an operator on tensors of two devices, a Triton kernel that receives
host memory, and flash attention with arguments that it does not take. Operators for which the host
waits for the device are counted. Triton kernels run in Triton's interpreter.

As a plugin of pytest (`-p tests.support.fake_cuda`) it moves every model that a test loads to this
device: the tests that compare models with their references then do so on the CUDA path.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE: Final = torch.device("cuda", 0)
MEMORY_BYTES: Final = 64 << 20

_TRANSFERS: Final = ("copy_", "_to_copy", "to")
_INDEXING: Final = ("index", "index_put", "index_put_", "_index_put_impl_")
_HOST_LENGTHS: Final = ("lstm", "gru", "_pack_padded_sequence", "_pad_packed_sequence")
"""Operators that take the lengths of sequences from host memory."""

_READS: Final = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
    "_unique2",
)  # fmt: skip
"""Operators with a result or a size that the host reads."""

_FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)


class FakeCudaTensor(torch.Tensor):
    """A tensor that reports the device. `host` has its values.

    C++ sees a meta tensor: a build for CPUs has no guard for a CUDA device.
    """

    host: Tensor
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[FakeCudaTensor], host: Tensor) -> FakeCudaTensor:
        # Always a tensor of the same kind: a view of a weight is not made in inference mode.
        with torch.inference_mode(False):
            made: FakeCudaTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device("meta"),
                requires_grad=False,
            )
        made.host = host
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def get_device(self) -> int:
        return DEVICE.index

    def __setitem__(self, key: Any, value: Any) -> None:
        # C++ would make a number a meta tensor, without its value.
        with _disable_current_modes():
            self.host[tree_map(_on_host, key)] = _on_host(value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return f"FakeCudaTensor({self.host})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} is called outside of the fake CUDA device")


class FakeCuda(TorchDispatchMode):
    """The device, on this thread, within this context.

    Attributes:
        waits: How often the host waited for the device, by operator.
        launches: Triton's kernels with their constants, in the order of launches.
    """

    def __init__(self) -> None:
        super().__init__()
        # torch initialises no CUDA device while a mode has this key.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.waits: Counter[str] = Counter()
        self.launches: list[tuple[str, dict[str, Any]]] = []
        self._lifts: list[bool] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> FakeCuda:
        # As torch's FakeTensorMode: `torch.tensor(..., device="cuda")` is made on the CPU and then
        # copied.
        self._lifts.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        leaves, spec = tree_flatten((args, kwargs or {}))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_device = {id(leaf.host): leaf for leaf in given if isinstance(leaf, FakeCudaTensor)}
        asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if on_device:
            self._check(name, given)
        self._count(name, given, asked, leaves)
        host_args, host_kwargs = tree_unflatten([_on_host(leaf) for leaf in leaves], spec)
        if name in ("pin_memory", "_pin_memory"):
            return host_args[0].clone()
        if host_kwargs.get("pin_memory"):
            host_kwargs["pin_memory"] = False
        if name == "_addmm_activation":  # on a CPU its GELU is the exact one
            result = F.gelu(torch.addmm(*host_args), approximate="tanh")
        else:
            result = func(*host_args, **host_kwargs)
        is_on_device = bool(on_device) if asked is None else asked.type == "cuda"
        plain = {id(leaf) for leaf in given if not isinstance(leaf, FakeCudaTensor)}

        def placed(out: Any) -> Any:
            if not isinstance(out, Tensor):
                return out
            if id(out) in on_device:  # computed in place, or not copied
                return on_device[id(out)] if asked is None or is_on_device else out.clone()
            if id(out) in plain:
                return FakeCudaTensor(out.clone()) if asked is not None and is_on_device else out
            return FakeCudaTensor(out) if is_on_device else out

        return tree_map(placed, result)

    @staticmethod
    def _check(name: str, given: Sequence[Tensor]) -> None:
        """Refuse tensors of two devices where torch does."""
        others = [one for one in given if not isinstance(one, FakeCudaTensor) and one.dim() > 0]
        is_exempt = name in (*_TRANSFERS, *_HOST_LENGTHS) or (
            name in _INDEXING and isinstance(given[0], FakeCudaTensor)
        )
        if others and not is_exempt:
            raise RuntimeError(
                f"aten::{name} expects all tensors to be on one device, and found cuda:0 and cpu"
            )

    def _count(
        self,
        name: str,
        given: Sequence[Tensor],
        asked: torch.device | None,
        leaves: Sequence[object],
    ) -> None:
        kinds = {isinstance(one, FakeCudaTensor) for one in given}
        if asked is not None and given and name in _TRANSFERS:
            kinds.add(asked.type == "cuda")
        crosses = len(kinds) == 2
        if name in _TRANSFERS:
            if crosses and not any(leaf is True for leaf in leaves):  # non_blocking
                self.waits[name] += 1
        elif name in _INDEXING:
            self.waits[name] += crosses or (
                True in kinds and any(one.dtype is torch.bool for one in given[1:])
            )
        elif name in _READS:
            self.waits[name] += True in kinds


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, FakeCudaTensor):
        return leaf.host
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return leaf


class _Kernel:
    """A Triton kernel that requires its tensors to be on the device."""

    def __init__(self, kernel: Any, device: FakeCuda, *, computes: bool) -> None:
        self._kernel, self._device, self._computes = kernel, device, computes

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            for value in (*args, *named.values()):
                if isinstance(value, Tensor) and not isinstance(value, FakeCudaTensor):
                    raise RuntimeError(f"{self._kernel.__name__} is launched with host memory")
            self._device.launches.append((self._kernel.__name__, named))
            if self._computes:
                with _disable_current_modes():
                    self._kernel[grid](
                        *map(_on_host, args), **{name: _on_host(one) for name, one in named.items()}
                    )

        return launch


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    sides: tuple[int, int],
) -> Tensor:
    """Check the arguments of flash attention as its kernel does, and compute it in float32."""
    assert q.dtype in _FLASH_DTYPES
    assert q.dtype == k.dtype == v.dtype
    assert all(isinstance(one, FakeCudaTensor) for one in (q, k, v, cu_q, cu_k))
    assert all(one.stride(-1) == 1 for one in (q, k, v)), "the last dimension is not contiguous"
    assert cu_q.dtype is cu_k.dtype is torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    assert q.shape[1] % k.shape[1] == 0
    with _disable_current_modes():
        q_ends, k_ends = _on_host(cu_q).tolist(), _on_host(cu_k).tolist()
        host_q, host_k, host_v = (_on_host(one).float() for one in (q, k, v))
        out = torch.zeros_like(_on_host(q), memory_format=torch.contiguous_format)
        for first_q, last_q, first_k, last_k in zip(
            q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False
        ):
            assert last_q - first_q <= max_q
            assert last_k - first_k <= max_k
            own, keys = last_q - first_q, last_k - first_k
            place = torch.arange(own)[:, None] + keys - own
            distance = torch.arange(keys)[None] - place
            seen = torch.ones(own, keys, dtype=torch.bool)
            seen &= (distance >= -sides[0]) if sides[0] >= 0 else True
            seen &= (distance <= sides[1]) if sides[1] >= 0 else True
            repeats = q.shape[1] // k.shape[1]
            own_keys, own_values = (
                one[first_k:last_k].transpose(0, 1).repeat_interleave(repeats, 0)
                for one in (host_k, host_v)
            )
            mixed = F.scaled_dot_product_attention(
                host_q[first_q:last_q].transpose(0, 1),
                own_keys,
                own_values,
                attn_mask=seen,
                scale=scale,
            )
            out[first_q:last_q] = mixed.transpose(0, 1).to(q.dtype)
    return FakeCudaTensor(out)


class FakeCudaSubmission:
    """A `Submission` that is over."""

    seconds = idle_seconds = 0.0

    def __init__(self, copies: tuple[Tensor, ...]) -> None:
        self.copies = copies

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...


class FakeCudaQueue:
    """A `DeviceQueue`. `waits`: how often the host waited between `begin` and `submit`."""

    def __init__(self, device: FakeCuda) -> None:
        self.waits: Counter[str] = Counter()
        self._device, self._before = device, Counter[str]()

    def begin(self) -> None:
        self._before = self._device.waits.copy()

    def submit(self, tensors: Sequence[Tensor]) -> FakeCudaSubmission:
        self.waits += self._device.waits - self._before
        assert all(isinstance(tensor, FakeCudaTensor) for tensor in tensors)
        return FakeCudaSubmission(tuple(_on_host(tensor).clone() for tensor in tensors))

    def read(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(tensor.cpu() for tensor in function())


class FakeArena:
    """Keeps the tensors where they are: `tests/models/test_tiers.py` has the real one."""

    bytes = host_bytes = 0

    def __init__(self, roots: object, device: torch.device) -> None: ...

    def stow(self) -> None: ...

    def bring(self) -> None: ...

    def wait(self) -> None: ...

    def drop_host_copy(self) -> None: ...


@contextmanager
def fake_cuda(*, computes: bool = True) -> Iterator[FakeCuda]:
    """Within this context, on this thread, the device exists.

    `computes`: Triton kernels run in the interpreter, which has no bfloat16; without it they leave
    what memory had.
    """
    from libs.kernels.attention import varlen
    from libs.kernels.linear import grouped
    from libs.models.generation import model as generation
    from libs.models.runtime import packed_model
    from libs.models.runtime.loaded import tiers
    from tests.support.triton_launches import _TRITON_MODULES, launched_kernels

    device = FakeCuda()
    with ExitStack() as stack:
        for module in map(importlib.import_module, _TRITON_MODULES):
            for name in launched_kernels() & set(vars(module)):
                replaced = _Kernel(getattr(module, name), device, computes=computes)
                stack.enter_context(mock.patch.object(module, name, replaced))
        for owner, name, stand in (
            (varlen, "_flash_kernel", lambda: _flash),
            (grouped, "_on_device", lambda index: True),
            (packed_model, "cuda_queue", lambda _: FakeCudaQueue(device)),
            (packed_model, "Arena", FakeArena),
            (generation, "Arena", FakeArena),
            # `Module.to` makes new parameters: a tensor of another class cannot be their data.
            (torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True),
            (torch.backends.cudnn, "is_acceptable", lambda _: False),
            (tiers, "_stream", lambda _: None),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (
                torch.cuda,
                "get_device_properties",
                lambda _: SimpleNamespace(total_memory=MEMORY_BYTES),
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand))
        stack.enter_context(device)
        yield device


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run each test with its fixtures on the device, if this module is a plugin."""
    from libs.models.interface.source import LoadArguments

    begun = LoadArguments.__init__

    def on_device(self: LoadArguments, *args: Any, **named: Any) -> None:
        moved: list[Any] = [DEVICE if isinstance(one, torch.device) else one for one in args]
        begun(self, *moved, **named)

    with fake_cuda(), mock.patch.object(LoadArguments, "__init__", on_device):
        yield
