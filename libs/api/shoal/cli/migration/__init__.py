"""`shoal alias` and `shoal migrate`: names that stand for models, and the change of such a name to
another embedding model while queries are answered.

Order of reading: `aliases.py`, `commands.py`, `comparison.py` (rankings by both models).
"""
