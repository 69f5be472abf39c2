"""Models that read text: `loading.py` makes one of a checkpoint directory.

`registry.py` and `families/` build the encoder, `kinds/` choose its `heads/` and `processing/`,
`tokenising/` makes token ids.
"""
