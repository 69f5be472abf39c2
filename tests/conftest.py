"""For all tests: torch takes one thread, because a test's forward pass shares the machine with the mesh under test."""

import torch

torch.set_num_threads(1)
