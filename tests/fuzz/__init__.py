"""Hostile input: targets, generators, and the corpus of what found something (docs/fuzzing.md)."""
