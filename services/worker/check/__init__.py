"""`shoal models check`: explains how a checkpoint is read (`explain.py`, without torch), and tests
whether it runs (`selftest.py`, and `generation.py` for generative models). Needs no mesh; the
worker itself does not use it.
"""
