"""Sparse vectors (SPLADE): a weight for each entry of the vocabulary."""
