"""From the states of tokens to results of sequences: pooled vectors, SPLADE's sparse vectors,
MaxSim of token vectors.
"""
