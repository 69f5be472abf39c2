"""The cards of models (`card.py`), read from checkpoints with the standard library alone
(`detect.py`, which asks `libs/kinds`, and `checkpoint/`) and overridden by cards in YAML
(`cards.py`), and the mesh's pools in YAML (`pools.py`). Fetching a model is in `libs/store`,
loading and running it in `libs/models`.
"""
