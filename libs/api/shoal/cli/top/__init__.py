"""`shoal top`: follows the mesh (`command.py`), computes rates (`history.py`, pure) and draws a
screen (`drawing.py`).

A command that prints once and ends belongs in `shoal.cli.operation`.
"""
