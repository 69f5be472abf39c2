"""Texts that are divided into chunks: where they end, and how late ones are pooled."""
