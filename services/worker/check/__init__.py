"""`shoal models check`: what is made of a checkpoint and why (`explain.py`, without torch), and whether it runs
(`selftest.py`). No mesh is needed, and the worker itself uses none of it."""
