"""Where the time of a forward pass goes: the half of `shoal profile` that needs torch. The rest is
in `services/local/profile`.
"""
