"""Heads that score words, spans and pairs of them: GLiNER and GLiREL. Their processors:
`processing/extraction/`.
"""
