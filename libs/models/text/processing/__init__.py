"""Pre- and post-processing on the host, around the forward: texts to token ids, outputs to
results.
"""
