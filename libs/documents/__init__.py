"""PDF files: their pages as pixels, and the text layer. PDFium reads them, in processes of their
own (decision 0043).

`limits.py` says how much is read, `child.py` is the program of the processes, `reader.py` starts
and ends them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

CAN_READ: Final = find_spec("pypdfium2") is not None
"""Whether this installation has what reads documents."""
