"""Conversion of published files into the formats that are served: torch checkpoints into
safetensors.

Not on the request path: `libs/store` converts once, after a download or for a directory of the
operator, in a child process. Order of reading: `plan.py` (which files become which), `process.py`
(the child and its limits), `convert.py` (a directory's files); in the child: `child.py`,
`archive.py` (formats), `tensors.py` (torch). Another sort of conversion is another `Kind` of
`plan.py` with its function in `child.py`.
"""

from libs.conversion.convert import ConversionRecord, convert, read_record
from libs.conversion.plan import ConversionStep, TorchCheckpoints, plan_steps

__all__ = [
    "ConversionRecord",
    "ConversionStep",
    "TorchCheckpoints",
    "convert",
    "plan_steps",
    "read_record",
]
