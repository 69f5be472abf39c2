"""Models that read text: `loading.py` builds a model from a checkpoint directory.

`registry.py` and `families/` build the encoder, and a kind (`libs/kinds`) what follows it, with the
`heads/` and `processing/` that several kinds share; `tokenising/` produces token ids.
"""
