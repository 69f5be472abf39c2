"""Shared pre- and post-processing on the host: texts to token ids before the forward, outputs to
results after it.
"""
