"""Processors of models that label words and spans: GLiNER and GLiREL, with what both share. Their
heads: `heads/extraction/`.
"""
