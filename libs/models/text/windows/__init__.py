"""Extraction and scoring of texts that are longer than the model's maximum, in windows."""
