"""Encoders in BERT's layout: position tables, relative positions or ALiBi."""
