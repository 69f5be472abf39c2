"""Texts to token ids: the tokenizer and its limits, truncation, chat templates, and frames of
queries and documents.

What a task makes of the token ids belongs to `processing/`.
"""
