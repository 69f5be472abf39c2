"""Texts to token ids: the tokenizer and its limits, truncation, chat templates, and frames of
queries and documents.

Task-specific processing of token ids belongs in `processing/`.
"""
