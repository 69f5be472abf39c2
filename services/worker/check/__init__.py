"""`shoal models check`: explains how a checkpoint is read and why (`explain.py`, without torch),
and tests whether it runs (`selftest.py`, and `generation.py` for generative models). No mesh is
needed, and the worker itself uses none of it."""
