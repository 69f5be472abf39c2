"""Heads that score words, spans and pairs of them: GLiNER and GLiREL. `processing/extraction/` has
their processors.
"""
