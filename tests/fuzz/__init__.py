"""Hostile input: targets, generators, and the corpus of inputs with findings (docs/fuzzing.md)."""
