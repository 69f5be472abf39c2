"""The kinds of models, each in one folder: which checkpoints it claims and what their card says
(`card.py`), and the heads and the processor that follow the encoder (`model.py`).

`registry.py` has all kinds, in the order in which detection asks them. A `card.py` needs the
standard library alone, because routers and schedulers read cards; a `model.py` is imported where a
model of its kind is loaded.
"""
