"""Tests, in folders named after the tested packages; `mesh` runs whole meshes of real processes,
`support` has code that several folders use.
"""
