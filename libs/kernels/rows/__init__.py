"""Operations on one row or one sequence at a time: norms, gated activations, rotations, sums and
maxima.
"""
