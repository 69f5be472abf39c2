"""The packed encoder that all families share: `spec.py` describes its variants as data,
`encoder.py` assembles them.
"""
