"""C++ kernels for x86-64 CPUs (`source/`), compiled by `build.py` into a library that is called
through ctypes.

The library depends on neither torch nor Python, so one build serves all versions of both. Without
it, or if it cannot be trusted (`library.py`), torch's operators are used.
"""

from typing import Final

from libs.kernels.native import library, trial
from libs.kernels.native.attention import attend
from libs.kernels.native.library import name
from libs.kernels.native.rows import embed, gate_up, norm, reduce, rotate

__all__ = ["KERNELS", "attend", "embed", "gate_up", "name", "norm", "reduce", "rotate"]

KERNELS: Final = ("attend", "embed", "gate_up", "norm", "reduce", "rotate")
"""The compute functions; callers use them as attributes of this module."""

library.TRIALS.append(trial.wrong)
