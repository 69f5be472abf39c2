"""Benchmarks of a mesh in trouble: overload, heavy or hostile neighbours, killed workers, long
runs.
"""
