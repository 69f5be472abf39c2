"""Models that read text: `loading.py` builds a model from a checkpoint directory.

`registry.py` and `families/` build the encoder, `kinds/` choose its `heads/` and `processing/`,
`tokenising/` produces token ids.
"""
