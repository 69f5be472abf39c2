"""Attention of packed sequences, also over keys and values in pages: `varlen.py` chooses the
device's implementation.
"""
