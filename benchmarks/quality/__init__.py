"""Measures how well real models rank, in each number format, on texts and human judgements that
ship inside packages of PyPI.
"""
