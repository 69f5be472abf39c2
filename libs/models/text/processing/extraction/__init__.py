"""Processors of models that label words and spans: GLiNER and GLiREL, and code that both share.
`heads/extraction/` has their heads.
"""
