"""Generators of the pages in docs/reference, one module for each source."""
