"""Profiles the parts of a forward pass: the half of `shoal profile` that needs torch. The rest is
in `services/local/profile`.
"""
