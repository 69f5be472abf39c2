"""Attention of packed sequences, also over paged keys and values. `varlen.py` selects the device's
implementation.
"""
