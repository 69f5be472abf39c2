"""Results of sequences from the states of tokens: pooled vectors, SPLADE's sparse vectors, MaxSim
of token vectors.
"""
