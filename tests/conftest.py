"""For all tests: torch takes one thread, because a test's forward pass shares the machine with the mesh under test; and without a
GPU the Triton kernels run in Triton's interpreter, which must be said before anything imports Triton.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
