"""The packed encoder shared by all families: `spec.py` describes its variants as data, and
`encoder.py` assembles them."""
