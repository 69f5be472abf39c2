"""Documents: the pages of PDF files as pixels, their text layer, and other formats as Markdown.
Separate processes read them (decision 0043).

`limits.py` says how much is read, `child.py` is the program of the processes, `reader.py` starts
and ends them, and `conversion` writes Markdown in them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

CAN_READ: Final = find_spec("pypdfium2") is not None
"""Whether this installation has what reads documents."""
